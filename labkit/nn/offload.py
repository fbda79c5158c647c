"""The host-resident path: activations live on the CPU, weights on the GPU, and small products stay here.

A call pays a fixed price for the way there and back, whatever its size. A product is sent over when its
2 * M * N * K FLOP pass a threshold, which follows from two measurements: that price, and the CPU's rate.
The figures are data (``data/offload.json``), and ``python -m labkit.nn.offload --measure`` prints the row
of this machine.

Fuse first. Query, key and value of one layer read the same activations, and so do gate and up: one weight
[Nq + Nk + Nv, K] pays once where three pay three times, and products that are each too small to be worth
the way are together large enough (the second seed's Q at 8.4 and K, V at 4.2 MFLOP make 16.8).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import InputError, refuse, require
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear
from labkit.nn.offload_table import OffloadRow, flop_threshold, row_for, rows, to_json
from labkit.nn.staging import staging_for
from labkit.quant import GroupedWeight, QuantWeight, quantize
from labkit.quant.packing import describe

RATE_SIZE = 2048
"""N and K of the product whose rate is measured, at M = 1: the size of a projection near the threshold."""


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """Where one call went and why.

    Attributes:
        place: "cpu" or "gpu".
        m: rows of the call.
        flop: 2 * M * N * K.
        reason: one line in words.
    """

    place: str
    m: int
    flop: int
    reason: str


def gpu_missing(device: torch.device) -> str:
    """Why nothing can be sent to ``device``, or an empty string."""
    if device.type != "cuda":
        return f"{device} is no GPU"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    count = torch.cuda.device_count()
    return "" if (device.index or 0) < count else f"there is no {device}: torch finds {count} GPUs"


class OffloadLinear(nn.Module):
    """y = x @ W.T (+ bias) of activations on the CPU, computed here or on a GPU by size.

    Args:
        weight: [N, K], on any device.
        bias: None or float [N].
        device: the GPU.
        threshold_flop: products of fewer FLOP stay on the CPU; by default the device's row of the
            table. 0 sends everything, ``math.inf`` nothing.
        table: dispatch table of both sides; the project's by default.

    The weight goes to the GPU at the first call that is sent; the CPU's copy stays only while some
    M >= 1 would be computed here. With no GPU every call is computed here, and the choice says why.
    Fuse weights that read the same activations (see the module's text).

    The weights are no parameters and no submodules: ``to(device)`` leaves the layer as it is.

    Attributes:
        last_choice: the :class:`OffloadChoice` of the last call, or None before the first.
        stats: how many calls went to "cpu" and "gpu".
    """

    def __init__(
        self,
        weight: QuantWeight | GroupedWeight,
        bias: Tensor | None = None,
        *,
        device: torch.device | str = "cuda",
        threshold_flop: float | None = None,
        table: DispatchTable | None = None,
    ) -> None:
        super().__init__()
        ok = isinstance(weight, QuantWeight | GroupedWeight)
        require(ok, "weight", describe(weight), "a QuantWeight or GroupedWeight")
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError):
            refuse("device", repr(device), "cuda, cuda:N or cpu")
        self.missing = gpu_missing(self.device)
        if not self.missing and self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.n, self.k = weight.shape
        self.last_choice: OffloadChoice | None = None
        self.stats: Counter[str] = Counter()
        self._table = table
        # In a dict, or nn.Module would take them for submodules and move them.
        self._sides: dict[str, QuantLinear] = {"cpu": self._side(weight, bias, torch.device("cpu"))}
        self._threshold, self.provenance = self._default_threshold()
        if threshold_flop is not None:
            self.set_threshold(threshold_flop)

    @property
    def threshold_flop(self) -> float:
        """Products of fewer FLOP stay on the CPU."""
        return self._threshold

    def set_threshold(self, flop: float) -> None:
        """Use another threshold from the next call on.

        Raises:
            InputError: negative, or not a number.
        """
        ok = isinstance(flop, int | float) and not isinstance(flop, bool) and flop >= 0
        require(ok, "threshold_flop", repr(flop), "a number >= 0 (math.inf sends nothing)")
        self._threshold, self.provenance = float(flop), "given by the caller"

    def choose(self, m: int) -> OffloadChoice:
        """Where a call with M = ``m`` rows goes; computes nothing."""
        require(isinstance(m, int) and m >= 1, "m", m, "a whole number >= 1")
        flop = 2 * m * self.n * self.k
        size = f"M = {m}: {flop / 1e6:.3g} MFLOP"
        if self.missing:
            return OffloadChoice("cpu", m, flop, f"{size}, computed on the CPU: {self.missing}")
        limit = f"threshold {self._threshold / 1e6:.3g} MFLOP ({self.provenance})"
        if flop < self._threshold:
            return OffloadChoice("cpu", m, flop, f"{size}, below the {limit}")
        return OffloadChoice("gpu", m, flop, f"{size}, not below the {limit}")

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: float16, bfloat16 or float32 [..., K] on the CPU; any strides, M = 0 allowed.

        Returns:
            [..., N] of x's dtype, on the CPU.

        Raises:
            InputError: a wrong K, dtype or device.
        """
        ok = isinstance(x, Tensor) and x.ndim >= 1 and x.shape[-1] == self.k
        require(ok, "x", describe(x), f"float [..., {self.k}]")
        require(
            x.device.type == "cpu", "x", f"on {x.device}", "on the CPU: this path is for activations there"
        )
        m = x.numel() // self.k
        if m == 0:
            return x.new_empty(*x.shape[:-1], self.n)
        choice = self.choose(m)
        if choice.place == "gpu":
            # The layer checks x's dtype itself, but only after the copy: say it before.
            require(
                x.is_floating_point() and x.dtype.itemsize <= 4,
                "x",
                describe(x),
                "float16, bfloat16 or float32",
            )
            y = staging_for(self.device).round_trip(x, self._on("gpu"))
        else:
            y = self._on("cpu")(x)
        self.last_choice = choice
        self.stats[choice.place] += 1
        return y

    def explain(self) -> str:
        """Where calls went and why, in words, with the kernels that computed them."""
        head = f"offload [{self.n}, {self.k}]"
        if self.last_choice is None:
            return f"{head}: not called yet"
        counts = ", ".join(f"{place} {count}" for place, count in sorted(self.stats.items()))
        sides = "".join(
            f"\n  on the {place}: {side.explain()}" for place, side in sorted(self._sides.items())
        )
        return f"{head}\n  last: {self.last_choice.reason}\n  calls: {counts}{sides}"

    def extra_repr(self) -> str:
        """Shape and threshold, for ``print(model)``."""
        return f"{self.k} -> {self.n}, from {self._threshold:.3g} FLOP on {self.device}"

    def _on(self, place: str) -> QuantLinear:
        """The layer of one side; made from the other when it is not there."""
        side = self._sides.get(place)
        if side is None:
            other = next(iter(self._sides.values()))
            target = self.device if place == "gpu" else torch.device("cpu")
            side = self._sides[place] = self._side(other.weight, other.bias, target)
            if place == "gpu" and self.choose(1).place == "gpu":
                del self._sides["cpu"]
        return side

    def _side(
        self, weight: QuantWeight | GroupedWeight, bias: Tensor | None, device: torch.device
    ) -> QuantLinear:
        moved = None if bias is None else bias.detach().to(device)
        return QuantLinear(weight.to(device), moved, table=self._table)

    def _default_threshold(self) -> tuple[float, str]:
        if self.missing or self.device.type != "cuda":
            return math.inf, "no GPU"
        row = row_for(torch.cuda.get_device_name(self.device))
        return row.threshold_flop, row.provenance


# --- measuring ------------------------------------------------------------------------------------------


def measure_round_trip(device: torch.device | str = "cuda", *, repeats: int = 200) -> float:
    """What a call costs however small it is: the median of a 32 x 32 product at M = 1, microseconds.

    Python, both copies, the launches and the synchronise are in it: that is what a product must earn.

    Raises:
        InputError: no GPU.
    """
    return _microseconds(_probe(device, 32, 0.0), repeats)


def measure(device: torch.device | str = "cuda", *, repeats: int = 200) -> OffloadRow:
    """Round trip, rates and threshold of this machine, as a row of ``data/offload.json``.

    Raises:
        InputError: no GPU.
    """
    trip = measure_round_trip(device, repeats=repeats)
    flop = 2 * RATE_SIZE * RATE_SIZE
    here = _microseconds(_probe(device, RATE_SIZE, math.inf), repeats)
    there = _microseconds(_probe(device, RATE_SIZE, 0.0), repeats)
    row = OffloadRow(
        device=torch.cuda.get_device_name(torch.device(device)),
        machine=f"{platform.machine()}, {torch.get_num_threads()} threads",
        round_trip_us=round(trip, 1),
        cpu_gflops=round(flop / here / 1e3, 2),
        # A call that costs what the smallest does shows no rate: it counts as infinite.
        gpu_gflops=round(flop / (there - trip) / 1e3, 2) if there - trip > 0.05 * trip else None,
        threshold_flop=0.0,
        provenance=f"measured: medians of {repeats} calls at M = 1, q8_0, float32, torch {torch.__version__}",
    )
    return replace(row, threshold_flop=float(f"{flop_threshold(row):.2g}"))


def _probe(device: torch.device | str, size: int, threshold: float) -> Callable[[], Any]:
    place = torch.device(device)
    missing = gpu_missing(place)
    require(not missing, "device", missing, "a machine with an NVIDIA GPU")
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(size, size, generator=generator) * 0.05, "q8_0")
    layer = OffloadLinear(weight, device=place, threshold_flop=threshold)
    x = torch.randn(1, size, generator=generator)
    return lambda: layer(x)


def _microseconds(call: Callable[[], Any], repeats: int) -> float:
    require(isinstance(repeats, int) and repeats >= 1, "repeats", repeats, "a whole number >= 1")
    for _ in range(max(3, repeats // 10)):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m labkit.nn.offload [--measure] [--device cuda:0]``: print rows as JSON."""
    parser = argparse.ArgumentParser(prog="python -m labkit.nn.offload", description=main.__doc__)
    parser.add_argument("--measure", action="store_true", help="measure this machine; else show the table")
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args(arguments)
    try:
        shown = [measure(chosen.device)] if chosen.measure else rows()
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    for row in shown:
        print(json.dumps(to_json(row), ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
