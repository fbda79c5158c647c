"""Overrides of the dispatch table, as flat parameters: ``{"w4.small_batch_up_to": 4}``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.errors import refuse, require

_SINGLE, _SMALL, _TILED = "gemv_single_row", "gemv_small_batch", "gemm_tiled"
_BOUNDARIES = {"single_row_up_to": (_SINGLE, _SMALL), "small_batch_up_to": (_SMALL, _TILED)}


@dataclass(frozen=True, slots=True)
class Override:
    """One change.

    Attributes:
        key: the parameter it came from.
        kind: "m_min", "m_max", "disable" or "force".
        value: a bound, the kernel names, or the kernel name.
        kernel: whose bound; empty for disable and force.
        format: whose rows; None for every format.
    """

    key: str
    kind: str
    value: Any
    kernel: str = ""
    format: str | None = None


def parse_overrides(
    params: Mapping[str, Any], kernels: Collection[str], formats: Collection[str]
) -> Iterator[Override]:
    """Read and check parameters; keys are listed at DispatchTable.from_params.

    Raises:
        InputError: an unknown key, kernel or format, or a value of the wrong type, by name.
    """
    require(isinstance(params, Mapping), "overrides", type(params).__name__, "a dict of parameters")
    for key, value in params.items():
        require(isinstance(key, str), "overrides", repr(key), "text keys")
        if key == "disable":
            yield Override(key, "disable", _kernel_names(key, value, kernels))
            continue
        if key == "force":
            if value is None or value == "":
                continue
            names = _kernel_names(key, value, kernels)
            require(len(names) == 1, key, repr(value), "one kernel name")
            yield Override(key, "force", names[0])
            continue
        head, _, rest = key.partition(".")
        format, name = (head, rest) if head in formats else (None, key)
        if name in _BOUNDARIES:
            below, above = _BOUNDARIES[name]
            bound = _whole(key, value, least=0)
            yield Override(key, "m_max", bound, below, format)
            yield Override(key, "m_min", bound + 1, above, format)
            continue
        kernel, _, bound_name = name.partition(".")
        if kernel not in kernels or bound_name not in ("m_min", "m_max"):
            refuse(
                f"override {key!r}",
                repr(value),
                "a key such as single_row_up_to, w4.small_batch_up_to, gemm_tiled.m_min, disable or force; "
                f"kernels: {', '.join(sorted(kernels))}; formats: {', '.join(formats)}",
            )
        if bound_name == "m_max" and value is None:
            yield Override(key, "m_max", None, kernel, format)
        else:
            yield Override(key, bound_name, _whole(key, value, least=0), kernel, format)


def _whole(key: str, value: Any, least: int) -> int:
    require(
        isinstance(value, int) and not isinstance(value, bool) and value >= least,
        f"override {key!r}",
        repr(value),
        f"a whole number >= {least}",
    )
    return value


def _kernel_names(key: str, value: Any, kernels: Collection[str]) -> list[str]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    require(
        isinstance(value, list | tuple) and all(isinstance(name, str) for name in value),
        f"override {key!r}",
        repr(value),
        "kernel names, as a list or a text with commas",
    )
    for name in value:
        require(
            name in kernels,
            f"override {key!r}",
            repr(name),
            "one of " + ", ".join(sorted(kernels)),
        )
    return list(value)
