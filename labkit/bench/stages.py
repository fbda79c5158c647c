"""Where the serving benchmarks run: simulated devices, SmolLM2 on the CPU, random 3B weights on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.bench import machine
from labkit.engine import cost_model
from labkit.engine.executor import Executor
from labkit.engine.sim import SimulatedExecutor
from labkit.errors import require

if TYPE_CHECKING:
    from labkit.bench.random_model import RandomModel
    from labkit.engine.executor_torch import TorchExecutor
    from labkit.models.decode_step import Products

SIMULATED = {"h200": cost_model.h200, "rtx3050": cost_model.rtx3050}
"""Cost models by the name that ``--simulate`` takes."""

MODEL = "qwen2.5-3b"
"""Shape of the random weights on a GPU, and of what both cost models were fitted to."""

_BLOCK = 16


@dataclass
class Stage:
    """An executor, and what a record says of it.

    Attributes:
        executor: of all cells; each has an engine, pool and prefix cache of its own.
        kind: of the figures, one of labkit.tables.ORIGINS.
        origin: the kind in words: "measured", "simulated from quoted", ...
        device: of a Record. notes: sentences that belong to every figure.
        exact: tokens must be equal, bit for bit, whatever the policy; if not, up to ties.
        real: its clock is a real one.
        facts: parameters of the record.
    """

    executor: Executor
    kind: str
    origin: str
    device: dict[str, Any]
    notes: list[str]
    exact: bool
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def real(self) -> bool:
        return self.kind == "measured"

    @property
    def on_gpu(self) -> bool:
        """Its works run on a GPU."""
        return self.real and self.device.get("key") != "cpu"

    def warm(self) -> None:
        """Everything that is made once, made now: graphs of every padded size."""
        warm = getattr(self.executor, "warm", None)
        if warm is not None:
            warm()


@dataclass(frozen=True)
class Need:
    """What a benchmark asks of a stage.

    Attributes:
        rows: requests that run at once.
        context: tokens of the longest sequence.
        tokens: of all sequences that run at once, together.
        chunk: prompt tokens of the largest piece of prefill work.
    """

    rows: int
    context: int
    tokens: int
    chunk: int

    @property
    def blocks(self) -> int:
        """Of the pool: every sequence may have a last block that is not full."""
        return -(-self.tokens // _BLOCK) + 2 * self.rows


def simulated(name: str, need: Need) -> Stage:
    """A cost model on a simulated clock, with two pretended lanes.

    Args:
        name: key of :data:`SIMULATED`.

    Raises:
        InputError: an unknown name.
    """
    require(name in SIMULATED, "simulate", repr(name), "one of " + ", ".join(SIMULATED))
    cost = SIMULATED[name]()
    executor = SimulatedExecutor(
        cost,
        num_blocks=need.blocks,
        block_size=_BLOCK,
        max_context=need.context,
        max_rows=need.rows,
        max_tokens=need.chunk + need.rows,
        feeds=cost.host > 0,  # what it models launches its decode steps ahead
    )
    return Stage(
        executor,
        "simulated",
        cost.origin,
        {"name": f"{cost.name} ({cost.origin})", "key": f"simulated-{name}", "capability": None},
        [f"{cost.origin}: {cost.source}", "tokens are a hash of the prefix: every schedule is checked"],
        exact=True,
        facts={"executor": executor.name},
    )


def on_cpu(need: Need, model: Any = None, dtype: str = "float32") -> Stage:
    """The default model (SmolLM2) on the CPU: one lane, works run one after the other.

    Args:
        model: a labkit.models.model.Model instead.
        dtype: of activations.

    Raises:
        MissingModelError: no default model; says how to get it.
    """
    import torch

    from labkit.engine.executor_for import executor_for
    from labkit.models.zoo import load_model

    if model is None:
        model = load_model(dtype=getattr(torch, dtype))
    executor = executor_for(
        model,
        num_blocks=need.blocks,
        block_size=_BLOCK,
        max_context=need.context,
        max_batch=need.rows,
        chunk=need.chunk,
    )
    return Stage(
        executor,
        "measured",
        "measured",
        machine.device_facts("cpu") | {"threads": torch.get_num_threads()},
        ["CPU: one lane, so nothing runs beside anything; tokens are equal up to ties"],
        exact=False,
        facts={"executor": executor.name, "dtype": dtype},
    )


def on_gpu(need: Need, *, model: str = MODEL, bits: int = 4, report: Callable[[str], None] = print) -> Stage:
    """Random weights of a published shape on torch's GPU: two streams, decode steps in CUDA graphs.

    Args:
        model: key of data/quoted/models.json. bits: of the matrices.
    """
    import time

    import torch

    from labkit.bench.random_model import RandomModel, config_of

    began = time.monotonic()
    executor = random_executor(RandomModel(config_of(model), f"w{bits}", device="cuda"), need)
    torch.cuda.synchronize()
    seconds = round(time.monotonic() - began, 1)
    report(f"random weights of {model}, W{bits}, repacked: {seconds} s")
    return Stage(
        executor,
        "measured",
        "measured",
        machine.device_facts("cuda"),
        [f"random weights of {model}, W{bits}, dense head; greedy; decode steps are CUDA graphs"],
        exact=True,
        facts={"executor": executor.name, "model": model, "bits": bits, "weights_seconds": seconds},
    )


def random_executor(model: RandomModel, need: Need, products: Products | None = None) -> TorchExecutor:
    """The kernels' executor over random weights; on a CPU they run in the emulator.

    Args:
        products: the tensor-core family by default, for any number of rows: bits that do not depend on it.
    """
    from labkit.cache.paged import PagedKV
    from labkit.engine.executor_torch import TorchExecutor
    from labkit.models.decode_step import Products
    from labkit.models.step_model import StepModel

    products = products or Products.tensor_core(dense_from=None)
    layers = StepModel(
        model.config, model.step_weights(products), max_context=need.context, products=products
    )
    kv = PagedKV(
        model.config, num_blocks=need.blocks, block_size=_BLOCK, dtype=layers.dtype, device=layers.device
    )
    return TorchExecutor(
        layers, kv=kv, chunk=need.chunk, max_batch=need.rows, max_context=need.context, eos_ids=()
    )


def make(where: str, need: Need, *, model: str = MODEL, report: Callable[[str], None] = print) -> Stage:
    """A stage by name: "cpu", "cuda", or a key of :data:`SIMULATED`."""
    if where == "cuda":
        return on_gpu(need, model=model, report=report)
    return on_cpu(need) if where == "cpu" else simulated(where, need)
