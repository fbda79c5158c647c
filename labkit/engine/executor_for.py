"""An executor for a model that is loaded: planned in bytes before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from labkit.cache.paged import PagedKV
from labkit.cache.plan import plan
from labkit.cache.weights import StoredWeight, WeightBytes, weight_bytes
from labkit.engine.executor_torch import DEFAULT_BATCH, DEFAULT_CHUNK, TorchExecutor
from labkit.errors import InputError, require
from labkit.models.decode_step import why_not
from labkit.models.step_model import StepModel
from labkit.models.step_weights import Products, check_layer, step_weights
from labkit.nn.memory import free_memory

if TYPE_CHECKING:
    from labkit.models.model import Model

_DEFAULT_CONTEXT = 8192
_FIRST_TOKENS = 16_384  # of a pool on a CPU


def executor_for(
    model: Model,
    *,
    num_blocks: int | None = None,
    block_size: int = 16,
    kv_dtype: torch.dtype | None = None,
    max_context: int | None = None,
    max_batch: int = DEFAULT_BATCH,
    release: bool | None = None,
    **options: Any,
) -> TorchExecutor:
    """An executor with a pool of its own for a model on its own device.

    On a GPU it runs on the kernels where they have the model (W4 or W3 matrices, float16 or bfloat16), else
    on the torch decoder.

    Args:
        model: a labkit.models.model.Model, or its decoder.
        num_blocks: of the pool. By default ``max_batch`` sequences of ``max_context`` tokens, or what there
            is room for: nine tenths of what the plan leaves, without kernels half of the free memory; on
            a CPU it begins small and grows.
        block_size, kv_dtype: of the pool, see PagedKV.
        max_context: most tokens of a sequence; by default what the model has, but no more than 8,192.
        max_batch: most rows of a batch.
        release: on a GPU, drop the decoder's packed weights once they are repacked; it is of no use then.
            By default where both do not fit.
        options: of :class:`TorchExecutor`.

    Raises:
        InputError: a value out of range, or no memory for one sequence, by labkit.cache.plan: found before
            anything is allocated.
    """
    decoder: Any = getattr(model, "decoder", model)
    config, device = decoder.config, decoder.device
    most = config.max_position_embeddings
    max_context = min(most, _DEFAULT_CONTEXT) if max_context is None else max_context
    require(1 <= max_context <= most, "max_context", max_context, f"1 to {most}")
    source: Any = decoder
    kernels = device.type == "cuda" and not options.get("invariant")
    kernels = kernels and not _why_no_kernels(decoder, max_context, block_size, kv_dtype)
    size = _size(decoder)
    kernels = kernels and size.step is not None  # group sizes that have no tiles
    bill = plan(
        config,
        size,
        free_memory(device),
        context=max_context,
        chunk=options.get("chunk", DEFAULT_CHUNK),
        block_size=block_size,
        dtype=decoder.dtype,
        kv_dtype=kv_dtype,
        device=device.type,
        graphs=kernels,
        capability=_capability(device),
        measured=True,
    )
    bill.require_fits()
    if kernels:
        products = Products.tensor_core(dense_from=None)
        release = bill.case.release if release is None else release
        weights = step_weights(decoder, products=products, release=release)
        source = StepModel(config, weights, max_context=max_context, products=products)
    if num_blocks is None:
        num_blocks = -(-max_batch * max_context // block_size)
        room = int(0.9 * bill.kv_blocks.last)
        if not kernels:
            room = free_memory(device) // 2 // bill.kv_blocks.block_bytes
        num_blocks = min(num_blocks, max(room, bill.kv_blocks.first))
        if device.type == "cpu":  # on a GPU growth would cost all graphs
            options.setdefault("most_blocks", num_blocks)
            num_blocks = min(num_blocks, _FIRST_TOKENS // block_size)
    elif device.type == "cpu":  # where the system promises more than it has, and kills who takes it
        room, wanted = free_memory(device), num_blocks * bill.kv_blocks.block_bytes
        if wanted > room:
            _no_room(num_blocks, wanted, room)
    try:
        kv = PagedKV(
            config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=decoder.dtype,
            kv_dtype=kv_dtype,
            device=device,
            head_major=not kernels and device.type == "cpu",
        )
    except torch.OutOfMemoryError as error:
        wanted = num_blocks * PagedKV.block_bytes(config, block_size, kv_dtype or decoder.dtype)
        _no_room(num_blocks, wanted, free_memory(device), error)
    return TorchExecutor(source, kv=kv, max_batch=max_batch, max_context=max_context, **options)


def _no_room(num_blocks: int, wanted: int, free: int, cause: Exception | None = None) -> NoReturn:
    words = f"{num_blocks} ({free:,} bytes free, {wanted:,} wanted)"
    fix = "labkit plan says what a model needs, and what to change"
    raise InputError("num_blocks", words, "a pool that fits", fix) from cause


def _why_no_kernels(decoder: Any, max_context: int, block_size: int, kv_dtype: torch.dtype | None) -> str:
    config, dtype = decoder.config, decoder.dtype
    if reason := why_not(config, capacity=max_context, dtype=dtype, block_size=block_size, kv_dtype=kv_dtype):
        return reason
    try:
        for layer in decoder.layers:
            check_layer(layer)
    except InputError as error:
        return str(error)
    return ""


def _size(decoder: Any) -> WeightBytes:
    """What is to be made beside the weights, which are there already."""
    stored = [StoredWeight.of(name, weight) for name, weight in decoder.named_weights()]
    device = decoder.device
    found = weight_bytes(
        decoder.config, stored, device=device.type, dtype=decoder.dtype, capability=_capability(device)
    )
    return replace(found, parts=(), loading=0)


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
