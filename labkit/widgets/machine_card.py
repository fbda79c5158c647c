"""The machine card: what a card is, what fits into its memory, and how fast decode can be at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit import device, quoted
from labkit.errors import require
from labkit.widgets import base

_GIB = 2**30
_BITS = (("W3", 3), ("W4", 4), ("8 bits", 8), ("FP16", 16))
_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_BLUE, _ORANGE, _GREY, _PALE, _RED = "#0072B2", "#E69F00", "#5F6670", "#E8EAED", "#D55E00"

RESERVE_GIB = 0.5
"""Set aside for the driver's context, the display and activations: an assumption, not a measurement."""


@dataclass(frozen=True)
class Card:
    """What the widget needs to know of a machine; ``origin`` says where its figures are from."""

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    detail: str
    origin: str

    @staticmethod
    def of(card: device.Device) -> Card:
        """The card of a device of the table."""
        major, minor = card.capability
        detail = f"compute capability {major}.{minor}, {card.sms} SMs, {card.l2_mib:g} MiB L2"
        return Card(card.name, card.memory_gib, card.bandwidth_gb_s, detail, card.origin)


@dataclass
class MachineCard(base.Controller):
    """Choose a card, a model, a format and a context; see whether it fits and the decode ceiling.

    Attributes:
        card: index into :attr:`cards` (this machine first, when one was given).
        model: key of :func:`labkit.quoted.models`.
        bits: weight bits; :attr:`group` follows from them and from the model.
        context: tokens held in the KV cache, FP16.
        extra: cards shown before those of the table, such as this machine as measured.
    """

    card: int = 0
    model: str = "qwen2.5-3b"
    bits: int = 4
    context: int = 2048
    extra: tuple[Card, ...] = ()
    title: str = "Machine card: does it fit, and how fast can it be?"
    cards: tuple[Card, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.cards = (*self.extra, *(Card.of(known) for known in device.devices().values()))
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        return (
            base.Choice("card", "Machine", tuple((card.name, i) for i, card in enumerate(self.cards))),
            base.Choice("model", "Model", tuple((m.name, m.key) for m in quoted.models().values())),
            base.Choice("bits", "Weight format", _BITS),
            base.Slider("context", "Context (tokens)", values=_CONTEXTS, fmt="{:.0f}"),
        )

    # --- numbers

    @property
    def group(self) -> int | None:
        """Weights that share a scale: 128 where the hidden size allows it, else 64; 32 for 8 bits."""
        if self.bits == 16:
            return None
        if self.bits == 8:
            return 32
        return 128 if quoted.model(self.model).hidden_size % 128 == 0 else 64

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight in the chosen format."""
        return device.bytes_per_weight(self.bits, self.group)

    def memory_gib(self) -> dict[str, float]:
        """GiB by use: weights, KV cache, reserve."""
        shape = quoted.model(self.model)
        return {
            "weights": shape.resident_weights * self.weight_bytes / _GIB,
            "KV cache": shape.kv_bytes_per_token() * self.context / _GIB,
            "reserve": RESERVE_GIB,
        }

    @property
    def fits(self) -> bool:
        """Whether weights, cache and reserve are within the memory."""
        return sum(self.memory_gib().values()) <= self.cards[self.card].memory_gib

    @property
    def ceiling_tok_s(self) -> float:
        """Tokens a second if every weight and the whole cache were read once a token, at full bandwidth."""
        shape = quoted.model(self.model)
        moved = shape.decode_weights * self.weight_bytes + shape.kv_bytes_per_token() * self.context
        return device.decode_ceiling_tok_s(moved, self.cards[self.card].bandwidth_gb_s)

    # --- words and picture

    def text(self) -> str:
        card, shape = self.cards[self.card], quoted.model(self.model)
        used = self.memory_gib()
        name = "FP16" if self.bits == 16 else f"{self.bits} bits at group {self.group}"
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"{card.name} ({card.origin}): {card.detail}, {card.memory_gib:.3g} GiB, "
            f"{card.bandwidth_gb_s:.4g} GB/s. {shape.name} in {name}: {used['weights']:.2f} GiB of weights, "
            f"{used['KV cache']:.2f} GiB of KV cache at {self.context} tokens, {RESERVE_GIB:g} GiB reserve: "
            f"{verdict}. Decode ceiling for one request: {self.ceiling_tok_s:.1f} tokens/s."
        )

    def html(self) -> str:
        card = self.cards[self.card]
        would = "" if self.fits else " if it did"
        width, height, left, bar = 640, 196, 16, 608
        used = self.memory_gib()
        total = sum(used.values())
        # An overfull bar keeps its scale readable: the longer of need and memory fills the width.
        scale = bar / max(total, card.memory_gib)
        parts = [
            base.rect(1, 1, width - 2, height - 2, "#FFFFFF", stroke=_PALE),
            base.label(left, 30, card.name, size=18, bold=True),
            base.label(width - left, 30, f"figures: {card.origin}", anchor="end", color=_GREY),
            base.label(
                left, 54, f"{card.detail}, {card.memory_gib:.3g} GiB, {card.bandwidth_gb_s:.4g} GB/s", size=13
            ),
            base.rect(left, 74, card.memory_gib * scale, 34, _PALE),
        ]
        start = float(left)
        for color, (name, size) in zip((_BLUE, _ORANGE, _GREY), used.items(), strict=True):
            parts.append(base.rect(start, 74, size * scale, 34, color, title=f"{name}: {size:.2f} GiB"))
            start += size * scale
        edge = left + card.memory_gib * scale
        parts.append(base.line([(edge, 68), (edge, 114)], _RED if not self.fits else "#22262B", width=3))
        at = float(left)
        for color, (name, size) in zip((_BLUE, _ORANGE, _GREY), used.items(), strict=True):
            parts.append(base.rect(at, 124, 12, 12, color))
            parts.append(base.label(at + 18, 135, f"{name} {size:.2f} GiB"))
            at += 200
        verdict = "fits" if self.fits else f"does not fit: {total:.2f} GiB of {card.memory_gib:.3g}"
        parts.append(
            base.label(left, 170, verdict, size=15, bold=True, color="#007A58" if self.fits else _RED)
        )
        parts.append(
            base.label(
                width - left,
                170,
                f"decode ceiling{would}: {self.ceiling_tok_s:.1f} tokens/s",
                size=15,
                anchor="end",
                bold=True,
            )
        )
        return base.svg(width, height, parts, label=self.text())


def this_machine(memory_bytes: int, bandwidth_gb_s: float, detail: str) -> Card:
    """A card for the machine in front of you, from a measured bandwidth (GB/s)."""
    require(memory_bytes > 0, "memory_bytes", memory_bytes, "more than 0")
    require(bandwidth_gb_s > 0, "bandwidth_gb_s", bandwidth_gb_s, "more than 0")
    return Card("This machine", memory_bytes / _GIB, bandwidth_gb_s, detail, "measured")
