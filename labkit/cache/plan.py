"""The memory bill before anything is allocated: what is needed, how many KV blocks are left, what to change.

Arithmetic only, no tensor is made. The engine calls :func:`plan` and :meth:`MemoryPlan.require_fits` before
it allocates; ``labkit plan`` prints the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from labkit.cache import advice
from labkit.cache.bill import Case, Item
from labkit.cache.memory_text import show_bytes
from labkit.cache.sizes import block_bytes, layer_block_bytes
from labkit.errors import InputError, require

if TYPE_CHECKING:
    from labkit.cache.weights import WeightBytes
    from labkit.models.config import ModelConfig

DEFAULT_CHUNK = 512
DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks of the KV pool.

    Attributes:
        first: enough for the rows and the context asked for; what to allocate at the start.
        last: most blocks that the pool may grow to; below ``first`` when what is asked for does not fit
            to run (a plan may also not fit because loading the model takes more).
        block_bytes: of one block, all layers.
    """

    first: int
    last: int
    block_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """What :func:`plan` found.

    Attributes:
        case: what was asked.
        items: the lines of the bill but for the KV pool.
        copy_bytes: what kernels may keep beside the weights (a line of ``items`` as well): the limit for
            labkit.nn.memory.set_default_budget. Less than ``case.weights.copies`` where there is no room.
        kv_blocks: the pool.
        grow_bytes: kept free for growing the pool layer by layer: the old tensors of one layer.
        changes: single changes, each computed: those that make it fit, the mildest first, then the others.
        together: the least that makes it fit where no single change does; empty otherwise.
        notes: what the reader should know, a sentence each.
    """

    case: Case
    items: tuple[Item, ...]
    copy_bytes: int
    kv_blocks: PoolSize
    grow_bytes: int
    changes: tuple[advice.Change, ...] = ()
    together: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the rows and the context asked for have room."""
        return self.case.needed <= self.case.memory

    @property
    def needed(self) -> int:
        """Bytes of everything asked for, optional copies apart: the least ``memory`` that fits."""
        return self.case.needed

    @property
    def fixed_bytes(self) -> int:
        """Bytes of everything but the pool."""
        return sum(item.nbytes for item in self.items)

    @property
    def total(self) -> int:
        """Bytes with the pool at its first size."""
        return self.fixed_bytes + self.kv_blocks.first * self.kv_blocks.block_bytes

    @property
    def tokens(self) -> int:
        """Tokens that the pool can hold at its last size."""
        return self.kv_blocks.last * self.case.block_size

    @property
    def rows(self) -> int:
        """Rows of the asked context that the pool can hold at its last size."""
        return self.kv_blocks.last // self.case.row_blocks

    @property
    def longest(self) -> int:
        """Longest context of a single row: the pool's last size, or what the model was trained for."""
        return min(self.tokens, self.case.config.max_position_embeddings)

    def require_fits(self) -> None:
        """Do nothing where it fits.

        Raises:
            InputError: names what is needed, what is there, and the smallest change that would do.
        """
        if self.fits:
            return
        case = self.case
        best = next((change.option for change in self.changes if change.fits), " ".join(self.together))
        raise InputError(
            "memory",
            f"{show_bytes(case.memory)} for {case.batch} x {case.context} tokens",
            f"at least {show_bytes(self.needed)}",
            best or "a smaller model",
        )

    def to_dict(self) -> dict[str, Any]:
        """A record for programs; sizes in bytes."""
        case = self.case
        return {
            "memory": case.memory,
            "fits": self.fits,
            "needed": self.needed,
            "total": self.total,
            "items": [{"name": i.name, "bytes": i.nbytes, "note": i.note} for i in self.items],
            "kv": {
                "block_bytes": self.kv_blocks.block_bytes,
                "block_size": case.block_size,
                "bytes_a_token": self.kv_blocks.block_bytes // case.block_size,
                "first_blocks": self.kv_blocks.first,
                "last_blocks": self.kv_blocks.last,
                "grow_bytes": self.grow_bytes,
                "tokens": self.tokens,
                "rows": self.rows,
                "longest": self.longest,
                "dtype": case.kv_dtype,
            },
            "copy_bytes": self.copy_bytes,
            "context": case.context,
            "batch": case.batch,
            "chunk": case.chunk,
            "device": case.device,
            "dtype": case.dtype,
            "graphs": case.graphs,
            "changes": [
                {"option": c.option, "saves": c.saves, "needed": c.needed, "fits": c.fits}
                for c in self.changes
            ],
            "together": list(self.together),
            "notes": list(self.notes),
        }


def plan(
    config: ModelConfig,
    weight_bytes: WeightBytes | int,
    memory: int,
    *,
    context: int | None = None,
    batch: int = 1,
    chunk: int = DEFAULT_CHUNK,
    block_size: int = 16,
    dtype: Any = "float16",
    kv_dtype: Any = None,
    device: str = "cuda",
    graphs: bool | None = None,
    capability: tuple[int, int] | None = None,
    measured: bool = False,
    others: Mapping[str, WeightBytes] | Sequence[tuple[str, WeightBytes]] = (),
) -> MemoryPlan:
    """Make the bill.

    Args:
        config: the architecture.
        weight_bytes: :func:`labkit.cache.weights.weight_bytes`, or plainly the bytes of all weights.
        memory: bytes that all of it may take.
        context: tokens of a row, prompt and answer together; default 2,048, or the model's own if less.
        batch: rows that decode at once.
        chunk: tokens of a prefill chunk.
        block_size: token slots of a KV block: 8, 16, 32 or 64.
        dtype: of the activations: float16, bfloat16 or float32, as a torch dtype or by name.
        kv_dtype: of the cache: that of the activations (the default), another float or int8.
        device: "cpu" or "cuda".
        graphs: decode by CUDA graphs, which need the weights as tiles: beside the packed codes if there is
            room, else instead of them; None: where that fits.
        capability: compute capability of the GPU, where it is known.
        measured: ``memory`` is free memory seen from the process that will run, so that neither the
            interpreter nor a CUDA context has to be paid from it.
        others: option -> weight bytes of the same model stored otherwise, to suggest from.

    Raises:
        InputError: a value that is out of range, by name. A plan that does not fit is no error:
            see :meth:`MemoryPlan.require_fits`.
    """
    from labkit.cache.weights import WeightBytes

    if not isinstance(weight_bytes, WeightBytes):
        whole = isinstance(weight_bytes, int) and not isinstance(weight_bytes, bool) and weight_bytes >= 0
        require(whole, "weight_bytes", repr(weight_bytes), "bytes >= 0, or WeightBytes")
        weight_bytes = WeightBytes((("weights", weight_bytes),), step=0)
    if context is None:
        context = min(DEFAULT_CONTEXT, config.max_position_embeddings)
    name = str(dtype).removeprefix("torch.")
    kv_name = name if kv_dtype is None else str(kv_dtype).removeprefix("torch.")
    case = Case(
        config, weight_bytes, memory, context, batch, chunk, block_size, name, kv_name, device,
        False, capability, measured,
    )  # fmt: skip
    require(
        context <= config.max_position_embeddings,
        "context",
        context,
        f"at most the {config.max_position_embeddings} tokens that the model was trained for",
    )
    why = why_no_graphs(case)
    require(not (graphs and why), "graphs", why, "what the decode step has kernels for", "leave graphs out")
    case = replace(case, graphs=not why if graphs is None else graphs)
    notes = []
    if graphs is None and why and device == "cuda":
        notes.append(f"without CUDA graphs, which decode fastest: {why}")
    if case.graphs and case.needed > memory and weight_bytes.released is not None:
        case = replace(case, release=True)
    if graphs is None and case.graphs and case.needed > memory:
        without = replace(case, graphs=False, release=False)
        notes.append(
            "without CUDA graphs, which decode fastest: they would take "
            f"{show_bytes(case.needed - without.needed)} more"
        )
        case = without
    elif case.release:
        notes.append(
            "packed weights are dropped once they are tiles: there is no room for both, and the model then "
            "runs in the engine only"
        )
    elif case.graphs and weight_bytes.repeated:
        notes.append(
            f"{show_bytes(weight_bytes.repeated)} of the weights are held twice, packed and as tiles of the "
            "decode step"
        )
    options = tuple(others.items()) if isinstance(others, Mapping) else tuple(others)
    return _solve(case, options, notes)


def why_no_graphs(case: Case) -> str:
    """Why a model cannot be decoded by CUDA graphs, or an empty string."""
    if case.device != "cuda":
        return "a CPU"
    if case.weights.step is None:
        return case.weights.why_no_step
    import torch

    from labkit.kernels.paged_attention import why_not

    dtype, kv_dtype = getattr(torch, case.dtype), getattr(torch, case.kv_dtype)
    return why_not(case.config.head_dim, case.config.group, case.block_size, dtype, kv_dtype)


def _solve(case: Case, others: Sequence[tuple[str, WeightBytes]], notes: list[str]) -> MemoryPlan:
    items = case.fixed
    spare = case.memory - case.running
    fits = case.needed <= case.memory
    wanted = 0 if case.release else case.weights.copies  # of packed weights, which then are gone
    copies = min(wanted, spare) if fits else 0
    if copies:
        share = "" if copies == wanted else f" ({copies / wanted:.0%} of them)"
        items.insert(1, Item("copies for speed", copies, case.weights.copies_name + share))
    if fits and copies < wanted:
        notes.append(
            f"{case.weights.copies_name}: room for {show_bytes(copies)} of "
            f"{show_bytes(wanted)}; other layers work from the packed weight, slower"
        )
    if case.loading > case.running:
        why = (
            "packed weights are there twice. A folder written by `labkit quantize` is mapped, and spares that"
            if case.device == "cpu"
            else "the decode step makes its dense embedding in float32 first"
        )
        notes.append(
            f"while it is loaded it takes {show_bytes(case.loading)} for a moment, more than to run: {why}"
        )
    elif case.device == "cuda" and case.weights.loading:
        host = case.weights.stored + case.weights.loading
        notes.append(f"while it is loaded the host holds {show_bytes(host)} for a moment")
    one = block_bytes(case.config, case.block_size, case.kv_dtype)
    of_layer = layer_block_bytes(case.config, case.block_size, case.kv_dtype)
    room = case.memory - sum(item.nbytes for item in items)
    first = case.asked_blocks
    # While the pool grows, one layer's old tensors stand beside all the new ones.
    last = max(0, room) // (one + of_layer)
    grow = 0
    if last > first:
        grow = last * of_layer
    else:
        last = max(0, room) // one
        last = first if last > first else last
    changes, together = advice.advise(case, others)
    return MemoryPlan(
        case, tuple(items), copies, PoolSize(first, last, one), grow, changes, together, tuple(notes)
    )
