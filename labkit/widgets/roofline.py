"""The roofline of one matrix product, with M, bits, group and bandwidth to move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit import device
from labkit.errors import require
from labkit.widgets import base

_GROUPS = (("32", 32), ("64", 64), ("128", 128))
_BITS = (("W3", 3), ("W4", 4), ("8 bits", 8), ("FP16, no groups", 16))
_BANDWIDTHS = (12.0, 25.0, 50.0, 100.0, 192.0, 360.0, 936.0, 1792.0, 4800.0)
_PEAKS = (0.1, 0.3, 1.0, 3.0, 6.1, 12.3, 25.5, 71.0, 165.2, 989.0)
_MS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

_WIDTH, _HEIGHT = 640, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 34, 52
_BLUE, _RED, _GREY, _PALE = "#0072B2", "#D55E00", "#5F6670", "#E8EAED"


@dataclass
class Roofline(base.Controller):
    """Where M rows stand under the two roofs, and what one pass over the weights costs.

    Attributes:
        m: rows of activations that share one read of the weights.
        bits, group: weight format (16 bits have no groups).
        bandwidth_gb_s, tflops: the two roofs; any value given at construction becomes a stop.
        weights: weights of one pass; the default is Qwen2.5-3B (layers and head).
    """

    m: int = 1
    bits: int = 4
    group: int = 128
    bandwidth_gb_s: float = 192.0
    tflops: float = 12.3
    weights: float = 3.0857e9
    title: str = "The roofline: move M, the format and the two roofs"
    _bandwidths: tuple[float, ...] = field(init=False, repr=False)
    _peaks: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.bandwidth_gb_s > 0, "bandwidth_gb_s", self.bandwidth_gb_s, "more than 0")
        require(self.tflops > 0, "tflops", self.tflops, "more than 0")
        require(self.weights > 0, "weights", self.weights, "more than 0")
        self._bandwidths = tuple(sorted({*_BANDWIDTHS, self.bandwidth_gb_s}))
        self._peaks = tuple(sorted({*_PEAKS, self.tflops}))
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        return (
            base.Slider("m", "M (rows)", values=_MS, fmt="{:.0f}"),
            base.Choice("bits", "Weight format", _BITS),
            base.Choice("group", "Group size", _GROUPS),
            base.Slider("bandwidth_gb_s", "Bandwidth (GB/s)", values=self._bandwidths, fmt="{:.4g}"),
            base.Slider("tflops", "Peak (TFLOP/s)", values=self._peaks, fmt="{:.3g}"),
        )

    # --- numbers

    @property
    def bytes_a_weight(self) -> float:
        """Stored bytes per weight, with its share of the scale."""
        return device.bytes_per_weight(self.bits, None if self.bits == 16 else self.group)

    @property
    def ridge(self) -> float:
        """M at which reading and computing take the same time."""
        return device.ridge_m(self.tflops, self.bandwidth_gb_s, self.bytes_a_weight)

    @property
    def seconds(self) -> tuple[float, float]:
        """(reading, computing) of one pass over the weights."""
        return device.step_seconds(
            self.weights, self.m, self.bytes_a_weight, self.bandwidth_gb_s, self.tflops
        )

    @property
    def limit(self) -> str:
        """``memory`` or ``arithmetic``: which roof is the lower one at this M."""
        return "memory" if self.m < self.ridge else "arithmetic"

    @property
    def tokens_per_second(self) -> float:
        """At most this many tokens a second, all M rows together."""
        return self.m / max(self.seconds)

    # --- words and picture

    def text(self) -> str:
        read, compute = (1e3 * s for s in self.seconds)
        name = "FP16" if self.bits == 16 else f"W{self.bits} at group {self.group}"
        return (
            f"M = {self.m}, {name}, {self.bandwidth_gb_s:.4g} GB/s, {self.tflops:.3g} TFLOP/s: "
            f"{self.bytes_a_weight:.3f} bytes a weight, ridge at M = {self.ridge:.1f}, limit: {self.limit}. "
            f"One pass over {self.weights / 1e9:.2f} G weights reads {read:.2f} ms and computes "
            f"{compute:.2f} ms: at most {self.tokens_per_second:.1f} tokens/s."
        )

    def html(self) -> str:
        return self._svg() + self._numbers()

    def _svg(self) -> str:
        low, high = self._y_range()

        def x(m: float) -> float:
            return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(m) / math.log(_MS[-1])

        def y(tflops: float) -> float:
            share = (math.log10(tflops) - low) / (high - low)
            return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

        def roof(m: float) -> float:
            return device.attainable_tflops(m, self.bytes_a_weight, self.bandwidth_gb_s, self.tflops)

        left, right, floor = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = []
        for decade in range(math.ceil(low), math.floor(high) + 1):
            parts.append(base.line([(left, y(10**decade)), (right, y(10**decade))], _PALE, width=1))
            parts.append(base.label(left - 8, y(10**decade) + 4, f"{10**decade:g}", anchor="end", size=12))
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            parts.append(base.line([(x(m), _TOP), (x(m), floor)], _PALE, width=1))
            parts.append(base.label(x(m), floor + 18, str(m), anchor="middle", size=12))
        knee = min(max(self.ridge, 1), _MS[-1])
        parts.append(base.line([(x(1), y(roof(1))), (x(knee), y(roof(knee)))], _BLUE, width=3))
        parts.append(base.line([(x(knee), y(roof(knee))), (x(_MS[-1]), y(roof(_MS[-1])))], _RED, width=3))
        if 1 < self.ridge < _MS[-1]:
            parts.append(base.line([(x(knee), y(roof(knee))), (x(knee), floor)], _GREY, dash="5 4"))
            near_right = x(knee) > _WIDTH - 180
            parts.append(
                base.label(
                    x(knee) + (-6 if near_right else 6),
                    floor - 8,
                    f"ridge M = {self.ridge:.1f}",
                    anchor="end" if near_right else "start",
                    color=_GREY,
                )
            )
        parts.append(base.label(_LEFT, 20, "blue: memory is the limit", color=_BLUE))
        parts.append(base.label(_LEFT + 200, 20, "red: arithmetic is the limit", color=_RED))
        color = _BLUE if self.limit == "memory" else _RED
        parts.append(base.dot(x(self.m), y(roof(self.m)), color, radius=8, title=self.text()))
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(
            base.label(middle, _HEIGHT - 12, "M, rows that share one read of the weights", anchor="middle")
        )
        center = (_TOP + _HEIGHT - _BOTTOM) / 2
        parts.append(base.label(16, center, "attainable TFLOP/s", anchor="middle", rotate=-90))
        return base.svg(_WIDTH, _HEIGHT, parts, label=self.text())

    def _y_range(self) -> tuple[float, float]:
        """Decades of the y axis: from the memory roof at M = 1 to the compute peak, with room."""
        first = device.attainable_tflops(1, self.bytes_a_weight, self.bandwidth_gb_s, self.tflops)
        low = math.floor(math.log10(first))
        high = math.log10(self.tflops) + 0.25
        return low, max(high, low + 1)

    def _numbers(self) -> str:
        read, compute = (1e3 * s for s in self.seconds)
        rows = (
            ("bytes a weight", f"{self.bytes_a_weight:.3f}"),
            ("FLOP a byte", f"{device.intensity(self.m, self.bytes_a_weight):.1f}"),
            ("read the weights once", f"{read:.2f} ms"),
            (f"compute with {self.m} row{'s' if self.m > 1 else ''}", f"{compute:.2f} ms"),
            ("limit", self.limit),
            ("at most", f"{self.tokens_per_second:.1f} tokens/s"),
        )
        cells = "".join(
            f'<tr><td style="text-align:left">{name}</td>'
            f'<td style="text-align:right"><b>{value}</b></td></tr>'
            for name, value in rows
        )
        return f"<table>{cells}</table>"
