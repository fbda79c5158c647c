"""What a kernel's launches move, counted by the emulator: never a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from labkit.bench import contenders
from labkit.bench.cases import Case
from labkit.quant.formats import QuantWeight


@dataclass(frozen=True)
class Launch:
    """One launch of an emulated kernel, as it was made."""

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]
    shared_bytes: int

    def trace(self, blocks: int | None) -> Any:
        """Run it again with counting; None for every block."""
        return self.kernel.trace(self.grid, self.block, list(self.args), self.shared_bytes, blocks=blocks)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect every launch that emulated kernels make inside, whoever makes it.

    Any kernel of the registry can so be counted without telling its launch shape a second time.
    """
    from labkit import emulator

    launches: list[Launch] = []
    kind: Any = emulator.EmulatedKernel
    call = kind.__call__

    def watched(
        self: Any, grid: Any, block: Any, args: Any, shared_bytes: int = 0, *more: Any, **options: Any
    ) -> Any:
        launches.append(Launch(self, tuple(grid), tuple(block), tuple(args), shared_bytes))
        return call(self, grid, block, args, shared_bytes, *more, **options)

    kind.__call__ = watched
    try:
        yield launches
    finally:
        kind.__call__ = call


def launches_of(name: str, case: Case, x: Tensor, weight: QuantWeight) -> list[Launch]:
    """The emulated launches of one call of a kernel; empty for one made of torch operations.

    Args:
        name: contender.
        x: float16 [M, K] on the CPU.
        weight: [N, K] on the CPU.
    """
    call = contenders.get(name).calls(case, [weight], 1)[0]
    with recorded() as launches:
        call(x)
    return launches


def of(name: str, case: Case, x: Tensor, weight: QuantWeight, blocks: int | None = None) -> dict[str, Any]:
    """Counts of one call, summed over its launches; empty for a contender that is not emulated.

    Args:
        name, case, x, weight: as in :func:`launches_of`.
        blocks: blocks of each launch to trace, spread evenly; None for all.

    Returns:
        {"launches": [...], "blocks_traced", "blocks", "requests", "sectors", "bytes", "wavefronts",
        "faults"}: 32-byte sectors of global memory, their bytes, wavefronts of shared memory, of
        the traced blocks.
    """
    found = [
        _counted(launch.kernel.name, launch.trace(blocks)) for launch in launches_of(name, case, x, weight)
    ]
    if not found:
        return {}
    total = {key: sum(one[key] for one in found) for key in found[0] if key != "kernel"}
    return {"launches": found, **total}


def _counted(kernel: str, trace: Any) -> dict[str, Any]:
    sectors = int(trace.sectors(space="global"))
    return {
        "kernel": kernel,
        "blocks_traced": int(trace.blocks_traced),
        "blocks": int(trace.blocks_total),
        "requests": int(trace.requests(space="global")),
        "sectors": sectors,
        "bytes": 32 * sectors,
        "wavefronts": int(trace.wavefronts(space="shared")),
        "faults": len(trace.faults),
    }
