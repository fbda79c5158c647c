"""A small engine for the shadow KV: admission, chunked prefill, decode, and everything that disturbs them.

It drives the real allocator, prefix cache and slot arithmetic round robin, as a scheduler would: two streams
(or one, mixed) with delayed completion, several works in flight, aborts at any moment, preemption by
recompute, forks, drafts that are rejected, rewinds, a pool that grows and shrinks. Every decision is a
number drawn from :class:`Choices`, so a run is its list of numbers, and a failing list can be shrunk.

Each class under test can be replaced by a broken one: that is how the oracle shows its teeth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from choices import Choices, shrink
from oracle import OracleError, Prefixes, Row, ShadowKV, ShadowWork, expected_token

from labkit.cache.blocks import BlockAllocator, BlockCopy, BlockTable, slots_of
from labkit.cache.prefix import PrefixCache, chained_hash

PATIENCE = 2_000  # cycles; the longest of 25,000 runs took 638


def weak_hash(salt: str, parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """Forces collisions: three keys in all."""
    return bytes([sum(tokens) % 3])


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request, or one fork of it."""

    number: int
    salt: str
    tokens: list[int]
    target: int  # tokens in all when it is finished
    given: int  # leading tokens that the model did not say
    prefixes: list[int]
    table: BlockTable | None = None
    computed: int = 0
    busy: bool = False
    doomed: bool = False


@dataclass(slots=True, eq=False)
class Step:
    """What a work does for one sequence."""

    sequence: SequenceState
    stop: int  # tokens computed when it has joined, drafts apart
    drafts: list[int] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    pins: list[BlockTable] = field(default_factory=list)  # hold what must stay alive until the join


@dataclass(slots=True, eq=False)
class Work:
    """A launched work."""

    shadow: ShadowWork
    steps: list[Step]


@dataclass
class Parts:
    """What a run is made of; a mutation test replaces one of them."""

    allocator: type[BlockAllocator] = BlockAllocator
    cache: type[PrefixCache] = PrefixCache
    slots: Callable[[BlockTable, int, int, int], list[int]] = slots_of
    driver: type[Driver] | None = None


@dataclass
class Scenario:
    """Sizes and requests of a run, drawn first."""

    block_size: int
    vocabulary: int
    requests: list[tuple[str, list[int], int]] = field(default_factory=list)  # salt, prompt, tokens in all
    needed: int = 0  # blocks of the longest request

    @classmethod
    def draw(cls, choices: Choices) -> Scenario:
        size = choices.pick((2, 4, 8, 16))
        scenario = cls(size, choices.pick((2, 3)))
        tenants = choices.pick((("",), ("", "b")))
        base = [choices.below(scenario.vocabulary) for _ in range(2 * size)]
        for _ in range(1 + choices.below(8)):
            shared = choices.pick((0, size - 1, size, size + 1, 2 * size, 2 * size))
            tail = [choices.below(scenario.vocabulary) for _ in range(choices.below(size + 2))]
            prompt = base[:shared] + tail or [0]
            salt = choices.pick(tenants)
            total = len(prompt) + 1 + choices.below(7)
            scenario.requests.append((salt, prompt, total))
            scenario.needed = max(scenario.needed, -(-total // size))
        return scenario


class Driver:
    """Runs a scenario to its end; raises as soon as anything would have been computed wrongly."""

    def __init__(self, choices: Choices, parts: Parts) -> None:
        self.choices = choices
        self.scenario = scenario = Scenario.draw(choices)
        self.size = scenario.block_size
        self.slots = parts.slots
        self.blocks = parts.allocator(scenario.needed + choices.below(2 * scenario.needed + 4), self.size)
        self.cache = parts.cache(self.blocks, hasher=choices.pick((chained_hash, chained_hash, weak_hash)))
        self.prefixes = Prefixes()
        self.shadow = ShadowKV(self.prefixes, self.size)
        self.budget = choices.pick((3 * self.size, self.size + 1, self.size, self.size - 1, 1, 3))
        self.max_rows = 1 + choices.below(5)
        self.order = choices.pick(("two streams", "mixed", "any stream"))
        self.depth = choices.pick((1, 2, 3))
        self.lag = choices.pick((2, 4))  # a work joins once in so many cycles
        self.calm = choices.pick((4, 2))  # and so many cycles pass between disturbances
        self.turn = 0
        self.seen: Counter[str] = Counter()
        self.in_flight: list[Work] = []
        self.running: list[SequenceState] = []
        self.doomed: list[SequenceState] = []
        self.finished: list[SequenceState] = []
        self.history: list[tuple[str, list[int]]] = []  # what was computed once, and by whom
        self.waiting: list[SequenceState] = []
        for salt, prompt, total in scenario.requests:
            self.waiting.append(self.new_sequence(salt, prompt, total))

    def new_sequence(self, salt: str, prompt: list[int], total: int) -> SequenceState:
        self.turn += 1
        return SequenceState(self.turn, salt, prompt, total, len(prompt), self.prefixes.along(prompt, salt))

    def run(self) -> Counter[str]:
        """All requests to their end, then the books; counts of what happened on the way."""
        while self.waiting or self.running or self.in_flight:
            self.cycle()
            self.seen["cycles"] += 1
            if self.seen["cycles"] == PATIENCE:
                raise OracleError(f"no end after {PATIENCE} cycles, {self.blocks.num_available} blocks left")
        self.finish()
        return self.seen

    def cycle(self) -> None:
        """One step of the loop. With dull choices only, it launches, joins and gets to the end."""
        if self.seen["disturbed"] < 30 and self.choices.chance(self.calm):
            self.disturb()
        self.admit(1 + self.choices.below(2))
        if self.order == "mixed":
            launched = self.launch(self.prefill() + self.decode(), stream=0)
        else:
            swap = self.order == "any stream" and self.choices.below(2)
            launched = self.launch(self.decode(), stream=1 - swap)
            launched += self.launch(self.prefill(), stream=swap)
        for stream in range(2):
            works = [work for work in self.in_flight if work.shadow.stream == stream]
            if works and (not launched or len(works) >= self.depth or not self.choices.below(self.lag)):
                self.join(works[0])
        if self.choices.chance(8):
            self.validate()

    # --- what a scheduler does -----------------------------------------------------------------------------

    def admit(self, most: int) -> None:
        for _ in range(min(most, len(self.waiting), self.max_rows - len(self.running))):
            sequence = self.waiting[0]
            if not self.cache.can_allocate(sequence.tokens, salt=sequence.salt):
                return
            sequence.table, cached = self.cache.allocate(sequence.tokens, salt=sequence.salt)
            if not 0 <= cached < len(sequence.tokens) or cached % self.size:
                raise OracleError(f"sequence {sequence.number}: {cached} of {len(sequence.tokens)} cached")
            self.seen["queries"] += len(sequence.tokens)
            self.seen["hits"] += cached
            sequence.computed = cached
            self.running.append(self.waiting.pop(0))

    def prefill(self) -> list[Step]:
        """Chunks of tokens that have their slots already, shared out among the prompts in turn."""
        ready = [one for one in self.running if not one.busy and one.table.length > one.computed]
        budget, steps = self.budget, []
        while ready and budget:
            sequence = ready.pop(self.turn % len(ready))
            self.turn += 1
            count = min(budget, sequence.table.length - sequence.computed)
            if ready and count > 1 and self.choices.chance(2):
                count = 1 + self.choices.below(count)
            budget -= count
            sequence.busy = True
            steps.append(Step(sequence, sequence.computed + count))
        return steps

    def decode(self) -> list[Step]:
        """One new token for each sequence that has its prompt; some with draft tokens behind it."""
        steps = []
        for sequence in [one for one in self.running if not one.busy and one.table.length == one.computed]:
            if sequence.table is None or self.choices.chance(5):
                continue  # preempted by a row before it; or this sequence sits out
            drafts: list[int] = []
            while self.choices.chance(4) and len(sequence.tokens) + len(drafts) + 1 < sequence.target:
                drafts.append(self.guess(sequence, drafts))
            while not self.blocks.can_append(sequence.table, 1 + len(drafts)):
                if drafts:
                    drafts = []
                elif not self.preempt(sequence):
                    break
            else:
                copies = self.blocks.append(sequence.table, 1 + len(drafts))
                sequence.busy = True
                steps.append(Step(sequence, sequence.computed + 1, drafts, copies, self.pin(copies)))
        return steps

    def launch(self, steps: list[Step], *, stream: int) -> int:
        """Start a work; 0 when there is nothing to do."""
        if not steps:
            return 0
        rows, copies = [], []
        for step in steps:
            sequence, stop = step.sequence, step.stop + len(step.drafts)
            prefixes = sequence.prefixes[: step.stop]
            for token in step.drafts:
                prefixes.append(self.prefixes.extend(prefixes[-1], token))
            reads = self.slots(sequence.table, 0, stop, self.size)
            writes = self.slots(sequence.table, sequence.computed, stop, self.size)
            rows.append(Row(f"sequence {sequence.number}", prefixes, reads, writes))
            copies += [(copy.source, copy.target, copy.tokens) for copy in step.copies]
        self.in_flight.append(Work(self.shadow.launch(rows, copies, stream=stream), steps))
        self.seen["copies"] += len(copies)
        self.seen["works"] += 1
        return 1

    def pin(self, copies: Sequence[BlockCopy]) -> list[BlockTable]:
        """Hold a copy's source: from now on, until the copy has run, nobody else may be given it."""
        return [self.blocks.allocate(self.size, shared=[copy.source]) for copy in copies]

    def join(self, work: Work) -> None:
        """A work's end: its tokens count, are published, and the next ones are known."""
        self.shadow.join(work.shadow)
        self.in_flight.remove(work)
        for step in work.steps:
            sequence = step.sequence
            sequence.busy = False
            for pin in step.pins:
                self.blocks.free(pin)
            if sequence.doomed:
                if sequence in self.doomed:
                    self.doomed.remove(sequence)
                    self.blocks.free(sequence.table)
                continue
            sequence.computed = step.stop
            if step.stop == len(sequence.tokens):
                self.sample(sequence, step.drafts)
            self.publish(sequence)
            if len(sequence.tokens) == sequence.target:
                self.running.remove(sequence)
                self.finished.append(sequence)
                self.history.append((sequence.salt, sequence.tokens))
                self.blocks.free(sequence.table)

    def sample(self, sequence: SequenceState, drafts: list[int]) -> None:
        """The next token; draft tokens that it confirms count as computed, the rest is taken back."""
        self.say(sequence)
        for draft in drafts:
            if draft != sequence.tokens[-1]:
                self.seen["rejected"] += 1
                break
            sequence.computed += 1
            self.say(sequence)
        if drafts:
            self.blocks.truncate(sequence.table, sequence.computed)

    def say(self, sequence: SequenceState) -> None:
        last = sequence.prefixes[-1]
        token = self.prefixes.next_token(last, self.scenario.vocabulary)
        sequence.tokens.append(token)
        sequence.prefixes.append(self.prefixes.extend(last, token))

    def guess(self, sequence: SequenceState, drafts: list[int]) -> int:
        """A draft token, right more often than not."""
        prefix = sequence.prefixes[-1]
        for draft in drafts:
            prefix = self.prefixes.extend(prefix, draft)
        right = self.prefixes.next_token(prefix, self.scenario.vocabulary)
        return (right + self.choices.chance(3)) % self.scenario.vocabulary

    def publish(self, sequence: SequenceState) -> None:
        self.cache.publish(sequence.table, sequence.tokens, sequence.computed, salt=sequence.salt)

    def preempt(self, wanting: SequenceState) -> bool:
        """Take the youngest sequence's blocks, to be computed again later; False when none may be taken."""
        for victim in reversed(self.running):
            if not victim.busy and victim.number > wanting.number:
                self.running.remove(victim)
                self.blocks.free(victim.table)
                victim.table, victim.computed = None, 0
                self.waiting.append(victim)
                self.waiting.sort(key=lambda one: one.number)
                self.seen["preempted"] += 1
                return True
        return False

    # --- what disturbs it ----------------------------------------------------------------------------------

    def disturb(self) -> None:
        what = self.choices.below(9)
        self.seen["disturbed"] += 1
        if what == 1:
            self.abort()
        elif what in (2, 3):
            self.fork()
        elif what in (4, 5):
            self.rewind()
        elif what == 6:
            self.resize()
        elif what == 7:
            self.follow_up()
        elif what == 8 and self.choices.chance(3):
            self.cache.clear()
            self.seen["cleared"] += 1

    def abort(self) -> None:
        """Any sequence, at any moment; the blocks of one that is in flight come back at its join."""
        if not self.waiting and not self.running:
            return
        sequence = self.choices.pick(self.running + self.waiting)
        self.seen["aborted in flight" if sequence.busy else "aborted"] += 1
        sequence.doomed = True
        self.history.append((sequence.salt, sequence.tokens))
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.retire(sequence)

    def retire(self, sequence: SequenceState) -> None:
        if sequence.busy:
            self.doomed.append(sequence)
        else:
            self.blocks.free(sequence.table)

    def settled(self) -> SequenceState | None:
        """A sequence that waits for its next decode step."""
        ready = [one for one in self.running if not one.busy and one.table.length == one.computed]
        return self.choices.pick(ready) if ready else None

    def fork(self) -> None:
        """A second sequence that goes on from the same tokens, usually with another one."""
        parent = self.settled()
        if parent is None:
            return
        tokens = list(parent.tokens)
        tokens[-1] = (tokens[-1] + 1 - self.choices.chance(4)) % self.scenario.vocabulary
        child = self.new_sequence(parent.salt, tokens, parent.target)
        child.table, child.computed = self.blocks.fork(parent.table), parent.computed
        self.running.append(child)
        self.seen["forked"] += 1

    def rewind(self) -> None:
        """Back to an earlier token, and on from there with another one."""
        sequence = self.settled()
        if sequence is None or sequence.computed < 2:
            return
        length = 1 + self.choices.below(sequence.computed - 1)
        token = (sequence.tokens[length] + 1) % self.scenario.vocabulary
        self.history.append((sequence.salt, list(sequence.tokens)))
        self.blocks.truncate(sequence.table, length)
        sequence.computed, sequence.given = length, length + 1
        del sequence.tokens[length:], sequence.prefixes[length:]
        sequence.tokens.append(token)
        sequence.prefixes.append(self.prefixes.extend(sequence.prefixes[-1], token))
        self.seen["rewound"] += 1

    def resize(self) -> None:
        """One block more, or as few as the longest request needs."""
        smaller = max(self.scenario.needed, self.blocks.num_blocks - 1 - self.choices.below(4))
        if smaller < self.blocks.num_blocks and self.blocks.can_shrink(smaller):
            self.blocks.shrink(smaller)
            self.seen["shrunk"] += 1
        else:
            self.blocks.grow(self.blocks.num_blocks + 1)
            self.seen["grown"] += 1

    def follow_up(self) -> None:
        """A prompt that goes on from what was computed before, as the next turn of a chat does."""
        most = self.scenario.needed * self.size - 2
        if not self.history or most < 1:
            return
        salt, tokens = self.choices.pick(self.history)
        prompt = [*tokens[: most - 1], self.choices.below(self.scenario.vocabulary)]
        total = min(len(prompt) + 2 + self.choices.below(4), most + 2)
        self.waiting.append(self.new_sequence(salt, prompt, total))
        self.seen["followed up"] += 1

    # --- the books -----------------------------------------------------------------------------------------

    def validate(self) -> None:
        tables = [one.table for one in self.running + self.doomed]
        tables += [pin for work in self.in_flight for step in work.steps for pin in step.pins]
        self.blocks.validate(tables)
        self.cache.validate()

    def finish(self) -> None:
        """Every token exact, every block free, every count zero."""
        self.validate()
        if self.blocks.num_used or self.doomed:
            raise OracleError(f"{self.blocks.num_used} blocks still used, {len(self.doomed)} aborts pending")
        for sequence in self.finished:
            tokens = sequence.tokens
            for at in range(sequence.given, len(tokens)):
                if tokens[at] != expected_token(tokens[:at], self.scenario.vocabulary):
                    raise OracleError(f"sequence {sequence.number}, token {at}: {tokens[at]}")
        if (self.cache.queries, self.cache.hits) != (self.seen["queries"], self.seen["hits"]):
            raise OracleError(f"counted {self.cache.queries} queries and {self.cache.hits} hits: {self.seen}")
        self.cache.clear()
        self.blocks.validate(())
        if self.blocks.num_free != self.blocks.num_blocks or self.cache.num_cached:
            raise OracleError(f"{self.blocks.num_free} of {self.blocks.num_blocks} blocks free at the end")
        self.seen["finished"] += len(self.finished)


def run(choices: Choices, parts: Parts | None = None) -> Counter[str]:
    """One run; raises what it finds."""
    parts = parts or Parts()
    return (parts.driver or Driver)(choices, parts).run()


def failure(choices: Choices, parts: Parts | None = None) -> Exception | None:
    """What a run finds, or None."""
    try:
        run(choices, parts)
    except Exception as found:
        return found
    return None


def shrunk(drawn: Sequence[int], parts: Parts | None = None) -> list[int]:
    """A shorter and smaller list of choices that still fails."""
    return shrink(drawn, lambda candidate: failure(Choices(replay=candidate), parts) is not None)
