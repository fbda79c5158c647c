"""Launch shapes of the W4 and W3 seed kernels: every number that Python and the kernels share."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from labkit.errors import refuse, require
from labkit.kernels import runner
from labkit.kernels.limits import MAX_GRID
from labkit.kernels.source import KernelSource
from labkit.quant.formats import QuantWeight

MAX_GRID_X, MAX_GRID_Y, _ = MAX_GRID

_OFFSET = {None: 0, torch.float16: 1, torch.float32: 2}
_VECTOR = 8  # activations of one 16-byte load


@dataclass(frozen=True, slots=True)
class SeedKernel:
    """One seed kernel: y [M, N] = x [M, K] @ W.T, float16 activations, sums in float32.

    Attributes:
        entry: ``__global__`` function.
        file: its source beside labkit.kernels.
        format: weight format, "w4" or "w3".
        threads: threads a block, along x.
        tile_m: rows of x a block takes.
        tile_n: columns of y a block makes.
        columns: a group, and the padded K, must hold a multiple of this many columns.
        vector_x: whether it has a variant that reads x 16 bytes at a time.
        defines: its own compile-time constants, as pairs.
    """

    entry: str
    file: str
    format: str
    threads: int
    tile_m: int
    tile_n: int
    columns: int
    vector_x: bool
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def max_rows(self) -> int:
        """Most rows of x that one launch takes."""
        return MAX_GRID_Y * self.tile_m

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Blocks along N and M.

        Raises:
            InputError: more blocks than a CUDA grid has, by name.
        """
        x, y = -(-n // self.tile_n), -(-m // self.tile_m)
        if x > MAX_GRID_X:
            refuse(f"{self.entry}: N", n, f"at most {MAX_GRID_X * self.tile_n} columns a launch")
        if y > MAX_GRID_Y:
            refuse(f"{self.entry}: M", m, f"at most {self.max_rows} rows a launch", "split x by rows")
        return x, y

    def why_not(self, weight: Any) -> str:
        """Why this kernel cannot take the weight, or an empty string when it can."""
        if not isinstance(weight, QuantWeight):
            return "W4 and W3 weights only"
        if weight.format != self.format:
            return f"{self.format} weights only"
        if weight.group_size % self.columns or weight.k_padded % self.columns:
            return f"group size {weight.group_size}: it takes multiples of {self.columns}"
        if -(-weight.n // self.tile_n) > MAX_GRID_X:
            return f"N = {weight.n}: a launch makes at most {MAX_GRID_X * self.tile_n} columns"
        return ""

    def source(self, offset: torch.dtype | None, vector_x: bool, **defines: int) -> KernelSource:
        """The kernel's text with its constants.

        Args:
            offset: dtype of the weight's offset, or None without one.
            vector_x: see :func:`reads_vectors`; ignored by a kernel without that variant.
            defines: constants to change for a lesson, such as ``PAD=0``.
        """
        return _source(self, _OFFSET[offset], self.vector_x and vector_x, tuple(defines.items()))


@functools.lru_cache(maxsize=256)
def _source(
    kernel: SeedKernel, offset: int, vector_x: bool, extra: tuple[tuple[str, int], ...]
) -> KernelSource:
    """Made once: a source reads its file to know its parameters, which no launch should wait for."""
    own = {"OFFSET": offset, **({"VECTOR_X": int(vector_x)} if kernel.vector_x else {})}
    return KernelSource(kernel.file, kernel.entry, {**own, **dict(kernel.defines), **dict(extra)})


@dataclass(frozen=True, slots=True)
class Launch:
    """A seed kernel with everything one launch takes.

    Attributes:
        source: the kernel.
        grid: blocks.
        block: threads.
        args: in the order of the kernel's parameters.
        out: y [M, N]; the tensor in ``args`` that the kernel writes.
    """

    source: KernelSource
    grid: tuple[int, int]
    block: tuple[int]
    args: list[Any]
    out: Tensor

    def run(self) -> Tensor:
        """Launch where the tensors are (CUDA: on torch's current stream, nothing waits); gives ``out``."""
        runner.load(self.source, self.out.device)(self.grid, self.block, self.args)
        return self.out

    def trace(self, **options: Any) -> Any:
        """The emulator's trace of this launch (CPU tensors only); see ``labkit.emulator``."""
        return runner.load(self.source, "cpu").trace(self.grid, self.block, self.args, **options)


def plan(
    kernel: SeedKernel, x: Tensor, weight: QuantWeight, out: Tensor | None = None, **defines: int
) -> Launch:
    """Check and put together one launch.

    Args:
        kernel: which.
        x: float16 [M, K], contiguous, columns in the weight's stored order, M >= 1.
        weight: [N, K] on x's device.
        out: float16 [M, N], contiguous; made when it is None.
        defines: as in :meth:`SeedKernel.source`. A tile that is no default must be told to the
            kernel *and* to the launch: use :func:`with_batch_tile` for BATCH_TILE.

    Raises:
        InputError: what does not fit, by name.
    """
    if why := kernel.why_not(weight):
        refuse("weight", getattr(weight, "format", type(weight).__name__), why)
    ok = x.dtype == torch.float16 and x.ndim == 2 and x.shape[0] >= 1 and x.shape[1] == weight.k
    if not ok or not x.is_contiguous():
        refuse("x", _described(x), f"contiguous float16 [M >= 1, {weight.k}]")
    if x.device != weight.device:
        refuse("x", f"on {x.device}", f"on {weight.device}, where the weight is", "x.to(device)")
    m, n = x.shape[0], weight.n
    grid = kernel.grid(m, n)
    if out is None:
        out = torch.empty(m, n, dtype=torch.float16, device=x.device)
    ok = out.dtype == torch.float16 and tuple(out.shape) == (m, n) and out.device == x.device
    if not ok or not out.is_contiguous():
        refuse("out", _described(out), f"contiguous float16 [{m}, {n}] on {x.device}")
    offset = weight.offset
    source = kernel.source(None if offset is None else offset.dtype, reads_vectors(x), **defines)
    sizes = [m, n, weight.k, weight.k_padded, group_shift(weight)]
    args = [x, weight.packed, weight.scales, offset, out, *sizes]
    return Launch(source, grid, (kernel.threads,), args, out)


def reads_vectors(x: Tensor) -> bool:
    """Whether every row of x [M, K] starts at 16 bytes and holds whole 16-byte pieces."""
    return x.shape[1] % _VECTOR == 0 and x.data_ptr() % (2 * _VECTOR) == 0


def group_shift(weight: QuantWeight) -> int:
    """log2 of the group size, or 31 where one group is the whole row: ``column >> shift`` is the group."""
    if weight.group_size == weight.k_padded:
        return 31
    return weight.group_size.bit_length() - 1


def _described(x: Tensor) -> str:
    strided = "" if x.is_contiguous() else ", not contiguous"
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}{strided}"


def _tiled(format: str, columns: int) -> SeedKernel:
    name = f"gemm_tiled_{format}"
    return SeedKernel(name, f"{name}.cu", format, 256, 32, 64, columns, vector_x=False)


def _row(format: str) -> SeedKernel:
    return SeedKernel(f"gemv_row_{format}", "gemv_row.cu", format, 256, 1, 8, 8, vector_x=True)


def with_batch_tile(kernel: SeedKernel, rows: int) -> SeedKernel:
    """A batch-tile GEMV whose blocks hold ``rows`` rows of x (1 to 16)."""
    require(bool(kernel.defines), "kernel", kernel.entry, "gemv_batch_w4 or gemv_batch_w3")
    require(isinstance(rows, int) and 1 <= rows <= 16, "rows", rows, "a whole number from 1 to 16")
    return replace(kernel, tile_m=rows, defines=(("BATCH_TILE", rows),))


def _batch(format: str) -> SeedKernel:
    name, rows = f"gemv_batch_{format}", 8
    return SeedKernel(name, "gemv_batch.cu", format, 256, rows, 8, 8, True, (("BATCH_TILE", rows),))


GEMM_TILED = {"w4": _tiled("w4", 2), "w3": _tiled("w3", 8)}
GEMV_ROW = {"w4": _row("w4"), "w3": _row("w3")}
GEMV_BATCH = {"w4": _batch("w4"), "w3": _batch("w3")}

_FAMILIES = (GEMM_TILED, GEMV_ROW, GEMV_BATCH)
KERNELS = {kernel.entry: kernel for family in _FAMILIES for kernel in family.values()}
"""Every seed kernel of this family by its entry name."""
