"""Right before timed: logits of a decode step against float32 torch on the same dequantised weights.

The largest error of all logits is the luck of a few hidden states: between two right contenders it differs
by a factor of two. So positions are compared by their root mean square, the middle one tightly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.bench.random_model import RandomModel

CHECKED_POSITIONS = 4
TOLERANCE = 2.0
"""Times the error of plain torch in the same dtype that the middle one of the positions may have."""
WORST_TOLERANCE = 8.0
"""The same for the worst position: its hidden state may be an ill-conditioned one."""


@dataclass(frozen=True)
class Errors:
    """How far logits [B, T, V] are off.

    Attributes:
        largest: of all logits, absolute.
        middle, worst: root mean square over a position's logits, of the middle and the worst position.
    """

    largest: float
    middle: float
    worst: float

    @classmethod
    def of(cls, logits: Tensor, exact: Tensor) -> Errors:
        """Against ``exact`` of the same shape."""
        difference = logits.float() - exact
        positions = difference.square().mean(-1).sqrt().flatten()
        largest, middle, worst = difference.abs().max(), positions.median(), positions.max()
        return cls(float(largest), float(middle), float(worst))

    def within(self, plain: Errors, factor: float = 1.0) -> bool:
        """Whether a contender with these may be timed; ``factor`` times more is allowed."""
        middle = self.middle <= factor * TOLERANCE * plain.middle
        return middle and self.worst <= factor * WORST_TOLERANCE * plain.worst


@dataclass(frozen=True)
class Wanted:
    """Tokens, and the logits that they must lead to.

    Attributes:
        tokens: int64 [B, T], fed one after the other.
        exact: float32 [B, T, V], the dequantised weights in float32 torch.
        plain: errors of torch in the activations' dtype on them.
    """

    tokens: Tensor
    exact: Tensor
    plain: Errors

    @classmethod
    def of(cls, model: RandomModel, batch: int) -> Wanted:
        """For one batch of a model."""
        source = torch.Generator().manual_seed(batch)
        shape = (batch, CHECKED_POSITIONS)
        tokens = torch.randint(0, model.config.vocab_size, shape, generator=source).to(model.device)
        exact = model.logits(tokens, torch.float32)
        return cls(tokens, exact, Errors.of(model.logits(tokens, model.dtype), exact))

    def errors(self, forward: Callable[[Tensor], Tensor]) -> Errors:
        """The same of ``forward`` [B] -> logits [B, V], which is fed the tokens from an empty cache on."""
        found = [forward(self.tokens[:, t]).float() for t in range(self.tokens.shape[1])]
        return Errors.of(torch.stack(found, 1), self.exact)
