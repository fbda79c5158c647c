"""Which layer gets how many bits, what that weighs, whether it fits, and how fast decode can be at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit import device, quoted
from labkit.errors import require
from labkit.widgets import base

_GIB = 2**30
_FORMATS = (("W3", "w3"), ("W4", "w4"), ("8 bits", "q8"), ("FP16", "fp16"))
_NAMES = {value: name for name, value in _FORMATS}
_GROUPS = (("32", 32), ("64", 64), ("128", 128))
_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_KV = (("FP16", "fp16"), ("INT8, FP16 scale a head", "int8"))

# One hue for the formats, darker with more bits, so that it also reads in grey; parts have other hues.
_COLORS = {"w3": "#BBDDF2", "w4": "#56B4E9", "q8": "#0072B2", "fp16": "#00304A"}
_PARTS = {"attention": "#D55E00", "MLP": "#009E73", "head": "#E69F00", "embedding": "#CC79A7"}
_PARTS |= {"KV cache": "#F0E442", "reserve": "#8A8F98"}
_GREY, _PALE, _RED, _GREEN, _INK = "#5F6670", "#E8EAED", "#B3261E", "#00704F", "#22262B"
_WIDTH, _LEFT = 680, 84

RESERVE_GIB = 0.5
"""Set aside for the driver's context, the display and activations: an assumption, not a measurement."""


def stored_bytes(format: str, n: int, k: int, group: int, offset: bool) -> int:
    """Bytes of a matrix [n, k] as labkit stores it.

    Args:
        format: "w3" or "w4" (FP16 scale, and FP16 offset, for each ``group``), "q8" (Q8_0: groups of
            32 with an FP32 scale, no offset) or "fp16".
        group, offset: of W3 and W4; a K that is no multiple of the group is padded.
    """
    # The formula lives beside the formats, which need torch; a widget is drawn only in a notebook.
    import torch

    from labkit.quant.sizes import packed_bytes

    require(format in _NAMES, "format", repr(format), "one of " + ", ".join(_NAMES))
    if format == "fp16":
        return 2 * n * k
    if format == "q8":
        return packed_bytes("q8_0", n, k, 32)
    return packed_bytes(format, n, k, group, torch.float16 if offset else None)


@dataclass
class LayerBitsMap(base.Controller):
    """A model, a format for each part of it, and a card; numbers by formula, nothing is loaded.

    Attributes:
        model: key of :func:`labkit.quoted.models`.
        attn, mlp: format of these matrices in all layers but the edge layers.
        edge: so many first and so many last layers get ``edge_format`` in both parts.
        head, embed: format of the output head and of the embedding; a tied model has one matrix
            for both, and ``head`` says its format.
        embed_on_cpu: an untied embedding stays in the host's memory: one row a token crosses the bus.
        group, offset: of all W3 and W4 matrices.
        context, kv: tokens in the KV cache of one request, and its format.
        card: key of :func:`labkit.device.devices`.
    """

    model: str = "qwen2.5-7b"
    attn: str = "w4"
    mlp: str = "w4"
    edge: int = 0
    edge_format: str = "w4"
    head: str = "q8"
    embed: str = "q8"
    embed_on_cpu: bool = False
    group: int = 128
    offset: bool = False
    context: int = 2048
    kv: str = "fp16"
    card: str = "rtx3050-laptop"
    title: str = field(default="Layer bits: give every part its bits, and watch the memory", repr=False)

    def __post_init__(self) -> None:
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        """Model, formats of the parts, group and offset, cache, card."""
        models = tuple((shape.name, shape.key) for shape in quoted.models().values())
        cards = tuple((card.name, card.key) for card in device.devices().values())
        return (
            base.Choice("model", "Model", models),
            base.Choice("attn", "Attention", _FORMATS),
            base.Choice("mlp", "MLP", _FORMATS),
            base.Slider("edge", "Edge layers, each end", 0, 6),
            base.Choice("edge_format", "Edge format", _FORMATS),
            base.Choice("head", "Head", _FORMATS),
            base.Choice("embed", "Embedding (untied)", _FORMATS),
            base.Toggle("embed_on_cpu", "Embedding on the CPU"),
            base.Choice("group", "Group size", _GROUPS),
            base.Toggle("offset", "Offset"),
            base.Slider("context", "Context (tokens)", values=_CONTEXTS, fmt="{:.0f}"),
            base.Choice("kv", "KV cache", _KV),
            base.Choice("card", "Card", cards),
        )

    # ---- numbers ----

    @property
    def shape(self) -> quoted.ModelShape:
        """The model's shape."""
        return quoted.model(self.model)

    def layer_formats(self) -> list[tuple[str, str]]:
        """(attention format, MLP format) of every layer, first to last."""
        count = self.shape.num_layers
        at_edge = [min(i, count - 1 - i) < self.edge for i in range(count)]
        return [(self.edge_format,) * 2 if edge else (self.attn, self.mlp) for edge in at_edge]

    def per_layer(self) -> dict[str, str]:
        """The same map as rules for ``load_model(bits="none", per_layer=...)``; FP16 parts stay float."""
        names = {"fp16": "none"}
        rules = {"attn": names.get(self.attn, self.attn), "mlp": names.get(self.mlp, self.mlp)}
        rules |= {"head": names.get(self.head, self.head)}
        embed = self.head if self.shape.tied_embeddings else self.embed
        rules |= {"embed": names.get(embed, embed)}
        edge = names.get(self.edge_format, self.edge_format)
        count = self.shape.num_layers
        for layer in range(count):
            if min(layer, count - 1 - layer) < self.edge:
                rules[f"model.layers.{layer}.*_proj"] = edge
        return rules

    def part_bytes(self) -> dict[str, float]:
        """Bytes on the card by part: attention, MLP, head, embedding, KV cache. Norms and biases
        (under 0.1 %) are left out. A tied embedding is the head, and counts 0."""
        shape = self.shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        attn_shapes = ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q))
        mlp_shapes = ((inner, hidden), (inner, hidden), (hidden, inner))

        def of(format: str, shapes: Sequence[tuple[int, int]]) -> int:
            return sum(stored_bytes(format, n, k, self.group, self.offset) for n, k in shapes)

        attn = {name: of(name, attn_shapes) for name in {self.attn, self.edge_format}}
        mlp = {name: of(name, mlp_shapes) for name in {self.mlp, self.edge_format}}
        table = ((shape.vocab_size, hidden),)
        resident = not shape.tied_embeddings and not self.embed_on_cpu
        return {
            "attention": sum(attn[a] for a, _ in self.layer_formats()),
            "MLP": sum(mlp[m] for _, m in self.layer_formats()),
            "head": of(self.head, table),
            "embedding": of(self.embed, table) if resident else 0,
            "KV cache": self.kv_bytes_per_token * self.context,
        }

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V of one token in all layers; INT8 has one FP16 scale for each head."""
        if self.kv == "fp16":
            return self.shape.kv_bytes_per_token(2)
        return self.shape.kv_bytes_per_token(1 + 2 / self.shape.head_dim)

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on the card."""
        return sum(size for part, size in self.part_bytes().items() if part != "KV cache")

    @property
    def total_bytes(self) -> float:
        """Weights, cache and the reserve of :data:`RESERVE_GIB`."""
        return sum(self.part_bytes().values()) + RESERVE_GIB * _GIB

    @property
    def memory_bytes(self) -> float:
        """Memory of the card."""
        return device.get_device(self.card).memory_gib * _GIB

    @property
    def fits(self) -> bool:
        """Whether all of it is within the card's memory."""
        return self.total_bytes <= self.memory_bytes

    @property
    def bits_per_weight(self) -> float:
        """Average stored bits of the weights of the layers and the head."""
        parts = self.part_bytes()
        read = parts["attention"] + parts["MLP"] + parts["head"]
        return 8 * read / self.shape.decode_weights

    @property
    def ceiling_tok_s(self) -> float:
        """Tokens a second of one request if layers, head and cache are read once a token at the card's
        full nominal bandwidth; of the embedding only one row is read."""
        parts = self.part_bytes()
        read = parts["attention"] + parts["MLP"] + parts["head"] + parts["KV cache"]
        return device.decode_ceiling_tok_s(read, device.get_device(self.card).bandwidth_gb_s)

    # ---- words and picture ----

    def text(self) -> str:
        card, shape = device.get_device(self.card), self.shape
        sizes = ", ".join(f"{part} {size / _GIB:.2f}" for part, size in self.part_bytes().items() if size)
        edge = f", {self.edge} edge layers at each end {_NAMES[self.edge_format]}" if self.edge else ""
        verdict = "fits" if self.fits else "does not fit"
        plus = " and offset" if self.offset else ""
        return (
            f"{shape.name}: attention {_NAMES[self.attn]}, MLP {_NAMES[self.mlp]}{edge}, "
            f"head {_NAMES[self.head]}; groups of {self.group} with scale{plus}. GiB: {sizes}, "
            f"reserve {RESERVE_GIB:g}; total {self.total_bytes / _GIB:.2f} of {card.memory_gib:g} on "
            f"{card.name}: {verdict}. {self.bits_per_weight:.2f} bits per weight read; "
            f"ceiling {self.ceiling_tok_s:.1f} tokens/s at {card.bandwidth_gb_s:g} GB/s (nominal)."
        )

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        return f"Layer strip and memory bar. {self.text()}"

    def picture(self) -> str:
        """SVG: one column a layer with the format of its two parts, and the memory bar below."""
        parts = [*self._strip(), *self._legend(), *self._bar(), *self._verdict()]
        return base.svg(_WIDTH, 306, parts, label=self.alt())

    def html(self) -> str:
        return f'<div style="max-width:{_WIDTH}px;background:white;color:{_INK}">{self.picture()}</div>'

    def _strip(self) -> list[str]:
        formats = self.layer_formats()
        step = (_WIDTH - _LEFT - 8) / len(formats)
        out = [
            base.label(_LEFT - 8, 43, "attention", anchor="end"),
            base.label(_LEFT - 8, 71, "MLP", anchor="end"),
        ]
        for layer, pair in enumerate(formats):
            x = _LEFT + layer * step
            for row, name in enumerate(pair):
                tip = f"layer {layer} {'attention' if row == 0 else 'MLP'}: {_NAMES[name]}"
                out.append(base.rect(x + 0.5, 26 + 28 * row, step - 1, 26, _COLORS[name], title=tip))
            if layer % 5 == 0 or (layer == len(formats) - 1 and layer % 5 > 1):
                out.append(base.label(x + step / 2, 98, str(layer), size=11, anchor="middle", color=_GREY))
        return [base.label(_LEFT, 16, "format of each layer", size=12, color=_GREY), *out]

    def _legend(self) -> list[str]:
        used = {name for pair in self.layer_formats() for name in pair} | {self.head}
        untied = not self.shape.tied_embeddings
        used |= {self.embed} if untied else set()
        out, x = [], float(_LEFT)
        for name, value in _FORMATS:
            if value in used:
                out += [base.rect(x, 110, 12, 12, _COLORS[value]), base.label(x + 17, 121, name)]
                x += 72
        head = f"head {_NAMES[self.head]}"
        where = " on the CPU" if self.embed_on_cpu else ""
        table = f"embedding {_NAMES[self.embed]}{where}" if untied else "embedding: the same matrix"
        out.append(base.label(_WIDTH - 8, 121, f"{head}, {table}", anchor="end"))
        return out

    def _sizes(self) -> dict[str, float]:
        return {**self.part_bytes(), "reserve": RESERVE_GIB * _GIB}

    def _bar(self) -> list[str]:
        left, width = 8.0, _WIDTH - 16.0
        # The longer of need and memory fills the width, so an overfull bar keeps its scale.
        scale = width / max(self.total_bytes, self.memory_bytes)
        out = [base.rect(left, 156, self.memory_bytes * scale, 38, _PALE, title="memory of the card")]
        x = left
        for part, size in self._sizes().items():
            tip = f"{part}: {size / _GIB:.2f} GiB"
            out.append(base.rect(x, 156, size * scale, 38, _PARTS[part], title=tip))
            x += size * scale
        edge = left + self.memory_bytes * scale
        memory = device.get_device(self.card).memory_gib
        color = _INK if self.fits else _RED
        out.append(base.line([(edge, 150), (edge, 200)], color, width=3))
        anchor = "end" if edge > _WIDTH / 2 else "start"
        out.append(base.label(edge, 146, f"{memory:g} GiB", size=12, anchor=anchor, color=color, bold=True))
        for i, (part, size) in enumerate(self._sizes().items()):
            x, y = left + (i % 3) * 224, 214 + (i // 3) * 22
            out.append(base.rect(x, y, 12, 12, _PARTS[part]))
            amount = f"{size / _GIB:.2f} GiB" if size else "–"
            out.append(base.label(x + 18, y + 11, f"{part} {amount}"))
        return out

    def _verdict(self) -> list[str]:
        total, memory = self.total_bytes / _GIB, self.memory_bytes / _GIB
        word, color = ("fits", _GREEN) if self.fits else ("does not fit", _RED)
        would = "" if self.fits else " if it did fit"
        return [
            base.label(8, 278, f"{word}: {total:.2f} of {memory:g} GiB", size=15, bold=True, color=color),
            base.label(
                _WIDTH - 8,
                278,
                f"at most {self.ceiling_tok_s:.1f} tokens/s{would}",
                size=15,
                anchor="end",
                bold=True,
            ),
            base.label(8, 298, f"{self.bits_per_weight:.2f} bits per weight read", size=12, color=_GREY),
            base.label(
                _WIDTH - 8,
                298,
                "by formula; nominal bandwidth of the card (quoted)",
                size=12,
                anchor="end",
                color=_GREY,
            ),
        ]
