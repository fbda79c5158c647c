"""What the tensor-core family is tested with, in the emulator and on a GPU alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from zsplit_cases import guarded, intact, poisoned

from labkit.kernels.launch import Launch
from labkit.kernels.source import KernelSource
from labkit.kernels.tensor_core import launch as tlaunch
from labkit.kernels.tensor_core import rule
from labkit.kernels.tensor_core.reference import linear_reference, order_reference
from labkit.kernels.tensor_core.rule import DENSE_FROM, Device, Plan, plan
from labkit.quant import QuantWeight, padded_k, repack
from labkit.quant.packing import CODE_RANGE
from labkit.quant.tiles import TileWeight

HALF, BFLOAT = torch.float16, torch.bfloat16

ROWS = (1, 8, 9, 16, 17, 33, 64, 65, DENSE_FROM)
"""M: both sides of every change of kernel, two bands of tensor_core_wide, and the dense path."""

DEVICES = tuple(
    Device(multiprocessors, kib << 10) for multiprocessors in (1, 16, 132, 1000) for kib in (64, 99, 227)
)
"""GPUs to plan for; 64 KiB is less shared memory than any GPU with these instructions has."""


@dataclass(frozen=True)
class Case:
    """A kind of weight and activation, with a shape."""

    format: str
    group: int | str
    offset: torch.dtype | None = None
    dtype: torch.dtype = HALF
    paired: bool = False
    ordered: bool = False
    n: int = 70
    k: int = 576

    def __str__(self) -> str:
        names = [self.format, f"g{self.group}", str(self.dtype).removeprefix("torch.")]
        names += [f"offset_{self.offset.itemsize * 8}"] if self.offset else []
        names += [name for name in ("paired", "ordered") if getattr(self, name)]
        return "-".join([*names, f"{self.n}x{self.k}"])

    def weight(self, device: str = "cpu") -> TileWeight:
        """Codes over their whole range, scales of both signs and zero among them."""
        source = torch.Generator().manual_seed(1000 * self.n + self.k)
        low, high = CODE_RANGE[self.format]
        codes = torch.randint(low, high + 1, (self.n, self.k), generator=source).to(torch.int8)
        groups = 1 if self.group == "row" else padded_k(self.format, self.k, self.group) // int(self.group)
        scales = (torch.randn(self.n, groups, generator=source) * 0.02).half()
        scales.view(-1)[3::7] = 0
        shift = None
        if self.offset is not None:
            shift = (torch.randn(self.n, groups, generator=source) * 0.02).to(self.offset)
        order = torch.randperm(self.k, generator=source) if self.ordered else None
        weight = QuantWeight.from_codes(
            self.format, codes, scales, shift, group_size=self.group, k_order=order
        )
        return guard_tiles(repack(weight, paired=self.paired).to(device))

    def x(self, m: int, device: str = "cpu") -> Tensor:
        return x_of(m, self.k, self.dtype, device)


F32 = torch.float32
CASES = (
    Case("w4", 128),
    Case("w3", 128, dtype=BFLOAT, n=31, k=1536),
    Case("w4", 64, HALF, BFLOAT),
    Case("w3", 64, F32, n=33, k=100),
    Case("w4", 32, F32, n=70, k=576),  # the longest record: more than a vector a lane of scales and offsets
    Case("w3", 32, F32, BFLOAT, paired=True, n=66, k=576),
    Case("w4", 128, paired=True, n=62, k=1536),
    Case("w3", 32, HALF, paired=True, ordered=True, n=34, k=100),
    Case("w4", "row", ordered=True, n=31, k=200),
    Case("w3", 128, n=1, k=1),
    Case("w4", 32, HALF, n=1, k=1),
)
"""Every format, group, offset and dtype, and of their pairs those that meet in one expression."""


def guard_tiles(weight: TileWeight) -> TileWeight:
    """The weight with guards around its tiles, which a read beyond them would take for scales of NaN."""
    return replace(weight, tiles=guarded(weight.tiles))


def x_of(m: int, k: int, dtype: torch.dtype = HALF, device: str = "cpu") -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)).to(dtype).to(device)


def lone_x(m: int, weight: TileWeight, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """One number a group of x: no tensor core has a sum to round, and the orders of the rest show.

    Sizes grow and shrink over K by powers of two, so that additions in another order have other bits.
    """
    source = torch.Generator().manual_seed(m)
    x = torch.zeros(m, weight.k)
    for first in range(0, weight.k, weight.tile_group):
        size = min(weight.tile_group, weight.k - first)
        at = first + torch.randint(0, size, (m,), generator=source)
        x[torch.arange(m), at] = torch.randn(m, generator=source) * 2.0 ** int(first // weight.tile_group % 7)
    if weight.k_order is not None:
        x = x[:, weight.k_order.cpu().argsort()]
    return x.to(dtype).to(device)


def run(
    x: Tensor,
    weight: TileWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    through: Callable[[Launch], Any] = Launch.run,
    **options: Any,
) -> Tensor:
    """The launches into a poisoned, guarded output, from guarded inputs; every buffer checked after."""
    x = guarded(tlaunch.readable(x, weight))
    more = {"bias": bias, "residual": residual}
    more = {name: None if value is None else guarded(value) for name, value in more.items()}
    out = poisoned(x.shape[0], weight.outputs, x.dtype, x.device)
    for launch in tlaunch.launches(x, weight, out, **more, **options):
        through(launch)
    assert not out.isnan().any(), "a cell was not written"
    for tensor in (out, x, weight.tiles, *more.values()):
        assert tensor is None or intact(tensor), "written beyond a buffer"
    return out


def planned_on(device: Device, m: int, weight: TileWeight) -> Plan:
    """The rule's plan for M rows on a GPU that need not be there."""
    heavy = weight.tile_group < 128 or weight.offset is not None
    return plan(m, weight.row_tiles, weight.k_tiles, weight.record_bytes, heavy, device)


def other_plans(m: int, weight: TileWeight, most_shared: int) -> Iterator[Plan]:
    """Plans for M rows that differ: those of :data:`DEVICES`, then other warps, stages and turns."""
    plans = [planned_on(device, m, weight) for device in DEVICES]
    n_tiles, first = -(-m // 8), plans[0]
    if first.entry == "tensor_core_narrow":
        for k_warps, stages, turns in ((1, 2, 1), (2, 3, 1), (4, 3, 2), (8, 3, 3), (16 // n_tiles, 2, 1)):
            k_warps = max(k_warps, n_tiles)  # one to add up each n tile
            rack = min(turns * k_warps, weight.k_tiles) * n_tiles * 1024
            defines = (("N_TILES", n_tiles), ("K_WARPS", k_warps), ("STAGES", stages))
            shared = k_warps * stages * weight.record_bytes + rack
            plans.append(Plan(first.entry, defines, (weight.row_tiles, 1, 1), 32 * k_warps, shared, 0, turns))
    else:
        parts = rule.slices(weight.row_tiles, weight.k_tiles)
        names = ("N_TILES", "COLUMN_WARPS", "BLOCK_TILES", "STAGES", "TURN")
        for values in ((4, 1, 1, 2, 1), (4, 2, 3, 3, 1), (8, 1, 4, 2, 1), (4, 1, 2, 3, 2), (4, 2, 2, 2, 2)):
            n_tiles, columns, block_tiles, stages, turn = values
            band = 8 * n_tiles * columns
            grid = (-(-weight.row_tiles // block_tiles), -(-m // band), parts)
            shared = stages * turn * (band * 256 + block_tiles * weight.record_bytes)
            threads, planes = 32 * block_tiles * columns, parts if parts > 1 else 0
            plans.append(Plan(first.entry, tuple(zip(names, values)), grid, threads, shared, planes))
    for one in dict.fromkeys(plans):
        if one.shared_bytes <= most_shared:
            yield one


def checked(launch: Launch) -> Launch:
    """The same launch of a build with its assertions on."""
    source = launch.source
    defines = {**source.define_map, "LABKIT_CHECKS": 1}
    return replace(launch, source=KernelSource(source.file, source.entry, defines, source.own_text))


# --- checks that both runners make ----------------------------------------------------------------------


def rms(value: Tensor) -> float:
    return value.square().mean().sqrt().item()


def assert_accurate(
    y: Tensor, x: Tensor, weight: TileWeight, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """Error against FP64 at most twice that of plain torch in x's dtype.

    Where plain torch is nearly exact by luck (short sums), a rounding of the result and, in float32, of the
    sum of magnitudes are allowed.
    """
    exact = linear_reference(x, weight, bias, residual)
    dense = weight.dequantize(x.dtype)
    plain = (x.float() @ dense.float().T).to(x.dtype)
    plain = plain if bias is None else plain + bias
    if weight.paired:
        gate, up = plain.chunk(2, dim=1)
        plain = torch.nn.functional.silu(gate) * up
    plain = plain if residual is None else plain + residual
    unit = torch.finfo(x.dtype).eps / 2 * exact.abs()
    rounding = unit
    if not weight.paired:
        rounding = 2.0**-24 * (x.double().abs() @ weight.dequantize(torch.float64).abs().T)
    error, allowed = y.double() - exact, plain.double() - exact
    assert y.dtype == x.dtype and y.shape == exact.shape
    assert rms(error) <= 2 * max(rms(allowed), rms(unit) / 2, rms(rounding))
    assert error.abs().max() <= 2 * max(allowed.abs().max(), unit.max(), rounding.max())


def check_accurate(case: Case, rows: Iterable[int], device: str = "cpu") -> None:
    """:func:`assert_accurate` for each M, through the call, with and without bias and residual."""
    weight = case.weight(device)
    bias, far = x_of(1, weight.n, case.dtype, device)[0], x_of(400, weight.outputs, case.dtype, device)
    for m in rows:
        x, residual = case.x(m, device), far[:m]
        assert_accurate(tlaunch.linear(x, weight), x, weight)
        y = tlaunch.linear(x, weight, bias=bias, residual=residual)
        assert_accurate(y, x, weight, bias, residual)
        into = residual.clone()  # added where it lies
        assert torch.equal(tlaunch.linear(x, weight, bias=bias, residual=into, out=into), y)


def check_rows_alone(case: Case, batches: Iterable[int], device: str = "cpu", alone: int = 64) -> None:
    """Row i of a batch has the bits that it has alone, with bias and residual; and so on a repeat."""
    weight = case.weight(device)
    batches = sorted(batches)
    x, bias = case.x(batches[-1], device), x_of(1, weight.n, case.dtype, device)[0]
    residual = x_of(batches[-1], weight.outputs, case.dtype, device)
    one_by_one = torch.cat(
        [
            run(x[i : i + 1], weight, bias=bias, residual=residual[i : i + 1])
            for i in range(min(alone, batches[-1]))
        ]
    )
    for m in batches:
        y = run(x[:m], weight, bias=bias, residual=residual[:m])
        assert torch.equal(y[:alone], one_by_one[:m]), f"M = {m}"
        last = run(x[m - 1 : m], weight, bias=bias, residual=residual[m - 1 : m])
        assert torch.equal(y[-1:], last), f"the last row, M = {m}"
    assert torch.equal(run(x[:m], weight, bias=bias, residual=residual[:m]), y), "another result on a repeat"


def check_order(case: Case, rows: Iterable[int], device: str = "cpu") -> None:
    """Bits of the reference in the documented order.

    The residual takes away the leading bits of the result, so that those show which rounding would drop.
    """
    weight = case.weight(device)
    for m in rows:
        x = lone_x(m, weight, case.dtype, device)
        y, meant = run(x, weight), order_reference(x, weight)
        if weight.paired:  # the exponential is the machine's own
            torch.testing.assert_close(y, meant, rtol=torch.finfo(case.dtype).eps, atol=0)
            continue
        assert torch.equal(y, meant), f"M = {m}"
        rest = order_reference(x, weight, residual=-meant)
        assert torch.equal(run(x, weight, residual=-meant), rest), f"M = {m}, the last bits"
        assert rest.any()


def check_views(device: str = "cpu") -> None:
    """Rows with gaps, off a boundary, transposed, repeated: the bits of a plain copy; gaps are not read."""
    case = CASES[0]
    weight = case.weight(device)
    for m in (1, 9, 17, DENSE_FROM):
        wide = torch.full((2 * m, 1024), float("nan"), dtype=case.dtype, device=device)
        for first in (0, 8, 1):
            views = [wide[:m, first : first + case.k], wide[::2, first : first + case.k]]
            views.append(torch.full((case.k, m + 1), float("nan"), dtype=case.dtype, device=device).T[:m])
            for view in views:
                view.copy_(case.x(m, device))
                y = tlaunch.linear(view, weight)
                assert torch.equal(y, tlaunch.linear(view.contiguous(), weight)), (m, view.stride())
                view.fill_(float("nan"))
        same = case.x(1, device).expand(m, case.k)
        assert torch.equal(tlaunch.linear(same, weight), tlaunch.linear(same.contiguous(), weight))
    assert tlaunch.linear(case.x(0, device), weight).shape == (0, case.n)


def check_extremes(device: str = "cpu") -> None:
    """Activations of 6e4 do not overflow inside; NaN and infinity stay in their row."""
    for case in (CASES[0], CASES[4]):
        weight = case.weight(device)
        for m in (5, 16, 33):
            x = torch.full((m, case.k), 6e4, dtype=case.dtype, device=device)
            x[:, 1::2] *= -1
            x[2] = 0
            exact = linear_reference(x, weight)
            x[1, 3], x[3, 4] = float("nan"), float("inf")
            y = tlaunch.linear(x, weight)
            assert not y[2].any() and y[1].isnan().all() and not y[3].isfinite().all()
            kept = torch.tensor([i for i in range(m) if i not in (1, 2, 3)], device=device)
            y, exact = y[kept], exact[kept]
            beyond, inside = exact.abs() > 65520 * 1.001, exact.abs() < 65504 * 0.999
            assert beyond.any() and inside.any(), "the case must have both"
            assert torch.equal(y[beyond].double(), exact[beyond].sign() * float("inf"))
            slack = 2.0**-11 * exact.abs() + 2.0**-18 * 6e4 * weight.dequantize(torch.float64).abs().sum(1)
            assert ((y.double() - exact).abs() <= slack)[inside].all()
