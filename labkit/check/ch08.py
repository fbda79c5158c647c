"""Exercises of chapter 08: the fragment map, halves from bits, W3's sixteenth field, copies ahead."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from labkit.bench import curves, gemm
from labkit.bench.cases import FAST, SWEEP, TENSOR_CORE
from labkit.bench.labels import foreign, label
from labkit.bench.record import Entry, Record, read_all
from labkit.check import Verdict, cuda, exercise, forbid_calls, not_yet, passed
from labkit.check.verdict import NotYet
from labkit.errors import InputError, require
from labkit.kernels import sass
from labkit.kernels.preprocess import without_comments
from labkit.kernels.sass import Instruction
from labkit.kernels.source import KernelSource
from labkit.paths import data_dir
from labkit.widgets import mma_layout

STAGES = 4
"""Stages of the ring of exercise 08.4."""

_ARCH = "sm_86"
_OWN = ("place", "holder", "locate")  # the library's answers, in labkit.widgets.mma_layout


def step_instructions(source: KernelSource, arch: str = _ARCH) -> tuple[Instruction, ...]:
    """Machine instructions of one step of a kernel that waits, multiplies on tensor cores and jumps back.

    Args:
        source: a kernel with one such loop, such as ``lesson/mma_w4.cu``.

    Returns:
        From the wait for copies (DEPBAR) to the first branch after the last product (HMMA).

    Raises:
        InputError: no such loop, or a text that does not compile.
    """
    code = sass.disassemble(source, arch).instructions
    waits = [at for at, each in enumerate(code) if each.base == "DEPBAR"]
    products = [at for at, each in enumerate(code) if each.base == "HMMA"]
    found = bool(waits and products) and waits[0] < products[0]
    require(found, "source", source.name, "a kernel whose loop waits for copies and then multiplies")
    ends = [at for at in range(products[-1], len(code)) if code[at].base == "BRA"]
    require(bool(ends), "source", source.name, "a kernel with a loop around its products")
    return code[waits[0] : ends[0] + 1]


def instructions_per_weight(source: KernelSource, arch: str = _ARCH) -> float:
    """Lane instructions of a step for each weight, of a kernel with one n8 tile.

    A product is 16 × 16 weights of a warp, so eight of a lane, however often the loop was unrolled.
    """
    step = step_instructions(source, arch)
    return len(step) / (8 * sum(each.base == "HMMA" for each in step))


# --- times of GPUs

_LARGE = 20_000_000  # weights: the article's largest matrices

SHOWN_M = (1, 8, 30, 64, 256)
"""Rows of x in the table of times; of a record, those that it has."""


def peer_rows(folder: Path | None = None) -> list[dict[str, Any]]:
    """labkit and the fastest kernel that is not labkit's, from the newest kept record of the family.

    Until there is one, from the newest sweep of the seed kernels.

    Args:
        folder: records; ``data/measured`` by default.

    Returns:
        Rows as of :func:`record_rows`, of the largest and of the smallest weight; [] without any record.
    """
    for table in (FAST, SWEEP):
        for record in _newest(folder):
            if rows := record_rows(record, table):
                return rows
    return []


def peer_ratios(folder: Path | None = None) -> dict[int, list[float]]:
    """Time of the best peer over ours, for every weight and format of the newest kept record of the family.

    Args:
        folder: records; ``data/measured`` by default.

    Returns:
        M of :data:`SHOWN_M` → ratios; {} without a record.
    """
    for record in _newest(folder):
        timed = _timed(record, FAST)
        weights = dict.fromkeys((entry.format, entry.n, entry.k) for entry in timed)
        ratios: dict[int, list[float]] = {}
        for m, weight in ((m, weight) for m in SHOWN_M for weight in weights):
            if row := _row(record, timed, *weight, m):
                ratios.setdefault(m, []).append(row["peer / ours"])
        if ratios:
            return ratios
    return {}


def _newest(folder: Path | None) -> list[Record]:
    records, _ = read_all(sorted((folder or data_dir() / "measured").glob("*.json")))
    return sorted(records, key=lambda record: record.started, reverse=True)


def gpu_rows(
    shape: tuple[int, int] = (37888, 3584), m: tuple[int, ...] = (1, 8, 30, 64)
) -> list[dict[str, Any]]:
    """The same, timed on this GPU: each contender found right first, weights cold, in turns."""
    options = gemm.Options(FAST, shapes=(shape,), m=m, device="cuda")
    return record_rows(gemm.run(options, "chapter 08", report=lambda _: None), FAST)


def quoted_rows() -> list[dict[str, Any]]:
    """The article's tiled kernel beside its own fallback, on its own card, in the same columns."""
    rows = []
    for one in curves.quoted_curves():
        if not {"gemm_tiled", "dequant_matmul"} <= one.points.keys() or one.n * one.k < _LARGE:
            continue
        (m, ours), (_, peer) = one["gemm_tiled"][0], one["dequant_matmul"][0]
        row = {"weight": f"{one.format.upper()} {one.n}×{one.k}", "M": m, "ours": "article 7: tiled GEMM"}
        row |= {"ours (µs)": ours, "peer": f"article 7: {label('dequant_matmul')}", "peer (µs)": peer}
        rows.append(row | {"peer / ours": peer / ours, "where": "RTX 3050 Laptop", "origin": one.origin})
    return rows


def record_rows(record: Record, table: str) -> list[dict[str, Any]]:
    """Rows for :func:`labkit.tables.table`: ours against the best peer, µs a call, for :data:`SHOWN_M`.

    Args:
        record: of ``labkit bench gemm``.
        table: the table of it to take, "fast" or "sweep"; of its weights the largest and the smallest.
    """
    timed = _timed(record, table)
    sizes = sorted({(entry.n * entry.k, entry.n, entry.k) for entry in timed})
    kept = [(n, k) for _, n, k in dict.fromkeys([*sizes[-1:], *sizes[:1]])]
    cases = ((format, n, k, m) for format in ("w4", "w3") for n, k in kept for m in SHOWN_M)
    return [row for case in cases if (row := _row(record, timed, *case))]


def _timed(record: Record, table: str) -> list[Entry]:
    return [entry for entry in record.of_table(table) if entry.samples_us and entry.m in SHOWN_M]


def _row(record: Record, timed: Sequence[Entry], format: str, n: int, k: int, m: int) -> dict[str, Any]:
    """One product's row, or {} where one side was not timed."""
    here = [one for one in timed if (one.format, one.n, one.k, one.m) == (format, n, k, m)]
    ours, peer = _fastest(here, own=True), _fastest(here, own=False)
    if ours is None or peer is None or ours.median_us is None or peer.median_us is None:
        return {}
    row = {"weight": f"{format.upper()} {n}×{k}", "M": m, "ours": label(ours.contender)}
    row |= {"ours (µs)": ours.median_us, "peer": label(peer.contender), "peer (µs)": peer.median_us}
    row |= {"peer / ours": peer.median_us / ours.median_us, "where": record.device.get("name", "?")}
    return row | {"origin": record.kind}


def _fastest(entries: Sequence[Entry], *, own: bool) -> Entry | None:
    """The best of one side; of ours the family wherever it was timed."""
    side = [one for one in entries if foreign(one.contender) != own]
    family = [one for one in side if one.contender == TENSOR_CORE]
    return min(family or side, key=lambda one: one.median_us or 0.0, default=None)


# --- exercises


@exercise("08.1", title="The fragment map")
def fragment_map(answer: Callable[[int, int, int], tuple[int, int]]) -> Verdict:
    """(row, k) of the weight that a lane holds in a register, at position 0 (low) or 1 (high)."""
    forbid_calls(answer, _OWN)
    a = mma_layout.A
    for register in range(a.registers):
        for position in range(a.positions):
            for lane in range(mma_layout.LANES):
                wanted, got = a.place(lane, register, position), answer(lane, register, position)
                if _pair(got) != wanted:
                    where = f"lane {lane}, register {register}, position {position}"
                    return not_yet(
                        f"(row, k) = {wanted} for {where}", repr(got), _map_hint(register, position)
                    )
    return passed("right for all 256 elements: 32 lanes, four registers, two positions")


def _pair(value: Any) -> tuple[int, int] | None:
    """Two whole numbers, or None."""
    try:
        row, k = value
        pair = int(row), int(k)
    except (TypeError, ValueError):
        return None
    return pair if pair == (row, k) else None


def _map_hint(register: int, position: int) -> str:
    if register == 0 and position == 0:
        return "four neighbouring lanes share a row; each of them has two neighbouring k"
    if register == 0:
        return "position 1 is the high half of the register: the next k of the same row"
    return (
        "one bit of the register's number moves 8 rows down, the other one 8 k to the right: which is which?"
    )


@exercise("08.2", title="Halves from bits", par=21, limit=25, unit="instructions", text_stub="8e4d65b3")
def halves_from_bits(answer: str) -> Verdict:
    """Words of eight W4 codes to halves, every half-word exact; the score is sm_86 machine code."""
    low = torch.arange(1 << 16)
    high = (low * 40503 + 12345) % (1 << 16)  # every half-word once more, beside another one
    words = (low | high << 16).to(torch.int32)
    shifts = 4 * torch.arange(4)
    codes = [(half[:, None] >> shifts & 15) - 8 for half in (low, high)]
    wanted = torch.stack(codes, dim=-1)  # [word, pair, low or high half]
    args = {"words": words, "out": cuda.poisoned(wanted.shape), "count": len(words)}
    hidden = ("int4x2_to_half2",)
    outcome = cuda.run(answer, "halves", (256,), (256,), args, blocks=2, forbidden=hidden)
    hint = "pairs[p] holds nibble p (low half of the register) and nibble p + 4 (high half), each minus 8"
    cuda.expect(outcome.args["out"], wanted, name="out", hint=hint)
    score, hint = _arithmetic(answer)
    return passed("all 65,536 half-words are exact", score=score, hint=hint)


def _arithmetic(text: str) -> tuple[float, str]:
    """Instructions of the kernel that compute, and what the dear ones are."""
    try:
        code = sass.disassemble(KernelSource.from_text(text, "halves"), _ARCH).instructions
    except InputError as error:
        hint = "the emulator took this text; does it use something that only a CPU compiler knows?"
        raise NotYet(not_yet(f"machine code for {_ARCH}", str(error), hint)) from None
    kinds = [each.kind for each in code]
    work = ("address and integer", "half", "float", "conversion")
    score = float(sum(kinds.count(kind) for kind in work))
    if "conversion" in kinds:
        slow = sorted({each.base for each in code if each.kind == "conversion"})
        return score, f"{', '.join(slow)} convert numbers: 0x6400 | u is a half already, 1024 + u"
    return score, "one mask takes two nibbles at once; a code four bits higher is 16 times as large"


@exercise("08.3", title="The sixteenth field")
def w3_field(answer: Callable[[Sequence[int], int, int], int]) -> Verdict:
    """The 3-bit field of pair 0 … 15, position 0 or 1, out of three words."""
    forbid_calls(answer, _OWN)
    random = torch.Generator().manual_seed(8)
    for _ in range(40):
        words = tuple(int(word) for word in torch.randint(0, 1 << 32, (3,), generator=random))
        for pair in range(16):
            for position in range(2):
                wanted, got = _field(words, pair, position), answer(words, pair, position)
                if not (hasattr(got, "__index__") and int(got) == wanted):
                    shown = ", ".join(f"0x{word:08x}" for word in words)
                    expected = f"{wanted} for pair {pair}, position {position} of ({shown})"
                    return not_yet(expected, repr(got), _field_hint(pair))
    return passed("right for all 32 fields of 40 random triples")


def _field(words: Sequence[int], pair: int, position: int) -> int:
    # row and column of a lane's code: any lane and chunk would do
    half, step, register = pair // 8, pair // 4 % 2, pair % 4
    row, column = 16 * half + 8 * (register % 2), 4 * step + 2 * (register // 2) + position
    piece = mma_layout.locate("w3", row, column)
    value = done = 0
    for word, bit, width in zip(piece.words, piece.bits, piece.width, strict=True):
        value |= (words[word] >> bit & (1 << width) - 1) << done
        done += width
    return value


def _field_hint(pair: int) -> str:
    if pair < 5:
        return "pair p of the first word begins at bit 3 p; position 1 lies 16 bits higher"
    if pair < 15:
        return "each word holds five pairs: which word, and which of its five?"
    return "each half-word has one bit left, its highest; bit b of the last field is the one in word b"


@exercise(
    "08.4",
    title="Wait, and meet",
    par=2,
    limit=2,
    unit="groups under way",
    better="higher",
    text_stub="396f3a0b",
)
def wait_and_meet(answer: str) -> Verdict:
    """A ring of four stages without a race; the score is the groups of copies that a wait leaves alone."""
    n, k = 128, 9 * 32
    random = torch.Generator().manual_seed(8)
    w = torch.randn(n, k, generator=random).half()
    x = torch.randn(k, generator=random).half()
    args = {"w": w, "x": x, "out": cuda.poisoned((n,)), "K": k}
    try:
        outcome = cuda.run(answer, "gemv_ring", (1,), (128,), args)
    except NotYet as stopped:
        if not stopped.verdict.got.startswith("uninitialised"):
            raise
        # the general hint speaks of a missing write; here the write is another thread's copy
        hint = "the wait knows only this thread's copies: where do all threads meet after it?"
        raise NotYet(stopped.verdict.with_frame(hint=hint)) from None
    exact = w.double() @ x.double()
    # float sums of 288 products, then one rounding to half
    cuda.expect(outcome.args["out"], exact, bound=2.0**-10 * exact.abs().max().item(), name="out")
    if not outcome.trace.requests(kind="cp.async read"):
        return not_yet("tiles that come by cp_async_16", "no asynchronous copy", "keep copy() as it is")
    score = _left_under_way(answer)
    hint = "when tile `step` is needed, the copies of the next two steps are under way already: let them be"
    return passed("no race, and the product is right", score=score, hint=hint)


def _left_under_way(text: str) -> float:
    """The N of ``cp_async_wait<N>``, the largest one; 0 when all copies are waited for."""
    code = without_comments(text)
    defined = re.search(r"#[ \t]*define[ \t]+STAGES[ \t]+(\d+)", code)
    if defined is None or int(defined[1]) != STAGES:
        got = f"STAGES {defined[1]}" if defined else "no such line"
        raise NotYet(not_yet(f"#define STAGES {STAGES}", got, "keep the ring as it is"))
    found = re.findall(r"\bcp_async_wait\s*<([^>]*)>", code)
    return float(max((_number(each) for each in found), default=0))


def _number(expression: str) -> int:
    """A small C expression of numbers and STAGES."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, KeyError):
        hint = "write the number of groups as a number, or as STAGES - …"
        raise NotYet(
            not_yet("cp_async_wait<N>() with N from STAGES", f"N is {expression.strip()}", hint)
        ) from None
    return value


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return {"STAGES": STAGES}[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]  # type: ignore[index]
    raise KeyError(ast.unparse(node))
