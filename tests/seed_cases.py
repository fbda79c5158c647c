"""What the W4/W3 seed kernels are tested with, on the emulator and on a GPU alike."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit.kernels.seed.launch import KERNELS, Launch, SeedKernel, plan
from labkit.quant import QuantWeight
from labkit.quant.sizes import resolve_group

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 30, 31, 32, 33, 37, 64)
"""M: every small batch, and both sides of every tile boundary."""

REPEATED = (1, 8, 37)
FEW_ROWS = (1, 2, 8, 9, 33)
"""M for the larger shapes: the emulator's time goes with M x N."""

SHAPES: tuple[tuple[int, int, int | str], ...] = (
    (1, 96, 32),
    (5, 160, 32),
    (63, 224, 32),
    (65, 256, 64),
    (130, 128, 128),
    (63, 200, 64),
    (9, 96, "row"),
)
"""N, K, group: no N is a whole number of tiles, K = 32 x odd, K that is padded (200), and a scale a row."""

RAGGED: tuple[tuple[int, int, int | str], ...] = ((5, 75, 32), (65, 201, 64), (8, 30, 16), (1, 1, 32))
"""K that is no multiple of 8 (activations cannot be read 16 bytes at a time), or smaller than a group."""

GUARD = 256  # bytes before and after a tensor: keeps 16-byte alignment
_PATTERN = 0x7E  # 0x7e7e is a half NaN, 0x7e7e7e7e a huge float: neither may get into a result


@dataclass(frozen=True)
class Case:
    """One kernel build with the shapes it is tried on."""

    entry: str
    offset: torch.dtype | None
    whole: bool

    @property
    def kernel(self) -> SeedKernel:
        return KERNELS[self.entry]

    @property
    def name(self) -> str:
        offset = "symmetric" if self.offset is None else f"offset-{str(self.offset).removeprefix('torch.')}"
        return f"{self.entry}-{offset}-{'whole' if self.whole else 'ragged'}"

    def weights(self) -> Iterator[QuantWeight]:
        for seed, (n, k, group) in enumerate(SHAPES if self.whole else RAGGED):
            weight = random_weight(self.kernel.format, n, k, group, self.offset, seed)
            if not self.kernel.why_not(weight):
                yield weight


def _cases() -> list[Case]:
    found = []
    for entry, kernel in KERNELS.items():
        found += [
            Case(entry, None, True),
            Case(entry, torch.float16, True),
            Case(entry, torch.float32, False),
        ]
        if kernel.vector_x:  # the build for ragged K differs
            found.append(Case(entry, None, False))
    return found


CASES = _cases()


def guarded(values: Tensor) -> Tensor:
    """A contiguous copy with GUARD bytes of a pattern on both sides; see :func:`guards_intact`."""
    size = values.nbytes
    raw = torch.full((size + 2 * GUARD,), _PATTERN, dtype=torch.uint8, device=values.device)
    inside = raw[GUARD : GUARD + size].view(values.dtype).view(values.shape)
    inside.copy_(values)
    inside.guards = raw  # type: ignore[attr-defined]
    return inside


def guards_intact(inside: Tensor) -> bool:
    """Nothing was written just before or after the tensor."""
    raw: Tensor = inside.guards  # type: ignore[attr-defined]
    return bool((raw[:GUARD] == _PATTERN).all() and (raw[-GUARD:] == _PATTERN).all())


def poisoned(m: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """A guarded float16 [m, n] of NaN: a cell that stays NaN was not written."""
    return guarded(torch.full((m, n), float("nan"), dtype=torch.float16, device=device))


def random_weight(
    format: str, n: int, k: int, group: int | str, offset: torch.dtype | None, seed: int = 0
) -> QuantWeight:
    """Codes over their whole range, scales of both signs and zero among them."""
    source = torch.Generator().manual_seed(1000 * seed + 10 * n + k)
    low = -8 if format == "w4" else -4
    codes = torch.randint(low, -low, (n, k), generator=source, dtype=torch.int8)
    groups = -(-k // resolve_group(format, k, group))
    scales = (torch.randn(n, groups, generator=source) * 0.02).half()
    scales.view(-1)[3::7] = 0
    shift = None if offset is None else (torch.randn(n, groups, generator=source) * 0.1).to(offset)
    return QuantWeight.from_codes(format, codes, scales, shift, group_size=group)


def random_x(m: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed + m)).half()


def guarded_weight(weight: QuantWeight) -> QuantWeight:
    """The weight with guards around each of its tensors."""
    tensors = {name: guarded(tensor) for name, tensor in weight.tensors().items()}
    return QuantWeight.from_tensors(tensors, weight.metadata())


def launch(kernel: SeedKernel, x: Tensor, weight: QuantWeight) -> Launch:
    """A launch into a poisoned output."""
    return plan(kernel, x, weight, poisoned(x.shape[0], weight.n, x.device))


def check_written(launched: Launch) -> None:
    """Every cell written, nothing beyond; inputs untouched around (their guards) as well."""
    assert not launched.out.isnan().any(), f"{launched.source.name}: a cell was not written"
    for tensor in launched.args:
        if hasattr(tensor, "guards"):
            assert guards_intact(tensor), f"{launched.source.name}: written beyond a buffer"


def plain_fp16(x: Tensor, weight: QuantWeight) -> Tensor:
    """The plain FP16 result: half weights, float sums, half output (as cuBLAS; the CPU's may be worse)."""
    dense = weight.dequantize(torch.float16)
    if x.device.type == "cuda":
        return linear(x, dense)
    return linear(x.float(), dense.float()).half()


def check_accurate(y: Tensor, x: Tensor, weight: QuantWeight) -> None:
    """Error against float64 of the same weights at most twice that of plain FP16.

    Where plain FP16 is nearly exact by luck (a few short sums), half a unit of the result and the
    float32 rounding of the sum of magnitudes are allowed.
    """
    dense = weight.dequantize(torch.float64)
    exact = linear(x.double(), dense)
    error, plain = y.double() - exact, plain_fp16(x, weight).double() - exact
    unit = torch.finfo(torch.float16).eps / 2 * exact.abs()
    rounding = 2.0**-24 * linear(x.double().abs(), dense.abs())
    assert rms(error) <= 2 * max(rms(plain), rms(unit) / 2, rms(rounding))
    assert error.abs().max() <= 2 * max(plain.abs().max(), unit.max(), rounding.max())


def check_extreme(y: Tensor, x: Tensor, weight: QuantWeight) -> None:
    """Infinite where the exact result is beyond FP16, of the right sign, and accurate elsewhere."""
    dense = weight.dequantize(torch.float64)
    exact, magnitudes = linear(x.double(), dense), linear(x.double().abs(), dense.abs())
    # Rounding the weights to half, which some kernels do, moves a sum of large terms that nearly cancel.
    slack = 2.0**-10 * exact.abs() + 2.0**-11 * magnitudes
    largest = torch.finfo(torch.float16).max
    beyond, inside = exact.abs() - slack > largest + 16, exact.abs() + slack < largest
    assert beyond.any() and inside.any(), "the case must have both"
    assert torch.equal(y[beyond].double(), exact[beyond].sign() * float("inf"))
    assert ((y.double() - exact).abs() <= slack)[inside].all()


def untouched(size: int) -> np.ndarray:
    """uint8 [size] of zeros in memory that is reserved; only pages that are written take any."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    except OSError as error:
        pytest.skip(f"no {size >> 20} MiB of address space: {error}")


def rms(value: Tensor) -> float:
    return value.square().mean().sqrt().item()


def check_case(case: Case, device: str) -> None:
    """Values, identity input, poison, guards and repeats for every shape of a case."""
    kernel = case.kernel
    for weight in case.weights():
        weight = guarded_weight(weight.to(device))
        for m in ROWS if weight.n * weight.k < 15_000 else FEW_ROWS:
            x = guarded(random_x(m, weight.k).to(device))
            launched = launch(kernel, x, weight)
            check_accurate(launched.run(), x, weight)
            check_written(launched)
            if m in REPEATED:
                again = launch(kernel, x, weight).run()
                assert torch.equal(again, launched.out), "another result on a repeat"
        columns = sorted({*range(0, weight.k, 3), *range(32), weight.k - 1} & {*range(weight.k)})
        eye = torch.eye(weight.k, dtype=torch.float16, device=device)[columns]
        identity = launch(kernel, guarded(eye), weight)
        assert torch.equal(identity.run().t(), weight.dequantize(torch.float16)[:, columns])
        check_written(identity)


def check_large_activations(entry: str, device: str) -> None:
    """Activations of 6e4 in both signs: sums in float32 hold them, the FP16 output overflows."""
    kernel = KERNELS[entry]
    for offset in (None, torch.float16):
        weight = random_weight(kernel.format, 65, 224, 32, offset).to(device)
        x = torch.full((33, 224), 6e4, dtype=torch.float16, device=device)
        x[:, 1::2] *= -1
        x[::2, 64:] = 0
        x[::4, 2:] = 0
        check_extreme(plan(kernel, x, weight).run(), x, weight)


def check_a_row_does_not_know_its_batch(format: str, device: str) -> None:
    """The batch tile gives the bits of the single row kernel, for every row of every batch.

    The second half of the columns nearly cancels the first, so that the last bits of the float sums are the
    first ones of the FP16 result: another order of the sums would show.
    """
    half = random_weight(format, 19, 544, 32, torch.float16)
    halves = {name: torch.cat([tensor, tensor], 1) for name, tensor in half.tensors().items()}
    weight = QuantWeight.from_tensors(halves, {**half.metadata(), "k": 1088}).to(device)
    x = random_x(17, 544)
    x = torch.cat([x, -(x.view(torch.int16) + 1).view(torch.float16)], 1).to(device)
    alone = plan(KERNELS[f"gemv_row_{format}"], x, weight).run()
    for m in (1, 2, 7, 8, 9, 17):
        assert torch.equal(plan(KERNELS[f"gemv_batch_{format}"], x[:m], weight).run(), alone[:m])
    tiled = plan(KERNELS[f"gemm_tiled_{format}"], x, weight).run()
    for m in (1, 5, 16):
        assert torch.equal(plan(KERNELS[f"gemm_tiled_{format}"], x[:m], weight).run(), tiled[:m])


def check_padding_is_never_read(entry: str, device: str) -> None:
    """Codes and scales of the padding may hold anything: they do not reach a result."""
    kernel = KERNELS[entry]
    clean = random_weight(kernel.format, 9, 69, 64, torch.float32)
    # Columns 64 .. 68 are zero and their scale is so large that other codes of the group are beyond FP16:
    # a product with the zeros that stand for x there would be NaN.
    clean.packed[:, 64 * (4 if clean.format == "w4" else 3) // 8 :] = 0
    clean.scales[:, 1] = 6e4
    dirty = QuantWeight(
        clean.format, clean.packed.clone(), clean.scales, clean.offset, clean.n, clean.k, clean.group_size
    )
    # Code 7 (W3: 3) in every column from 69 on, in the byte that column 68 lies in as well.
    if clean.format == "w4":
        dirty.packed[:, 34] |= 0x70
        dirty.packed[:, 35:] = 0x77
    else:
        dirty.packed[:, 25] |= 0x80
        dirty.packed[:, 26] |= 0x6D
        dirty.packed[:, 27:] = torch.tensor([0xDB, 0xB6, 0x6D], dtype=torch.uint8).repeat(7)
    assert torch.equal(clean.dequantize(torch.float32), dirty.dequantize(torch.float32))
    x = random_x(9, 69).to(device)
    a, b = (plan(kernel, x, weight.to(device)).run() for weight in (clean, dirty))
    assert torch.equal(a, b)
