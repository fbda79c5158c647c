"""Bytes that the weights of a model will take, from headers and formulas; nothing is loaded.

What is held is more than the checkpoint: kernels keep copies in a layout of their own. As the code is today:

==========  =====================================================================================
where       held
==========  =====================================================================================
CPU         the stored weight, and for each matrix a dense copy in the activation dtype (bfloat16: torch's
            int4 layout, where it has the group size). Optional: without room the weight is dequantised at
            every use.
GPU         the stored weight. Where the dispatch table gives the format to the tensor-core family, its
            tiles beside the packed codes; optional in the same way.
CUDA graph  the decode step repacks every matrix for itself, and wants the embedding dense; where memory is
            short it drops the packed codes as it goes, and leaves the embedding. Not optional.
==========  =====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from labkit.models.config import ModelConfig
from labkit.models.model import EMBEDDING, HEAD, layer_prefix, role
from labkit.models.recipe import DEFAULT_GROUP_SIZE, Recipe, is_matrix
from labkit.nn.dispatch import DispatchTable
from labkit.quant.sizes import GROUPED_FORMATS, PACKED_FORMATS, packed_bytes, resolve_group, round_up
from labkit.quant.tiles import TILE_COLUMNS, TILE_ROWS, record_bytes

FLOAT = "float"
_INT4_GROUPS = (32, 64, 128, 256)
_FUSED = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight as it will be held.

    Attributes:
        name: canonical name.
        shape: [N, K] for a matrix.
        format: "w4", "w3", "q8_0", "q4_0" or "float".
        group: codes of a scale; 0 for a float.
        offset: None, torch.float16 or torch.float32.
        order: it has a column order, int32 [K].
    """

    name: str
    shape: tuple[int, ...]
    format: str = FLOAT
    group: int = 0
    offset: torch.dtype | None = None
    order: bool = False

    @classmethod
    def of(cls, name: str, weight: Any) -> StoredWeight:
        """A weight that is there: a tensor, a QuantWeight or a GroupedWeight."""
        if isinstance(weight, torch.Tensor):
            return cls(name, tuple(weight.shape))
        offset = None if weight.offset is None else weight.offset.dtype
        order = weight.k_order is not None
        return cls(name, weight.shape, weight.format, weight.group_size, offset, order)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes held; a float weight is converted to the activations' ``dtype``."""
        if self.format == FLOAT:
            return self.dense_bytes(dtype)
        n, k = self.shape
        return packed_bytes(self.format, n, k, self.group, self.offset) + (4 * k if self.order else 0)

    def dense_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a float copy."""
        return math.prod(self.shape) * dtype.itemsize

    def under(self, form: str, recipe: Recipe) -> StoredWeight:
        """What :meth:`Recipe.apply` makes of it for the format ``form`` of a plan."""
        if form == "keep" or len(self.shape) != 2:
            return self
        if form == "none":
            return StoredWeight(self.name, self.shape)
        if form == "q8":
            return self if self.format == "q8_0" else StoredWeight(self.name, self.shape, "q8_0", 32)
        k = self.shape[1]
        wanted = None if recipe.group_size is None else resolve_group(form, k, recipe.group_size)
        if self.format == form and wanted in (None, self.group):
            return self
        offset = torch.float16 if recipe.offset else None
        group = resolve_group(form, k, DEFAULT_GROUP_SIZE) if wanted is None else wanted
        return StoredWeight(self.name, self.shape, form, group, offset)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a model's weights on one device.

    Attributes:
        parts: stored bytes by part: attention, MLP, embedding, head, norms and biases.
        copies: what kernels would keep beside them, if there is room.
        copies_name: which kernels, in words.
        step: further copies of a decode step in a CUDA graph; None where that step cannot run the model.
        why_no_step: the reason, when it is None.
        released: the same where the packed codes are dropped once they are repacked: what tiles take more.
        repeated: bytes of ``step`` that say the same as packed codes which are kept beside them.
        loading: host memory beside the stored weights, for a moment while the model is built.
        step_loading: device memory beside them, for a moment while the decode step makes its dense tables.
        released_loading: the same of ``released``: the head and a layer held twice.
    """

    parts: tuple[tuple[str, int], ...]
    copies: int = 0
    copies_name: str = ""
    step: int | None = None
    why_no_step: str = ""
    repeated: int = 0
    loading: int = 0
    step_loading: int = 0
    released: int | None = None
    released_loading: int = 0

    @property
    def stored(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size in self.parts)


def apply_recipe(weights: Iterable[StoredWeight], recipe: Recipe) -> tuple[StoredWeight, ...]:
    """The weights that a recipe makes of a source's.

    Raises:
        InputError: a pattern that names no weight, or a group size that a format does not have.
    """
    weights = tuple(weights)
    plan = recipe.plan(weight.name for weight in weights)
    if recipe.keep:
        # Nothing but what a rule names changes; a plan calls norms and biases "none", and they are floats.
        plan = {name: form if is_matrix(name) else "keep" for name, form in plan.items()}
    return tuple(weight.under(plan[weight.name], recipe) for weight in weights)


def weight_bytes(
    config: ModelConfig,
    weights: Sequence[StoredWeight],
    *,
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None = None,
    mapped: bool = False,
    source_bytes: int = 0,
) -> WeightBytes:
    """Sum up what ``weights`` will take.

    Args:
        config: the architecture.
        weights: all of the model's.
        device: "cpu" or "cuda".
        dtype: of the activations.
        capability: compute capability of the GPU.
        mapped: the stored weights are backed by a file, whose pages the system can take back.
        source_bytes: of the weights that these are made from, where both are held for a moment.
    """
    by_name = {weight.name: weight for weight in weights}
    matrices = joined(config, by_name)
    parts = dict.fromkeys(("attention", "MLP", "embedding", "head", "norms and biases"), 0)
    names = {"attn": "attention", "mlp": "MLP", "embed": "embedding", "head": "head"}
    for weight in (*(each for each, _ in matrices), *(w for w in weights if not _in_layers(w.name))):
        parts[names.get(role(weight.name), "norms and biases")] += weight.nbytes(dtype)
    found = tuple((name, size) for name, size in parts.items() if size)
    # The decoder is built while the matrices that it joins are still there one by one.
    fused = [
        each
        for each, _ in matrices
        if by_name[each.name].shape != each.shape and each.format != FLOAT and not mapped
    ]
    loading = max(source_bytes, sum(each.nbytes(dtype) for each in fused))
    if device == "cpu":
        copies = _cpu_copies(config, by_name, dtype)
        name = "dense copies" if dtype != torch.bfloat16 else "int4 and dense copies"
        return WeightBytes(found, copies, name, loading=loading)
    why = _why_no_step(config, by_name, dtype)
    step = None if why else _step_copies(config, by_name, dtype)
    tiles = _tile_copies(config, by_name, dtype, capability)
    repeated = sum(each.nbytes(dtype) for each, _ in matrices) if step is not None else 0
    making = _step_loading(config, by_name, dtype) if step is not None else 0
    name = "tiles of the tensor-core products"
    released, twice = (None, 0) if step is None else _released(config, by_name, dtype)
    return WeightBytes(found, tiles, name, step, why, repeated, loading, making, released, twice)


def joined(config: ModelConfig, weights: dict[str, StoredWeight]) -> list[tuple[StoredWeight, bool]]:
    """Layer matrices as the decoder multiplies them, and whether that is gate above up.

    Matrices of one input are one weight where their formats allow, as in labkit.models.decoder. Their column
    orders are taken to be the same, as quantisers make them: a header does not show it.
    """
    made: list[tuple[StoredWeight, bool]] = []
    for layer in range(config.num_layers):
        for block, names in _FUSED:
            group = [weights[f"{layer_prefix(layer)}{block}.{name}.weight"] for name in names]
            first = group[0]
            alike = all(replace(each, name=first.name, shape=first.shape) == first for each in group)
            if len(group) > 1 and alike:
                rows = sum(each.shape[0] for each in group)
                made.append((replace(first, shape=(rows, first.shape[1])), block == "mlp"))
            else:
                made += [(each, False) for each in group]
    return made


def _in_layers(name: str) -> bool:
    return role(name) in ("attn", "mlp")


def tile_bytes(weight: StoredWeight, *, paired: bool = False) -> int | None:
    """Bytes of the tensor-core tiles of a W4 or W3 weight; None where it has no tiles.

    The formula of :func:`labkit.quant.tiles.tile_bytes`, for a weight that is not there.
    """
    if weight.format not in PACKED_FORMATS:
        return None
    n, k = weight.shape
    kp = round_up(k, weight.group)
    whole = weight.group % TILE_COLUMNS == 0 or weight.group == kp
    if weight.group not in (32, 64) and not whole:
        return None
    tile_group = weight.group if weight.group in (32, 64) else TILE_COLUMNS
    blocks = 2 if paired else 1
    row_tiles = -(-(n // blocks) // (TILE_ROWS // blocks))
    record = record_bytes(weight.format, tile_group, weight.offset)
    return row_tiles * -(-kp // TILE_COLUMNS) * record + (4 * k if weight.order else 0)


def _cpu_copies(config: ModelConfig, weights: dict[str, StoredWeight], dtype: torch.dtype) -> int:
    multiplied = [each for each, _ in joined(config, weights)]
    multiplied.append(weights[EMBEDDING if config.tie_word_embeddings else HEAD])
    total = 0
    for weight in multiplied:
        if weight.format == FLOAT:
            continue
        n, k = weight.shape
        int4 = dtype == torch.bfloat16 and weight.format in PACKED_FORMATS and weight.group in _INT4_GROUPS
        if int4 and k % weight.group == 0 and n % 16 == 0:
            total += n * k // 2 + n * (k // weight.group) * 4
        else:
            total += weight.dense_bytes(dtype)
    return total


def _tile_copies(
    config: ModelConfig,
    weights: dict[str, StoredWeight],
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
) -> int:
    multiplied: list[tuple[StoredWeight, bool]] = joined(config, weights)
    multiplied.append((weights[EMBEDDING if config.tie_word_embeddings else HEAD], False))
    chosen: dict[str, bool] = {}
    total = 0
    for weight, _ in multiplied:
        if weight.format not in PACKED_FORMATS:
            continue
        if weight.format not in chosen:
            chosen[weight.format] = _is_tensor_core(weight.format, dtype, capability)
        if chosen[weight.format]:
            total += tile_bytes(weight) or 0
    return total


def _is_tensor_core(format: str, dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    """Whether the dispatch table gives a format to the tensor-core family; the oldest GPU by default."""
    chosen = DispatchTable.load().select(
        "cuda", capability or (8, 0), format, dtype, 1, why_not=lambda name: ""
    )
    return chosen.kernel == "tensor_core"


def _why_no_step(config: ModelConfig, weights: dict[str, StoredWeight], dtype: torch.dtype) -> str:
    if dtype not in (torch.float16, torch.bfloat16):
        return f"activations of {str(dtype).removeprefix('torch.')}"
    if config.mlp_bias:
        return "gate and up with a bias"
    matrices = joined(config, weights)
    if len(matrices) != 4 * config.num_layers:
        return "matrices of one input in different formats"
    for weight, paired in matrices:
        if tile_bytes(weight, paired=paired) is None:
            form = (
                "float weights" if weight.format == FLOAT else f"{weight.format} in groups of {weight.group}"
            )
            return f"{form}, such as {weight.name}"
    return ""


def _step_copies(config: ModelConfig, weights: dict[str, StoredWeight], dtype: torch.dtype) -> int:
    """See labkit.models.decode_step.step_weights."""
    total = sum(tile_bytes(weight, paired=paired) or 0 for weight, paired in joined(config, weights))
    embedding = weights[EMBEDDING]
    if embedding.format != FLOAT:
        total += embedding.dense_bytes(dtype)
    if config.tie_word_embeddings and embedding.format in GROUPED_FORMATS:
        return total  # the head multiplies by the dense table
    head = embedding if config.tie_word_embeddings else weights[HEAD]
    if head.format in PACKED_FORMATS:
        total += tile_bytes(head) or 0
    elif head.format != FLOAT:
        total += head.dense_bytes(dtype)
    return total


def _released(config: ModelConfig, weights: dict[str, StoredWeight], dtype: torch.dtype) -> tuple[int, int]:
    """What tiles take more than the packed codes that go, and what is there for a moment beside both.

    See labkit.models.step_weights.step_weights with ``release``: the head first, then layer by layer.
    """
    matrices = joined(config, weights)
    a_layer = sum(tile_bytes(weight, paired=paired) or 0 for weight, paired in matrices[:4])
    more = sum((tile_bytes(weight, paired=paired) or 0) - weight.nbytes(dtype) for weight, paired in matrices)
    tied = config.tie_word_embeddings
    head = weights[EMBEDDING if tied else HEAD]
    if head.format == FLOAT:
        return more, a_layer
    packed = head.format in PACKED_FORMATS
    made = (tile_bytes(head) or 0) if packed else head.dense_bytes(dtype)
    kept = tied and packed  # the embedding is looked up in the packed codes
    moment = made if packed else _table_peak(head, dtype)
    return more + made - (0 if kept else head.nbytes(dtype)), max(moment, a_layer + made)


def _table_peak(weight: StoredWeight, dtype: torch.dtype) -> int:
    """A dense table and a band of it, in float32 and then rounded."""
    from labkit.models.decode_step import BAND_BYTES

    dense, exact = weight.dense_bytes(dtype), weight.dense_bytes(torch.float32)
    band = min(exact, BAND_BYTES)
    return dense + band + band * dense // exact


def _step_loading(config: ModelConfig, weights: dict[str, StoredWeight], dtype: torch.dtype) -> int:
    """A table is made in bands, float32 and then rounded; the embedding's stays while the head's is made."""
    total = peak = 0
    for name in (EMBEDDING,) if config.tie_word_embeddings else (EMBEDDING, HEAD):
        weight = weights[name]
        if weight.format == FLOAT or (name == HEAD and weight.format in PACKED_FORMATS):
            continue
        peak = max(peak, total + _table_peak(weight, dtype))
        total += weight.dense_bytes(dtype)
    return peak


def as_json(weights: WeightBytes) -> dict[str, Any]:
    """A record for ``--json``."""
    return {
        "parts": dict(weights.parts),
        "stored": weights.stored,
        "copies": weights.copies,
        "copies_name": weights.copies_name,
        "decode_step_copies": weights.step,
        "why_no_decode_step": weights.why_no_step,
        "repeated": weights.repeated,
        "loading": weights.loading,
        "decode_step_loading": weights.step_loading,
        "decode_step_released": weights.released,
        "decode_step_released_loading": weights.released_loading,
    }
