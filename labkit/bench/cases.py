"""The products that are timed: the articles' own shapes, those of models, and any N×K.

Shapes of the articles are read from ``data/quoted``, those of models from their configurations there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from labkit import quoted
from labkit.errors import refuse, require
from labkit.quant.sizes import GROUP_SIZES, PACKED_FORMATS, packed_bytes, round_up

GROUP = 128
SWEEP_M = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64)
SEED_TABLES = ("tiled_w4", "tiled_w3", "w3_batch_tile")
SWEEP = "sweep"
FAST = "fast"
FAST_M = (1, 8, 16, 30, 32, 64, 256, 512)
FAST_SHAPES = "3b,7b"
TABLES = ("seed", *SEED_TABLES, SWEEP, FAST)
DTYPES = ("float16", "bfloat16")

# What a model's name on the command line stands for: the shapes of KERNELS' targets.
MODELS = {"0.5b": "qwen2.5-0.5b", "1.5b": "qwen2.5-1.5b", "3b": "qwen2.5-3b", "7b": "qwen2.5-7b"}

_TILED = ("gemm_tiled", "dequant_matmul", "dense_fp16")
_BATCH_TILE = ("gemv_small_batch", "gemv_batch_w3", "dense_fp16")
_SWEEP = ("gemv_single_row", "gemv_small_batch", "gemm_tiled", "dequant_matmul", "dense_fp16")

TENSOR_CORE = "tensor_core"
SEED_DISPATCH = "seed_dispatch"
DENSE = {"float16": "dense_fp16", "bfloat16": "dense_bf16"}
PEERS = {"w4": ("tinygemm_w4", "humming_w4"), "w3": ("humming_w3",)}
_SEED_MOST_M = 64  # above, the seed kernels are many times slower: minutes of GPU time for no news


@dataclass(frozen=True)
class Case:
    """One product: y [M, N] = x [M, K] · W [N, K]ᵀ, and who computes it.

    Attributes:
        table: the table of the run that it belongs to.
        format: storage format of W.
        m, n, k, group: shape, and weights that share one scale.
        contenders: names, in the order in which they take turns.
        dtype: name of the activation dtype, one of :data:`DTYPES`.
    """

    table: str
    format: str
    m: int
    n: int
    k: int
    group: int
    contenders: tuple[str, ...]
    dtype: str = "float16"

    @property
    def key(self) -> tuple[str, str, int, int, int, str]:
        """What cases that differ only in M and in who competes have in common."""
        return self.table, self.format, self.n, self.k, self.group, self.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weight."""
        return packed_bytes(self.format, self.n, self.k, self.group)

    @property
    def label(self) -> str:
        """Such as "w4 30×5632×2048" (M×N×K)."""
        return f"{self.format} {self.m}×{self.n}×{self.k}"


def cases(
    table: str = "seed",
    *,
    shapes: Sequence[tuple[int, int]] | None = None,
    m: Sequence[int] = SWEEP_M,
    formats: Sequence[str] = PACKED_FORMATS,
    group: int = GROUP,
    dtype: str = "float16",
    peers: bool = False,
) -> list[Case]:
    """Cases of one table, or of the article's and the sweep ("seed"), in the order in which they run.

    Args:
        table: one of :data:`TABLES`.
        shapes: (N, K) of the sweep over M and of "fast"; when left out, the articles' small and large
            shape for the sweep, :data:`FAST_SHAPES` for "fast".
        m: rows of the sweep and of "fast".
        formats: formats; the articles' tables have their own and are left out when it is not here.
        group: group size of the sweep and of "fast" (the articles' tables have 128).
        dtype: activations of "fast"; the other tables are of float16.
        peers: the kernels of other projects compete as well (:data:`PEERS`).

    Raises:
        InputError: unknown table, format, group or dtype, or nothing left to run.
    """
    require(table in TABLES, "table", repr(table), "one of " + ", ".join(TABLES))
    require(group in GROUP_SIZES, "group", group, "one of " + ", ".join(map(str, GROUP_SIZES)))
    require(dtype in DTYPES, "dtype", repr(dtype), " or ".join(DTYPES))
    fixed = dtype == "float16" or table == FAST
    require(fixed, "dtype", f"{dtype} for the table {table}", "float16", f"--table {FAST}")
    for name in formats:
        require(name in PACKED_FORMATS, "bits", repr(name), "4, 3 or both")
    wanted = (*SEED_TABLES, SWEEP) if table == "seed" else (table,)
    found: list[Case] = []
    for name in wanted:
        if name == SWEEP:
            found += _sweep(shapes or default_shapes(), m, formats, group)
        elif name == FAST:
            found += _fast(shapes or parse_shapes(FAST_SHAPES), m, formats, group, dtype)
        else:
            found += [case for case in seed_cases(name) if case.format in formats]
    if peers:
        found = [replace(case, contenders=(*case.contenders, *PEERS[case.format])) for case in found]
    require(bool(found), "table and bits", f"{table}, {', '.join(formats)}", "at least one case")
    return found


def seed_cases(table: str) -> Iterator[Case]:
    """Cases of one table of the first article, shapes as quoted."""
    rows = quoted.table(quoted.DEEPINFER, table)
    if table == "w3_batch_tile":
        n, k = batch_tile_shape()
        for row in rows.rows:
            yield Case(table, "w3", row["batch"], n, k, GROUP, _BATCH_TILE)
        return
    for row in rows.rows:
        yield Case(table, table.removeprefix("tiled_"), row["m"], row["n"], row["k"], GROUP, _TILED)


def batch_tile_shape() -> tuple[int, int]:
    """(N, K) of the article's W3 batch table; it stands in the table's notes."""
    notes = quoted.table(quoted.DEEPINFER, "w3_batch_tile").notes
    found = re.search(r"N x K = (\d+) x (\d+)", notes)
    require(found is not None, "data/quoted", notes, "notes that give N x K")
    assert found is not None
    return int(found[1]), int(found[2])


def default_shapes() -> list[tuple[int, int]]:
    """(N, K) of the sweep: the first and the last row of the article's W4 table."""
    rows = quoted.table(quoted.DEEPINFER, "tiled_w4").rows
    return [(row["n"], row["k"]) for row in (rows[0], rows[-1])]


def _sweep(
    shapes: Sequence[tuple[int, int]], m: Sequence[int], formats: Sequence[str], group: int
) -> Iterator[Case]:
    for n, k in shapes:
        for name in formats:
            extra = ("gemv_batch_w3",) if name == "w3" else ()
            for rows in m:
                yield Case(SWEEP, name, rows, n, k, group, (*_SWEEP, *extra))


def _fast(
    shapes: Sequence[tuple[int, int]], m: Sequence[int], formats: Sequence[str], group: int, dtype: str
) -> Iterator[Case]:
    for n, k in shapes:
        for name in formats:
            for rows in m:
                seed = (SEED_DISPATCH,) if rows <= _SEED_MOST_M else ()
                names = (TENSOR_CORE, *seed, "dequant_matmul", DENSE[dtype])
                yield Case(FAST, name, rows, n, k, group, names, dtype)


def grouped(found: Sequence[Case]) -> list[list[Case]]:
    """Neighbours with the same :attr:`Case.key` together: they share a weight, its copies, its reference."""
    return [list(together) for _, together in groupby(found, key=lambda case: case.key)]


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Shapes of the command line: ``5632x2048,7b`` to (N, K) pairs, each once.

    A model's name stands for its fused projections: QKV, O, gate+up, down.
    """
    found: list[tuple[int, int]] = []
    for part in (part.strip().lower() for part in text.split(",") if part.strip()):
        if part in MODELS:
            found += model_shapes(MODELS[part])
            continue
        numbers = re.fullmatch(r"(\d+)[x×](\d+)", part)
        if numbers is None or min(int(numbers[1]), int(numbers[2])) < 1:
            refuse("shapes", repr(part), "N×K such as 5632x2048, or " + ", ".join(MODELS))
        found.append((int(numbers[1]), int(numbers[2])))
    require(bool(found), "shapes", repr(text), "at least one N×K")
    return list(dict.fromkeys(found))


def model_shapes(key: str) -> list[tuple[int, int]]:
    """(N, K) of a model's four fused projections."""
    model = quoted.model(key)
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    return [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]


def parse_numbers(text: str, argument: str) -> list[int]:
    """``1,2,8`` or ``1-8`` to whole numbers >= 1, each once, in order given."""
    found: list[int] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if span is None or int(span[1]) < 1 or int(span[2] or span[1]) < int(span[1]):
            refuse(argument, repr(part), "whole numbers >= 1, such as 1,2,8 or 1-8")
        found += range(int(span[1]), int(span[2] or span[1]) + 1)
    require(bool(found), argument, repr(text), "at least one whole number >= 1")
    return list(dict.fromkeys(found))


def shrunk(case: Case) -> Case:
    """The same case small enough for the emulator: N ragged against every tile, K whole groups."""
    n = max(24, case.n // 64 + 5)
    k = min(1024, max(2 * case.group, round_up(case.k // 16, case.group)))
    return replace(case, n=n, k=k)
