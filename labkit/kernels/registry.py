"""Kernels by name. The dispatch table names a kernel; this says whether it is there and runs it.

A kernel is a function ``run(x, prepared) -> y`` with x [M, K] and y [M, N] of x's dtype, M >= 1.
``prepare(request)`` turns a weight into what ``run`` reads (the weight itself by default); it is
called once for each layer, dtype and device, and kept until the layer moves or changes dtype, so
what it returns must serve every M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from labkit.errors import InputError, require


class Unavailable(Exception):
    """Raised by ``prepare`` when a kernel cannot serve this weight; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a kernel is asked to do.

    Attributes:
        device: device type, "cpu" or "cuda".
        capability: compute capability such as (8, 6), or None on the CPU.
        format: storage format of the weight.
        dtype: name of the activation dtype, such as "float16".
        m: rows of activations.
        weight: the QuantWeight or GroupedWeight.
        temp_bytes: temporaries a call may use beside x and y.
        budget: a labkit.nn.memory.MemoryBudget for what ``prepare`` keeps.
    """

    device: str
    capability: tuple[int, int] | None
    format: str
    dtype: str
    m: int
    weight: Any
    temp_bytes: int
    budget: Any


def _always(request: Request) -> str:
    return ""


def _weight(request: Request) -> Any:
    return request.weight


@dataclass(frozen=True, slots=True)
class Kernel:
    """A registered kernel; ``available`` returns the reason why not, or an empty string."""

    name: str
    run: Callable[[Any, Any], Any]
    available: Callable[[Request], str] = _always
    prepare: Callable[[Request], Any] = _weight


_kernels: dict[str, Kernel] = {}
_generation = 0


def register(
    name: str,
    run: Callable[[Any, Any], Any],
    *,
    available: Callable[[Request], str] = _always,
    prepare: Callable[[Request], Any] = _weight,
    replace: bool = False,
) -> Kernel:
    """Add a kernel under the name the dispatch table uses.

    Raises:
        InputError: the name is taken and ``replace`` is not set.
    """
    global _generation
    require(replace or name not in _kernels, "name", repr(name), "a kernel name not in use", "replace=True")
    kernel = _kernels[name] = Kernel(name, run, available, prepare)
    _generation += 1
    return kernel


def unregister(name: str) -> None:
    """Remove a kernel; layers choose again at their next call."""
    global _generation
    get(name)
    del _kernels[name]
    _generation += 1


def get(name: str) -> Kernel:
    """The kernel of that name, or :class:`InputError`."""
    if name not in _kernels:
        raise InputError("kernel", repr(name), "one of " + (", ".join(names()) or "none: nothing registered"))
    return _kernels[name]


def find(name: str) -> Kernel | None:
    """The kernel of that name, or None."""
    return _kernels.get(name)


def names() -> list[str]:
    """Names of all registered kernels, sorted."""
    return sorted(_kernels)


def generation() -> int:
    """A number that changes whenever a kernel comes or goes, so that cached choices can be dropped."""
    return _generation


@contextmanager
def loading(device: Any) -> Iterator[None]:
    """What keeps a kernel from being loaded inside becomes :class:`Unavailable`, with its first line.

    Not while a CUDA graph is captured: the graph would keep a slower kernel for good.
    """
    try:
        yield
    except (InputError, ImportError, OSError) as error:
        if device.type == "cuda":
            import torch

            if torch.cuda.is_current_stream_capturing():
                raise
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unavailable(first_line) from error


def why_not(name: str, request: Request | None = None) -> str:
    """Why ``name`` cannot run (``request``), or an empty string when it can."""
    kernel = find(name)
    if kernel is None:
        return "not registered: this build has no kernel of that name yet"
    return kernel.available(request) if request is not None else ""
