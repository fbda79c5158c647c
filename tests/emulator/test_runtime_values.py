"""Warp operations, half and bfloat16 arithmetic, conversions and fragments against NumPy and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from labkit import emulator

TEXT = (Path(__file__).parent / "kernels" / "values.cu").read_text(encoding="utf-8")
LANES = np.arange(32)


def launch(entry: str, *args: Any, block: int = 32, grid: int = 1, defines: Any = None) -> None:
    kernel = emulator.compile(TEXT, entry, filename="values.cu", isolate=False, defines=defines)
    kernel((grid,), (block,), list(args))


def signed(values: object) -> np.ndarray:
    """32-bit patterns as int32."""
    return np.broadcast_to(np.asarray(values, np.int64), 32).astype(np.uint32).view(np.int32)


def mask(lanes: np.ndarray) -> int:
    return int(sum(1 << lane for lane in LANES[lanes]))


def test_collectives() -> None:
    v = np.random.default_rng(0).integers(-100, 100, 32).astype(np.int32)
    out = np.zeros((23, 32), np.int32)
    launch("collectives", v, out)
    segment = LANES // 8 * 8
    expected = [
        signed(v[5]),
        v[segment + (LANES + 1) % 8],
        np.where(LANES >= 3, v[LANES - 3], v),
        np.where(LANES % 16 + 3 < 16, v[(LANES + 3) % 32], v),
        v[LANES ^ 9],
        signed(mask(v > 0)),
        signed(1),
        signed(2),
        signed(v.sum()),
        signed(v.min()),
        signed(v.max()),
        signed(v.view(np.uint32).max()),
        signed(np.bitwise_and.reduce(v)),
        signed(np.bitwise_or.reduce(v)),
        signed(np.bitwise_xor.reduce(v)),
        signed([mask((v & 3) == (x & 3)) for x in v]),
        signed(0),
        signed(0xFFFFFFFE),
        v[LANES ^ 1],
        LANES ^ 1,
        np.minimum(LANES + 1, 31),
        v[LANES ^ 2],
        np.where(LANES < 16, v[:16].sum(), signed(0xAAAA0000)),
    ]
    np.testing.assert_array_equal(out, np.stack(expected))


def test_block_votes() -> None:
    v = np.random.default_rng(1).integers(-100, 100, 64).astype(np.int32)
    out = np.zeros((3, 64), np.int32)
    launch("block_votes", v, out, block=64)
    assert (out == np.array([[(v > 0).sum()], [2], [1]])).all()


def special(count: int, seed: int) -> np.ndarray:
    """Ordinary numbers, tiny, huge and special ones, as float64."""
    rng = np.random.default_rng(seed)
    ordinary = rng.standard_normal(count) * 2.0 ** rng.integers(-24, 16, count)
    ordinary[:6] = 0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-24
    rng.shuffle(ordinary)
    return ordinary


N = 4096


def arithmetic(a: Any, b: Any, c: Any, fused: Any) -> list[Any]:
    """The kernel's operations in an array module of 16-bit floats."""
    total = (a + b) * c
    one = (a > b) * 1.0, (b > c) * 1.0
    smaller = [x if x < y else y for x, y in zip(a, b, strict=True)]
    products = [a * c - b, b * c - a]
    return [
        a + b,
        a - b,
        a * b,
        a / b,
        fused(a, b, c),
        -a,
        abs(a),
        ...,
        ...,
        total,
        fused(a, b, c),
        fused(b, c, a),
        *products,
        smaller,
        *one,
    ]


def compare(out: np.ndarray, expected: list[Any]) -> None:
    assert len(out) == len(expected)
    for number, (row, want) in enumerate(zip(out, expected, strict=True)):
        if want is not ...:
            np.testing.assert_array_equal(row, np.asarray(want, np.float32), err_msg=f"operation {number}")


# The second is for compilers that do not know _Float16.
HALVES = pytest.mark.parametrize("defines", [None, {"CUEMU_SOFT_HALF": 1}], ids=["native", "software"])


@HALVES
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_half_arithmetic_rounds_once(defines: Any) -> None:
    a, b, c = (special(N, seed).astype(np.float16) for seed in (2, 3, 4))
    out = np.zeros((17, N), np.float16)
    launch("half_operations", a, b, c, out, N, block=128, grid=N // 128, defines=defines)

    def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        return (x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)).astype(np.float16)

    expected = arithmetic(a, b, c, fused)
    expected[7], expected[8] = np.fmax(a, b), np.fmin(a, b)
    compare(out.astype(np.float32), expected)


def test_a_fused_multiply_add_is_not_two_roundings() -> None:
    # 1 + 2^-11 + 2^-20 lies just above the middle of 1 and its successor.
    a = np.array([2.0**-11 * (1 + 2.0**-9)] * 2, np.float16)
    one = np.array([1.0, -1.0], np.float16)
    out = np.zeros((17, 2), np.float16)
    launch("half_operations", a, one, one, out, 2)
    assert out[4, 0] == np.float16(1 + 2.0**-10)
    assert out[4, 1] == np.float16(-1 - 2.0**-10)


def test_bfloat_arithmetic() -> None:
    a, b, c = (torch.from_numpy(special(N, seed)).to(torch.bfloat16) for seed in (5, 6, 7))
    out = torch.zeros(17, N, dtype=torch.bfloat16)
    launch("bfloat_operations", a, b, c, out, N, block=128, grid=N // 128)

    def fused(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        exact = (x.double() * y.double() + z.double()).numpy()  # torch would round it to float first
        pattern = exact.view(np.uint64)
        pattern = pattern + np.uint64(2**44 - 1) + (pattern >> np.uint64(45) & np.uint64(1))
        nearest = (pattern & ~np.uint64(2**45 - 1)).view(np.float64)
        return torch.from_numpy(np.where(np.isfinite(exact), nearest, exact)).to(torch.bfloat16)

    expected = arithmetic(a, b, c, fused)
    expected[7], expected[8] = torch.fmax(a, b), torch.fmin(a, b)
    compare(
        out.float().numpy(), [row if row is ... else np.array([float(x) for x in row]) for row in expected]
    )


@HALVES
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_conversions(defines: Any) -> None:
    rng = np.random.default_rng(8)
    values = (rng.standard_normal(N) * 2.0 ** rng.integers(-30, 36, N)).astype(np.float32)
    values[:8] = 65519.0, 65520.0, 2.0**-25, 1.5 * 2.0**-25, np.inf, np.nan, -0.0, 2.5
    half, zero = np.zeros(N, np.float16), np.zeros(N, np.float16)
    bfloat = torch.zeros(N, dtype=torch.bfloat16)
    rounded, back = np.zeros((4, N), np.int32), np.zeros((2, N), np.float32)
    arguments = [values, half, zero, bfloat, rounded, back, N]
    launch("conversions", *arguments, block=128, grid=N // 128, defines=defines)
    np.testing.assert_array_equal(half, values.astype(np.float16))
    np.testing.assert_array_equal(back[0], values.astype(np.float16).astype(np.float32))
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(back[1], expected)
    finite = np.abs(values) < 65504
    assert (np.abs(zero[finite].astype(np.float32)) <= np.abs(values[finite])).all()
    step = np.spacing(np.abs(zero[finite])).astype(np.float32)
    assert (np.abs(values[finite]) - np.abs(zero[finite].astype(np.float32)) < step).all()
    wide = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=2.0**40)
    limits = np.iinfo(np.int32)
    for row, rule in zip(rounded, (np.rint, np.trunc, np.floor), strict=False):
        np.testing.assert_array_equal(row, np.clip(rule(wide), limits.min, limits.max))
    unsigned = np.clip(np.rint(wide), 0, 2**32 - 1)
    np.testing.assert_array_equal(rounded[3].view(np.uint32), unsigned)


def test_integers() -> None:
    rng = np.random.default_rng(9)
    n = 256
    a, b, s = (rng.integers(0, 2**32, n, dtype=np.uint32) for _ in range(3))
    a[:3] = 0, 1, 0x80000000
    s = s & np.uint32(0x77777777)  # no sign replication: that is for another day
    out = np.zeros((16, n), np.uint32)
    launch("integers", a, b, s, out, n, block=128, grid=2)
    wide_a, wide_b = a.astype(object), b.astype(object)
    both = wide_b * 2**32 + wide_a
    shift = (s & 31).astype(object)
    text = [f"{int(x):032b}" for x in a]
    bytes_of = np.concatenate([a.view(np.uint8).reshape(n, 4), b.view(np.uint8).reshape(n, 4)], 1)
    chosen = np.stack(
        [np.take_along_axis(bytes_of, (s >> (4 * i) & 7)[:, None].astype(int), 1)[:, 0] for i in range(4)], 1
    )
    fixed = bytes_of[:, [0, 4, 1, 5]]
    signed_a, signed_b = a.view(np.int8).reshape(n, 4), b.view(np.int8).reshape(n, 4)
    plain_a, plain_b = a.view(np.uint8).reshape(n, 4), b.view(np.uint8).reshape(n, 4)
    expected = [
        [t.count("1") for t in text],
        [32 if "1" not in t else t.index("1") for t in text],
        [0 if "1" not in t else 32 - t.rindex("1") for t in text],
        [int(t[::-1], 2) for t in text],
        [int(f"{int(x):032b}"[::-1], 2) for x in b],
        np.ascontiguousarray(chosen).view(np.uint32)[:, 0],
        [(int(x) << int(k)) >> 32 & 0xFFFFFFFF for x, k in zip(both, shift, strict=True)],
        [int(x) >> int(k) & 0xFFFFFFFF for x, k in zip(both, shift, strict=True)],
        [int(x) * int(y) >> 32 for x, y in zip(a, b, strict=True)],
        [
            (int(x) * int(y) >> 32) & 0xFFFFFFFF
            for x, y in zip(a.view(np.int32), b.view(np.int32), strict=True)
        ],
        ((signed_a.astype(int) * signed_b).sum(1) + s.astype(int)) & 0xFFFFFFFF,
        ((plain_a.astype(int) * plain_b).sum(1) + s.astype(int)) & 0xFFFFFFFF,
        (a & b) ^ s,
        (a & b) | (a & s) | (b & s),
        np.ascontiguousarray(fixed).view(np.uint32)[:, 0],
        a,
    ]
    for number, (row, want) in enumerate(zip(out, expected, strict=True)):
        np.testing.assert_array_equal(row, np.array(want, np.uint32), err_msg=f"operation {number}")


@pytest.mark.parametrize(
    ("entry", "dtype", "tolerance"),
    [
        ("mma_half", torch.float16, 1e-6),
        ("mma_bfloat", torch.bfloat16, 1e-6),
        ("mma_half_sum", torch.float16, 2**-11),
    ],
)
def test_mma(entry: str, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(10)
    a = torch.randn(16, 16, generator=generator).to(dtype)
    b = torch.randn(16, 8, generator=generator).to(dtype)
    c = torch.randn(16, 8, generator=generator).to(torch.float16).float()
    d = torch.zeros(16, 8)
    launch(entry, a, b, c, d)
    expected = a.double() @ b.double() + c.double()
    torch.testing.assert_close(d.double(), expected, rtol=tolerance, atol=tolerance)


def test_mma_of_bytes() -> None:
    rng = np.random.default_rng(11)
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((16, 32), (8, 32)))
    c = rng.integers(-1000, 1000, (16, 8)).astype(np.int32)
    d = np.zeros((16, 8), np.int32)
    launch("mma_bytes", a, b, c, d)
    np.testing.assert_array_equal(d, a.astype(int) @ b.T.astype(int) + c)


def test_matrix_loads() -> None:
    matrices = np.arange(256, dtype=np.float16).reshape(4, 8, 8)
    out = np.zeros((11, 32, 2), np.float16)
    launch("matrix_loads", matrices, out)
    plain = matrices.reshape(4, 32, 2)
    transposed = matrices.transpose(0, 2, 1).reshape(4, 32, 2)
    np.testing.assert_array_equal(out, np.concatenate([plain, transposed, plain[:2], plain[:1]]))


def test_more_atomics() -> None:
    i = np.array([0, -99, 99, 0, 0, 3], np.int32)
    u = np.array([5, 2**32 - 1, 0, 0, 0, 0], np.uint32)
    wide, single, double = np.zeros(2, np.uint64), np.zeros(1, np.float32), np.zeros(1)
    launch("more_atomics", i, u, wide, single, double)
    # CAS: lane 3 finds 3 and makes it 4, lane 4 makes that 5, … lane 31 makes 32.
    assert i.tolist() == [496, -9, -40, -496, 0, 32]
    # Inc counts 0 … 9 and starts again; Dec goes from 0 to 9 and down.
    assert u.tolist() == [31, 0, 2**32 - 1, 2, 8, 7]
    assert wide.tolist() == [32 << 40, 31 << 40]
    assert (single[0], double[0]) == (16.0, 8.0)


def test_templates_and_scalars() -> None:
    given, out = np.arange(32, dtype=np.float32), np.zeros(40, np.float32)
    launch("scaled<float, 3>", out, given, True, 8, 0.5, 20)
    expected = np.zeros(40, np.float32)
    expected[8:28] = -1.5 * given[:20]
    np.testing.assert_array_equal(out, expected)
