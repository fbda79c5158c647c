"""Exercises whose answer is CUDA C++: run the text apart, turn what happens into a verdict, score it.

A check of such an exercise::

    @exercise("03.2", title="Neighbouring words", par=24, limit=32, unit="sectors", text_stub="1a2b3c4d")
    def gemv_sectors(answer: str) -> Verdict:
        case = product_case("w4", n=16, k=96)
        outcome = cuda.run(answer, "gemv", (2,), (256,), case.args("packed", "scales", "x", "out", "N", "K"))
        case.judge(outcome)
        return cuda.score_sectors(outcome, "packed")

:func:`run`, ``judge`` and :func:`expect` end the check with :class:`~labkit.check.verdict.NotYet` when
something is wrong, so that the lines read as what should happen. Every launch is isolated: the text is
compiled and run in a child process with a time limit. That protects the notebook from a mistake in a
kernel. It does not protect the machine: the text is the user's own program, with the user's own rights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.check import cuda_text
from labkit.check.verdict import NotYet, Verdict, not_yet, passed
from labkit.errors import InputError, require

FILENAME = "kernel.cu"
"""What compilers and reports call the text of an answer; a verdict says ``line 9`` instead."""

SECTOR = 32
"""Bytes of a sector, the smallest piece that global memory moves."""

_PLAIN_HINT = "run the kernel yourself through labkit.emulator and read its report"
_METRICS = ("sectors", "requests", "wavefronts")


@dataclass(frozen=True)
class Outcome:
    """A launch that went to its end with no fault.

    Attributes:
        text: the answer.
        args: parameter name -> value after the launch; outputs hold results.
        trace: the :class:`labkit.emulator.Trace`, None when it was not asked for.
        run: the fast :class:`labkit.emulator.Run`, None when all blocks were traced.
    """

    text: str
    args: Mapping[str, Any]
    trace: Any = None
    run: Any = None

    def source(self, line: int) -> str:
        """Line ``line`` (from 1) of the answer, stripped; empty when there is none."""
        lines = self.text.splitlines()
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def run(
    answer: Any,
    entry: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Mapping[str, Any],
    shared_bytes: int = 0,
    trace: bool = True,
    time_limit: float = 10.0,
    *,
    blocks: Any = None,
    defines: Mapping[str, object] | None = None,
    forbidden: Iterable[str] = (),
) -> Outcome:
    """Compile and launch a student's text, isolated.

    Args:
        answer: CUDA C++; anything else is "not yet".
        entry: name of its ``__global__`` function.
        grid, block, shared_bytes: as for every launch.
        args: the kernel's parameters, name -> value in their order; outputs are written in place
            (fill them with :func:`poisoned`). The answer must declare these names in this order.
        trace: count accesses and look for races, bounds and barriers.
        time_limit: seconds for each launch.
        blocks: trace only these (as in ``kernel.trace``); results then come from a fast launch of all.
        defines: macros, as ``-Dname=value``.
        forbidden: names that the answer may not use (:func:`labkit.check.cuda_text.refusal`).

    Raises:
        NotYet: no text, another kernel, a compile error, a fault: said at the student's own line.
    """
    text = _accepted(answer, entry, args, tuple(forbidden))
    from labkit import emulator

    try:
        kernel = emulator.compile(
            text,
            entry,
            filename=FILENAME,
            defines=defines,
            isolate=True,
            time_limit=time_limit,
            first="trace" if trace else "fast",
        )
    except emulator.CompileError as error:
        raise NotYet(_compile_verdict(error, text)) from None
    values = list(args.values())
    traced = ran = None
    try:
        if trace:
            given = [_copy(value) for value in values] if blocks is not None else values
            traced = kernel.trace(grid, block, given, shared_bytes, blocks=blocks)
            _no_faults(traced.faults, text)
        if not trace or blocks is not None:
            ran = kernel(grid, block, values, shared_bytes)
    except emulator.KernelFault as fault:
        raise NotYet(_fault_verdict(fault, text)) from None
    except InputError as error:
        hint = "leave the kernel's name and parameters as they stand in the stub"
        raise NotYet(not_yet(f"a kernel called as {entry}({', '.join(args)})", str(error), hint)) from None
    return Outcome(text, args, traced, ran)


def _accepted(answer: Any, entry: str, args: Mapping[str, Any], forbidden: Sequence[str]) -> str:
    """The text, when it is one that may be compiled."""
    if not isinstance(answer, str):
        hint = 'write it as a text: my_kernel = r"""…"""'
        raise NotYet(not_yet("a text of CUDA C++", f"{type(answer).__name__}", hint))
    if (refused := cuda_text.refusal(answer, forbidden)) is not None:
        line, what, hint = refused
        raise NotYet(not_yet("a kernel of your own, in plain CUDA C++", f"line {line}: {what}", hint))
    found = {kernel.name: kernel for kernel in cuda_text.kernels(answer)}
    if entry not in found:
        got = f"kernels: {', '.join(found)}" if found else "no __global__ function with a body"
        raise NotYet(not_yet(f"a kernel named {entry}", got, "keep the name that the stub gives it"))
    names = [parameter.name for parameter in found[entry].parameters]
    if names != list(args):
        hint = "keep the parameters of the stub, in their order"
        raise NotYet(not_yet(f"{entry}({', '.join(args)})", f"{entry}({', '.join(names)})", hint))
    return answer


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if hasattr(value, "copy") else value


# --- faults in words ----------------------------------------------------------------------------------


def _no_faults(faults: Sequence[Any], text: str) -> None:
    if not faults:
        return
    # What ended the launch explains the rest, but for a wild address: the report before it knows more.
    ended = (fault for fault in faults if fault.fatal and fault.kind != "illegal memory access")
    first = next(ended, faults[0])
    more = len(faults) - 1
    also = f"\nand {more} more report{'' if more == 1 else 's'}" if more else ""
    raise NotYet(_fault_verdict(first, text, also))


def _fault_verdict(fault: Any, text: str, also: str = "") -> Verdict:
    """A fault's message is facts, a hint after the first full stop, and the lines that it names."""
    first, _, lines = str(fault).partition("\n")
    facts, _, hint = first.partition(". ")
    got = _located("\n".join(filter(None, [facts, lines])), text, fault.line)
    return not_yet("a launch with no fault", got + also, hint[:1].lower() + hint[1:] or _PLAIN_HINT)


def _compile_verdict(error: Any, text: str) -> Verdict:
    message, _, fix = str(error).partition("\nFix: ")
    hint = fix or "mend the first error first: the others may follow from it"
    return not_yet("a text that compiles", _located(message, text, error.line), hint)


def _located(message: str, text: str, line: int | None) -> str:
    """The message with no file name and no address, and with the student's line in front if it names none."""
    words = re.sub(rf"\b{re.escape(FILENAME)}(?:,? line |:)(\d+)(?::\d+)?", r"line \1", message.strip())
    facts, *rest = words.split("\n")  # what follows are lines of the kernel: they stay as they are
    words = "\n".join([re.sub(r"\s*(?:\b(?:at|to) )?\b0x[0-9a-fA-F]+", "", facts), *rest])
    lines = text.splitlines()
    if line is None or not 0 < line <= len(lines):
        return words
    if not re.search(rf"\bline {line}\b", words):
        words = f"line {line}: {words}"
    source = lines[line - 1].strip()
    return words if not source or source in words else f"{words}\n{line} | {source}"


# --- results --------------------------------------------------------------------------------------------

# A NaN that no arithmetic makes, by width: a cell that still holds it was never written.
_POISON = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FDA),
    torch.float32: (torch.int32, 0x7FC5A5A5),
    torch.float64: (torch.int64, 0x7FF8A5A5A5A5A5A5),
    torch.int32: (torch.int32, 0x5A5A5A5A),
    torch.int64: (torch.int64, 0x5A5A5A5A5A5A5A5A),
}


def poisoned(shape: Sequence[int], dtype: torch.dtype = torch.float16) -> Tensor:
    """An output to hand to :func:`run`: every cell holds a value that says "never written"."""
    require(dtype in _POISON, "dtype", dtype, ", ".join(str(known) for known in _POISON))
    bits, pattern = _POISON[dtype]
    return torch.full(tuple(shape), pattern, dtype=bits).view(dtype)


def unwritten(output: Tensor) -> Tensor:
    """Flat indices of the cells that still hold the poison: int64 [count]."""
    bits, pattern = _POISON[output.dtype]
    return (output.contiguous().view(bits) == pattern).flatten().nonzero().flatten()


def expect(
    output: Tensor, expected: Tensor, bound: float = 0.0, *, name: str = "output", hint: str = ""
) -> None:
    """End the check unless ``output`` is what it should be.

    Args:
        output: from a launch, made with :func:`poisoned`.
        expected: of the same shape, any dtype; compared in float64.
        bound: largest absolute error that is right; 0 for integers and copies.
        name: the kernel's parameter.
        hint: shown for wrong values; without one, a hint from where they are.

    Raises:
        NotYet: cells that were never written, or values that are wrong: index, expected, got, error.
    """
    require(output.shape == expected.shape, "output", list(output.shape), f"the shape {list(expected.shape)}")
    if len(missing := unwritten(output)):
        got = f"{name} cells {spans(missing.tolist())} were never written"
        say = "which thread writes them, and does the grid have enough blocks?"
        raise NotYet(not_yet(f"all {output.numel()} cells of {name} written", got, say))
    came, wanted = output.double().flatten(), expected.double().flatten()
    error = (came - wanted).abs()
    wrong = (~(error <= bound)).nonzero().flatten()  # a NaN is wrong as well
    if not len(wrong):
        return
    first = int(wrong[0])
    value, right = came[first].item(), wanted[first].item()
    allowed = f" ± {bound:.2g}" if bound else ""
    relative = f", relative error {abs(value - right) / abs(right):.2g}" if right else ""
    share = f"{len(wrong)} of {output.numel()} cells are wrong: {spans(wrong.tolist())}"
    raise NotYet(
        not_yet(
            f"{name}[{_index(first, output.shape)}] = {right:.6g}{allowed}",
            f"{value:.6g}{relative}\n{share}",
            hint or _value_hint(came, wrong),
        )
    )


def _value_hint(came: Tensor, wrong: Tensor) -> str:
    if came[wrong].isnan().any():
        return "a NaN came out: was something read that nobody had written, or 0 × Inf computed?"
    if not came[wrong].any():
        return "the wrong cells hold 0: is the sum stored, and by every thread that should?"
    if int(wrong[0]) and len(wrong) == came.numel() - int(wrong[0]):
        return f"all is right up to cell {int(wrong[0]) - 1}: look at what changes there"
    return "work one cell out by hand: which weight, which scale, which x did the kernel use?"


def _index(flat: int, shape: Sequence[int]) -> str:
    out = []
    for size in reversed(shape):
        out.append(str(flat % size))
        flat //= size
    return ", ".join(reversed(out))


def spans(cells: Sequence[int], most: int = 4) -> str:
    """Ascending whole numbers as ranges: ``0…31, 64, 70…71``; an ellipsis after ``most`` ranges."""
    runs: list[list[int]] = []
    for cell in cells:
        if runs and cell == runs[-1][1] + 1:
            runs[-1][1] = cell
        else:
            runs.append([cell, cell])
    shown = [str(low) if low == high else f"{low}…{high}" for low, high in runs[:most]]
    return ", ".join(shown) + (", …" if len(runs) > most else "")


# --- scores ---------------------------------------------------------------------------------------------


def score_sectors(outcome: Outcome, buffer: str, message: str = "", **filters: Any) -> Verdict:
    """Passed, scored by the sectors of ``buffer`` that the launch moved: ``96 sectors, par 24, pass <= 32``.

    Every byte of the buffer must have been read or written where the trace sees it, else a score could
    be had for accesses that are not counted. ``filters``: as for ``trace.total`` (kind, line).
    """
    _whole(outcome, buffer)
    return _score(outcome, "sectors", message, buffer=buffer, **filters)


def score_requests(outcome: Outcome, buffer: str, message: str = "", **filters: Any) -> Verdict:
    """Passed, scored by the warp instructions that touched ``buffer``; see :func:`score_sectors`."""
    _whole(outcome, buffer)
    return _score(outcome, "requests", message, buffer=buffer, **filters)


def score_wavefronts(
    outcome: Outcome, buffer: str | None = None, message: str = "", **filters: Any
) -> Verdict:
    """Passed, scored by shared-memory wavefronts, of one shared array or of all.

    An answer that does not use shared memory any more is "not yet".
    """
    chosen = {"space": "shared"} | ({"buffer": buffer} if buffer else {}) | filters
    if not outcome.trace.requests(**chosen):
        what = buffer or "shared memory"
        raise NotYet(not_yet(f"accesses to {what}", "none", f"this exercise is about {what}: keep it"))
    return _score(outcome, "wavefronts", message, **chosen)


def _whole(outcome: Outcome, buffer: str) -> None:
    value = outcome.args.get(buffer)
    require(isinstance(value, Tensor), "buffer", repr(buffer), "the name of a tensor in args")
    assert isinstance(value, Tensor)
    trace = outcome.trace
    needed = -(-value.nbytes // SECTOR)
    if trace.blocks_traced == trace.blocks_total and (seen := trace.compulsory_sectors(buffer)) < needed:
        hint = f"read {buffer} through its pointer: memcpy and the like are not counted"
        raise NotYet(not_yet(f"all {needed} sectors of {buffer} used", f"{seen} of them in the count", hint))


def _score(outcome: Outcome, metric: str, message: str, **filters: Any) -> Verdict:
    require(metric in _METRICS, "metric", repr(metric), "one of " + ", ".join(_METRICS))
    value = outcome.trace.total(metric, **filters)
    return passed(message or "the result is right", score=value, hint=_costly(outcome, metric, filters))


def _costly(outcome: Outcome, metric: str, filters: Mapping[str, Any]) -> str:
    """The line that costs most, and what its bytes would need at best."""
    rows = [row for row in outcome.trace.select(**filters) if getattr(row, metric)]
    if not rows:
        return ""
    row = max(rows, key=lambda row: getattr(row, metric))
    where = f"line {row.line} ({row.kind} of {row.buffer})"
    if metric == "wavefronts":
        each, best = row.wavefronts / row.requests, row.ideal_wavefronts / row.requests
        return f"{where}: {each:.3g} wavefronts a request, {best:.3g} without conflicts"
    if metric == "requests":
        return f"{where}: {row.requests} requests of {row.size} bytes a lane; a lane may read up to 16"
    different = outcome.trace.compulsory_sectors(row.buffer)
    if SECTOR * row.sectors <= 1.05 * row.useful_bytes and different < row.sectors:
        return f"{where} moves {row.sectors} sectors, {different} of them different: read each once"
    each, best = row.sectors / row.requests, row.useful_bytes / row.requests / SECTOR
    return f"{where}: {each:.3g} sectors a request, its bytes would fill {best:.3g}"
