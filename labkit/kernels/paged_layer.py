"""Keys and values of one layer in blocks: what the attention kernels read and write.

A block holds ``block_size`` tokens of every key/value head; slot = block * block_size + offset.
Hkv key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.errors import require
from labkit.quant.packing import describe

BLOCK_SIZES = (8, 16, 32, 64)
"""Tokens a block that storage and kernels have."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of keys and values that are not quantised; float32 is for torch alone."""

MOST_CODE = 127
"""INT8 codes are symmetric: scale = largest magnitude / 127."""


@dataclass(frozen=True)
class PagedLayer:
    """Keys and values of one layer.

    Attributes:
        keys, values: [num_blocks, Hkv, block_size, D], contiguous; float16, bfloat16, float32 (torch only)
            or int8; keys are after rope.
        key_scales, value_scales: float32 [num_blocks, Hkv, block_size] when int8: one scale a token and head.

    Raises:
        InputError: shapes, dtypes or devices that do not agree, by name.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        keys = self.keys
        good = isinstance(keys, Tensor) and keys.ndim == 4 and keys.dtype in (*FLOATS, torch.int8)
        expected = "[num_blocks, Hkv, block_size, D], float16, bfloat16, float32 or int8"
        require(good and keys.is_contiguous(), "keys", describe(keys), f"contiguous {expected}")
        sizes = ", ".join(map(str, BLOCK_SIZES))
        require(self.block_size in BLOCK_SIZES, "block_size", self.block_size, f"one of {sizes}")
        wanted = f"like the keys: {describe(keys)}, contiguous, on {keys.device}"
        require(_like(self.values, keys, keys.shape, keys.dtype), "values", describe(self.values), wanted)
        for name in ("key_scales", "value_scales"):
            scales = getattr(self, name)
            if not self.quantised:
                require(scales is None, name, describe(scales), f"None beside {keys.dtype} keys")
                continue
            text = f"contiguous float32 {list(keys.shape[:3])} on {keys.device}, beside int8 keys"
            fits = _like(scales, keys, keys.shape[:3], torch.float32)
            require(fits, name, "None" if scales is None else describe(scales), text)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.keys.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored keys and values."""
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.keys.device

    @property
    def quantised(self) -> bool:
        """INT8 with scales."""
        return self.keys.dtype == torch.int8

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        held = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(one.nbytes for one in held if one is not None)


def _like(tensor: object, keys: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.shape == shape
        and tensor.dtype == dtype
        and tensor.device == keys.device
        and tensor.is_contiguous()
    )


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 codes of heads: the rule that every writer of the cache follows.

    Args:
        x: [..., D], any float dtype.

    Returns:
        codes int8 [..., D], round-half-even(x / scale) clipped to ±127, and scales float32 [...],
        largest magnitude / 127; a head of zeros has scale 0 and codes 0.
    """
    wide = x.float()
    largest = wide.abs().amax(-1)
    # By a tensor: on a GPU torch divides by a number through its reciprocal, which rounds otherwise.
    scales = largest / torch.full_like(largest, MOST_CODE)
    ratio = torch.where(scales[..., None] > 0, wide / scales[..., None], 0.0)
    return ratio.round().clamp(-MOST_CODE, MOST_CODE).to(torch.int8), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., D] of codes int8 [..., D] and scales [...]."""
    return codes.float() * scales[..., None]
