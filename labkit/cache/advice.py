"""What to change so that a model fits: each suggestion is a plan of its own, with the bytes it saves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.cache.bill import Case
    from labkit.cache.weights import WeightBytes

LEAST_CONTEXT = 256
SHORT_CHUNK = 128

# What a change costs its user; only the order of the sums matters.
_BATCH_COST, _CONTEXT_COST = 5, 6


@dataclass(frozen=True, slots=True)
class Change:
    """One option changed.

    Attributes:
        option: as it is typed.
        saves: bytes less than what was asked for.
        needed: bytes that are then needed.
        fits: whether that is within the memory.
    """

    option: str
    saves: int
    needed: int
    fits: bool


@dataclass(frozen=True)
class _Lever:
    """A group of options of which at most one is taken; ``cost`` says how much it hurts."""

    options: tuple[tuple[str, int, dict[str, Any]], ...]


def advise(
    case: Case, others: Sequence[tuple[str, WeightBytes]]
) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Single changes that save something, and the mildest combination where none is enough.

    Args:
        case: what was asked.
        others: option -> bytes of the same weights stored otherwise, the mildest first.
    """
    levers = _levers(case, others)
    options = [option for lever in levers for option in lever.options]
    if (rows := _most_rows(case)) is not None:
        options.append((f"--batch {rows}", _BATCH_COST, {"batch": rows}))
    if (shorter := _longest(case)) is not None:
        options.append((f"--context {shorter}", _CONTEXT_COST, {"context": shorter}))
    found = []
    for option, cost, fields in options:
        needed = replace(case, **fields).needed
        if needed < case.needed:
            found.append((cost, Change(option, case.needed - needed, needed, needed <= case.memory)))
    # Those that are enough by how little they hurt, the others by how much they save.
    found.sort(key=lambda pair: (0, pair[0]) if pair[1].fits else (1, -pair[1].saves))
    changes = [change for _, change in found]
    together: tuple[str, ...] = ()
    if case.needed > case.memory and not any(change.fits for change in changes):
        together = _combination(case, levers)
    return tuple(changes), together


def _levers(case: Case, others: Sequence[tuple[str, WeightBytes]]) -> list[_Lever]:
    levers = []
    if case.chunk > SHORT_CHUNK:
        levers.append(_Lever(((f"--chunk {SHORT_CHUNK}", 1, {"chunk": SHORT_CHUNK}),)))
    if case.kv_dtype != "int8":
        levers.append(_Lever((("--kv int8", 2, {"kv_dtype": "int8"}),)))
    if case.graphs:
        levers.append(_Lever((("--no-graphs", 3, {"graphs": False}),)))
    if others:
        levers.append(
            _Lever(tuple((option, 4 + i, {"weights": weights}) for i, (option, weights) in enumerate(others)))
        )
    return levers


def _longest(case: Case) -> int | None:
    """The longest shorter context, in whole blocks, that fits; None without one, or when all fits."""
    if case.needed <= case.memory:
        return None

    def fits(blocks: int) -> bool:
        return replace(case, context=blocks * case.block_size).needed <= case.memory

    least = -(-min(LEAST_CONTEXT, case.context) // case.block_size)
    if case.row_blocks <= least or not fits(least):
        return None
    low, high = least, case.row_blocks  # fits(low), and not fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * case.block_size


def _most_rows(case: Case) -> int | None:
    """The most rows below those asked for that fit; None without any, or when all fits."""
    if case.needed <= case.memory or case.batch == 1:
        return None
    low, high = 0, case.batch  # the need grows with the rows
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if replace(case, batch=middle).needed <= case.memory else (low, middle)
    return low or None


def _combination(case: Case, levers: Sequence[_Lever]) -> tuple[str, ...]:
    """Options that fit together at the least cost; the context is shortened only when nothing else does."""
    choices = [(None, *lever.options) for lever in levers]
    best: tuple[int, tuple[str, ...]] | None = None
    for picked in itertools.product(*choices):
        taken = [option for option in picked if option is not None]
        fields: dict[str, Any] = {}
        for _, _, changed in taken:
            fields |= changed
        changed_case = replace(case, **fields)
        names = [option for option, _, _ in taken]
        cost = sum(price for _, price, _ in taken)
        if changed_case.needed > case.memory and case.batch > 1:
            rows = _most_rows(changed_case)
            if rows is not None:
                changed_case = replace(changed_case, batch=rows)
                names.append(f"--batch {rows}")
                cost += _BATCH_COST
        if changed_case.needed > case.memory:
            shorter = _longest(changed_case)
            if shorter is None:
                continue
            names.append(f"--context {shorter}")
            cost += _CONTEXT_COST
        if best is None or cost < best[0]:
            best = (cost, tuple(names))
    return best[1] if best else ()
