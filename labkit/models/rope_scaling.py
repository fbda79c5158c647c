"""RoPE base and scaling of a configuration: read from Hugging Face and GGUF, checked once, nothing dropped.

The result is the ``rope_scaling`` of :class:`labkit.models.config.ModelConfig`; the formulas are in
:mod:`labkit.nn.rope`. Every number is bounded here, so that they cannot overflow or divide by zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from labkit.errors import ModelFileError
from labkit.models.fields import is_number, number, shown

ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn", "factors")

# Far outside published models (bases of 1e4 to 5e10, factors of 1 to 128), far inside float32.
_THETA = (1.0, 1e15)
_POSITIVE = (1e-6, 1e9)
_FACTORS = (1e-6, 1e30)  # a huge divisor leaves a pair unturned

_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "factors": (),
}
# Absent or null is the formula's default; of those marked True, 0 is too (as in transformers).
_OPTIONAL_YARN = {
    "beta_fast": True,
    "beta_slow": True,
    "mscale": True,
    "mscale_all_dim": True,
    "attention_factor": False,
}


def check_theta(theta: object) -> None:
    """Raise ModelFileError unless ``theta`` can be a RoPE base."""
    if not is_number(theta) or not _THETA[0] < theta <= _THETA[1]:  # type: ignore[operator]
        low, high = _THETA
        raise ModelFileError("rope_theta", shown(theta), f"a number above {low:g}, at most {high:g}")


def check_scaling(scaling: object, head_dim: int) -> None:
    """Raise ModelFileError unless ``scaling`` is None or complete, with numbers the formulas can take."""
    if scaling is None:
        return
    if not isinstance(scaling, dict):
        raise ModelFileError("rope_scaling", shown(scaling), "an object, or none")
    kind = scaling.get("rope_type")
    if kind not in ROPE_TYPES:
        raise ModelFileError("rope_scaling type", shown(kind), "default, " + ", ".join(ROPE_TYPES))
    for key in _REQUIRED[kind]:
        _check_positive(scaling, key, kind)
    if kind == "yarn":
        for key, zero in _OPTIONAL_YARN.items():
            value = scaling.get(key)
            if value is not None and not (zero and is_number(value) and value == 0):
                _check_positive(scaling, key, kind)
        if not isinstance(scaling.get("truncate", True), bool):
            raise ModelFileError("rope_scaling truncate", shown(scaling["truncate"]), "true or false")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ModelFileError(
            "rope_scaling high_freq_factor", scaling["high_freq_factor"], "more than low_freq_factor"
        )
    if kind == "dynamic" and head_dim <= 2:
        raise ModelFileError("head_dim", head_dim, "more than 2 for dynamic RoPE scaling")
    if kind == "factors":
        factors = scaling.get("factors")
        low, high = _FACTORS
        good = isinstance(factors, (list, tuple)) and len(factors) == head_dim // 2
        if not good or not all(is_number(f) and low <= f <= high for f in factors):  # type: ignore[union-attr]
            raise ModelFileError(
                "rope_scaling factors", "a bad list", f"{head_dim // 2} numbers from {low:g} to {high:g}"
            )


def _check_positive(scaling: Mapping[str, Any], key: str, kind: str) -> None:
    value, (low, high) = scaling.get(key), _POSITIVE
    if not is_number(value) or not low <= value <= high:  # type: ignore[operator]
        raise ModelFileError(
            f"rope_scaling {key}", shown(value), f"a number from {low:g} to {high:g} for {kind!r}"
        )


def rope_from_hf(record: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Base and scaling of a ``config.json``, in the old spelling or the new.

    Raises:
        ModelFileError: not objects, parameters without a type, one set of parameters a layer kind, or
            a head that is only partly rotated.
    """
    parameters = {key: _object(record, key) for key in ("rope_parameters", "rope_scaling")}
    scaling = parameters["rope_parameters"] or parameters["rope_scaling"]
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = record.get("rope_theta", 10_000.0)
    kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", kind)
    part = scaling.pop("partial_rotary_factor", record.get("partial_rotary_factor", 1.0))
    if part not in (1, None):
        raise ModelFileError("partial_rotary_factor", shown(part), "1 (all of a head is rotated)")
    if kind is None and scaling:
        # Nested objects are one set a layer kind; numbers without a type would be ignored silently.
        raise ModelFileError("rope_scaling type", f"nothing, beside {shown(sorted(scaling))}", "the type")
    if kind is None or kind == "default":
        return theta, None
    context, original = record.get("max_position_embeddings"), "original_max_position_embeddings"
    if kind in ("llama3", "yarn") and scaling.get(original) is None:
        scaling[original] = context
    elif kind == "yarn" and scaling.get("factor") is None:
        if not is_number(context):
            raise ModelFileError("max_position_embeddings", shown(context), "a whole number")
        _check_positive(scaling, original, kind)
        scaling["factor"] = context / scaling[original]  # type: ignore[operator]
    return theta, {**scaling, "rope_type": kind}


def _object(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ModelFileError(key, shown(value), "an object, or null")
    return dict(value or {})


def rope_from_gguf(metadata: Mapping[str, Any], prefix: str, context: int) -> dict[str, Any] | None:
    """Scaling of the "{arch}.rope.*" keys, with llama.cpp's defaults.

    A factor without a type is linear; ``rope.scale_linear`` is the old name of the factor; 0 and 1
    scale nothing. The two attention factors multiply what YaRN computes from its factor.

    Raises:
        ModelFileError: another type, or a key or value that this decoder has no meaning for.
    """
    here = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(f"{prefix}rope.")}
    for key in ("rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned"):
        here.pop(key, None)  # read by the caller; "finetuned" says how the model was made

    def take(key: str, default: float) -> float:
        value = number(metadata, prefix + key, default)
        here.pop(key, None)
        return value

    kind = here.pop("rope.scaling.type", "linear")
    if not isinstance(kind, str) or kind not in ("none", "", "linear", "yarn"):
        raise ModelFileError(prefix + "rope.scaling.type", shown(kind), "none, linear or yarn")
    old = take("rope.scale_linear", 0.0)
    factor = take("rope.scaling.factor", old) or 1.0
    original = here.pop("rope.scaling.original_context_length", context)
    neutral: dict[str, tuple[float, ...]] = {
        "rope.scaling.yarn_ext_factor": (1.0, -1.0),  # -1: as the type wants it
        "rope.scaling.yarn_log_multiplier": (0.0,),
        "rope.scaling.alpha": (0.0, 1.0),
    }
    attention = take("rope.scaling.attn_factor", 1.0) * take("rope.scaling.yarn_attn_factor", 1.0)
    scaling: dict[str, Any] | None = None
    if kind == "yarn":
        scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            key = f"rope.scaling.yarn_{name}"
            if key in here:
                scaling[name] = take(key, 0.0)
        if prefix + "rope.scaling.factor" not in metadata and not old:
            scaling["factor"] = None  # refused: a YaRN without its factor is not a YaRN
        elif attention != 1.0:
            scaling["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0)
    else:
        if attention != 1.0:
            raise ModelFileError(
                f"{prefix}rope.scaling.attn_factor", attention, "1, or the scaling type yarn"
            )
        for name in ("beta_fast", "beta_slow"):
            here.pop(f"rope.scaling.yarn_{name}", None)  # parts of a formula that is not used
        if kind == "linear" and factor != 1.0:
            scaling = {"rope_type": kind, "factor": factor}
    for key, values in neutral.items():
        if key in here and take(key, values[0]) not in values:
            raise ModelFileError(prefix + key, shown(metadata[prefix + key]), f"{values[0]:g}, or none")
    if here:
        key = min(here)
        raise ModelFileError(prefix + key, shown(here[key]), "a key that this decoder has a meaning for")
    return scaling
