"""The shadow KV: what a paged cache should hold, kept as a dictionary slot → token prefix.

Keys and values at position p depend on tokens 0 … p alone. So the shadow writes, instead of numbers, *which
prefix* was computed there, and every attention call must find each position's own prefix. Whatever goes
wrong with blocks (freed early, matched early, shared and overwritten, mistaken for other content, a slot
off by one) shows up as a wrong prefix, or as two works that touch one slot at the same time.

Works run on streams. A work's writes land when it joins, not before; works of one stream follow each other,
works of two streams have no order. Nothing here knows who schedules: a driver says what it launches and
joins (``oracle_driver`` is a small one, an engine with a simulated executor another).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

MASK = (1 << 61) - 1


class OracleError(AssertionError):
    """The cache under test would have computed with wrong keys and values."""


class Prefixes:
    """Numbers every token prefix it meets: equal numbers, equal tokens and tenant. Exact, no hashing."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._parents: list[int] = []
        self._tokens: list[Hashable] = []
        self._mixed: list[int] = []

    def root(self, salt: str = "") -> int:
        """The empty prefix of a tenant."""
        number = self._number(-1, salt)
        self._mixed[number] = 1
        return number

    def extend(self, prefix: int, token: int) -> int:
        """The prefix with one token more."""
        number = self._number(prefix, token)
        self._mixed[number] = mix(self._mixed[prefix], token)
        return number

    def along(self, tokens: Iterable[int], salt: str = "") -> list[int]:
        """The prefixes that end at each of the tokens."""
        found, prefix = [], self.root(salt)
        for token in tokens:
            prefix = self.extend(prefix, token)
            found.append(prefix)
        return found

    def next_token(self, prefix: int, vocabulary: int) -> int:
        """What the pretended model says after a prefix."""
        return (self._mixed[prefix] >> 7) % vocabulary

    def text(self, prefix: int | None) -> str:
        """A prefix for people."""
        if prefix is None:
            return "nothing"
        tokens: list[Hashable] = []
        while prefix >= 0:
            tokens.append(self._tokens[prefix])
            prefix = self._parents[prefix]
        return f"{tokens.pop()!r}:" + " ".join(str(token) for token in reversed(tokens))

    def _number(self, parent: int, token: Hashable) -> int:
        number = self._numbers.setdefault((parent, token), len(self._parents))
        if number == len(self._parents):
            self._parents.append(parent)
            self._tokens.append(token)
            self._mixed.append(0)
        return number


def mix(state: int, token: int) -> int:
    """One step of the pretended model's hash."""
    return (state * 0x9E3779B97F4A7C15 + token + 1) & MASK


def expected_token(tokens: Iterable[int], vocabulary: int) -> int:
    """What the pretended model says after ``tokens``, from the tokens alone."""
    state = 1
    for token in tokens:
        state = mix(state, token)
    return (state >> 7) % vocabulary


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence in a work: its tokens start … stop − 1 are computed, and attend to 0 … stop − 1.

    Attributes:
        name: for messages.
        prefixes: prefix numbers of positions 0 … stop − 1, from the sequence's tokens.
        reads: slots of positions 0 … stop − 1, as attention finds them (block table).
        writes: slots of positions start … stop − 1, as the append finds them (slot mapping).
    """

    name: str
    prefixes: Sequence[int]
    reads: Sequence[int]
    writes: Sequence[int]


@dataclass(slots=True, eq=False)
class ShadowWork:
    """A launched work: what it reads and what it will have written when it joins."""

    number: int
    stream: int
    read: set[int] = field(default_factory=set)
    written: dict[int, int | None] = field(default_factory=dict)


class ShadowKV:
    """Memory of the pretended model, with every launch checked.

    Args:
        prefixes: numbering that the driver's rows use.
        block_size: tokens a block, for copies.
    """

    def __init__(self, prefixes: Prefixes, block_size: int) -> None:
        self.prefixes = prefixes
        self.block_size = block_size
        self.memory: dict[int, int | None] = {}
        self.in_flight: list[ShadowWork] = []
        self.launched = 0

    def launch(
        self, rows: Sequence[Row], copies: Iterable[tuple[int, int, int]] = (), *, stream: int = 0
    ) -> ShadowWork:
        """Start a work: copies first, (source, target, tokens) in order, then every row.

        Raises:
            OracleError: a position does not read its own prefix; two rows, or works on two streams,
                touch one slot and one of them writes it.
        """
        work = ShadowWork(self.launched, stream)
        self.launched += 1
        copied: set[int] = set()
        before = [other for other in self.in_flight if other.stream == stream]
        for source, target, tokens in copies:
            for offset in range(tokens):
                slot = source * self.block_size + offset
                copied.add(slot)
                work.written[target * self.block_size + offset] = self._value(slot, work, before)
        plain = not work.written and not before
        for row in rows:
            start = len(row.prefixes) - len(row.writes)
            if plain:
                found = list(map(self.memory.get, row.reads[:start]))
            else:
                found = [self._value(slot, work, before) for slot in row.reads[:start]]
            if found != list(row.prefixes[:start]) or len(row.reads) != len(row.prefixes):
                self._wrong_read(row, found)
            if list(row.reads[start:]) != list(row.writes):
                raise OracleError(f"{row.name} writes slots {row.writes}, its table says {row.reads[start:]}")
            work.read.update(row.reads[:start])
        # Only after all history was read: no row may see, or spoil, what a neighbour writes.
        slots = [slot for row in rows for slot in row.writes]
        new = dict(zip(slots, (prefix for row in rows for prefix in row.prefixes[-len(row.writes) :])))
        if len(new) != len(slots):
            raise OracleError(f"work {work.number} writes a slot twice: {sorted(slots)}")
        if not work.read.isdisjoint(new):
            raise OracleError(f"work {work.number} writes slots it reads: {sorted(work.read & new.keys())}")
        work.read |= copied  # copies run first: a row of the same work may write there afterwards
        work.written.update(new)
        for other in self.in_flight:
            if other.stream != stream:
                self._check_race(work, other)
        self.in_flight.append(work)
        return work

    def join(self, work: ShadowWork) -> None:
        """A work has finished: its writes become visible."""
        first = next(other for other in self.in_flight if other.stream == work.stream)
        if first is not work:
            raise OracleError(f"work {work.number} joins before work {first.number} of its stream")
        self.in_flight.remove(work)
        self.memory.update(work.written)

    def _value(self, slot: int, work: ShadowWork, before: Sequence[ShadowWork]) -> int | None:
        """What a slot holds when a work of this stream gets to it."""
        for earlier in (work, *reversed(before)):
            if slot in earlier.written:
                return earlier.written[slot]
        return self.memory.get(slot)

    def _check_race(self, work: ShadowWork, other: ShadowWork) -> None:
        clash = work.written.keys() & (other.read | other.written.keys())
        clash |= other.written.keys() & work.read
        if clash:
            raise OracleError(
                f"work {work.number} (stream {work.stream}) and work {other.number} (stream {other.stream}, "
                f"not joined) both touch slots {sorted(clash)}, and one of them writes"
            )

    def _wrong_read(self, row: Row, found: Sequence[int | None]) -> None:
        if len(row.reads) != len(row.prefixes):
            raise OracleError(f"{row.name} reads {len(row.reads)} slots for {len(row.prefixes)} positions")
        for position, (is_there, wanted) in enumerate(zip(found, row.prefixes)):
            if is_there != wanted:
                raise OracleError(
                    f"{row.name}, position {position}, slot {row.reads[position]}: reads "
                    f"[{self.prefixes.text(is_there)}], its own prefix is [{self.prefixes.text(wanted)}]"
                )
