"""The W3 batch-tile against grid.y: every candidate cause of its loss as a count, with no GPU.

The article saw the batch-tile run 0.48 to 0.53 times as fast as grid.y and named fewer resident warps
as the cause. Here each candidate is a figure of both kernels: from the machine code
(:mod:`labkit.kernels.loops`), from the emulator's trace, or from the grid. Times are in
:mod:`labkit.bench.batch_times`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit import tables
from labkit.bench.cases import batch_tile_shape
from labkit.device import Device, get_device
from labkit.errors import require
from labkit.kernels import loops, resources
from labkit.kernels.occupancy import Occupancy
from labkit.kernels.source import KernelSource

ROWS = 8
"""Rows of x that a tile holds: the article's eight accumulators."""

VARIANTS = ("grid.y", "tile", "rolled", "together")
"""grid.y: ``gemv_row_w3``; tile: ``gemv_batch_w3`` with a guard before each row; rolled: its loop over the
rows left as a loop (ROLLED=1); together: without the guard, so that the rows' loads go out together, and with
room for the registers that this takes (three blocks an SM)."""

STEP = 256
"""Columns of K that a warp takes at a time."""

_WEIGHT_LOADS = 3  # byte loads of a step: eight codes in three bytes

_UNROLLED = re.compile(r"(?<=#else\n)#pragma unroll\n.*?(?=#endif)", re.DOTALL)
_TOGETHER = (("if (i < rows) {", "{"), ("(size_t)i * K", "(size_t)min(i, rows - 1) * K"))


def source(variant: str, **defines: int) -> KernelSource:
    """One of :data:`VARIANTS`, as it is launched for a weight without offset and K a multiple of 8.

    Raises:
        InputError: an unknown variant, or a kernel file that no longer holds the lines to change.
    """
    require(variant in VARIANTS, "variant", repr(variant), "one of " + ", ".join(VARIANTS))
    common = {"OFFSET": 0, "VECTOR_X": 1}
    if variant == "grid.y":
        return KernelSource("gemv_row.cu", "gemv_row_w3", {**common, **defines})
    common |= {"BATCH_TILE": ROWS, **({"ROLLED": 1} if variant == "rolled" else {})}
    tile = KernelSource("gemv_batch.cu", "gemv_batch_w3", {**common, **defines})
    if variant != "together":
        return tile
    found = _UNROLLED.search(tile.text)
    lines = found[0] if found else ""
    whole = all(lines.count(old) == 1 for old, _ in _TOGETHER)
    require(whole, tile.filename, "another loop over the rows", f"the unrolled one, with {_TOGETHER[0][0]}")
    for old, new in _TOGETHER:
        lines = lines.replace(old, new)
    common["MIN_BLOCKS"] = 3
    text = _UNROLLED.sub(lambda _: lines, tile.text, count=1)
    return KernelSource.from_text(text, tile.entry, {**common, **defines}, filename=tile.filename)


def launch(variant: str, x: Any, weight: Any) -> Any:
    """A :class:`labkit.kernels.seed.launch.Launch` of a variant.

    Args:
        x: float16 [M, K], M from 1 to :data:`ROWS`.
        weight: W3, no offset, on x's device.
    """
    from labkit.kernels.seed.launch import GEMV_BATCH, GEMV_ROW, plan

    family = GEMV_ROW if variant == "grid.y" else GEMV_BATCH
    return replace(plan(family["w3"], x, weight), source=source(variant))


# --- machine code -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """What the machine code of a variant says of one step: 256 columns of K, one column of the output.

    Attributes:
        usage: registers, spills, stack, code size.
        fixed, each: instructions of a warp for a step, and for every row of x on top.
        fixed_waits, each_waits: how often it needs loaded values (:meth:`labkit.kernels.loops.Loop.waits`).
        together: most loads on their way at one time in a warp.
        local: loads from local memory.
        classes: instructions of :data:`ROWS` rows by class (:data:`labkit.kernels.sass.CLASSES`).
    """

    variant: str
    usage: resources.Usage
    fixed: float
    each: float
    fixed_waits: float
    each_waits: float
    together: int
    local: int
    classes: Mapping[str, float]

    def instructions(self, m: int = ROWS) -> float:
        """Warp instructions of a step for m rows (grid.y: of the m warps that share the column)."""
        return self.fixed + m * self.each

    def waits(self, m: int = ROWS) -> float:
        """Waits of a step for m rows, counted like :meth:`instructions`."""
        return self.fixed_waits + m * self.each_waits

    def resident(self, card: str | Device = "rtx3050-laptop") -> Occupancy:
        """Blocks and warps of it that an SM of a card of this architecture holds."""
        return self.usage.occupancy(card)


@functools.cache
def code(variant: str, arch: str = "sm_86", min_blocks: int = 0) -> Code:
    """Compile a variant and read its main loop.

    Args:
        variant: one of :data:`VARIANTS`.
        arch: architecture, such as "sm_86".
        min_blocks: blocks an SM must be able to hold (a register limit); 0 for the kernel's own.

    Raises:
        InputError: NVRTC or nvdisasm is missing.
    """
    chosen = source(variant, **({"MIN_BLOCKS": min_blocks} if min_blocks else {}))
    loop = loops.main_loop(chosen, arch)
    loads = loop.loads(ROWS)
    steps = loads["LDG.U8"] / _WEIGHT_LOADS
    row = variant == "grid.y"  # a warp of grid.y takes a step for one row: nothing is shared
    bare = loop if variant == "together" else loop.unguarded()  # which does all eight, wanted or not
    fixed, fixed_waits = (0.0, 0.0) if row else (bare.executed(0) / steps, bare.waits(0) / steps)
    rows = 1 if row else ROWS
    classes = Counter(each.kind for each in loop.instructions)
    for each in loop.inner.instructions if loop.inner else ():
        classes[each.kind] += ROWS
    return Code(
        variant,
        resources.usage(chosen, arch),
        fixed=fixed,
        each=(loop.executed(ROWS) / steps - fixed) / rows,
        fixed_waits=fixed_waits,
        each_waits=(loop.waits(ROWS) / steps - fixed_waits) / rows,
        together=loop.together,
        local=sum(count for name, count in loads.items() if name.startswith("LDL")),
        classes={kind: (ROWS if row else 1) * count / steps for kind, count in classes.items()},
    )


def kernel_table(us: Mapping[str, float], card: str, m: int = ROWS) -> tables.Table:
    """Machine code and time of variants, slowest first: what changed from one to the next, and what it did.

    Args:
        us: variant → µs that were measured for m rows; other names are passed over.
        card: key of the device that was timed; the machine code is compiled for it.
    """
    facts = get_device(card)
    rows = []
    for variant in sorted(us.keys() & set(VARIANTS), key=lambda name: us[name], reverse=True):
        found = code(variant, f"sm_{facts.capability[0]}{facts.capability[1]}")
        row = {
            "kernel": variant,
            "registers": found.usage.registers,
            "warps": working_warps(variant, m, card),
        }
        row |= {"waits": found.waits(m), "instructions": found.instructions(m), "us": us[variant]}
        rows.append(row | {"origin": "measured"})
    headers = {"kernel": "kernel", "registers": "registers", "warps": "warps at work", "waits": "waits"}
    headers |= {"instructions": "instructions", "us": "µs", "origin": "origin of µs"}
    formats = {"warps": ".0f", "waits": ".0f", "instructions": ".0f", "us": ".1f"}
    caption = f"{facts.name}, {m} rows: machine code of a step (counted) and time of a call"
    return tables.table(rows, headers, formats=formats, caption=caption)


def code_table(variants: Sequence[str], arch: str = "sm_86") -> tables.Table:
    """Instructions of a step of several variants; shows itself in a notebook."""
    kinds = {
        "address and integer": "integer",
        "conversion": "conversion",
        "float": "float",
        "memory": "memory",
    }
    rows = []
    for variant in variants:
        found = code(variant, arch)
        row = {"kernel": variant, "fixed": found.fixed, "each": found.each}
        row |= {f"m{m}": found.instructions(m) for m in (2, ROWS)}
        rows.append(row | {kind: found.classes.get(kind, 0) for kind in kinds})
    headers = {
        "kernel": "kernel",
        "fixed": "fixed",
        "each": "each row",
        "m2": "M = 2",
        f"m{ROWS}": f"M = {ROWS}",
    }
    formats = dict.fromkeys([*headers, *kinds][1:], ".0f")
    caption = f"Warp instructions of one step ({arch} machine code), and for M = {ROWS} by class"
    return tables.table(rows, headers | kinds, formats=formats, caption=caption, origins=False)


# --- evidence ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """One candidate cause: the same burden of both kernels; the larger, the worse.

    Attributes:
        cause: short name.
        what: what is counted, and for what.
        grid_y, tile: the counts.
        origin: "emulated" where a trace gave them, "simulated" where they were computed from code or grid.
    """

    cause: str
    what: str
    grid_y: float
    tile: float
    origin: str

    @property
    def ratio(self) -> float:
        """How many times the burden of grid.y the tile has; 1 when both have none."""
        if not self.grid_y:
            return 1.0 if not self.tile else float("inf")
        return self.tile / self.grid_y


JUDGEMENTS = ("refuted", "too small", "possible")


def judge(ratio: float, slowdown: float) -> str:
    """What a burden says about a slow-down that is to be explained.

    Args:
        ratio: burden of the tile over that of grid.y.
        slowdown: time of the tile over that of grid.y, more than 1.

    Returns:
        "refuted": the tile has no more of it, so it cannot make it slower. "too small": it has more, but
        even if all time were spent on it, that would not give this slow-down. "possible": enough of it;
        whether it is the cause, only a time can tell. One unit is taken to cost both kernels the same.
    """
    require(slowdown > 1, "slowdown", slowdown, "more than 1: something to explain")
    if ratio <= 1.0:
        return "refuted"
    return "possible" if ratio >= slowdown else "too small"


def evidence(traces: Mapping[str, Any], m: int = ROWS, card: str = "rtx3050-laptop") -> list[Evidence]:
    """Every candidate cause, for m rows of the article's shape.

    Args:
        traces: "grid.y" and "tile" → a trace of the launch with m rows of the same weight.
        m: rows, 1 to :data:`ROWS`.
        card: key of a device; the machine code is compiled for it.
    """
    _, k = batch_tile_shape()
    facts = get_device(card)
    arch = f"sm_{facts.capability[0]}{facts.capability[1]}"
    asked, sectors, room, idle, instructions, local, waits = ({} for _ in range(7))  # type: ignore[var-annotated]
    for name in ("grid.y", "tile"):
        found = code(name, arch)
        asked[name] = traces[name].requests(buffer="packed")
        sectors[name] = traces[name].sectors(space="global")
        room[name] = facts.warps_per_sm / working_warps(name, m, card)
        idle[name] = 1 / found.resident(card).waves(grids(m)[name]).utilisation
        instructions[name] = k // STEP * found.instructions(m)
        local[name] = found.local
        waits[name] = k // STEP * found.waits(m)
    return [
        Evidence("weight bytes", "requests for the weight", **_both(asked), origin="emulated"),
        Evidence("all bytes", "32-byte sectors asked for", **_both(sectors), origin="emulated"),
        Evidence("occupancy", "room for warps / warps at work", **_both(room), origin="simulated"),
        Evidence("instructions", "instructions a column", **_both(instructions), origin="simulated"),
        Evidence("last wave", "slots paid for / slots filled", **_both(idle), origin="simulated"),
        Evidence("local memory", "loads from local memory", **_both(local), origin="simulated"),
        Evidence("waits", "waits for loads a column", **_both(waits), origin="simulated"),
    ]


def evidence_table(found: Sequence[Evidence], caption: str = "") -> tables.Table:
    """The burdens of both kernels and their ratio; shows itself in a notebook."""
    rows = [
        {
            "cause": e.cause,
            "what": e.what,
            "y": e.grid_y,
            "tile": e.tile,
            "ratio": e.ratio,
            "origin": e.origin,
        }
        for e in found
    ]
    headers = {"cause": "cause", "what": "counted", "y": "grid.y", "tile": "tile", "ratio": "tile / grid.y"}
    return tables.table(rows, headers, formats={"ratio": ".2f"}, caption=caption)


def possible(found: Sequence[Evidence], slowdown: float) -> str:
    """The causes that are left for a slow-down, as a text; also when there is nothing to explain."""
    if slowdown <= 1:
        return "nothing to explain"
    return ", ".join(e.cause for e in found if judge(e.ratio, slowdown) == "possible") or "none of these"


def _both(counts: Mapping[str, float]) -> dict[str, float]:
    return {"grid_y": counts["grid.y"], "tile": counts["tile"]}


def working_warps(variant: str, m: int = ROWS, card: str = "rtx3050-laptop") -> float:
    """Warps that work on an SM at one time: as many as fit, or as many as the grid has where that is less."""
    facts = get_device(card)
    fits = code(variant, f"sm_{facts.capability[0]}{facts.capability[1]}").resident(facts)
    blocks = grids(m)["grid.y" if variant == "grid.y" else "tile"]
    return min(fits.warps, blocks * fits.threads / 32 / facts.sms)


def grids(m: int = ROWS) -> dict[str, int]:
    """Blocks of both kernels for the article's N: eight columns a block; grid.y has as many for every row."""
    blocks = -(-batch_tile_shape()[0] // 8)
    return {"grid.y": m * blocks, "tile": blocks * -(-m // ROWS)}
