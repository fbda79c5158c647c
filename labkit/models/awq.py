"""AWQ checkpoints (AutoAWQ, version "gemm") as W4 with an offset, exactly: ``w = (u - z) * s``.

A quantised linear layer ``M`` of N outputs and K inputs is stored as

- ``M.qweight`` int32 [K, N/8], ``M.qzeros`` int32 [groups, N/8]: nibble i of word c belongs to output
  ``8c + ORDER[i]`` with ORDER = 0, 2, 4, 6, 1, 3, 5, 7 (the order its GPU kernel unpacks fastest);
- ``M.scales`` float [groups, N].

Zero points are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import ModelFileError
from labkit.models.gptq import check_group_size
from labkit.models.zero_points import CODES_PER_WORD, check_part, exact_w4, unpack_words
from labkit.quant.formats import QuantWeight

PARTS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INVERSE = torch.tensor(sorted(range(CODES_PER_WORD), key=ORDER.__getitem__))


@dataclass(frozen=True)
class AwqScheme:
    """What config.json says of an AWQ checkpoint; ``group_size`` -1 is one group a row."""

    group_size: int
    method: str = "awq"
    parts: tuple[str, ...] = PARTS
    optional: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, where: str, record: Mapping[str, Any]) -> AwqScheme:
        """Read ``quantization_config``; every variant that is not supported is refused by its name."""
        bits = record.get("bits", record.get("w_bit", 4))
        if bits != 4:
            raise ModelFileError(where, f"AWQ with bits = {bits!r}", "bits = 4")
        version = str(record.get("version", record.get("format", "gemm"))).lower()
        if version != "gemm" or record.get("backend") == "llm-awq":
            if record.get("backend") == "llm-awq":
                version = "llm-awq"
            raise ModelFileError(
                where,
                f"AWQ version {version!r}",
                "'gemm'",
                "save the checkpoint as version 'gemm' with AutoAWQ",
            )
        if record.get("zero_point", True) is not True:
            raise ModelFileError(where, "AWQ without zero points", "zero_point = true")
        group = record.get("group_size", record.get("q_group_size", 128))
        check_group_size(where, group)
        return cls(group)

    def weight(self, where: str, parts: Mapping[str, Tensor], n: int, k: int) -> QuantWeight:
        """Import one layer; ``parts`` maps "qweight", "qzeros" and "scales" to tensors.

        Returns:
            W4 [n, k] with an FP32 offset (none where every zero point is 8).
        """
        if n % CODES_PER_WORD:
            raise ModelFileError(where, f"an AWQ layer of {n} outputs", "a multiple of 8")
        group = k if self.group_size == -1 else self.group_size
        groups = -(-k // group)
        qweight = check_part(where, "qweight", parts["qweight"], "int32", (k, n // CODES_PER_WORD))
        qzeros = check_part(where, "qzeros", parts["qzeros"], "int32", (groups, n // CODES_PER_WORD))
        scales = check_part(where, "scales", parts["scales"], "float", (groups, n))
        return exact_w4(
            where,
            _in_order(qweight).t().contiguous(),
            _in_order(qzeros).t().contiguous(),
            scales.t(),
            group_size=group,
        )


def _in_order(words: Tensor) -> Tensor:
    """uint8 [A, 8B] of the nibbles of int32 [A, B], in the order of the outputs."""
    a, b = words.shape
    return unpack_words(words, 1).view(a, b, CODES_PER_WORD)[..., _INVERSE].view(a, -1)
