"""Exercises of chapter 07: thresholds from curves, reading a choice, overrides, rows for a new card."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit import quoted
from labkit.bench import curves, gemm
from labkit.bench.curves import Curves
from labkit.bench.record import read_all
from labkit.check import Verdict, exercise, not_yet, passed
from labkit.check.verdict import NotYet
from labkit.errors import InputError
from labkit.nn.dispatch import DTYPES, FORMATS, Choice, DispatchTable, Row, parse_capability
from labkit.paths import data_dir

GIVEN = ("article_table", "this_gpu", "tiled_times", "two_choices")
"""What the notebook imports from here: an answer may use it."""

KERNELS = ("gemv_single_row", "gemv_small_batch", "gemm_tiled")
"""The three that the two thresholds choose from."""

CARD, CAPABILITY = "h200", (9, 0)
SHAPES = ((5632, 2048), (3584, 18944))
"""(N, K) of the recorded sweeps."""

CARDS = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
LAST_M = 64
"""The largest M of the record."""

Times = Mapping[str, Mapping[int, float]]


def article_table() -> DispatchTable:
    """labkit's table of the kernels up to chapter 07, without the rows that were measured on this project's
    own card (9.0 and newer)."""
    table = DispatchTable.load()
    old = (row for row in table.rows if row.kernel != "tensor_core")
    rows = (row for row in old if parse_capability(row.capability) < CAPABILITY)
    return DispatchTable(tuple(rows), source=table.source)


def tiled_times() -> dict[str, dict[tuple[int, int], float]]:
    """Device key → (N, K) → µs of the tiled W4 GEMM at M = 30: the newest record, and the article's table."""
    article = quoted.table(quoted.DEEPINFER, "tiled_w4")
    found = {curves.QUOTED_DEVICE: {(row["n"], row["k"]): 1e3 * row["tiled_ms"] for row in article.rows}}
    records, _ = read_all(sorted((data_dir() / "measured").glob("*.json")))
    for record in sorted(records, key=lambda one: one.started):
        entries = [entry for entry in record.of_table("tiled_w4") if entry.contender == KERNELS[2]]
        times = {(entry.n, entry.k): entry.median_us for entry in entries if entry.median_us is not None}
        if record.kind == "measured" and times:
            found[str(record.device.get("key"))] = times
    return found


def this_gpu(n: int = 5632, k: int = 2048) -> Curves:
    """Time the W4 kernels on this machine's GPU as ``labkit bench gemm`` does, at seven M (about 10 s).

    Args:
        n, k: shape of the weight, groups of 128.

    Returns:
        The curves, origin "measured"; ``device`` is "unknown" for a card that the table of devices lacks.
    """
    options = gemm.Options(
        "sweep", shapes=((n, k),), m=(1, 2, 4, 8, 16, 32, 64), formats=("w4",), device="cuda"
    )
    record = gemm.run(options, f"labkit bench gemm --table sweep --shapes {n}x{k}", lambda line: None)
    return curves.from_record(record)[0]


def recorded(format: str = "w4") -> list[dict[str, dict[int, float]]]:
    """The record of the H200: for each of the two shapes, kernel → M → µs of the three kernels."""
    found = [curves.curves(CARD, format, shape).points for shape in SHAPES]
    return [{kernel: dict(points[kernel]) for kernel in KERNELS} for points in found]


def percent_lost(times: Times, single: int, small: int) -> float:
    """One call at every recorded M with two thresholds: % longer than with the best kernel each time."""
    first, second, third = (times[kernel] for kernel in KERNELS)
    rows = sorted(set(first) & set(second) & set(third))
    taken = sum((first if m <= single else second if m <= small else third)[m] for m in rows)
    return 100 * (taken / sum(min(first[m], second[m], third[m]) for m in rows) - 1)


def worst_lost(shapes: Sequence[Times], single: int, small: int) -> float:
    """:func:`percent_lost` of the shape that loses most."""
    return max(percent_lost(times, single, small) for times in shapes)


def least_lost(shapes: Sequence[Times]) -> float:
    """:func:`worst_lost` of the best pair of thresholds there is."""
    stops = [0, *sorted({m for times in shapes for line in times.values() for m in line})]
    return min(worst_lost(shapes, single, small) for single in stops for small in stops if small >= single)


# ---- 07.1 ----


def _up_to(first: Mapping[int, float], second: Mapping[int, float]) -> int:
    found = 0
    for m in sorted(set(first) & set(second)):
        if first[m] > second[m]:
            break
        found = m
    return found


@exercise("07.1", title="A threshold from two curves")
def up_to(answer: Callable[[Mapping[int, float], Mapping[int, float]], int]) -> Verdict:
    """The greatest M up to which the first curve is never slower."""
    cases = [
        ("two plain curves", {1: 6.0, 2: 9.0, 4: 15.0, 8: 28.0}, {1: 10.0, 2: 12.0, 4: 16.0, 8: 23.0}),
        ("a first that never wins", {1: 9.0, 2: 9.5}, {1: 3.0, 2: 4.0}),
        ("a first that always wins", {1: 1.0, 2: 2.0, 64: 3.0}, {1: 5.0, 2: 5.0, 64: 5.0}),
        ("a tie at M = 4", {1: 5.0, 4: 8.0, 8: 20.0}, {1: 9.0, 4: 8.0, 8: 9.0}),
        ("curves that cross twice", {1: 1.0, 2: 9.0, 4: 3.0, 8: 9.0}, {1: 2.0, 2: 4.0, 4: 6.0, 8: 8.0}),
        ("an M that only one has", {1: 1.0, 2: 2.0, 8: 3.0}, {1: 4.0, 4: 5.0, 8: 6.0}),
        ("points in no order", {8: 9.0, 1: 1.0, 4: 3.0}, {4: 5.0, 8: 6.0, 1: 7.0}),
    ]
    for shape, times in zip(SHAPES, recorded(), strict=True):
        for one, two in ((KERNELS[0], KERNELS[1]), (KERNELS[1], KERNELS[2])):
            cases.append((f"{one} and {two}, {shape[0]}×{shape[1]}", times[one], times[two]))
    for what, first, second in cases:
        wanted, got = _up_to(first, second), answer(dict(first), dict(second))
        if not (hasattr(got, "__float__") and float(got) == wanted):
            hint = "walk along the M that both have, in ascending order; stop where the first is slower"
            return not_yet(f"{wanted} for {what}", repr(got), hint)
    return passed("right for seven small cases and the record")


# ---- 07.2 ----


@exercise("07.2", title="One pair for two shapes", par=0, limit=2, unit="% over the best pair")
def best_pair(answer: Callable[[list[dict[str, dict[int, float]]]], tuple[int, int]]) -> Verdict:
    """(single_row_up_to, small_batch_up_to) with the least loss at the shape that loses most."""
    flat, never = dict.fromkeys((1, 2, 4, 8), 20.0), dict.fromkeys((1, 2, 4, 8), 95.0)
    slow, steep = {1: 2.0, 2: 4.0, 4: 8.0, 8: 16.0}, {1: 9.0, 2: 30.0, 4: 60.0, 8: 90.0}
    made = [dict(zip(KERNELS, (line, never, flat), strict=True)) for line in (slow, steep)]
    cases = [("the first made-up shape", made[:1]), ("two made-up shapes", made), ("the record", recorded())]
    scores = []
    for what, shapes in cases:
        got = answer([{kernel: dict(line) for kernel, line in times.items()} for times in shapes])
        single, small = _pair(what, got)
        over = worst_lost(shapes, single, small) - least_lost(shapes)
        if over > 2:
            expected = f"for {what}, a pair that loses at most 2 % more than the best pair"
            hint = "try every pair of recorded M (and 0); a pair is as bad as the shape where it loses most"
            return not_yet(expected, f"({single}, {small}): {over:.1f} % more", hint, score=round(over, 2))
        scores.append(over)
    message = "one pair, two shapes; the loss that is left belongs to the table"
    return passed(message, score=round(max(scores), 2))


def _pair(what: str, got: Any) -> tuple[int, int]:
    try:
        single, small = (int(value) for value in got)
    except (TypeError, ValueError):
        raise NotYet(
            not_yet(f"two whole numbers for {what}", repr(got), "return single_row_up_to, small_batch_up_to")
        ) from None
    if not 0 <= single <= small:
        hint = "the small-batch kernel begins where the single-row kernel ends"
        raise NotYet(not_yet("0 <= single <= small", f"({single}, {small})", hint))
    return single, small


# ---- 07.3 ----


def two_choices() -> tuple[Choice, Choice]:
    """An RTX 4060 at M = 20 with gemm_tiled disabled, and an A100 at M = 4: what the exercise reads."""
    table = article_table()
    without = table.with_override(disable="gemm_tiled")
    first = without.select("cuda", (8, 9), "w4", "float16", 20, why_not=_can_run)
    return first, table.select("cuda", (8, 0), "w4", "float16", 4, why_not=_can_run)


def _can_run(name: str) -> str:
    """Every kernel can: the question is what the table says, not what this machine has."""
    return ""


@exercise("07.3", title="Read a reason")
def reading(answer: Mapping[str, Any]) -> Verdict:
    """What ran, what was wanted and why it was not taken, and how well the second choice is known."""
    first, second = two_choices()
    wanted, why = first.skipped[0]
    right = {
        "runs": (first.kernel, "the kernel stands right after M = 20"),
        "wanted": (wanted, "the rows before the chosen one are named after 'passed over'"),
        "stopped_by": ("override" if "override" in why else "missing", "the words after the kernel's name"),
        "a100_origin": (
            second.row.provenance.split(":")[0],
            "the first word in the brackets of the second line",
        ),
    }
    if not isinstance(answer, Mapping):
        return not_yet("a dict", type(answer).__name__, f"keys: {', '.join(right)}")
    for key, (value, hint) in right.items():
        if key not in answer or str(answer[key]).strip().lower() != value:
            return not_yet(f"the right word for {key!r}", repr(answer.get(key, "no such key")), hint)
    return passed("an assumed row is a place where nobody has measured")


# ---- 07.4 ----


@exercise("07.4", title="An override that leaves a way out")
def override(answer: Mapping[str, Any]) -> Verdict:
    """Parameters: W4 small batch up to 64, gemm_tiled off, everything else as it was."""
    if not isinstance(answer, Mapping):
        return not_yet("a dict of parameters", type(answer).__name__, 'such as {"w4.small_batch_up_to": 16}')
    before = article_table()
    try:
        changed = DispatchTable.from_params(dict(answer), before)
    except InputError as error:
        return not_yet(
            "parameters that the table knows", str(error), "DispatchTable.from_params lists the keys"
        )
    for capability in CARDS:
        for format in FORMATS:
            for dtype in DTYPES:
                for m in (1, 2, 8, 9, 30, 64, 65, 512, 10**9):
                    where = f"{format}, {dtype}, M = {m} on a card of {capability[0]}.{capability[1]}"
                    _judge_override(where, before, changed, (capability, format, dtype, m))
    return passed("W4 and W3 still find a kernel everywhere, and only what was asked has changed")


def _judge_override(where: str, before: DispatchTable, changed: DispatchTable, call: Any) -> None:
    capability, format, dtype, m = call
    select = functools.partial(changed.select, "cuda", capability, format, dtype, m)
    wanted = before.select("cuda", capability, format, dtype, m, why_not=_can_run).kernel
    if wanted == "gemm_tiled":
        wanted = "gemv_small_batch" if format == "w4" and m <= 64 else "dequant_matmul"
    try:
        got = select(why_not=_can_run).kernel
        # a machine where no CUDA C++ kernel runs: the fallback must still be there
        bare = select(why_not=lambda name: "" if name == "dequant_matmul" else "cannot run here").kernel
    except InputError as error:
        hint = "force leaves no way out; disable takes one kernel away and the next row follows"
        raise NotYet(not_yet(f"a kernel for {where}", error.received, hint)) from None
    if got != wanted or bare != "dequant_matmul":
        hint = "a key with 'w4.' in front changes W4 only; gemm_tiled must not run for any format"
        raise NotYet(not_yet(f"{wanted} for {where}", got, hint))


# ---- 07.5 ----


@exercise("07.5", title="Add a card", par=0, limit=5, unit="% over the best pair")
def add_card(answer: Sequence[Mapping[str, Any]]) -> Verdict:
    """Rows for W4 on the H200, with provenance; the score is their loss at the worse shape."""
    rows = _read_rows(answer)
    for row in rows:
        if (row.device, row.capability, row.format, row.dtypes) != ("cuda", "9.0", "w4", ("float16",)):
            got = f"{row.device} {row.capability} {row.format} {', '.join(row.dtypes)}"
            hint = "nothing else was measured here: leave the other formats and cards alone"
            return not_yet("cuda 9.0 w4 float16 in every row", got, hint)
        said = row.provenance.lower()
        if row.m_min > LAST_M and not said.startswith("measured"):
            continue
        if said.startswith("assumed"):
            hint = f"begin the assumed row at {LAST_M + 1}; up to {LAST_M} say measured, and where"
            return not_yet(f"measured rows up to M = {LAST_M}", f"{row.bounds}: {row.provenance!r}", hint)
        if row.m_max is None or row.m_max > LAST_M:
            hint = "end the row at 64; what is above is assumed, or left to the rows of 8.6"
            got = f"{row.bounds}: {row.provenance!r}"
            return not_yet(f"measured only up to M = {LAST_M}, where the record ends", got, hint)
        if not said.startswith("measured") or CARD not in said:
            hint = "say measured, on which card, at which shapes; a reader must be able to repeat it"
            return not_yet('a provenance such as "measured: H200, …"', repr(row.provenance), hint)
    before = article_table()
    table = DispatchTable((*rows, *before.rows))
    for m in range(1, LAST_M + 1):
        choice = table.select("cuda", CAPABILITY, "w4", "float16", m, why_not=_can_run)
        if choice.row not in rows:
            hint = "m_min of a row is one more than m_max of the row before; both count"
            return not_yet(f"a row of yours for M = {m}", f"{choice.kernel} by {choice.row.capability}", hint)
        if choice.kernel not in KERNELS:
            return not_yet(
                f"one of {', '.join(KERNELS)} for M = {m}", choice.kernel, "these three were recorded"
            )
    shapes = recorded()
    over = max(_lost_by(table, times) for times in shapes) - least_lost(shapes)
    hint = "07.2 finds the pair of thresholds; write it down as rows"
    return passed("the H200 has its own rows; other cards choose as before", score=round(over, 2), hint=hint)


def _read_rows(answer: Any) -> tuple[Row, ...]:
    """The rows, through the reader of the real file."""
    if not isinstance(answer, Sequence) or isinstance(answer, str) or not answer:
        raise NotYet(not_yet("a list of rows", repr(answer), "each row a dict with the eight fields"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        try:
            path.write_text(json.dumps({"rows": list(answer)}), encoding="utf-8")
            return DispatchTable.load(path).rows
        except (TypeError, ValueError) as error:
            hint = "the same fields as in data/dispatch.json, all eight in every row"
            raise NotYet(not_yet("rows that the table's reader takes", str(error), hint)) from None


def _lost_by(table: DispatchTable, times: Times) -> float:
    """% that the table loses at one shape over all recorded M."""
    rows = sorted(times[KERNELS[0]])
    select = functools.partial(table.select, "cuda", CAPABILITY, "w4", "float16", why_not=_can_run)
    taken = sum(times[select(m).kernel][m] for m in rows)
    return 100 * (taken / sum(min(line[m] for line in times.values()) for m in rows) - 1)
