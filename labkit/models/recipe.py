"""How a source's weights become the weights that are kept: formats by layer, group size, offset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from labkit.errors import InputError, ModelFileError, require
from labkit.models.layer_bits import LayerBits, layer_bits
from labkit.models.model import Weight, role
from labkit.quant.formats import GroupedWeight, QuantWeight
from labkit.quant.quantize import quantize
from labkit.quant.sizes import GROUP_SIZES, packed_bytes

DEFAULT_GROUP_SIZE = 32
_STORED = {"w4": "w4", "w3": "w3", "q8": "q8_0"}
_FINITE_CHUNK = 4 << 20  # values looked at together when a float tensor is checked


@dataclass(frozen=True)
class Recipe:
    """Formats by layer, and the group size and offset for what must be quantised.

    Attributes:
        layers: weight name -> "w4" | "w3" | "q8" | "none" | "keep".
        group_size: 16, 32, 64, 128, "row", or None: 32 for float sources, and whatever a source that
            already has the format uses.
        offset: whether newly quantised W4 and W3 weights get an offset (asymmetric).

    A weight that the source already holds in the wanted format (and group size, when one is asked
    for) is kept exactly, never quantised again.
    """

    layers: LayerBits
    group_size: int | str | None = None
    offset: bool = False

    @classmethod
    def of(
        cls,
        bits: str | None,
        *,
        group_size: int | str | None = None,
        offset: bool = False,
        per_layer: Mapping[str, str] | None = None,
    ) -> Recipe:
        """Build from the options of the command line and of ``load_hf``; refuses bad ones by name.

        ``bits`` None or "keep" leaves every weight that no rule of ``per_layer`` names as the source
        stores it (GPTQ and AWQ weights stay W4).
        """
        bits = None if bits == "keep" else bits
        require(
            group_size is None
            or group_size == "row"
            or (group_size in GROUP_SIZES and group_size is not True),
            "group_size",
            repr(group_size),
            ", ".join(str(size) for size in GROUP_SIZES) + ' or "row"',
        )
        require(isinstance(offset, bool), "offset", repr(offset), "True or False")
        return cls(layer_bits(bits, per_layer), group_size, offset)

    @property
    def keep(self) -> bool:
        """Whether weights that no rule names stay as the source stores them."""
        return self.layers.default == "keep"

    def plan(self, names: Iterable[str]) -> dict[str, str]:
        """Format of every weight in ``names``; norms and biases are "none"."""
        names = list(names)
        matrices = [name for name in names if is_matrix(name)]
        return dict.fromkeys(names, "none") | self.layers.plan(matrices)

    def apply(self, name: str, weight: Weight, form: str, *, where: str) -> Weight:
        """Turn one weight of the source into what is kept.

        Args:
            name: canonical name.
            weight: tensor or quantised weight of the source.
            form: its format in the plan.
            where: the file, for error messages.

        Raises:
            ModelFileError: NaN or infinity, or values that the format cannot hold.
        """
        if form in ("none", "keep"):
            if isinstance(weight, torch.Tensor):
                check_finite(f"{where}: {name}", weight)
                return weight
            return weight if form == "keep" else weight.dequantize(torch.float32)
        if self._already(weight, form):
            return weight
        try:
            values = weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
            if form == "q8":
                return quantize(values, "q8_0", argument=name)
            group = DEFAULT_GROUP_SIZE if self.group_size is None else self.group_size
            return quantize(values, form, group, offset=self.offset, argument=name)
        except InputError as error:
            raise ModelFileError(f"{where}: {name}", error.received, error.expected, error.fix) from error

    def estimate(self, form: str, shape: tuple[int, ...], source_bytes: int, *, quantised: bool) -> int:
        """Bytes that a weight of ``shape`` will take, about: exact for float sources.

        Args:
            form: its format in the plan.
            shape: of the weight.
            source_bytes: what it takes in the source.
            quantised: whether the source stores it quantised; "none" then makes it float32.
        """
        if form == "none" and quantised:
            return math.prod(shape) * torch.float32.itemsize
        if form in ("none", "keep") or len(shape) != 2:
            return source_bytes
        if form == "q8":
            return packed_bytes("q8_0", *shape, 32)
        group = DEFAULT_GROUP_SIZE if self.group_size is None else self.group_size
        return packed_bytes(form, *shape, group, torch.float16 if self.offset else None)

    def to_json(self) -> dict[str, Any]:
        """The recipe as a record, for manifests and for comparing two runs."""
        return {
            "layers": self.layers.to_json(),
            "group_size": self.group_size,
            "offset": self.offset,
            "keep": self.keep,
        }

    def _already(self, weight: Weight, form: str) -> bool:
        if isinstance(weight, QuantWeight) and weight.format == _STORED[form]:
            wanted = weight.k_padded if self.group_size == "row" else self.group_size
            return wanted is None or wanted == weight.group_size
        return isinstance(weight, GroupedWeight) and weight.format == _STORED[form]


def is_matrix(name: str) -> bool:
    """Whether ``name`` is a weight that a recipe may quantise."""
    return role(name) in ("attn", "mlp", "embed", "head")


def check_finite(where: str, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinity; looks at a few megabytes at a time."""
    for part in tensor.reshape(-1).split(_FINITE_CHUNK):
        finite = torch.isfinite(part)
        if not bool(finite.all()):
            value = part[~finite][0].item()
            raise ModelFileError(where, f"a weight that is {value}", "finite weights", "the file is damaged")
