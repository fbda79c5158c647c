"""Rotary position embedding, half-split layout, with the frequency scalings of this model family.

Sources of the formulas: RoPE (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); dynamic
NTK, Llama-3 and YaRN (arXiv 2309.00071) as the Hugging Face configuration fields define them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_FIRST_ROWS = 512


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    *,
    context: int = 2048,
    length: int | None = None,
) -> tuple[Tensor, float]:
    """Angle per position of every rotated pair.

    Args:
        head_dim: D, even.
        theta: base.
        scaling: as in :class:`labkit.models.config.ModelConfig`.
        context: trained context; "dynamic" stretches the base only past it.
        length: current sequence length, used by "dynamic" alone.

    Returns:
        float32 [D/2] in radians per position, and the factor that cos and sin are multiplied by
        (1.0 except for YaRN).
    """
    kind = scaling["rope_type"] if scaling else "default"
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if kind == "dynamic":
        assert scaling is not None
        factor, seen = scaling["factor"], max(length or 0, context)
        theta = theta * ((factor * seen / context) - (factor - 1)) ** (head_dim / (head_dim - 2))
    plain = 1.0 / theta**exponent
    if scaling is None or kind == "dynamic":
        return plain, 1.0
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "factors":
        return plain / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, head_dim, theta, scaling)


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Slow pairs are divided by the factor, fast ones kept, those between interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / factor


def _yarn(plain: Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Ramp from kept (fast pairs) to interpolated (slow pairs), and the attention temperature."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_with(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with(scaling.get("beta_fast") or 32)
    high = pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = plain * (1.0 - ramp) + plain / factor * ramp

    def temperature(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all:
            attention = temperature(factor, mscale) / temperature(factor, mscale_all)
        else:
            attention = temperature(factor)
    return frequencies, float(attention)


class Rotary:
    """Tables of cos and sin, grown on demand, so a long trained context costs nothing until used.

    Args:
        head_dim, theta, scaling, context: see :func:`inverse_frequencies`.
        device, dtype: of the tables; angles are always computed in float32.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None = None,
        *,
        context: int = 2048,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.head_dim, self.theta, self.scaling, self.context = head_dim, theta, scaling, context
        self.device, self.dtype = torch.device(device), dtype
        self._dynamic = bool(scaling) and scaling["rope_type"] == "dynamic"  # type: ignore[index]
        self._cos = self._sin = torch.empty(0, 1, head_dim, device=self.device, dtype=dtype)

    def tables(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows for positions start..stop-1: cos and sin, each [T, 1, D] (one row for all heads).

        The first half of sin carries the minus sign of the rotation, see :func:`rotate`.
        """
        if self._dynamic and stop > self.context:
            # The base depends on the length of the sequence, so nothing can be kept.
            return self._rows(start, stop, length=stop)
        if stop > len(self._cos):
            rows = max(_FIRST_ROWS, 1 << (stop - 1).bit_length())
            if self._dynamic:
                rows = min(rows, self.context)
            self._cos, self._sin = self._rows(0, rows)
        return self._cos[start:stop], self._sin[start:stop]

    def _rows(self, start: int, stop: int, length: int | None = None) -> tuple[Tensor, Tensor]:
        frequencies, attention = inverse_frequencies(
            self.head_dim, self.theta, self.scaling, context=self.context, length=length
        )
        angles = torch.arange(start, stop, dtype=torch.float32)[:, None] * frequencies  # [T, D/2]
        cos, sin = angles.cos() * attention, angles.sin() * attention
        return (
            torch.cat((cos, cos), -1)[:, None].to(self.device, self.dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self.device, self.dtype),
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of ``x`` [B, T, heads, D]; cos and sin [T, 1, D] from :meth:`Rotary.tables`.

    Half-split layout: element i of a head pairs with element i + D/2.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, sin)
