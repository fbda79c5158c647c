"""Kernels of other projects, in the same run: torch's tinygemm, and humming where it is installed.

Both are given the codes and scales of the case, in their own layout, so their results are compared
with the product of the same weights; where their layout has bfloat16 scales (tinygemm; humming for
bfloat16 activations), with that of the rounded ones. How exactly they sum is theirs: up to
:data:`TOLERANCE` times the error of plain torch, which a wrong layout, scale or tile exceeds by far.

Importing this makes them known to :mod:`labkit.bench.contenders`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor

from labkit.bench.cases import PEERS, Case
from labkit.bench.contenders import Call, Contender, add
from labkit.quant.formats import QuantWeight

TOLERANCE = 8.0
"""Times the error of plain torch; labkit's own kernels have 2."""

_TINYGEMM_OPS = ("_convert_weight_to_int4pack", "_weight_int4pack_mm")
_TINYGEMM_MOST_M = 64
_INNER_K_TILES = 8
_PACKED_AT_ONCE = 16 << 20  # codes: int32 of them while a layout is made
_COMPILED_TOGETHER = 4


class Tinygemm(Contender):
    """torch's ``_weight_int4pack_mm``: W4, bfloat16 activations."""

    name = "tinygemm_w4"
    repeatable = False
    activations = "bfloat16"
    tolerance = TOLERANCE

    def why_not(self, case: Case, weight: QuantWeight) -> str:
        if weight.device.type != "cuda":
            return "CUDA only"
        if torch.cuda.get_device_capability(weight.device) < (8, 0):
            return "needs compute capability 8.0 or newer"
        if not all(hasattr(torch.ops.aten, name) for name in _TINYGEMM_OPS):
            return f"torch {torch.__version__} does not have it"
        if case.group not in (32, 64, 128, 256):
            return f"group size {case.group}; it has 32, 64, 128 and 256"
        if case.n % 8 or case.k % (16 * _INNER_K_TILES) or case.k % case.group:
            return f"[{case.n}, {case.k}] is not whole: it needs N % 8 == 0 and K % 128 == 0"
        if case.m > _TINYGEMM_MOST_M:
            return f"made for few rows, its time grows with M: not timed above {_TINYGEMM_MOST_M}"
        return ""

    def nbytes(self, case: Case) -> int:
        # Four bits a code; scale and zero, bfloat16 each, a group.
        return case.n * case.k // 2 + 4 * case.n * (case.k // case.group)

    def held(self, case: Case, weight: QuantWeight) -> QuantWeight:
        return _bfloat16_scales(weight)

    def calls(self, case: Case, weights: Sequence[QuantWeight], copies: int) -> list[Call]:
        pairs, both = tinygemm_layout(weights[0])
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_K_TILES)
        copied = [(packed, both), *((packed.clone(), both.clone()) for _ in range(copies - 1))]

        def call(x: Tensor, packed: Tensor, both: Tensor) -> Tensor:
            return torch.ops.aten._weight_int4pack_mm(x, packed, case.group, both)

        return [functools.partial(call, packed=one, both=two) for one, two in copied]


def _bfloat16_scales(weight: QuantWeight) -> QuantWeight:
    # float16 holds them exactly: they have fewer bits, and those of a benchmark are far from subnormal.
    return replace(weight, scales=weight.scales.bfloat16().half())


def tinygemm_layout(weight: QuantWeight) -> tuple[Tensor, Tensor]:
    """What tinygemm is given: ``w = (u - 8) · scale + zero``, u of even columns in the high halves of bytes.

    Returns:
        uint8 [N, K/2], and scale and zero, bfloat16 [K/G, N, 2].
    """
    codes = (weight.codes() + 8).to(torch.uint8)
    scales = weight.scales.t().bfloat16()
    zeros = torch.zeros_like(scales)
    return codes[:, ::2] << 4 | codes[:, 1::2], torch.stack([scales, zeros], dim=-1).contiguous()


class Humming(Contender):
    """``humming-kernels`` of the Python package index: integers of any width, compiled at run time."""

    repeatable = False
    tolerance = TOLERANCE

    def __init__(self, format: str) -> None:
        self.name, self.format = f"humming_{format}", format
        self._rows: dict[tuple[Any, ...], list[int]] = {}
        self._problem: dict[tuple[Any, ...], str] = {}

    def why_not(self, case: Case, weight: QuantWeight) -> str:
        if case.format != self.format:
            return f"{self.format} weights only"
        if weight.device.type != "cuda":
            return "CUDA only"
        missing = humming_missing()
        if missing:
            return missing
        if case.k % case.group or case.k % 64 or case.n % 64:
            return f"[{case.n}, {case.k}] is not whole: it needs N % 64 == 0, K % 64 == 0 and whole groups"
        return self._problem.get(_layer_key(case), "")

    def held(self, case: Case, weight: QuantWeight) -> QuantWeight:
        return weight if case.dtype == "float16" else _bfloat16_scales(weight)  # scales are of x's dtype

    def compile(self, found: Sequence[Case]) -> None:
        """Compile its kernels for every shape and M of a run, side by side: seconds each, one by one."""
        mine = [case for case in found if self.name in case.contenders]
        for case in mine:
            self._rows.setdefault(_layer_key(case), []).append(case.m)
        if not mine or humming_missing():
            return
        device = torch.cuda.current_device()

        def once(case: Case) -> None:
            key = _layer_key(case)
            rows = sorted(set(self._rows[key]))
            for chosen in (rows, []):  # should humming not take its own choice cut down, then all of it
                try:
                    with torch.cuda.device(device), torch.no_grad():
                        _try_out(case, rows, chosen)
                except torch.OutOfMemoryError:
                    return  # alone it may fit: the case itself will tell
                except Exception as error:  # another project's code: whatever it raises is the reason
                    self._problem[key] = f"it does not compile here: {_line(error)}"
                else:
                    self._problem.pop(key, None)
                    self._rows[key] = chosen
                    return

        firsts = {_layer_key(case): case for case in mine}
        with ThreadPoolExecutor(_COMPILED_TOGETHER) as pool:
            list(pool.map(once, firsts.values()))
        torch.cuda.empty_cache()

    def calls(self, case: Case, weights: Sequence[QuantWeight], copies: int) -> list[Call]:
        rows = self._rows.get(_layer_key(case), [])
        made: list[Call] = []
        try:
            codes = _humming_codes(weights[0])
            for _ in range(copies):
                layer = _layer(case)
                scales = weights[0].scales.to(layer.weight_scale.dtype)
                layer.load_from_tensors({"weight": codes, "weight_scale": scales})
                layer.transform()
                made.append(_call(layer, rows))
        except (AssertionError, AttributeError, ImportError, TypeError, KeyError) as error:
            raise RuntimeError(f"humming: {_line(error)}") from error
        return made


@functools.cache
def humming_missing() -> str:
    """Why humming cannot be used here, or an empty string; imports it."""
    if util.find_spec("humming") is None:
        return "not installed: pip install humming-kernels"
    try:
        import_module("humming.layer")
    except Exception as error:  # its import compiles and looks for CUDA: anything may be raised
        return f"installed, but its import fails: {_line(error)}"
    return ""


def _try_out(case: Case, rows: Sequence[int], chosen: Sequence[int]) -> None:
    """Call a layer of zeros for each M, so that its kernels are compiled."""
    layer = _layer(case)
    layer.weight.zero_()  # the least code of all, which every real weight has too
    layer.weight_scale.zero_()
    layer.transform()
    call = _call(layer, chosen)
    for m in rows:
        call(torch.zeros(m, case.k, dtype=getattr(torch, case.dtype), device="cuda"))
    torch.cuda.synchronize()


def _layer_key(case: Case) -> tuple[Any, ...]:
    return case.format, case.n, case.k, case.group, case.dtype


def _layer(case: Case) -> Any:
    """An empty HummingLayer [N, K] on the current GPU."""
    layer = import_module("humming.layer").HummingLayer(
        shape_n=case.n,
        shape_k=case.k,
        weight_config={"dtype": f"int{case.format[1:]}", "group_size": case.group},
        torch_dtype=getattr(torch, case.dtype),
    )
    return layer.cuda()


def _humming_codes(weight: QuantWeight) -> Tensor:
    """Codes as humming takes them, each plus half its range: int32 [N, K · bits / 32]."""
    bits = int(weight.format[1:])
    pack = import_module("humming.ops").pack_weight
    rows = max(1, _PACKED_AT_ONCE // weight.k)
    parts = []
    for start in range(0, weight.n, rows):
        index = torch.arange(start, min(start + rows, weight.n), device=weight.device)
        codes = weight.select_rows(index).codes().to(torch.int32) + (1 << (bits - 1))
        parts.append(pack(codes.contiguous(), bits))
    return torch.cat(parts)


def _call(layer: Any, rows: Sequence[int]) -> Call:
    config = _tuning(layer, rows)
    return lambda x: layer(x, tuning_config=config)


def _tuning(layer: Any, rows: Sequence[int]) -> str | None:
    """humming's own choice of kernels, cut down to those that these M's use: the others need no compiler.

    None, for all of them, where it cannot be asked.
    """
    if not rows:
        return None
    try:
        ranges = import_module("humming.tune").get_heuristics_config(layer.humming_config)
        wanted = {1, *rows}  # its launcher always looks for the kernel of one row
        kept = [entry for entry in ranges if any(entry[0] < m <= entry[1] for m in wanted)]
        return json.dumps(kept) if kept else None
    except (AttributeError, ImportError, TypeError, ValueError, IndexError, KeyError):
        return None


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}".rstrip(": ")


def _register() -> None:
    add(Tinygemm())
    for format, names in PEERS.items():
        if f"humming_{format}" in names:
            add(Humming(format))


_register()
