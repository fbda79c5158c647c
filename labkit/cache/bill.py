"""The lines of a memory bill: what a model needs to run, by formula, and what each line assumes.

L layers, d hidden size, F inner size, H query heads, Hkv key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.cache.memory_text import show_bytes
from labkit.cache.sizes import WIDTH, block_bytes, check_block_size
from labkit.errors import require

if TYPE_CHECKING:
    from labkit.cache.weights import WeightBytes
    from labkit.models.config import ModelConfig

DTYPES = ("float16", "bfloat16", "float32")
DEVICES = ("cpu", "cuda")

GPU_RUNTIME_BYTES = 400 << 20
"""CUDA context, loaded kernels, and what a desktop shows on the same card: assumed, not measured."""

CPU_RUNTIME_BYTES = 320 << 20
"""Interpreter, torch, tokenizer. Measured: 311 MiB resident on Linux, torch 2.13, SmolLM2's tokenizer."""

ROUNDING_SHARE = 1 / 32
"""Of what torch allocates on a GPU: its allocator hands out 2 MiB pieces and keeps them. Assumed."""

ROUNDING_BYTES = 20 << 20
"""Beside that: one segment of its middle size class (torch: c10/cuda/CUDACachingAllocator)."""

CUBLAS_BYTES = {False: 8_519_680, True: 32 << 20}
"""Workspace of cuBLAS for one stream, before and from compute capability 9.0 on (torch's own setting)."""

GRAPH_NODE_BYTES = 8 << 10
"""Device memory of one kernel node of a CUDA graph: assumed, not measured."""

LAUNCHES_A_LAYER = 7
GPU_STREAMS = 2
"""Prefill and decode may run at once, each with scratch of its own."""

_SPLIT_BYTES_A_ROW = (
    128 << 10
)  # partial sums of a product with few row tiles: at most 1,024 tiles of 32 floats
_SAMPLING_BYTES = 16  # a logit as float32, sorted, with an int64 index
_LEAST_HEAD_ROWS = 8  # labkit.models.decode_step.HEAD_ROWS
_ENGINE_HEAD_ROWS = 64  # labkit.models.step_model.HEAD_ROWS
_ENGINE_LOGITS = 3  # buffers of so many: of decode, and of a chunk on each lane


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the bill: bytes, and how they come about."""

    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class Case:
    """Everything that a bill depends on; checked once. Fields as for :func:`plan`."""

    config: ModelConfig
    weights: WeightBytes
    memory: int
    context: int
    batch: int
    chunk: int
    block_size: int
    dtype: str
    kv_dtype: str
    device: str
    graphs: bool
    capability: tuple[int, int] | None
    measured: bool
    release: bool = False

    def __post_init__(self) -> None:
        for name in ("context", "batch", "chunk", "memory"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value >= 1, name, repr(value), "a whole number of at least 1")
        check_block_size(self.block_size)
        require(self.device in DEVICES, "device", repr(self.device), "cpu or cuda")
        require(self.dtype in DTYPES, "dtype", repr(self.dtype), ", ".join(DTYPES))
        require(self.kv_dtype in WIDTH, "kv_dtype", repr(self.kv_dtype), ", ".join(WIDTH))

    @property
    def row_blocks(self) -> int:
        """Blocks of one row of the context."""
        return -(-self.context // self.block_size)

    @property
    def asked_blocks(self) -> int:
        """Blocks of all rows."""
        return self.batch * self.row_blocks

    @property
    def kv_bytes(self) -> int:
        """Bytes of :attr:`asked_blocks`."""
        return self.asked_blocks * block_bytes(self.config, self.block_size, self.kv_dtype)

    @property
    def fixed(self) -> list[Item]:
        """The lines that are no KV cache and that nothing can do without."""
        return fixed_items(self)

    @property
    def running(self) -> int:
        """Bytes of everything asked for, optional copies apart."""
        return sum(item.nbytes for item in self.fixed) + self.kv_bytes

    @property
    def needed(self) -> int:
        """The least memory that will do: to run, or to load the model if that takes more."""
        return max(self.running, self.loading)

    @property
    def loading(self) -> int:
        """Bytes while the model is built: there is no KV pool yet, but copies that go again."""
        moment = self.weights.loading
        if self.device == "cuda":
            of_step = self.weights.released_loading if self.release else self.weights.step_loading
            moment = of_step if self.graphs else 0
        runtime = CPU_RUNTIME_BYTES if self.device == "cpu" else GPU_RUNTIME_BYTES
        return self.weights.stored + moment + (0 if self.measured else runtime)


def fixed_items(case: Case) -> list[Item]:
    """Every line but the KV pool and the optional copies, the largest groups first."""
    config, width = case.config, WIDTH[case.dtype]
    gpu = case.device == "cuda"
    large = [part for part in case.weights.parts if part[1] >= case.weights.stored / 100]
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in large)
    items = [Item("weights", case.weights.stored, parts)]
    if case.graphs and case.release:
        more = case.weights.released or 0
        items.append(Item("tiles for packed codes", more, "what tiles take more than the codes they replace"))
    elif case.graphs:
        copies, how = case.weights.step or 0, "tiles beside the packed codes, dense embedding"
        items.append(Item("copies of the decode step", copies, how))
    tokens = case.chunk + case.batch
    items.append(
        Item(
            "activations",
            activation_bytes(config, tokens, width),
            f"a chunk of {case.chunk} tokens, {case.batch} to decode",
        )
    )
    rows = max(case.batch + 1, _LEAST_HEAD_ROWS)
    logits = rows * config.vocab_size * (width + _SAMPLING_BYTES)
    note = f"{rows} rows x {config.vocab_size}"
    if case.graphs:
        # A dense head is computed for so many rows at a time, whatever the batch: a row's bits depend on it.
        logits += _ENGINE_LOGITS * _ENGINE_HEAD_ROWS * config.vocab_size * width
        note += f", and {_ENGINE_LOGITS} buffers of {_ENGINE_HEAD_ROWS}"
    items.append(Item("logits and sampling", logits, note))
    items.append(
        Item("kernel scratch", _scratch_bytes(case), "temporaries of products, attention, rope tables")
    )
    if case.graphs:
        sizes = graph_sizes(case.batch)
        nodes = len(sizes) * (LAUNCHES_A_LAYER * config.num_layers + 4)
        buffers = case.batch * (_row_values(config) * width + 4 * case.context)
        items.append(
            Item(
                "CUDA graphs",
                nodes * GRAPH_NODE_BYTES + buffers,
                f"batch {', '.join(map(str, sizes))}: {nodes} kernels",
            )
        )
    if gpu:
        allocated = sum(item.nbytes for item in items) + case.kv_bytes
        reserve = int(allocated * ROUNDING_SHARE) + ROUNDING_BYTES
        items.append(
            Item("reserve: allocator", reserve, f"{ROUNDING_SHARE:.0%} of the above and the KV cache")
        )
        if not case.measured:
            items.append(
                Item("reserve: CUDA", GPU_RUNTIME_BYTES, "context, loaded kernels, display (assumed)")
            )
    elif not case.measured:
        items.append(Item("reserve: Python", CPU_RUNTIME_BYTES, "interpreter, torch, tokenizer (measured)"))
    return items


def activation_bytes(config: ModelConfig, tokens: int, width: int) -> int:
    """Most bytes of activations alive at once in a forward of ``tokens`` tokens, ``width`` bytes a value.

    The larger of the two halves of a layer, with the residual stream before and after it: gate, up, their
    product and the MLP's output, or q, k, v before and after the rotation and the attention's output.
    """
    d, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp = 3 * inner + 5 * d
    attention = 4 * d + (q + 2 * kv) + 3 * (q + kv) + 2 * q
    return tokens * max(mlp, attention) * width


def graph_sizes(batch: int) -> tuple[int, ...]:
    """Batch sizes that are captured: powers of two below ``batch``, and ``batch``."""
    sizes = [1 << i for i in range(batch.bit_length()) if 1 << i < batch]
    return (*sizes, batch)


def attention_scratch_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """Partial results of the decode attention, one set for all layers; see labkit.kernels.paged_plan."""
    from labkit.kernels.paged_plan import partial_bytes

    return partial_bytes(batch * config.num_kv_heads, config.group, config.head_dim, context)


def prefill_scratch_bytes(config: ModelConfig, chunk: int, batch: int, context: int) -> int:
    """The same of a chunk's attention, with the decoding rows beside it."""
    from labkit.kernels.paged_attention import MOST_GROUP, query_tile
    from labkit.kernels.paged_plan import MOST_TILE_BYTES, partial_bytes

    if config.group > MOST_GROUP:
        return 0  # torch attends
    queries = query_tile(config.group)
    units = (-(-chunk // queries) + batch) * config.num_kv_heads
    most = partial_bytes(units, config.group * queries, config.head_dim, context)
    return min(most, MOST_TILE_BYTES)


def _row_values(config: ModelConfig) -> int:
    """Values of the buffers of one row of a decode step."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return 4 * config.hidden_size + 2 * q + 2 * kv + config.intermediate_size + config.vocab_size


def _scratch_bytes(case: Case) -> int:
    from labkit.nn.linear import default_temp_bytes

    rope = 4 * case.config.head_dim * 4 * case.context  # cos and sin, of the decoder and of the decode step
    total = default_temp_bytes(case.device) + rope
    if case.device == "cuda":
        total += GPU_STREAMS * CUBLAS_BYTES[(case.capability or (8, 6)) >= (9, 0)]
        total += attention_scratch_bytes(case.config, case.batch, case.context)
        total += prefill_scratch_bytes(case.config, case.chunk, case.batch, case.context)
        total += case.batch * _SPLIT_BYTES_A_ROW
    return total
