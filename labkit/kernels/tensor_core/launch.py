"""torch tensors in, torch tensors out: the tensor-core family on a GPU or in the emulator.

Launches go to torch's current stream; partial sums come from torch's allocator, so they belong to that
stream and a CUDA graph can capture the call, once the kernels are loaded (:func:`load`). From compute
capability 9.0 on a launch begins to read its weight while the kernel ahead of it finishes; ``repack``
therefore waits until its tiles are complete.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.errors import refuse, require
from labkit.kernels import runner
from labkit.kernels.launch import Launch
from labkit.kernels.source import KernelSource
from labkit.kernels.tensor_core import rule
from labkit.kernels.tensor_core.rule import DENSE_FROM, SM86, Device, Plan, plan
from labkit.quant.packing import describe
from labkit.quant.tiles import TILE_COLUMNS, TILE_ROWS, TileWeight

DTYPES = (torch.float16, torch.bfloat16)
TEMP_BYTES = 64 << 20
"""Bytes of dense weight that :func:`linear` makes at a time for many rows."""

_VECTOR = 8  # activations of a 16-byte load
_OFFSETS = {None: 0, torch.float16: 1, torch.float32: 2}
_BUCKETS = (1, 9, 17, 33, 65)  # one M of each set of kernels
_EXACT_ROWS = 512  # of a launch of the family where more rows stay on it: bounds the partial sums


def linear(
    x: Tensor,
    weight: TileWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    fp16_sums: bool = False,
    temp_bytes: int = TEMP_BYTES,
    dense_from: int | None = DENSE_FROM,
) -> Tensor:
    """y = x @ W.T + bias + residual; with a paired weight y = silu(gate + bias) * (up + bias) + residual.

    Rows of a batch of up to ``dense_from`` - 1 have the bits that they have alone, on any GPU; more rows go
    through cuBLAS.

    Args:
        x: float16 or bfloat16 [M, K] on the weight's device, any strides, M >= 0.
        weight: tiles of [N, K]; paired: of [2F, K], and y has F columns.
        bias: None or [N] of x's dtype (paired: [2F], gate first).
        residual: None or [M, y's columns] of x's dtype, contiguous; may be ``out``.
        out: where to write y, contiguous; made when it is None.
        fp16_sums: add up a group in float16, for speed on compute capability 8.6 and 8.9: less exact, and
            inputs whose sums pass 65,504 overflow. float16 only.
        temp_bytes: most dense weight to hold at a time, in bytes, for many rows.
        dense_from: from this many rows on cuBLAS multiplies, which is faster for many; None: never, so that
            every row has the bits that it has alone.

    Returns:
        [M, N] of x's dtype.

    Raises:
        InputError: a wrong shape, dtype or device, by name.
    """
    _check(x, weight, bias, residual, fp16_sums)
    m, n = x.shape[0], weight.outputs
    if out is None:
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    _check_like("out", out, (m, n), x)
    if m == 0:
        return out
    x = readable(x, weight)
    if dense_from is not None and m >= dense_from:
        return _through_dense(x, weight, bias, residual, out, temp_bytes)
    for first in range(0, m, _EXACT_ROWS):
        band = slice(first, first + _EXACT_ROWS)
        added = None if residual is None else residual[band]
        for launch in launches(x[band], weight, out[band], bias=bias, residual=added, fp16_sums=fp16_sums):
            launch.run()
    return out


def launches(
    x: Tensor,
    weight: TileWeight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    fp16_sums: bool = False,
    planned: Plan | None = None,
) -> Iterator[Launch]:
    """Launches that fill ``out``, in order: the product, then its second pass where K is split over blocks.

    Args:
        x: as :func:`readable` gives it, M >= 1.
        planned: another plan than the rule's, for tests and sweeps.
        out, bias, residual, fp16_sums, weight: as in :func:`linear`.
    """
    m, columns = x.shape
    p = planned or plan_for(m, weight)
    defines = weight_defines(weight, x.dtype, fp16_sums)
    part = None
    if p.planes:
        part = torch.empty(p.planes, m, weight.row_tiles * TILE_ROWS, dtype=torch.float32, device=x.device)
    parts = rule.slices(weight.row_tiles, weight.k_tiles)
    stride = max(x.stride(0), columns)
    # A launch takes contiguous tensors: rows with gaps go as the piece of memory that they lie in.
    rows = x if x.is_contiguous() else x.as_strided(((m - 1) * stride + columns,), (1,))
    args = [weight.tiles, rows, bias, residual, out, part, m, weight.outputs, columns]
    args += [weight.row_tiles, weight.k_tiles, parts, weight.k_tiles // parts]
    if p.entry == "tensor_core_narrow":
        args.append(p.round)
    args.append(stride)
    chosen = source(p.entry, (*defines, *p.defines))
    yield Launch(chosen, p.grid, (p.threads,), args, x.device, True, p.shared_bytes)
    if part is not None:
        grid = (-(-weight.row_tiles * TILE_ROWS // 2 // rule.REDUCE_THREADS), m)
        args = [part, bias, residual, out, m, weight.outputs, weight.row_tiles, p.planes]
        second = source("tensor_core_reduce", defines)
        yield Launch(second, grid, (rule.REDUCE_THREADS,), args, x.device, True)


def load(weight: TileWeight, dtype: torch.dtype, *, fp16_sums: bool = False) -> None:
    """Compile and load every kernel that a call with this weight may launch, for any M."""
    defines = weight_defines(weight, dtype, fp16_sums)
    wanted = {source("tensor_core_dense", weight_defines(weight, dtype, False)): 0}
    for m in _BUCKETS:
        p = plan_for(m, weight)
        chosen = source(p.entry, (*defines, *p.defines))
        wanted[chosen] = max(p.shared_bytes, wanted.get(chosen, 0))
        if p.planes:
            wanted[source("tensor_core_reduce", defines)] = 0
    for one, shared_bytes in wanted.items():
        kernel = runner.load(one, weight.device)
        if weight.device.type == "cuda":
            kernel.prepare(shared_bytes)


def plan_for(m: int, weight: TileWeight) -> Plan:
    """The rule's plan for M rows on the weight's device."""
    heavy = weight.tile_group < TILE_COLUMNS or weight.offset is not None
    place = device_facts(weight.device)
    return plan(m, weight.row_tiles, weight.k_tiles, weight.record_bytes, heavy, place)


@functools.lru_cache(maxsize=64)
def device_facts(device: torch.device) -> Device:
    """Multiprocessors and shared memory of a GPU; of an RTX 3050 Laptop for the emulator."""
    if device.type != "cuda":
        return SM86
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", SM86.shared_bytes)
    return Device(properties.multi_processor_count, shared)


def weight_defines(weight: TileWeight, dtype: torch.dtype, fp16_sums: bool) -> tuple[tuple[str, int], ...]:
    """Constants of tensor_core.cuh for a weight and an activation dtype."""
    return (
        ("BITS", 4 if weight.format == "w4" else 3),
        ("GROUP", weight.tile_group),
        ("OFFSET", _OFFSETS[weight.offset]),
        ("BF16", int(dtype == torch.bfloat16)),
        ("PAIRED", int(weight.paired)),
        ("FP16_SUMS", int(fp16_sums)),
    )


@functools.lru_cache(maxsize=1024)
def source(entry: str, defines: tuple[tuple[str, int], ...]) -> KernelSource:
    """Made once: a source reads its file to know its parameters, which no launch should wait for."""
    return KernelSource(f"{entry}.cu", entry, dict(defines))


def readable(x: Tensor, weight: TileWeight) -> Tensor:
    """x with its columns in the weight's order, in rows that 16-byte loads can read; a copy where needed."""
    if weight.k_order is not None:
        x = x.index_select(1, weight.k_order)
    if x.shape[1] % _VECTOR:
        return F.pad(x, (0, -x.shape[1] % _VECTOR))
    fits = x.stride(1) == 1 and x.data_ptr() % 16 == 0
    fits = fits and (x.shape[0] == 1 or (x.stride(0) % _VECTOR == 0 and x.stride(0) >= x.shape[1]))
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _through_dense(
    x: Tensor,
    weight: TileWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    temp_bytes: int,
) -> Tensor:
    """Bands of row tiles made dense, and multiplied by cuBLAS."""
    m = x.shape[0]
    width = weight.k_tiles * TILE_COLUMNS
    rows = max(1, temp_bytes // (width * x.element_size() * TILE_ROWS))
    x = F.pad(x, (0, width - x.shape[1])) if width != x.shape[1] else x
    entry = source("tensor_core_dense", weight_defines(weight, x.dtype, False))
    per_tile = TILE_ROWS // 2 if weight.paired else TILE_ROWS
    n = weight.outputs
    dense = torch.empty(min(rows, weight.row_tiles) * TILE_ROWS, width, dtype=x.dtype, device=x.device)
    for first in range(0, weight.row_tiles, rows):
        count = min(rows, weight.row_tiles - first)
        grid = (-(-weight.k_tiles // rule.DENSE_WARPS), count)
        args = [weight.tiles, dense, first, weight.k_tiles]
        Launch(entry, grid, (32 * rule.DENSE_WARPS,), args, x.device, True).run()
        y = x @ dense[: count * TILE_ROWS].T
        here = slice(first * per_tile, min(n, (first + count) * per_tile))
        if weight.paired:
            gate, up = y.view(m, count, 2, per_tile).unbind(2)
            gate, up = (half.reshape(m, -1)[:, : here.stop - here.start] for half in (gate, up))
            if bias is not None:
                gate, up = gate + bias[here], up + bias[n:][here]
            y = F.silu(gate) * up
        else:
            y = y[:, : here.stop - here.start]
            y = y if bias is None else y + bias[here]
        out[:, here] = y if residual is None else y + residual[:, here]
    return out


def _check(
    x: Tensor, weight: TileWeight, bias: Tensor | None, residual: Tensor | None, fp16_sums: bool
) -> None:
    if not isinstance(weight, TileWeight):
        refuse("weight", describe(weight), "a TileWeight", "labkit.quant.tiles.repack makes one")
    ok = isinstance(x, Tensor) and x.dtype in DTYPES and x.ndim == 2 and x.shape[1] == weight.k
    require(ok, "x", describe(x), f"float16 or bfloat16 [M, {weight.k}]")
    require(x.device == weight.device, "x", f"on {x.device}", f"on {weight.device}, where the weight is")
    require(not fp16_sums or x.dtype == torch.float16, "fp16_sums", f"{x.dtype} activations", "float16")
    if bias is not None:
        _check_like("bias", bias, (weight.n,), x)
    if residual is not None:
        _check_like("residual", residual, (x.shape[0], weight.outputs), x)


def _check_like(name: str, value: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    ok = isinstance(value, Tensor) and value.dtype == x.dtype and tuple(value.shape) == shape
    ok = ok and value.device == x.device and value.is_contiguous()
    require(ok, name, describe(value), f"contiguous {str(x.dtype).removeprefix('torch.')} {list(shape)}")
