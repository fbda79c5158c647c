"""Checks of chapter 09: the memory bill, blocks of rows, a swapped linear layer, the error budget."""

from __future__ import annotations

import math
from typing import Any

from labkit import quoted
from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed
from labkit.check.normalise import items, plain_int
from labkit.errors import InputError
from labkit.models.error_budget import default_parts, remaining
from labkit.quant.quantize import quantize

BUDGET_BYTES = 3_317_760
"""What exercise 09.4 may spend: a quarter of the bytes between all W3 and all W4."""

MOST_BLOCKS = 16
"""How many blocks of rows exercise 09.2 may use."""

_LIBRARY = ("LayerBitsMap", "part_bytes", "MachineCard", "memory_gib", "kv_bytes_per_token", "packed_bytes")


@exercise("09.1", title="The memory bill")
def memory_bill(answer: Any) -> Verdict:
    """``memory_bill(shape, bits, group, context)``: bytes on the card, weights and cache together."""
    forbid_calls(answer, (*_LIBRARY, "stored_bytes", "resident_weights"))
    cases = [(key, 4, 128, 2048) for key in ("qwen2.5-3b", "qwen2.5-7b")]
    cases += [("qwen2.5-7b", 3, 64, 8192), ("smollm2-135m", 4, 32, 512)]
    for key, bits, group, context in cases:
        shape = quoted.model(key)
        expected = _bill(shape, bits, group, context)
        got = answer(shape, bits, group, context)
        if not _close(got, expected):
            case = f"{shape.name}, {bits} bits, groups of {group}, {context} tokens"
            hint = _bill_hint(shape, bits, group, context, got)
            return not_yet(f"{expected:,.0f} bytes for {case}", _number(got), hint)
    return passed("right for three models: tied and untied, short and long context")


def _bill(
    shape: quoted.ModelShape,
    bits: float,
    group: int,
    context: int,
    *,
    table_bits: float = 9.0,
    tables: int | None = None,
    kv_heads: int | None = None,
    kv_sides: int = 2,
) -> float:
    """Bytes by formula; the keywords make the usual mistakes on purpose."""
    tables = (1 if shape.tied_embeddings else 2) if tables is None else tables
    kv_heads = shape.num_kv_heads if kv_heads is None else kv_heads
    layers = shape.num_layers * shape.layer_weights * (bits + 16 / group) / 8
    heads = tables * shape.head_weights * table_bits / 8
    cache = kv_sides * shape.num_layers * kv_heads * shape.head_dim * 2 * context
    return layers + heads + cache


def _bill_hint(shape: quoted.ModelShape, bits: float, group: int, context: int, got: Any) -> str:
    mistakes = (
        (_bill(shape, bits, group, 0), "the KV cache is missing"),
        (_bill(shape, bits, group, context, kv_sides=1), "the cache holds keys AND values"),
        (_bill(shape, bits, group, context, kv_heads=shape.num_heads), "only the KV heads are cached"),
        (_bill(shape, bits, group, context, tables=1), "an untied model has a second table, the embedding"),
        (_bill(shape, bits, group, context, tables=2), "a tied model has one table for both ends"),
        (
            _bill(shape, bits, group, context, table_bits=8),
            "the 8-bit table has scales too: 32 bits for 32 weights",
        ),
        (_bill(shape, bits, group, context, table_bits=8.5), "our 8-bit scales are FP32: 9 bits a weight"),
        (_bill(shape, bits, math.inf, context), "every group of a layer has a 16-bit scale"),  # type: ignore[arg-type]
        (8 * _bill(shape, bits, group, context), "you counted bits; 8 bits are a byte"),
    )
    for value, hint in mistakes:
        if _close(got, value):
            return hint
    return "three sums: layers (bits + 16/group), tables (9 bits), cache (K and V, FP16, KV heads only)"


class CountedRows:
    """A quantised weight that counts the float rows it hands out.

    Attributes:
        shape: (N, K).
        blocks: calls of :meth:`dequantize`; ``peak``: most float bytes of one call.
    """

    def __init__(self, weight: Any) -> None:
        self._weight, self.shape = weight, tuple(weight.shape)
        self.blocks, self.peak = 0, 0

    def dequantize(self, rows: slice | None = None) -> Any:
        """Rows ``rows`` (all when None) as float32 [rows, K]."""
        values = self._weight.dequantize(rows=rows)
        self.blocks += 1
        self.peak = max(self.peak, values.nbytes)
        return values


@exercise("09.2", title="Never all rows at once", par=126, limit=256, unit="KiB of floats")
def matmul_in_blocks(answer: Any) -> Verdict:
    """``matmul_in_blocks(x, weight)`` = x @ W.T with at most 16 blocks; scored by the largest block."""
    import torch

    forbid_calls(answer, ("QuantLinear", "dequant_matmul", "_weight"))
    peak = 0
    for m, n, k in ((3, 1000, 512), (1, 7, 64), (2, 16, 32)):
        generator = torch.Generator().manual_seed(n)
        stored = quantize(torch.randn(n, k, generator=generator), "w4", 32)
        x = torch.randn(m, k, generator=generator)
        weight = CountedRows(stored)
        y = answer(x, weight)
        if not isinstance(y, torch.Tensor) or y.shape != (m, n):
            got = f"shape {list(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
            hint = "the last block may be shorter" if n == 1000 else "fewer rows than blocks must work too"
            return not_yet(f"a tensor [{m}, {n}] for x [{m}, {k}] and a weight [{n}, {k}]", got, hint)
        if weight.blocks == 0:
            return not_yet("rows taken through weight.dequantize(rows=slice(a, b))", "no call of it")
        if not torch.allclose(y, x @ stored.dequantize().T, atol=1e-3):
            return not_yet("y = x @ W.T", "other values", "block a..b of the rows gives columns a..b of y")
        if weight.blocks > MOST_BLOCKS:
            hint = f"choose the rows a block so that {MOST_BLOCKS} blocks are enough"
            return not_yet(f"at most {MOST_BLOCKS} blocks", f"{weight.blocks} for {n} rows", hint)
        peak = max(peak, weight.peak)
    return passed("the same result, and never the whole matrix as floats", score=peak / 1024)


@exercise("09.3", title="Swap a linear layer", none_ok=True)
def swap_linear(answer: Any) -> Verdict:
    """``swap_linear(model, name, format, group_size)``: an nn.Linear becomes a QuantLinear, in place."""
    import torch
    from torch import nn

    from labkit.nn.linear import QuantLinear

    forbid_calls(answer, ("requantise", "requantise_weights", "load_model"))
    for name, format, group in (("1.up", "w4", 32), ("1.down", "w3", 16), ("2", "w3", 64)):
        model, x = _small_model(), torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
        before = dict(model.named_modules())
        old = before[name]
        assert isinstance(old, nn.Linear)
        expected_weight = quantize(old.weight.detach(), format, group)
        assert not isinstance(expected_weight, tuple)
        if answer(model, name, format, group) not in (None, model):
            return not_yet(
                "the same model, changed", "another object", "change it in place, then: return model"
            )
        after = dict(model.named_modules())
        new = after.get(name)
        if not isinstance(new, QuantLinear):
            hint = "find the parent module, then setattr(parent, last part of the name, new)"
            return not_yet(f"a QuantLinear at {name!r}", type(new).__name__, hint)
        weight = new.weight
        if (weight.format, weight.group_size) != (format, expected_weight.group_size):
            got = f"{weight.format}, group {weight.group_size}"
            return not_yet(
                f"{format}, group {group} at {name!r}", got, "hand format and group_size to quantize"
            )
        if (old.bias is None) != (new.bias is None):
            missing = "no bias" if new.bias is None else "a bias"
            return not_yet(f"the bias of the old layer at {name!r}", missing, "QuantLinear(weight, bias)")
        touched = [n for n, m in before.items() if n != name and n and after.get(n) is not m]
        if touched:
            return not_yet(
                "every other module as it was", f"{touched[0]!r} is another object", "swap one layer only"
            )
        bias = 0 if old.bias is None else old.bias.detach()
        probe = torch.randn(3, old.in_features, generator=torch.Generator().manual_seed(2))
        if not torch.allclose(new(probe), probe @ expected_weight.dequantize().T + bias, atol=1e-4):
            return not_yet(
                "the rounded weight of the old layer", "another result", "quantize(old.weight.detach(), ...)"
            )
        if model(x).shape != (5, 8):
            return not_yet("a model that still runs", f"output {list(model(x).shape)}")
    return passed("swapped with and without bias, at the top and nested, and nothing else moved")


def _small_model() -> Any:
    """A nested module with three Linear layers; one has no bias, one has a K that fits no group."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(40, 64), nn.Linear(64, 40, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    torch.manual_seed(9)
    return nn.Sequential(nn.Identity(), Block(), nn.Linear(40, 8)).requires_grad_(False)


@exercise("09.4", title="The error budget", par=44.5, limit=46, unit="% of the damage left")
def error_budget(answer: Any) -> Verdict:
    """``error_budget(parts, budget)``: indices of the parts that get W4; scored by the damage left."""
    forbid_calls(answer, ("spend",))
    parts = default_parts()
    came = answer(parts, BUDGET_BYTES)
    got = _indices(came, len(parts))
    if got is None:
        return not_yet(
            f"a list of different indices, 0 to {len(parts) - 1}", _number(came), "return indices into parts"
        )
    spent = sum(parts[i].extra_bytes for i in got)
    if spent > BUDGET_BYTES:
        return not_yet(
            f"at most {BUDGET_BYTES:,} bytes", f"{spent:,} bytes", "stop before the budget is passed"
        )
    nothing = answer(parts, 0)
    if nothing is not None and items(nothing) != []:
        return not_yet("no part for a budget of 0", "some", "compare with the budget before you take a part")
    left = round(100 * remaining(parts, got), 1)
    if left > 46:
        hint = "three times the bytes must save three times the damage: sort by damage saved for each byte"
        return not_yet("at most 46 % of the damage left", f"{left:g} %", hint, score=left)
    return passed(f"{len(got)} of {len(parts)} parts in W4, {spent:,} bytes spent", score=left)


def _indices(came: Any, count: int) -> list[int] | None:
    """Different indices below ``count``, of any kind of integer in any kind of list; else None."""
    found = items(came)
    if found is None:
        return None
    got = [plain_int(item) for item in found]
    right = all(isinstance(i, int) and 0 <= i < count for i in got)
    return got if right and len(set(got)) == len(got) else None


def _close(got: Any, wanted: float) -> bool:
    if isinstance(got, bool):
        return False
    try:
        return math.isclose(float(got), wanted, rel_tol=1e-4)
    except (TypeError, ValueError, RuntimeError, InputError):
        return False


def _number(got: Any) -> str:
    if isinstance(got, int | float) and not isinstance(got, bool):
        return f"{got:,.0f}"
    text = repr(got)
    return text if len(text) <= 60 else text[:57] + "..."
