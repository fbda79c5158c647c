"""Which storage format each weight of a model gets: the per-layer map behind ``--bits mixed``.

A map is an ordered list of rules ``pattern -> format``; the last rule that matches a weight
wins, so a caller's own rules are simply added behind the preset's. Only matrices are ever
quantised; norms and biases are always kept as they are.

Formats:
    ``"w4"``  signed 4-bit codes, two in a byte, one FP16 scale a group.
    ``"w3"``  signed 3-bit codes, eight in three bytes, one FP16 scale a group.
    ``"q8"``  signed 8-bit codes in groups of 32 (``q8_0``).
    ``"none"`` a float tensor.
    ``"keep"`` as the source stores it: what no rule names when there is no preset.

Patterns are either one of the short names below, or an :mod:`fnmatch` pattern on canonical
(Hugging Face) weight names, with or without the final ``.weight``:
``"model.layers.0.*"``, ``"*.down_proj"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from labkit.errors import InputError, require

FORMATS = ("w4", "w3", "q8", "none")
PRESETS = ("w4", "w3", "mixed", "q8", "none")

SHORT_NAMES: dict[str, str] = {
    "attn": "model.layers.*.self_attn.*_proj.weight",
    "mlp": "model.layers.*.mlp.*_proj.weight",
    "head": "lm_head.weight",
    "embed": "model.embed_tokens.weight",
}

# Embedding and head stay at 8 bits in every low-bit preset: a row of the embedding is read once a
# token (nothing to gain in bandwidth) and the head's error goes straight into the logits.
# "mixed" spends the fourth bit on attention and on down_proj, whose inputs have the widest range.
_PRESET_RULES: dict[str, tuple[tuple[str, str], ...]] = {
    "w4": (("attn", "w4"), ("mlp", "w4"), ("head", "q8"), ("embed", "q8")),
    "w3": (("attn", "w3"), ("mlp", "w3"), ("head", "q8"), ("embed", "q8")),
    "mixed": (("attn", "w4"), ("mlp", "w3"), ("*.mlp.down_proj", "w4"), ("head", "q8"), ("embed", "q8")),
    "q8": (("attn", "q8"), ("mlp", "q8"), ("head", "q8"), ("embed", "q8")),
    "none": (),
}


@dataclass(frozen=True)
class LayerBits:
    """An ordered map from weight names to formats.

    Attributes:
        rules: ``(pattern, format)`` in order; the last match wins, no match means ``default``.
        required: the patterns that must match at least one weight (the caller's own).
        default: ``"none"`` (float) or ``"keep"`` (as the source stores it).
    """

    rules: tuple[tuple[str, str], ...]
    required: tuple[str, ...] = ()
    default: str = "none"

    def format_of(self, name: str) -> str:
        """Format for the matrix ``name`` (canonical, with ``.weight``): w4, w3, q8, none or keep."""
        found = self.default
        for pattern, form in self.rules:
            if _matches(pattern, name):
                found = form
        return found

    def plan(self, names: Iterable[str]) -> dict[str, str]:
        """Format of every matrix in ``names``.

        Raises:
            InputError: one of the caller's own patterns matches none of ``names``.
        """
        names = list(names)
        for pattern in self.required:
            require(
                any(_matches(pattern, name) for name in names),
                "per_layer",
                f"pattern {pattern!r}, which matches no weight of this model",
                f"one of {', '.join(SHORT_NAMES)} or an fnmatch pattern on names such as {names[-1]!r}",
            )
        return {name: self.format_of(name) for name in names}

    def to_json(self) -> list[list[str]]:
        """Rules as plain lists, for a manifest."""
        return [list(rule) for rule in self.rules]


def layer_bits(bits: str | None, per_layer: Mapping[str, str] | None = None) -> LayerBits:
    """Build the map for a preset and the caller's own rules.

    Args:
        bits: ``"w4"``, ``"w3"``, ``"mixed"``, ``"q8"``, ``"none"`` (float), or None: what no own rule
            names is kept as the source stores it.
        per_layer: own rules, pattern -> format, in order; they win over the preset.

    Raises:
        InputError: unknown preset, format, or a pattern that is not a string.
    """
    preset = "none" if bits is None else bits
    require(preset in PRESETS, "bits", repr(bits), "one of " + ", ".join(PRESETS))
    rules = list(_PRESET_RULES[preset])
    own: list[str] = []
    for pattern, form in (per_layer or {}).items():
        if not isinstance(pattern, str) or not pattern:
            raise InputError("per_layer", repr(pattern), "a weight name pattern (non-empty text)")
        require(form in FORMATS, f"per_layer[{pattern!r}]", repr(form), "one of " + ", ".join(FORMATS))
        rules.append((pattern, form))
        if pattern not in SHORT_NAMES:  # a tied model has no head, and that is no mistake of the caller
            own.append(pattern)
    return LayerBits(tuple(rules), tuple(own), "keep" if bits is None else "none")


def _matches(pattern: str, name: str) -> bool:
    pattern = SHORT_NAMES.get(pattern, pattern)
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".weight")
