"""Storage of the keys and values: blocks of every layer, written by slot and read by block table.

L layers, Hkv key/value heads, D head width, T new tokens, S tokens of a sequence;
slot = block * block_size + offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.cache import sizes
from labkit.cache.blocks import BlockCopy, whole
from labkit.errors import refuse, require
from labkit.kernels.paged_layer import FLOATS, PagedLayer, dequantise, quantise
from labkit.models.config import ModelConfig
from labkit.quant.packing import describe


@dataclass(frozen=True)
class HeadMajorLayer(PagedLayer):
    """A layer of the same shapes in which the blocks of one head follow each other in memory.

    A sequence in consecutive blocks is then one view [Hkv, S, D], which torch's attention reads without a
    copy. Kernels must never get one: they want a block's heads side by side.
    """

    def __post_init__(self) -> None:
        for name in ("keys", "values", "key_scales", "value_scales"):
            tensor = getattr(self, name)
            good = tensor is None or tensor.transpose(0, 1).is_contiguous()
            require(good, name, describe(tensor), "the blocks of a head side by side")


@dataclass(frozen=True)
class Growth:
    """What :meth:`PagedKV.grow` did.

    Attributes:
        old_blocks, new_blocks: size of the pool before and after.
        nbytes: bytes that were added.
    """

    old_blocks: int
    new_blocks: int
    nbytes: int

    def __str__(self) -> str:
        return f"KV pool: {self.old_blocks} to {self.new_blocks} blocks (+{self.nbytes / 1e6:,.1f} MB)"


@dataclass(frozen=True)
class Places:
    """Where the T tokens of a step go, worked out once for all layers.

    Attributes:
        first: the first slot, where they follow each other and the storage has that as a view; else -1.
        blocks, offsets: int64 [T], where ``first`` is -1.
    """

    first: int
    blocks: Tensor | None = None
    offsets: Tensor | None = None


class PagedKV:
    """Keys (after rope) and values of all layers in blocks; who holds which is not known here.

    Args:
        config: gives layers, KV heads and head width.
        num_blocks: blocks of the pool.
        block_size: token slots a block: 8, 16, 32 or 64.
        dtype: of the activations, and of what :meth:`gather` gives: float16, bfloat16 or float32.
        kv_dtype: of the storage: None for ``dtype``, another float, or torch.int8 with one float32 scale a
            token and head.
        device: where the storage is.
        head_major: store for torch's attention, see :class:`HeadMajorLayer`; no kernel reads it.

    Attributes:
        generation: counts up when addresses change: CUDA graphs that hold some must be captured anew.

    Raises:
        InputError: a size or dtype that does not exist.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        head_major: bool = False,
    ) -> None:
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        whole("num_blocks", num_blocks, 1)
        sizes.check_block_size(block_size)
        require(dtype in FLOATS, "dtype", dtype, "float16, bfloat16 or float32")
        stored = (*FLOATS, torch.int8)
        require(kv_dtype in stored, "kv_dtype", kv_dtype, "float16, bfloat16, float32 or int8")
        self.config, self.block_size, self.dtype, self.kv_dtype = config, block_size, dtype, kv_dtype
        self.device, self.head_major = torch.device(device), head_major
        self.num_blocks, self.generation = num_blocks, 0
        self._layers = [self._storage(num_blocks) for _ in range(config.num_layers)]
        self.device = self._layers[0].device  # "cuda" has become a device with a number
        self._flat = [self._flattened(layer) for layer in self._layers]

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, kv_dtype: torch.dtype) -> int:
        """Bytes of one block in all layers, keys, values and scales; ``kv_dtype`` is that of the storage."""
        return sizes.block_bytes(config, block_size, kv_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def layers(self) -> tuple[PagedLayer, ...]:
        """The storage of every layer for torch, in whatever memory order; new objects after :meth:`grow`."""
        return tuple(self._layers)

    def layer(self, index: int) -> PagedLayer:
        """One layer as kernels read it: keys and values [num_blocks, Hkv, block_size, D], contiguous.

        Raises:
            InputError: head-major storage.
        """
        if self.head_major:
            refuse("layer", "head-major storage", "a block's heads side by side", "PagedKV(head_major=False)")
        return self._layers[index]

    # --- writing ------------------------------------------------------------------------------------------

    def write(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store new tokens in one layer; INT8 is quantised by labkit.kernels.paged_layer.quantise.

        Args:
            keys, values: [T, Hkv, D], float.
            slots: int64 [T], each once, on the same device. On a CPU they are checked; elsewhere a slot
                outside the pool is the caller's error.

        Raises:
            InputError: a wrong shape, dtype or device, or a slot outside the pool.
        """
        shape = (slots.shape[0] if slots.ndim == 1 else -1, self.config.num_kv_heads, self.config.head_dim)
        good = slots.dtype == torch.int64 and slots.ndim == 1
        require(good, "slots", describe(slots), "int64 [T]")
        for name, one in (("keys", keys), ("values", values)):
            right = tuple(one.shape) == shape and one.is_floating_point()
            require(right, name, describe(one), f"float {list(shape)}")
        for name, one in (("keys", keys), ("values", values), ("slots", slots)):
            require(one.device == self.device, name, f"on {one.device}", f"on {self.device}")
        if slots.numel():
            self.put(index, keys, values, self.places(slots))

    def places(self, slots: Tensor) -> Places:
        """Prepare :meth:`put` for slots int64 [T], T at least 1, of one step."""
        if slots.device.type == "cpu":
            ids = slots.tolist()
            last = self.num_blocks * self.block_size - 1
            low, high = min(ids), max(ids)
            inside = low >= 0 and high <= last
            require(
                inside, "slots", f"{low} to {high}", f"0 to {last}, the slots of {self.num_blocks} blocks"
            )
            if self._flat[0] is not None and as_range(ids) is not ids:
                return Places(low)
        return Places(-1, slots // self.block_size, slots % self.block_size)

    def put(self, index: int, keys: Tensor, values: Tensor, places: Places) -> None:
        """:meth:`write` without its checks: what a step calls in every layer."""
        flat, first = self._flat[index], places.first
        if flat is not None and first >= 0:
            stop = first + keys.shape[0]
            flat[0][:, first:stop] = keys.transpose(0, 1)
            flat[1][:, first:stop] = values.transpose(0, 1)
            return
        layer = self._layers[index]
        self._store(layer.keys, layer.key_scales, keys, places)
        self._store(layer.values, layer.value_scales, values, places)

    def _store(self, stored: Tensor, scales: Tensor | None, new: Tensor, places: Places) -> None:
        if scales is None:
            stored[places.blocks, :, places.offsets] = new.to(stored.dtype)
        else:
            codes, new_scales = quantise(new)
            stored[places.blocks, :, places.offsets] = codes
            scales[places.blocks, :, places.offsets] = new_scales

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Execute copy-on-write, in the given order: before anything of the step is written."""
        for copy in copies:
            for block in (copy.source, copy.target):
                inside = 0 <= block < self.num_blocks
                require(inside, "copies", f"block {block}", f"0 to {self.num_blocks - 1}")
            for layer in self._layers:
                for tensor in _tensors(layer):
                    tensor[copy.target, :, : copy.tokens] = tensor[copy.source, :, : copy.tokens]

    # --- reading ------------------------------------------------------------------------------------------

    def gather(self, index: int, blocks: Sequence[int] | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence in order, in ``dtype``.

        Args:
            blocks: its block table, as numbers or as an integer tensor on the device; more than needed is
                ignored.
            length: tokens S.

        Returns:
            [Hkv, S, D] each; of consecutive blocks in head-major float storage a view, else a copy.

        Raises:
            InputError: a table too short, or, given as numbers, a block outside the pool.
        """
        flat = self._flat[index]
        some = flat is not None and 0 < length <= len(blocks) * self.block_size
        if some and isinstance(blocks, range) and blocks.step == 1:
            assert flat is not None
            first = blocks.start * self.block_size
            self._check_blocks(blocks.start, (first + length - 1) // self.block_size)
            k, v = flat[0][:, first : first + length], flat[1][:, first : first + length]
            return (k, v) if self.kv_dtype == self.dtype else (k.to(self.dtype), v.to(self.dtype))
        used = -(-length // self.block_size)
        require(
            length >= 0 and used <= len(blocks), "blocks", f"{len(blocks)}", f"{used} for {length} tokens"
        )
        blocks = blocks[:used]
        if not isinstance(blocks, Tensor):
            blocks = as_range(blocks)
            if blocks:
                self._check_blocks(min(blocks), max(blocks))
            if not isinstance(blocks, range):
                blocks = torch.tensor(blocks, device=self.device)
            elif flat is not None and length:
                return self.gather(index, blocks, length)
        layer = self._layers[index]
        found = []
        for stored, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales)):
            rows = _picked(stored, blocks)[:, :length]
            if scales is not None:
                rows = dequantise(rows, _picked(scales, blocks)[:, :length])
            found.append(rows.to(self.dtype))
        return found[0], found[1]

    def _check_blocks(self, low: int, high: int) -> None:
        if low < 0 or high >= self.num_blocks:
            refuse("blocks", f"{low} to {high}", f"0 to {self.num_blocks - 1}")

    # --- size ---------------------------------------------------------------------------------------------

    def grow(self, num_blocks: int) -> Growth:
        """Make the pool larger; every block keeps its id and its bits, every address changes.

        Layer by layer, so beside the new pool one layer's old storage is all that is held. Work that was
        launched before must have finished. If memory runs out the pool stays usable at its old size (some
        layers hold more), the error goes on, and a later call takes up where this one stopped.

        Args:
            num_blocks: of the whole pool, more than now.
        """
        whole("num_blocks", num_blocks, 1)
        require(num_blocks > self.num_blocks, "num_blocks", num_blocks, f"more than {self.num_blocks}")
        before, old_bytes = self.num_blocks, self.nbytes
        self.generation += 1  # at once: a growth that fails half-way has moved layers too
        for i, layer in enumerate(self._layers):
            if layer.num_blocks >= num_blocks:
                continue
            larger = self._storage(num_blocks)
            for old, new in zip(_tensors(layer), _tensors(larger), strict=True):
                new[: old.shape[0]] = old
            self._layers[i], self._flat[i] = larger, self._flattened(larger)
            del layer, old
        self.num_blocks = num_blocks
        return Growth(before, num_blocks, self.nbytes - old_bytes)

    def _storage(self, num_blocks: int) -> PagedLayer:
        config = self.config
        shape = (num_blocks, config.num_kv_heads, self.block_size)

        def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
            blocks, heads, *rest = shape
            if not self.head_major:
                return torch.empty(shape, dtype=dtype, device=self.device)
            return torch.empty(heads, blocks, *rest, dtype=dtype, device=self.device).transpose(0, 1)

        # A pool made while inference mode is on must stay writable after it.
        with torch.inference_mode(False):
            parts = [tensor(*shape, config.head_dim, dtype=self.kv_dtype) for _ in range(2)]
            if self.kv_dtype == torch.int8:
                parts += [tensor(*shape, dtype=torch.float32) for _ in range(2)]
        return (HeadMajorLayer if self.head_major else PagedLayer)(*parts)

    def _flattened(self, layer: PagedLayer) -> tuple[Tensor, Tensor] | None:
        """Keys and values [Hkv, slots, D] as views, where the storage allows."""
        if not self.head_major or layer.quantised:
            return None
        shape = (layer.kv_heads, layer.num_blocks * self.block_size, layer.head_dim)
        return layer.keys.transpose(0, 1).view(shape), layer.values.transpose(0, 1).view(shape)


def as_range(blocks: Sequence[int]) -> Sequence[int]:
    """``blocks`` as a range where they are consecutive, else as they are."""
    if not blocks:
        return range(0)
    first = blocks[0]
    follow = blocks[-1] - first == len(blocks) - 1
    run = range(first, first + len(blocks))
    if isinstance(blocks, range):
        return run if blocks == run else list(blocks)
    return run if follow and list(blocks) == list(run) else blocks


def _picked(stored: Tensor, blocks: range | Tensor) -> Tensor:
    """[num_blocks, Hkv, block_size, ...] to [Hkv, tokens of the blocks, ...]."""
    turned = stored.transpose(0, 1)
    if isinstance(blocks, range):
        turned = turned.narrow(1, blocks.start, len(blocks))
    else:
        turned = turned.index_select(1, blocks)
    return turned.reshape(turned.shape[0], -1, *turned.shape[3:])


def _tensors(layer: PagedLayer) -> list[Tensor]:
    held = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
    return [one for one in held if one is not None]
