"""A linear layer over quantised weights, whose kernel the dispatch table chooses at every call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import refuse, require
from labkit.kernels import cpu as _cpu  # noqa: F401  (registers the torch kernels)
from labkit.kernels import registry
from labkit.kernels import zsplit as _zsplit  # noqa: F401  (registers the Q8_0 and Q4_0 kernels)
from labkit.kernels.registry import Request, Unavailable
from labkit.kernels.seed import linear as _seed  # noqa: F401  (registers the W4 and W3 seed kernels)
from labkit.kernels.tensor_core import register as _tensor_core
from labkit.nn.dispatch import DTYPES, Choice, DispatchTable
from labkit.nn.memory import MemoryBudget, default_budget
from labkit.quant.formats import QuantWeight
from labkit.quant.grouped import GroupedWeight
from labkit.quant.packing import describe

_tensor_core.register_kernel()

DEFAULT_TEMP_BYTES = 16 << 20
"""Temporaries of one call beside x and y. Measured: 256 KiB costs 6 times the time, 32 MiB
saves a seventh (W4, M = 1, two cores)."""

_CACHED_CHOICES = 1024


GPU_TEMP_BYTES = 64 << 20
"""The same on a GPU, where a band of dense weight is a cuBLAS call of its own: fewer, larger bands."""


def default_temp_bytes(device: str) -> int:
    """Bytes of temporaries beside x and y that a call may take on a device type, "cpu" or "cuda"."""
    return GPU_TEMP_BYTES if device == "cuda" else DEFAULT_TEMP_BYTES


class QuantLinear(nn.Module):
    """y = x @ W.T (+ bias) with W stored as :class:`QuantWeight` or :class:`GroupedWeight`.

    Args:
        weight: [N, K].
        bias: None or float [N], finite.
        table: dispatch table; the project's by default.
        budget: memory that kernels may keep beside the packed weight (a dense copy, an int4
            layout); by default half of the free memory, shared by all layers.
        temp_bytes: bound on the temporaries of a call; by default :func:`default_temp_bytes` of the device.

    The weight is no parameter: ``to(device)`` moves it, a dtype change leaves it as stored, and both
    drop what kernels kept. It is saved by labkit.quant.save_quantized, not by ``state_dict``.

    Attributes:
        last_choice: the :class:`Choice` of the last call, or None before the first.
        stats: how many calls went to each kernel.
    """

    def __init__(
        self,
        weight: QuantWeight | GroupedWeight,
        bias: Tensor | None = None,
        *,
        table: DispatchTable | None = None,
        budget: MemoryBudget | None = None,
        temp_bytes: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(weight, QuantWeight | GroupedWeight):
            fix = "labkit.quant.quantize makes one" if isinstance(weight, Tensor) else ""
            refuse("weight", describe(weight), "a QuantWeight or GroupedWeight", fix)
        whole = temp_bytes is None or (isinstance(temp_bytes, int) and temp_bytes >= 1)
        require(whole, "temp_bytes", repr(temp_bytes), "bytes >= 1, or None")
        if bias is not None:
            _check_bias(bias, weight)
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.table = table or DispatchTable.load()
        self.budget = budget or default_budget()
        self.temp_bytes = temp_bytes
        self.last_choice: Choice | None = None
        self.stats: Counter[str] = Counter()
        self._dtype: torch.dtype | None = None
        self._lock = threading.Lock()
        self._forget()

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.k

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.n

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: float16, bfloat16 or float32 [..., K] on the weight's device; any strides, M = 0 allowed.

        Returns:
            [..., N] of x's dtype.

        Raises:
            InputError: a wrong K, dtype or device.
        """
        self._check(x)
        flat = x.reshape(-1, self.weight.k)
        m = flat.shape[0]
        if m == 0:
            return x.new_empty(*x.shape[:-1], self.weight.n)
        with self._lock:  # held while a kernel is chosen and prepared, never while it runs
            choice, run, prepared = self._choose(x.dtype, m)
            self.last_choice = choice
            self.stats[choice.kernel] += 1
        y = run(flat, prepared)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.weight.n)

    def explain(self) -> str:
        """What was chosen and why, in words: the last call, and the count of each kernel."""
        head = f"{self.weight.format} [{self.weight.n}, {self.weight.k}] group {self.weight.group_size}"
        if self.last_choice is None:
            return f"{head}: not called yet"
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.stats.items()))
        return f"{head}\n  last: {self.last_choice.reason}\n  calls: {counts}"

    def set_table(self, table: DispatchTable) -> None:
        """Use another dispatch table from the next call on; what kernels kept is dropped."""
        with self._lock:
            self.table = table
            self._forget()

    def extra_repr(self) -> str:
        """Shape and storage, for ``print(model)``."""
        weight = self.weight
        return f"{weight.k} -> {weight.n}, {weight.format}, group {weight.group_size}"

    def _check(self, x: Any) -> None:
        k, n = self.weight.k, self.weight.n
        if not isinstance(x, Tensor) or str(x.dtype).removeprefix("torch.") not in DTYPES:
            refuse("x", describe(x), "float16, bfloat16 or float32 [..., K]")
        if x.ndim < 1 or x.shape[-1] != k:
            turned = x.ndim >= 1 and x.shape[-1] == n
            fix = f"this looks transposed: the weight is [N = {n}, K = {k}]" if turned else ""
            refuse("x", describe(x), f"[..., {k}]", fix)
        if x.device != self.weight.device:
            refuse("x", f"on {x.device}", f"on {self.weight.device}, where the weight is", "x.to(device)")

    def _choose(self, dtype: torch.dtype, m: int) -> tuple[Choice, Callable[[Any, Any], Tensor], Any]:
        if self._generation != registry.generation():
            self._forget()
        if dtype != self._dtype:
            # One activation dtype at a time: a dense copy for each would double the memory.
            self._forget()
            self._dtype = dtype
        cached = self._choices.get(m)
        if cached is not None:
            return cached
        device = self.weight.device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        request = Request(
            device.type,
            capability,
            self.weight.format,
            str(dtype).removeprefix("torch."),
            m,
            self.weight,
            self.temp_bytes or default_temp_bytes(device.type),
            self.budget,
        )
        choice = self.table.select(
            request.device,
            capability,
            request.format,
            request.dtype,
            m,
            why_not=lambda name: self._why_not(name, request),
        )
        if len(self._choices) >= _CACHED_CHOICES:
            self._choices.clear()
        found = (choice, registry.get(choice.kernel).run, self._prepared[choice.kernel])
        self._choices[m] = found
        return found

    def _why_not(self, name: str, request: Request) -> str:
        """Why a kernel cannot serve this call; prepares it when it can."""
        reason = registry.why_not(name, request) or self._refused.get(name, "")
        if reason or name in self._prepared:
            return reason
        try:
            self._prepared[name] = registry.get(name).prepare(request)
        except Unavailable as error:
            self._refused[name] = str(error)
        return self._refused.get(name, "")

    def _forget(self) -> None:
        """Drop cached choices and everything that kernels kept."""
        self._generation = registry.generation()
        self._dtype = None
        self._choices: dict[int, tuple[Choice, Callable[[Any, Any], Tensor], Any]] = {}
        self._prepared: dict[str, Any] = {}
        self._refused: dict[str, str] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        # A byte tensor shows where ``fn`` moves things; it is left alone by dtype changes.
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.weight.device)).device
        with self._lock:
            self._forget()
            self.weight = self.weight.to(device)
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles choose and prepare for themselves: kept memory is counted once.
        state = dict(self.__dict__)
        for name in ("_choices", "_prepared", "_refused"):
            state[name] = {}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.Lock()


def _check_bias(bias: Tensor, weight: QuantWeight | GroupedWeight) -> None:
    ok = isinstance(bias, Tensor) and bias.is_floating_point() and tuple(bias.shape) == (weight.n,)
    require(ok, "bias", describe(bias), f"float [{weight.n}]")
    require(bias.device == weight.device, "bias", f"on {bias.device}", f"on {weight.device}")
    require(bool(torch.isfinite(bias).all()), "bias", "NaN or Inf", "finite values")


def explain(model: nn.Module) -> str:
    """Kernel choices of every :class:`QuantLinear` in a model: one line a kind of layer and reason."""
    lines: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, QuantLinear):
            reason = module.last_choice.reason if module.last_choice else "not called yet"
            lines[f"{module.weight.format} [{module.weight.n}, {module.weight.k}]: {reason}"] += 1
    return "\n".join(f"{count} x {line}" for line, count in sorted(lines.items()))


def choice_counts(model: nn.Module) -> Counter[str]:
    """Calls by kernel, summed over every :class:`QuantLinear` of a model."""
    total: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, QuantLinear):
            total += module.stats
    return total
