"""What the kernels over paged keys and values serve, and the checks that their launches share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labkit.errors import require
from labkit.kernels.paged_layer import BLOCK_SIZES, PagedLayer
from labkit.kernels.rmsnorm import ACTIVATIONS
from labkit.quant.packing import describe

HEAD_DIMS = (64, 80, 96, 128)
MOST_GROUP = 16


def why_not(
    head_dim: int, group: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> str:
    """Why the kernels cannot serve a model, or an empty string.

    Args:
        head_dim, group, block_size: of the model and its cache.
        dtype: of the activations.
        kv_dtype: of the stored keys and values; ``dtype`` by default.
    """
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}; it has {', '.join(map(str, HEAD_DIMS))}"
    if not 1 <= group <= MOST_GROUP:
        return f"{group} query heads a key/value head; it has 1 to {MOST_GROUP}"
    if block_size not in BLOCK_SIZES:
        return f"block_size {block_size}; it has {', '.join(map(str, BLOCK_SIZES))}"
    if dtype not in ACTIVATIONS:
        return f"{dtype} activations; it has float16 and bfloat16"
    if kv_dtype not in (None, dtype, torch.int8):
        return f"{kv_dtype} keys and values beside {dtype} activations; it has {dtype} and int8"
    return ""


def group_of(qkv: Tensor, layer: PagedLayer) -> int:
    kv_heads, head_dim = layer.kv_heads, layer.head_dim
    good = isinstance(qkv, Tensor) and qkv.ndim == 2 and qkv.dtype in ACTIVATIONS
    group, rest = divmod(qkv.shape[1] - 2 * kv_heads * head_dim, kv_heads * head_dim) if good else (0, 1)
    expected = f"float16 or bfloat16 [T, (H + 2 x {kv_heads}) x {head_dim}]"
    require(good and rest == 0 and group > 0, "qkv", describe(qkv), expected)
    check_serves(layer, group, qkv.dtype, "qkv")
    return group


def check_serves(layer: PagedLayer, group: int, dtype: torch.dtype, name: str) -> None:
    reason = why_not(layer.head_dim, group, layer.block_size, dtype, layer.dtype)
    require(not reason, name, reason, "shapes and dtypes that the kernel has")
    plain = layer.keys.is_contiguous() and layer.values.is_contiguous()
    require(plain, "layer", "another memory order", "a block's heads side by side", "PagedKV.layer gives it")


Checked = tuple[str, Any, torch.dtype, tuple[int, ...]]


def angles(cos: Tensor, sin: Tensor, head_dim: int) -> tuple[Checked, Checked]:
    shape = (cos.shape[0], head_dim // 2)
    return ("cos", cos, torch.float32, shape), ("sin", sin, torch.float32, shape)


def norms(
    q_norm: Tensor | None, k_norm: Tensor | None, dtype: torch.dtype, head_dim: int
) -> tuple[Checked, ...]:
    require((q_norm is None) == (k_norm is None), "q_norm, k_norm", "one of them", "both or neither")
    if q_norm is None:
        return ()
    return ("q_norm", q_norm, dtype, (head_dim,)), ("k_norm", k_norm, dtype, (head_dim,))


def check(device: torch.device, *checked: Checked) -> None:
    for name, tensor, wanted, shape in checked:
        text = f"contiguous {str(wanted).removeprefix('torch.')} {list(shape)} on {device}"
        require(isinstance(tensor, Tensor), name, describe(tensor), text)
        right = tensor.dtype == wanted and tuple(tensor.shape) == shape and tensor.device == device
        require(right and tensor.is_contiguous(), name, f"{describe(tensor)} on {tensor.device}", text)
        if wanted not in (torch.int32, torch.int64):
            require(tensor.data_ptr() % 16 == 0, name, "an odd address", "alignment to 16 bytes", "clone it")
