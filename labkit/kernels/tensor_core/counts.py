"""Instructions a weight of the tensor-core family, and how its blocks fill an SM; with no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.errors import require
from labkit.kernels import loops, nvrtc, resources, sass
from labkit.kernels.occupancy import Occupancy
from labkit.kernels.source import KernelSource
from labkit.kernels.tensor_core.rule import SM86, Plan, plan
from labkit.quant.tiles import TILE_COLUMNS, TILE_ROWS

BUDGET = {4: 8.3, 3: 6.3}
"""Bits → lane-instructions a weight that an RTX 3050 Laptop can start while DRAM delivers the weight."""

RECORD_WEIGHTS = TILE_ROWS * TILE_COLUMNS


@dataclass(frozen=True)
class Count:
    """One record in the main loop of a kernel.

    Attributes:
        source, arch: the kernel.
        n_tiles: tiles of eight rows of x that the warp multiplies with the record.
        records: that a warp multiplies in one trip.
        turn: warp instructions of a trip by class, every branch taken as entered; the loop that adds up the
            rack, and what only the last trip loads, are left out.
        fold: warp instructions of that loop for this record, over all warps of the block; 0 without one.
    """

    source: KernelSource
    arch: str
    n_tiles: int
    records: int
    turn: Counter[str]
    fold: float

    @property
    def instructions(self) -> float:
        """Warp instructions for a record."""
        return self.turn.total() / self.records + self.fold

    @property
    def a_weight(self) -> float:
        """Lane-instructions for a weight."""
        return self.instructions * 32 / RECORD_WEIGHTS

    @property
    def a_product(self) -> float:
        """Lane-instructions for a weight and a row of x."""
        return self.a_weight / (8 * self.n_tiles)


def count(source: KernelSource, arch: object = "sm_86") -> Count:
    """Instructions of the loop over the k tiles.

    Args:
        source: tensor_core_narrow or tensor_core_wide with its constants.
        arch: such as ``"sm_86"``.

    Raises:
        InputError: a kernel without such a loop, no nvdisasm, or a text that does not compile.
    """
    code = sass.disassemble(source, arch)
    compiled = nvrtc.compile_cubin(source, arch)
    jumps = loops._jumps(sass._nvdisasm(compiled.cubin), compiled.symbol)
    once = _once(code.instructions, jumps)
    bodies = {
        span: Counter(
            each.kind
            for each in code.instructions
            if span[0] <= each.offset <= span[1] and each.offset not in once
        )
        for span in loops.loops(code.instructions, jumps)
    }
    spans = [span for span, kinds in bodies.items() if kinds["tensor core"]]
    require(bool(spans), "source", source.name, "a kernel with a loop of tensor-core instructions")
    outer = max(spans, key=lambda span: span[1] - span[0])
    inner = [span for span in bodies if span != outer and outer[0] <= span[0] and span[1] <= outer[1]]
    inner = [span for span in inner if not any(_inside(span, other) for other in inner)]
    n_tiles = int(source.define_map["N_TILES"])
    turn, fold = Counter(bodies[outer]), 0.0
    for span in inner:
        turn -= bodies[span]
        # One warp an n tile goes through the rack; it loads two halves of each of its places.
        loads = sum(each.base == "LDS" for each in code.instructions if span[0] <= each.offset <= span[1])
        fold += n_tiles * bodies[span].total() / (loads / 2)
    records = int(source.define_map.get("TURN", 1))
    return Count(source, code.arch, n_tiles, records, turn, fold)


def _once(instructions: Iterable[sass.Instruction], jumps: Iterable[tuple[int, int]]) -> set[int]:
    """Offsets of what jumps forward skip on all trips but the last: loads of a bias or a residual."""
    found: set[int] = set()
    for at, to in jumps:
        skipped = [each for each in instructions if at < each.offset < to]
        work = any(each.kind == "tensor core" or each.base in ("LDS", "LDGSTS") for each in skipped)
        if not work and any(each.base == "LDG" and each.width < 16 for each in skipped):
            found |= {each.offset for each in skipped}
    return found


def _inside(span: tuple[int, int], other: tuple[int, int]) -> bool:
    return span != other and other[0] <= span[0] and span[1] <= other[1]


@dataclass(frozen=True)
class Fill:
    """A launch of the product on the RTX 3050 Laptop.

    Attributes:
        planned: the rule's plan.
        registers: of a thread.
        held: blocks an SM holds.
    """

    planned: Plan
    registers: int
    held: Occupancy


def fill(
    bits: int, m: int, n: int, k: int, weight_defines: Iterable[tuple[str, int]] = (), *, group: int = 128
) -> Fill:
    """Occupancy on SM86 of the product of a symmetric weight [n, k].

    Args:
        bits: 4 or 3.
        m: rows of x.
        n, k: of the weight.
        weight_defines: other constants of tensor_core.cuh.
        group: columns of a scale: 128, 64 or 32.
    """
    record = 512 * bits + TILE_COLUMNS // group * TILE_ROWS * 2
    planned = plan(m, -(-n // TILE_ROWS), -(-k // TILE_COLUMNS), record, group < TILE_COLUMNS, SM86)
    defines = {"BITS": bits, "GROUP": group, **dict(weight_defines), **planned.constants}
    used = resources.usage(KernelSource(f"{planned.entry}.cu", planned.entry, defines), "sm_86")
    held = used.occupancy(threads=planned.threads, dynamic_shared=planned.shared_bytes)
    return Fill(planned, used.registers, held)
