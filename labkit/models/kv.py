"""A dense key/value cache: one preallocated buffer for all layers, filled from the left."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.errors import InputError, require
from labkit.models.config import ModelConfig


class KVCache:
    """Keys and values of the positions already computed; every row of the batch has the same length.

    Args:
        config: gives layers, KV heads and head width.
        capacity: positions that fit.
        batch: rows.
        device, dtype: of the buffers; the dtype of the decoder's activations.

    Attributes:
        length: positions held, 0 at first.

    Raises:
        InputError: capacity or batch below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        *,
        batch: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        for name, value in (("capacity", capacity), ("batch", batch)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value >= 1, name, repr(value), "a whole number of at least 1")
        shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)  # [L, B, Hkv, S, D]
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.capacity, self.batch, self.length = capacity, batch, 0

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.keys.nbytes + self.values.nbytes

    def can_append(self, tokens: int) -> bool:
        """Whether ``tokens`` more positions fit."""
        return self.length + tokens <= self.capacity

    def check_append(self, batch: int, tokens: int) -> None:
        """Raise InputError unless a step of [batch, tokens] fits."""
        require(batch == self.batch, "tokens", f"a batch of {batch}", f"the cache's batch of {self.batch}")
        if not self.can_append(tokens):
            raise InputError(
                "tokens",
                f"{tokens} more after {self.length} positions",
                f"at most {self.capacity - self.length} (KV cache capacity {self.capacity})",
                "use a larger capacity or a shorter prompt",
            )

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, Hkv, T, D] behind the held positions of one layer; return all of them as views
        [B, Hkv, length + T, D]. The length moves only in :meth:`advance`, after the last layer."""
        stop = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : stop] = keys
        self.values[layer, :, :, self.length : stop] = values
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]

    def advance(self, tokens: int) -> None:
        """Count the positions that every layer has appended."""
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on."""
        require(0 <= length <= self.length, "length", length, f"0 to {self.length}")
        self.length = length
