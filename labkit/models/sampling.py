"""From logits to the next token: greedy, or sampled at a temperature from a seeded generator."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.errors import InputError, require


class Sampler:
    """Picks one token a call.

    Args:
        temperature: 0 takes the most likely token (the lowest id among equals); above 0 divides the
            logits before softmax.
        seed: of this sampler's own generator; None draws one from the operating system. Two samplers
            of one seed and one sequence of logits pick the same tokens.

    Raises:
        InputError: temperature negative or not finite; seed not a whole number.
    """

    def __init__(self, temperature: float = 0.0, seed: int | None = None) -> None:
        number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        require(
            number and math.isfinite(temperature) and temperature >= 0,
            "temperature",
            repr(temperature),
            "a finite number of at least 0",
        )
        whole = isinstance(seed, int) and not isinstance(seed, bool) and -(1 << 63) <= seed < 1 << 64
        require(seed is None or whole, "seed", repr(seed), "a whole number of at most 64 bits, or None")
        self.temperature = float(temperature)
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """Token id from logits [V].

        Raises:
            InputError: a logit is NaN, or all are -inf: the model's weights or activations overflowed.
        """
        top = logits.max()
        if not bool(torch.isfinite(top)):  # max() is NaN as soon as one logit is
            raise InputError("logits", "NaN or infinite values", "finite logits", "use dtype float32")
        if self.temperature == 0:
            return int(logits.argmax())
        # Subtracting first keeps a tiny temperature from overflowing; CPU, so that a seed means the
        # same tokens on every device.
        scaled = ((logits - top).to("cpu", torch.float64) / self.temperature).softmax(-1)
        return int(torch.multinomial(scaled, 1, generator=self._generator))
