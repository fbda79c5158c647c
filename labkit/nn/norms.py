"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, statistics in float32.

    Args:
        weight: [d]; converted to ``dtype``.
        eps: added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.eps = eps
        self.shape = tuple(weight.shape)
        self.weight = nn.Parameter(weight.to(dtype).contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], same dtype."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)
