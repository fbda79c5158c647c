"""The runtime's findings as faults in the words of the kernel's own lines, with one hint each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.emulator.arena import element, many
from labkit.emulator.barriers import barrier_between, missing_barrier
from labkit.emulator.faults import Fault, Position, quoted_line
from labkit.emulator.lines import Resolver

_PC = re.compile("\x01([0-9a-f]+)\x02")
_WHERE = re.compile(r"block \((\d+),(\d+),(\d+)\) thread \((\d+),(\d+),(\d+)\)")
_ADDRESS = re.compile(r"illegal memory access:? (?:to|address) (0x[0-9a-f]+|0\b)(?: \(null pointer\))?")
_UNKNOWN = re.compile(r", an unknown line$")
_DYNAMIC = "dynamic shared memory"  # the runtime's name of it
_FILE_LINE = re.compile(r" at ([^\s,:]+):(\d+)")

# First words of the runtime's error → kind, as faults show it.
_FATAL = (
    ("deadlock", "deadlock"),
    ("divergent", "divergent barrier"),
    ("out-of-bounds", "out-of-bounds"),
    ("illegal memory access", "illegal memory access"),
    ("stack overflow", "stack overflow"),
    ("time limit", "time limit"),
    ("assert", "assert"),
    ("trap", "trap"),
    ("__trap", "trap"),
    ("misaligned", "misaligned"),
    ("integer division by zero", "integer division by zero"),
    ("warp", "warp mismatch"),
    ("lanes of one warp", "warp mismatch"),
    ("stopped", "stopped"),
    ("busy", "busy"),
    ("invalid configuration", "invalid configuration"),
    ("too much shared memory", "too much shared memory"),
)
TIME_LIMIT = (
    "Does every loop end for every thread? Does one thread wait for what another never does? (Blocks run one "
    "after another here: none can wait for a later one.)"
)
_HINTS = {
    "deadlock": "Every thread that has not returned must reach the same __syncthreads(), and every lane "
    "named in a warp operation's mask must call it.",
    "divergent barrier": "All threads of a block must meet at one and the same __syncthreads(): move it out "
    "of the branch.",
    "illegal memory access": "Was None passed for a pointer, or a pointer never set?",
    "stack overflow": "Put big arrays in shared or global memory; end every recursion.",
    "integer division by zero": "Guard the division, or launch with sizes that are not zero.",
    "time limit": TIME_LIMIT,
    "warp mismatch": "All lanes named in the mask must call the same operation together.",
    "too much shared memory": "Take smaller tiles, or extern __shared__ with the bytes given at the launch.",
    "misaligned": "An access of n bytes needs an address that n divides; uint4 and float4 need 16.",
    "out-of-bounds": "Guard the access with a comparison against the size.",
    "uninitialised": "Write the element before it is read, with __syncthreads() in between if another thread "
    "writes it.",
    "cp.async": "Call cp_async_wait<N>() and then __syncthreads() before the copied data is read.",
    "write to a const buffer": "The parameter is declared const: other code relies on it not changing.",
}


def fatal(
    error: str,
    resolve: Resolver,
    sources: Mapping[str, Sequence[str]],
    filename: str,
    place: Mapping[str, Any] | None = None,
    traced: bool = False,
) -> Fault:
    """The fault that ended a launch.

    Args:
        error: the runtime's error text, with marked addresses.
        resolve: address → file and line.
        sources: lines of the known files.
        filename: the kernel's file.
        place: the buffer that an illegal address is nearest to, when known.
        traced: whether it was a traced launch.
    """
    kind = next((kind for start, kind in _FATAL if error.startswith(start)), "fault")
    spots = [resolve(int(match[1], 16)) for match in _PC.finditer(error)]
    wheres = [tuple(int(n) for n in match.groups()) for match in _WHERE.finditer(error)]

    def named(match: re.Match[str]) -> str:
        file, line = resolve(int(match[1], 16))
        if line is None:
            return "an unknown line"
        return f"line {line}" if file == filename else f"{file} line {line}"

    text = _PC.sub(named, error).strip().rstrip(".").replace(":  ", ": ")
    file, line = spots[0] if spots else ("", None)
    if (match := _FILE_LINE.search(error)) and int(match[2]):  # an assert knows its own line
        file, line = match[1], int(match[2])
        text = text.replace(match[0], "", 1)
        text = text if spots and spots[0][1] == line else _UNKNOWN.sub("", text) + f", line {line}"
    if place:
        text = _ADDRESS.sub(f"illegal memory access: {place['text']}", text)
    text = _rename(text, kind)
    other = spots[1][1] if len(spots) > 1 and kind == "divergent barrier" else None
    hint = _HINTS.get(kind, "")
    if kind == "illegal memory access":
        hint = _illegal_hint(text, place, line, traced)
    return Fault(
        kind=kind,
        message=_message(text, hint, sources, [(file, line), (file, other)]),
        line=line,
        block=wheres[0][:3] if wheres else None,  # type: ignore[arg-type]
        thread=wheres[0][3:] if wheres else None,  # type: ignore[arg-type]
        buffer=place["buffer"] if place else "",
        offset=place["offset"] if place else None,
        other_line=other,
        other_block=wheres[1][:3] if other and len(wheres) > 1 else None,  # type: ignore[arg-type]
        other_thread=wheres[1][3:] if other and len(wheres) > 1 else None,  # type: ignore[arg-type]
        fatal=True,
        file=file,
    )


def _illegal_hint(text: str, place: Mapping[str, Any] | None, line: int | None, traced: bool) -> str:
    if "null pointer" in text:
        return "Was None passed for a pointer, or a pointer never set?"
    if place and place["buffer"]:
        return _HINTS["out-of-bounds"]
    if traced:
        return ""
    return f"trace() names {'the line, ' if line is None else ''}the buffer and the index."


def illegal_address(error: str) -> int | None:
    """The address in the runtime's "illegal memory access" error."""
    match = _ADDRESS.search(error)
    if match is None:
        return None
    return int(match[1], 16) if match[1].startswith("0x") else 0


def _rename(text: str, kind: str) -> str:
    """The kind first, in the words the course uses."""
    if kind == "divergent barrier":
        return re.sub(r"^divergent __syncthreads", "divergent barrier", text)
    if not text.startswith(kind):
        return f"{kind}: {text}"
    return text


def beside(name: str, offset: int, size: int, itemsize: int) -> Fault:
    """Something was written next to a buffer by a launch that ended well."""
    text = f"out-of-bounds: the kernel wrote {element(name, offset, size, itemsize)}"
    hint = f"trace() names the line. {_HINTS['out-of-bounds']}"
    return Fault("out-of-bounds", f"{text}. {hint}", buffer=name, offset=offset)


def reported(
    reports: Sequence[Mapping[str, Any]],
    resolve: Resolver,
    sources: Mapping[str, Sequence[str]],
    filename: str,
    block_shape: Position,
    buffers: Mapping[str, tuple[int, int]],
    shared: Mapping[str, int],
) -> list[Fault]:
    """Faults of a traced launch, one for each pair of lines: unrolled loops have many addresses.

    Args:
        reports: the runtime's reports.
        resolve: address → file and line.
        sources: lines of the known files.
        filename: the kernel's file.
        block_shape: blockDim.
        buffers: name → (bytes, bytes an element) of the launch's buffers.
        shared: name → bytes of the arrays in shared memory.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for report in reports:
        here = resolve(report["pc1"])
        there = resolve(report["pc2"]) if report["pc2"] else ("", None)
        key = (report["type"], here, there, report["region"])
        if key in merged:
            merged[key]["count"] += report["count"]
        else:
            merged[key] = {**report, "here": here, "there": there}
    one_dimensional = block_shape[1] == block_shape[2] == 1
    # `sum[0] += x` by all threads is three races; no barrier helps against any of them.
    many_writers = {
        (report["here"], report["region"])
        for report in merged.values()
        if report["type"].startswith("race: two writes") and report["here"] == report["there"]
    }
    return [
        _fault(
            report,
            sources,
            filename,
            block_shape,
            one_dimensional,
            buffers,
            shared,
            report["here"] == report["there"] and (report["here"], report["region"]) in many_writers,
        )
        for report in merged.values()
    ]


def _fault(
    report: Mapping[str, Any],
    sources: Mapping[str, Sequence[str]],
    filename: str,
    block_shape: Position,
    one_dimensional: bool,
    buffers: Mapping[str, tuple[int, int]],
    shared: Mapping[str, int],
    written_by_many: bool,
) -> Fault:
    kind, verb, other_verb = _kind(report["type"])
    (file, line), (other_file, other_line) = report["here"], report["there"]
    block, other_block = tuple(report["block"]), tuple(report["block2"])
    thread = _thread(report["t1"], block_shape)
    other_thread = _thread(report["t2"], block_shape) if report["t2"] >= 0 and report["pc2"] else None
    accessed = _element(report, buffers)
    where = f"block ({block[0]},{block[1]},{block[2]}) thread {_thread_text(thread, one_dimensional)}"
    head = report["type"] if kind == "race" else kind
    text = f"{head}: {_at(file, line, filename)} {verb} {accessed} in {where}"
    text += _extent(report, kind, buffers, shared)
    if other_thread is not None:
        text += f"; {_at(other_file, other_line, filename)} {other_verb} it"
        if other_block != block:
            text += f" in block ({other_block[0]},{other_block[1]},{other_block[2]})"
        else:
            text += " in"
        text += f" thread {_thread_text(other_thread, one_dimensional)}"
    if report["count"] > 1:
        text += f"; seen {report['count']} times"
    hint = _hint(report, kind, sources, written_by_many)
    return Fault(
        kind=kind,
        message=_message(text, hint, sources, [(file, line), (other_file, other_line)]),
        line=line,
        block=block,  # type: ignore[arg-type]
        thread=thread,
        buffer=report["region"],
        offset=report["off"],
        size=report["size"],
        other_line=other_line,
        other_block=other_block if other_thread is not None else None,  # type: ignore[arg-type]
        other_thread=other_thread,
        count=report["count"],
        file=file,
    )


def _kind(type_text: str) -> tuple[str, str, str]:
    """Kind, what the access does, what the other access did."""
    if type_text.startswith("race"):
        verb = "reads" if "read after" in type_text else "writes"
        if "atomic" in type_text or "cp.async" in type_text:
            return "race", "accesses", "accessed"
        return "race", verb, "read" if "after read" in type_text else "wrote"
    if type_text.startswith("null pointer"):
        verb = {"read": "reads", "write": "writes"}.get(type_text.split()[-1], "does an atomic")
        return "illegal memory access", f"{verb} through", ""
    if type_text.startswith("out-of-bounds"):
        action = type_text.removeprefix("out-of-bounds").strip()
        verb = {"read": "reads", "write": "writes", "atomic": "does an atomic on"}.get(action, "accesses")
        return "out-of-bounds", verb, ""
    if "uninitialised" in type_text:
        return "uninitialised", "reads", ""
    if "cp.async" in type_text:
        return "cp.async", "writes" if type_text.startswith("write") else "reads", "began to copy into"
    if "const" in type_text:
        return "write to a const buffer", "writes", ""
    if type_text.startswith("misaligned"):
        action = type_text.removeprefix("misaligned").strip(" :")
        return "misaligned", {"read": "reads", "write": "writes"}.get(action, "accesses"), ""
    return type_text.split(":")[0], "accesses", "accessed"


def _element(report: Mapping[str, Any], buffers: Mapping[str, tuple[int, int]]) -> str:
    """``out[64] (4 bytes)``; ``shared_a[+64] (2 bytes)`` where only the byte offset is known."""
    name, offset, size = report["region"], report["off"], report["size"]
    amount = f"({size} byte{'' if size == 1 else 's'})"
    if report["type"].startswith("null pointer"):
        return f"a null pointer {amount}"
    if not name:
        return f"memory that belongs to no buffer {amount}"
    if name in buffers:
        return f"{name}[{offset // max(buffers[name][1], 1)}] {amount}"
    return f"{name}[+{offset}] {amount}"


def _extent(
    report: Mapping[str, Any],
    kind: str,
    buffers: Mapping[str, tuple[int, int]],
    shared: Mapping[str, int],
) -> str:
    """How big a buffer is that was left."""
    name = report["region"]
    if kind != "out-of-bounds" or not name:
        return ""
    if name in buffers:
        size, item = buffers[name]
        return f", but {name} has {many(size // max(item, 1), 'element')}"
    return f", but {name} has {many(shared[name], 'byte')}" if name in shared else ""


def _hint(
    report: Mapping[str, Any], kind: str, sources: Mapping[str, Sequence[str]], written_by_many: bool
) -> str:
    if kind == "race":
        return _race_hint(report, sources, written_by_many)
    if kind == "cp.async":
        (file, line), (other_file, other_line) = report["here"], report["there"]
        if line and other_line and file == other_file:
            first, last = min(line, other_line), max(line, other_line)
            if barrier_between(sources.get(file, ()), first, last):
                return (
                    f"If that copy is for the next round of a loop, put __syncthreads() after line {last}, "
                    f"before the loop comes back to line {first}. {_HINTS[kind]}"
                )
    if kind == "out-of-bounds" and report["region"] == _DYNAMIC:
        return "Launch with more shared_bytes, or guard the access."
    if kind == "out-of-bounds" and not report["region"]:
        return (
            "Is the index negative, or an unsigned difference that fell below zero, or beyond what int holds?"
        )
    return _HINTS.get(kind, "")


def _race_hint(report: Mapping[str, Any], sources: Mapping[str, Sequence[str]], written_by_many: bool) -> str:
    if list(report["block"]) != list(report["block2"]):
        return (
            "Blocks run in any order: give each block its own memory, use an atomic, or put the second "
            "step into another launch."
        )
    if written_by_many:
        return "Several threads write it: let one thread do so, or use an atomic."
    (file, line), (other_file, other_line) = report["here"], report["there"]
    one_warp = report["t1"] // 32 == report["t2"] // 32
    if line is None or other_line is None or file != other_file or file not in sources:
        what = "put __syncthreads() between the two accesses."
    else:
        what = missing_barrier(sources[file], line, other_line, one_warp=one_warp)
    return f"Both touch it between the same two barriers: {what}"


def _at(file: str, line: int | None, filename: str) -> str:
    if line is None:
        return "an unknown line"
    return f"line {line}" if file == filename else f"{file} line {line}"


def _thread(linear: int, block_shape: Position) -> Position:
    x, y, _ = block_shape
    return linear % x, linear // x % y, linear // (x * y)


def _thread_text(thread: Position, one_dimensional: bool) -> str:
    return str(thread[0]) if one_dimensional else f"({thread[0]},{thread[1]},{thread[2]})"


def _message(
    text: str, hint: str, sources: Mapping[str, Sequence[str]], lines: Sequence[tuple[str, int | None]]
) -> str:
    out = f"{text}. {hint}" if hint else text
    shown = dict.fromkeys((file, line) for file, line in lines if line is not None)
    for file, line in sorted(shown, key=lambda spot: spot[1] or 0):
        lines_of_file = sources.get(file, ())
        if line and 1 <= line <= len(lines_of_file):
            out += "\n" + quoted_line(line, lines_of_file[line - 1])
    return out
