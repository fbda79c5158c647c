"""Bytes of the paged KV cache, by formula: the one place that says what a block takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.errors import require
from labkit.kernels.paged_layer import BLOCK_SIZES

if TYPE_CHECKING:
    import torch

    from labkit.models.config import ModelConfig

SCALE_BYTES = 4
"""A float32 scale for each token and head of INT8 keys, and one of INT8 values."""

WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1}
"""Bytes of a value, by dtype."""


def check_block_size(block_size: int, argument: str = "block_size") -> int:
    """Return ``block_size``, or raise :class:`InputError` when it is none of :data:`BLOCK_SIZES`."""
    whole = isinstance(block_size, int) and not isinstance(block_size, bool)
    require(
        whole and block_size in BLOCK_SIZES,
        argument,
        repr(block_size),
        "one of " + ", ".join(map(str, BLOCK_SIZES)),
    )
    return block_size


def layer_block_bytes(config: ModelConfig, block_size: int, kv_dtype: torch.dtype | str) -> int:
    """Bytes of one block in one layer: keys and values [Hkv, block_size, D], and INT8's scales.

    Args:
        config: gives KV heads and head width.
        block_size: token slots, 8, 16, 32 or 64.
        kv_dtype: of the storage: float16, bfloat16, float32 or int8, as a torch dtype or by name.

    Raises:
        InputError: another block size or dtype.
    """
    check_block_size(block_size)
    name = str(kv_dtype).removeprefix("torch.")
    require(name in WIDTH, "kv_dtype", name, "one of " + ", ".join(WIDTH))
    a_head = config.head_dim * WIDTH[name] + (SCALE_BYTES if name == "int8" else 0)
    return 2 * config.num_kv_heads * block_size * a_head


def block_bytes(config: ModelConfig, block_size: int, kv_dtype: torch.dtype | str) -> int:
    """Bytes of one block in all layers; arguments as for :func:`layer_block_bytes`."""
    return config.num_layers * layer_block_bytes(config, block_size, kv_dtype)
