"""GPTQ checkpoints (AutoGPTQ, GPTQModel) as W4 with an offset, exactly: ``w = (u - z) * s``.

A quantised linear layer ``M`` of N outputs and K inputs is stored as

- ``M.qweight`` int32 [K/8, N]: nibble i of word r is the code of input 8r + i;
- ``M.qzeros``  int32 [groups, N/8]: nibble i of word c is the zero point of output 8c + i;
- ``M.scales``  float [groups, N];
- ``M.g_idx``   int32 [K], optional: the group of each input (act-order makes it irregular).

``checkpoint_format`` "gptq" (v1, also the default) stores zero points minus one, "gptq_v2" as they
are. For v1 one is added to every nibble by a single 32-bit addition, as GPTQModel's own v1 -> v2
conversion does; that is the inverse of how it writes them, also where a zero point of 0 borrowed.

With act-order the inputs are sorted by group, so that groups become contiguous again, and the order
is kept in ``QuantWeight.k_order``: the same numbers, nothing re-rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import ModelFileError
from labkit.models.zero_points import CODES_PER_WORD, check_part, exact_w4, unpack_words
from labkit.quant.formats import QuantWeight

PARTS = ("qweight", "qzeros", "scales", "g_idx")
_ONE_IN_EACH_NIBBLE = 0x11111111


@dataclass(frozen=True)
class GptqScheme:
    """What config.json says of a GPTQ checkpoint.

    Attributes:
        group_size: inputs a group; -1 for one group a row.
        zero_bias: what must be added to a stored zero point: 1 (v1) or 0 (v2).
    """

    group_size: int
    zero_bias: int
    method: str = "gptq"
    parts: tuple[str, ...] = PARTS
    optional: tuple[str, ...] = ("g_idx",)

    @classmethod
    def from_config(cls, where: str, record: Mapping[str, Any]) -> GptqScheme:
        """Read ``quantization_config``; every variant that is not supported is refused by its name."""
        bits = record.get("bits")
        if bits != 4:
            raise ModelFileError(where, f"GPTQ with bits = {bits!r}", "bits = 4")
        form = record.get("checkpoint_format", record.get("format", "gptq"))
        if record.get("is_marlin_format"):
            form = "marlin"
        if form not in ("gptq", "gptq_v2"):
            raise ModelFileError(
                where,
                f"GPTQ checkpoint_format {form!r}",
                "'gptq' or 'gptq_v2'",
                "save the checkpoint in the plain GPTQ format with the tool that made it",
            )
        if record.get("pack_dtype", "int32") != "int32":
            raise ModelFileError(where, f"GPTQ pack_dtype {record['pack_dtype']!r}", "'int32'")
        dynamic = record.get("dynamic") or {}
        if any(not str(rule).startswith("-:") for rule in dynamic):
            raise ModelFileError(
                where, "GPTQ with per-module 'dynamic' settings", "one setting for all modules"
            )
        group = record.get("group_size", 128)
        check_group_size(where, group)
        return cls(group, 1 if form == "gptq" else 0)

    def weight(self, where: str, parts: Mapping[str, Tensor], n: int, k: int) -> QuantWeight:
        """Import one layer; ``parts`` maps "qweight", "qzeros", "scales" and maybe "g_idx" to tensors.

        Returns:
            W4 [n, k] with an FP32 offset (none where every zero point is 8).
        """
        if k % CODES_PER_WORD or n % CODES_PER_WORD:
            raise ModelFileError(where, f"a GPTQ layer of {n} x {k}", "multiples of 8")
        group = k if self.group_size == -1 else self.group_size
        groups = -(-k // group)
        qweight = check_part(where, "qweight", parts["qweight"], "int32", (k // CODES_PER_WORD, n))
        qzeros = check_part(where, "qzeros", parts["qzeros"], "int32", (groups, n // CODES_PER_WORD))
        scales = check_part(where, "scales", parts["scales"], "float", (groups, n))
        k_order = None
        if "g_idx" in parts:
            g_idx = check_part(where, "g_idx", parts["g_idx"], "int32", (k,))
            k_order = column_order(where, g_idx, group, groups)
        if self.zero_bias:
            qzeros = qzeros + _ONE_IN_EACH_NIBBLE  # wraps, as the format's own conversion does
        codes = unpack_words(qweight, 0)
        if k_order is not None:
            codes = codes[k_order]
        return exact_w4(
            where,
            codes.t().contiguous(),
            unpack_words(qzeros, 1).t().contiguous(),
            scales.t(),
            group_size=group,
            k_order=k_order,
        )


def column_order(where: str, g_idx: Tensor, group: int, groups: int) -> Tensor | None:
    """Order of the inputs that makes the groups contiguous, or None when they already are.

    Args:
        where: layer name, for errors.
        g_idx: int32 [K], the group of each input.
        group: inputs a group.
        groups: ceil(K / group).

    Returns:
        int64 [K]: stored column j is input ``order[j]``.

    Raises:
        ModelFileError: a group that is out of range or does not hold ``group`` inputs (the last may
            hold fewer).
    """
    k = g_idx.numel()
    plain = torch.arange(k, dtype=torch.int32) // group
    if torch.equal(g_idx, plain) or not bool(g_idx.any()):
        return None  # all zeros is how AutoGPTQ writes "no act-order"
    low, high = (int(value) for value in g_idx.aminmax())
    if low < 0 or high >= groups:
        raise ModelFileError(f"{where}.g_idx", f"groups {low}..{high}", f"groups 0..{groups - 1}")
    counts = torch.bincount(g_idx.long(), minlength=groups)
    wanted = torch.bincount(plain.long(), minlength=groups)
    if not torch.equal(counts, wanted):
        bad = int((counts != wanted).nonzero()[0])
        raise ModelFileError(
            f"{where}.g_idx", f"{int(counts[bad])} inputs in group {bad}", f"{int(wanted[bad])} inputs"
        )
    return torch.argsort(g_idx.long(), stable=True)


def check_group_size(where: str, group: object) -> None:
    """Refuse a group size that is not -1 or a whole number of at least 1."""
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and group < 1):
        raise ModelFileError(where, f"group_size {group!r}", "a whole number >= 1, or -1 for one group a row")
