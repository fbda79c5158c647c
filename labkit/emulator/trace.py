"""What a traced launch recorded: every memory access by source line, and every fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit import tables
from labkit.emulator.faults import Fault, KernelFault, Position
from labkit.emulator.lanes import LaneMap, Sample, lane_map
from labkit.errors import require

KINDS = ("read", "write", "atomic", "ldmatrix", "cp.async read", "cp.async write")
SECTOR = 32
_SPACES = {1: "shared", 3: "global"}


@dataclass(frozen=True)
class Access:
    """All accesses of one kind that one source line makes to one buffer.

    Args:
        file: file of the line.
        line: line, from 1; 0 when it is not known.
        kind: one of :data:`KINDS`.
        size: bytes a lane.
        buffer: parameter or shared array.
        space: ``global`` or ``shared``.
        requests: warp instructions.
        lanes: active lanes, summed over the requests.
        bytes: bytes that the lanes asked for.
        useful_bytes: distinct bytes asked for in the sectors moved (global).
        sectors: 32-byte sectors moved (global).
        cache_lines: 128-byte lines touched (global).
        wavefronts: passes through the 32 banks (shared).
        ideal_wavefronts: passes without a conflict (shared).
        degree: worst number of different words wanted from one bank in one pass (shared).
        source: text of the line.
    """

    file: str
    line: int
    kind: str
    size: int
    buffer: str
    space: str
    requests: int
    lanes: int
    bytes: int
    useful_bytes: int
    sectors: int
    cache_lines: int
    wavefronts: int
    ideal_wavefronts: int
    degree: int
    source: str = ""

    @property
    def sectors_per_request(self) -> float:
        """32-byte sectors that one warp instruction moves."""
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def efficiency(self) -> float:
        """Useful bytes over moved bytes (global); ideal over real wavefronts (shared)."""
        if self.space == "global":
            return self.useful_bytes / (SECTOR * self.sectors) if self.sectors else 1.0
        return self.ideal_wavefronts / self.wavefronts if self.wavefronts else 1.0

    @property
    def lanes_per_request(self) -> float:
        """Active lanes of one warp instruction, on average."""
        return self.lanes / self.requests if self.requests else 0.0


_SUMS = {
    "requests": "req",
    "lanes": "lanes",
    "bytes": "bytes",
    "useful_bytes": "useful",
    "sectors": "sectors",
    "cache_lines": "lines",
    "wavefronts": "wave",
    "ideal_wavefronts": "ideal",
}


@dataclass(frozen=True)
class Trace:
    """A traced launch.

    Args:
        kernel: its name.
        rows: accesses by line.
        faults: what went wrong, the fatal one last.
        seconds: time the traced blocks took.
        output: what the kernel printed.
        blocks_traced: how many blocks were run.
        blocks_total: how many the grid has.
        compulsory: buffer → distinct 32-byte sectors that the traced blocks touched.
        warp_instructions: line → basic blocks entered by warps (only with ``blocks_executed``).
    """

    kernel: str
    rows: list[Access]
    faults: list[Fault]
    seconds: float
    output: str
    blocks_traced: int
    blocks_total: int
    compulsory: Mapping[str, int] = field(default_factory=dict)
    warp_instructions: Mapping[int, int] = field(default_factory=dict)
    samples: Sequence[Sample] = field(default_factory=tuple, repr=False)

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not self.faults

    @property
    def races(self) -> list[Fault]:
        """The faults that are races."""
        return [fault for fault in self.faults if fault.kind == "race"]

    def raise_on_fault(self) -> Trace:
        """This trace, if nothing went wrong.

        Raises:
            KernelFault: the fatal fault, else the first one.
        """
        if self.faults:
            raise KernelFault(next((fault for fault in self.faults if fault.fatal), self.faults[0]))
        return self

    def report(self) -> str:
        """Every fault in words; one line when there is none."""
        if not self.faults:
            return f"{self.kernel}: no fault ({self._extent()})"
        many = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        head = f"{self.kernel}: {many} ({self._extent()})"
        return "\n\n".join([head, *(fault.message for fault in self.faults)])

    def select(
        self,
        *,
        space: str | None = None,
        buffer: str | None = None,
        kind: str | None = None,
        line: int | None = None,
    ) -> list[Access]:
        """The rows that match every filter given."""
        require(space in (None, "global", "shared"), "space", repr(space), "global or shared")
        require(kind is None or kind in KINDS, "kind", repr(kind), "one of " + ", ".join(KINDS))
        return [
            row
            for row in self.rows
            if (space is None or row.space == space)
            and (buffer is None or row.buffer == buffer or buffer in row.buffer.split("/"))
            and (kind is None or row.kind == kind)
            and (line is None or row.line == line)
        ]

    def total(self, metric: str, **filters: Any) -> int:
        """Sum of one column over the rows that match.

        Args:
            metric: ``requests``, ``lanes``, ``bytes``, ``useful_bytes``, ``sectors``, ``cache_lines``,
                ``wavefronts`` or ``ideal_wavefronts``.
            **filters: ``space``, ``buffer``, ``kind``, ``line``.
        """
        require(metric in _SUMS, "metric", repr(metric), "one of " + ", ".join(_SUMS))
        return sum(getattr(row, metric) for row in self.select(**filters))

    def sectors(self, **filters: Any) -> int:
        """32-byte sectors moved between the cache and global memory's side."""
        return self.total("sectors", **filters)

    def requests(self, **filters: Any) -> int:
        """Warp instructions that access memory."""
        return self.total("requests", **filters)

    def wavefronts(self, **filters: Any) -> int:
        """Passes through the banks of shared memory."""
        return self.total("wavefronts", **filters)

    def compulsory_sectors(self, buffer: str) -> int:
        """Distinct 32-byte sectors of ``buffer`` that were touched: what no access pattern avoids."""
        for name, count in self.compulsory.items():
            if name == buffer or buffer in name.split("/"):
                return count
        known = ", ".join(self.compulsory) or "none"
        require(False, "buffer", repr(buffer), f"a buffer of the launch ({known})")
        return 0

    def lanes(
        self, line: int, kind: str | None = None, buffer: str | None = None, request: int = 0
    ) -> LaneMap:
        """Where the 32 lanes of one warp instruction went, for pictures.

        Args:
            line: source line.
            kind: kind of access, when the line has several.
            buffer: buffer, when the line touches several.
            request: which of the recorded ones; the first few of every access point are kept.

        Raises:
            InputError: the line has no such access, or fewer were recorded.
        """
        found = [
            sample
            for sample in self.samples
            if sample.line == line
            and (kind is None or sample.kind == kind)
            and (buffer is None or sample.buffer == buffer or buffer in sample.buffer.split("/"))
        ]
        lines = sorted({sample.line for sample in self.samples})
        require(len(found) > 0, "line", line, f"a line with such an access ({', '.join(map(str, lines))})")
        require(0 <= request < len(found), "request", request, f"0 to {len(found) - 1}")
        return lane_map(found[request])

    def table(self) -> tables.Table:
        """The rows as a table; it displays itself in a notebook and prints aligned in a terminal."""
        rows = [_table_row(row) for row in self.rows]
        level = "source-level accesses after -O1; the GPU's compiler may merge some"
        caption = f"{self.kernel}: {level}. {self._extent().capitalize()}."
        if not rows:
            empty = {"line": "–", "access": "no memory access", "origin": "emulated"}
            return tables.table([empty], ["line", "access"], caption=caption)
        columns = {
            "line": "line",
            "access": "access",
            "size": "bytes/lane",
            "buffer": "buffer",
            "requests": "requests",
            "lanes": "lanes/request",
            "sectors": "sectors/request",
            "efficiency": "bytes used",
            "wavefronts": "wavefronts/request",
            "degree": "conflict",
        }
        # Without shared memory its columns would be dashes from top to bottom.
        columns = {
            name: title for name, title in columns.items() if any(row[name] is not None for row in rows)
        }
        formats = {"lanes": ".1f", "sectors": ".2f", "wavefronts": ".2f", "efficiency": ".0%"}
        return tables.table(rows, columns, caption=caption, formats=formats)

    def _extent(self) -> str:
        if self.blocks_traced >= self.blocks_total:
            return f"all {self.blocks_total} blocks traced" if self.blocks_total > 1 else "1 block traced"
        return f"{self.blocks_traced} of {self.blocks_total} blocks traced"


def _table_row(row: Access) -> dict[str, Any]:
    out: dict[str, Any] = {
        "line": row.line,
        "access": row.kind,
        "size": row.size,
        "buffer": row.buffer,
        "requests": row.requests,
        "lanes": row.lanes_per_request,
        "origin": "emulated",
        "sectors": None,
        "efficiency": None,
        "wavefronts": None,
        "degree": None,
    }
    if row.space == "global":
        out.update(sectors=row.sectors_per_request, efficiency=row.efficiency)
    else:
        degree = f"{row.degree}-way" if row.degree > 1 else "none"
        out.update(wavefronts=row.wavefronts / row.requests if row.requests else 0.0, degree=degree)
    return out


def accesses(
    points: Sequence[Mapping[str, Any]],
    where: Mapping[int, tuple[str, int | None]],
    sources: Mapping[str, Sequence[str]],
) -> list[Access]:
    """Rows by (file, line, kind, size, buffer) from the runtime's access points.

    Args:
        points: the runtime's ``pcs``.
        where: address → file and line.
        sources: lines of the known files.
    """
    rows: dict[tuple[Any, ...], dict[str, int]] = {}
    for point in points:
        if not 0 <= point["kind"] < len(KINDS):
            continue
        file, line = where[point["pc"]]
        key = (
            file,
            line or 0,
            KINDS[point["kind"]],
            point["size"],
            point["buf"],
            _SPACES.get(point["space"], ""),
        )
        sums = rows.setdefault(key, dict.fromkeys([*_SUMS, "degree"], 0))
        for name, short in _SUMS.items():
            sums[name] += point[short]
        sums["degree"] = max(sums["degree"], point["maxdeg"])
    out = []
    for (file, line, kind, size, buffer, space), sums in rows.items():
        text = sources.get(file, ())
        source = text[line - 1] if 0 < line <= len(text) else ""
        out.append(Access(file, line, kind, size, buffer, space, source=source, **sums))
    return sorted(out, key=lambda row: (row.file, row.line, KINDS.index(row.kind), row.buffer, row.size))


def spread(blocks: Any, grid: Position) -> list[int] | None:
    """Linear ids of the blocks to trace.

    Args:
        blocks: None for all; a number, spread evenly with the first and the last; a list of linear ids or
            of (x, y, z).
        grid: gridDim.

    Returns:
        Ids in ascending order, or None for all.

    Raises:
        InputError: not a count of at least one, or a block outside the grid.
    """
    total = grid[0] * grid[1] * grid[2]
    if blocks is None:
        return None
    if isinstance(blocks, int) and not isinstance(blocks, bool):
        require(blocks >= 1, "blocks", blocks, "at least 1")
        if blocks >= total:
            return None
        if blocks == 1:
            return [0]
        return sorted({round(i * (total - 1) / (blocks - 1)) for i in range(blocks)})
    require(isinstance(blocks, Sequence) and len(blocks) > 0, "blocks", repr(blocks), "a number or a list")
    return sorted({_linear(block, grid, total) for block in blocks})


def _linear(block: Any, grid: Position, total: int) -> int:
    if isinstance(block, int) and not isinstance(block, bool):
        require(0 <= block < total, "blocks", block, f"ids 0 to {total - 1}")
        return block
    ok = isinstance(block, Sequence) and 1 <= len(block) <= 3 and all(isinstance(n, int) for n in block)
    require(ok, "blocks", repr(block), "linear ids or (x, y, z)")
    x, y, z = (*block, 0, 0)[:3]
    inside = 0 <= x < grid[0] and 0 <= y < grid[1] and 0 <= z < grid[2]
    require(inside, "blocks", tuple(block), f"a block of the grid {grid}")
    return x + grid[0] * (y + grid[1] * z)
