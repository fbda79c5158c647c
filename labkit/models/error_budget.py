"""Spend a few bytes where they help most: which parts of a W3 model get a fourth bit.

``data/sensitivity_smollm2.json`` holds what each part of the default model costs alone in W3.
Costs of parts are added up; chapter 09 measures how far that holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.errors import require
from labkit.paths import data_dir


@dataclass(frozen=True)
class Part:
    """The attention or the MLP matrices of one layer.

    Attributes:
        pattern: matches its matrices; a key for ``per_layer``, such as ``"model.layers.3.mlp.*_proj"``.
        layer, role: where it is; role is "attn" or "mlp".
        cost: damage when it is W3 and all else is as stored (KL divergence, nats a token).
        extra_bytes: bytes that W4 in place of W3 costs.
    """

    pattern: str
    layer: int
    role: str
    cost: float
    extra_bytes: int


def default_parts() -> list[Part]:
    """The 60 parts of SmolLM2-135M in layer order, costs as measured (conditions are in the file)."""
    # Late, so that the model code and torch load only when a chapter asks.
    from labkit import quoted

    content = json.loads((data_dir() / "sensitivity_smollm2.json").read_text(encoding="utf-8"))
    shape = quoted.model("smollm2-135m")
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = {
        "attn": shape.hidden_size * 2 * (q + kv),
        "mlp": shape.hidden_size * 3 * shape.intermediate_size,
    }
    blocks = {"attn": ("self_attn", content["attention"]), "mlp": ("mlp", content["mlp"])}
    return [
        Part(f"model.layers.{layer}.{block}.*_proj", layer, role, costs[layer], weights[role] // 8)
        for layer in range(shape.num_layers)
        for role, (block, costs) in blocks.items()
    ]


def spend(parts: Sequence[Part], budget_bytes: float) -> list[int]:
    """Indices of the parts to store in W4: most cost saved a byte first, skipping what does not fit.

    Args:
        parts: candidates.
        budget_bytes: extra bytes allowed in all, >= 0.

    Returns:
        Indices into ``parts`` in ascending order.

    Raises:
        InputError: a negative budget, or a part without a size.
    """
    require(budget_bytes >= 0 and not math.isnan(budget_bytes), "budget_bytes", budget_bytes, "at least 0")
    for i, part in enumerate(parts):
        require(part.extra_bytes > 0, f"parts[{i}].extra_bytes", part.extra_bytes, "more than 0")
    order = sorted(range(len(parts)), key=lambda i: (-parts[i].cost / parts[i].extra_bytes, i))
    chosen, left = [], budget_bytes
    for i in order:
        if parts[i].extra_bytes <= left:
            chosen.append(i)
            left -= parts[i].extra_bytes
    return sorted(chosen)


def remaining(parts: Sequence[Part], chosen: Iterable[int]) -> float:
    """Share of the summed cost that stays, 0 to 1, when ``chosen`` are W4 and count as free."""
    saved = sum(parts[i].cost for i in set(chosen))
    return 1 - saved / sum(part.cost for part in parts)
