"""The paged KV of a batch that neither grows nor shrinks: rows of one length, blocks handed out at once."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.cache.blocks import BlockAllocator, whole
from labkit.cache.paged import PagedKV
from labkit.cache.views import KVView, ViewBuilder
from labkit.errors import InputError, require
from labkit.models.config import ModelConfig
from labkit.nn.attention import query_tile


class StaticCache:
    """Keys and values of the positions already computed; every row of the batch has the same length.

    Args:
        config: gives layers, KV heads and head width.
        capacity: positions that fit a row.
        batch: rows.
        device: of the storage.
        dtype: of the decoder's activations.
        block_size: token slots a block.
        kv_dtype: of the storage, see :class:`PagedKV`; None for ``dtype``.
        head_major: storage for torch's attention; None for what the device's decoder reads best.

    Attributes:
        kv: the storage.
        length: positions held, 0 at first.
        block_tables: int32 [B, NB] on the device, every block of every row.

    Raises:
        InputError: capacity or batch below 1, or a size or dtype that the storage does not have.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        *,
        batch: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        head_major: bool | None = None,
    ) -> None:
        whole("capacity", capacity, 1)
        whole("batch", batch, 1)
        device = torch.device(device)
        self.capacity, self.batch, self.length = capacity, batch, 0
        self._builder = ViewBuilder(device, block_size, query_tile(config.group))
        blocks = -(-capacity // block_size)
        self.kv = PagedKV(
            config,
            num_blocks=batch * blocks,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            head_major=device.type == "cpu" if head_major is None else head_major,
        )
        # A fresh pool gives consecutive blocks, which torch's attention reads without a copy.
        allocator = BlockAllocator(batch * blocks, block_size)
        self._tables = [allocator.allocate(capacity) for _ in range(batch)]
        tables = [table.blocks for table in self._tables]
        self.block_tables: Tensor = torch.tensor(tables, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.kv.nbytes

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

    def view(self, tokens: int) -> KVView:
        """The view of a step of [batch, tokens] behind the positions held."""
        self.check_append(self.batch, tokens)
        return self._builder.build(self._tables, [tokens] * self.batch, starts=[self.length] * self.batch)

    def advance(self, tokens: int) -> None:
        """Count the positions that every layer has appended."""
        require(
            tokens >= 0 and self.can_append(tokens), "tokens", tokens, f"0 to {self.capacity - self.length}"
        )
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on."""
        require(0 <= length <= self.length, "length", length, f"0 to {self.length}")
        self.length = length
