"""Angles of the rotary embedding as the kernels read them: float32 tables of cos and sin on a device.

T new tokens of all rows, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.models.config import ModelConfig
from labkit.nn.rope import inverse_frequencies


class Angles:
    """cos and sin as the kernels read them: float32 [positions, D/2] on the device, grown on demand."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self._cos = self._sin = torch.empty(0, config.head_dim // 2, device=device)

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """At least ``positions`` rows; a dynamic scaling must not stretch the base, see :func:`stretches`."""
        if positions > len(self._cos):
            rows = max(512, 1 << (positions - 1).bit_length())
            if _dynamic(self.config):
                rows = min(rows, self.config.max_position_embeddings)
            self._cos, self._sin = angles(self.config, rows, self.device)
        return self._cos, self._sin


def angles(
    config: ModelConfig, positions: int, device: torch.device, *, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, float32 [positions, D/2]; ``length`` as for inverse_frequencies."""
    frequencies, factor = inverse_frequencies(
        config.head_dim,
        config.rope_theta,
        config.rope_scaling,
        context=config.max_position_embeddings,
        length=length,
    )
    table = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return (table.cos() * factor).to(device), (table.sin() * factor).to(device)


def stretches(config: ModelConfig, length: int) -> bool:
    """Whether a sequence of ``length`` has angles of its own (dynamic scaling beyond the context)."""
    return _dynamic(config) and length > config.max_position_embeddings


def _dynamic(config: ModelConfig) -> bool:
    return (config.rope_scaling or {}).get("rope_type") == "dynamic"


def own_angles(
    config: ModelConfig, counts: Sequence[int], contexts: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of the new tokens of rows with angles of their own: float32 [T, D/2], row after row.

    Args:
        counts: new tokens of each row.
        contexts: tokens of each row with them.
    """
    rows = []
    for count, context in zip(counts, contexts, strict=True):
        tables = angles(config, context, device, length=context)
        rows.append([one[context - count :] for one in tables])
    cos, sin = (torch.cat(one) for one in zip(*rows, strict=True))
    return cos, sin
