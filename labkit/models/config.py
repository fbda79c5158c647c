"""Architecture of a Llama/Qwen2/Qwen3 model: one frozen record, validated once, read from three places."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from labkit.errors import ModelFileError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn", "factors")

# A header can claim any number; these bounds (an order of magnitude above published models of this
# family) keep a lying one from asking for terabytes before its weights are even looked at.
_LIMITS = {
    "vocab_size": 4_000_000,
    "hidden_size": 65_536,
    "intermediate_size": 1_048_576,
    "num_layers": 1_024,
    "num_heads": 1_024,
    "num_kv_heads": 1_024,
    "head_dim": 1_024,
    "max_position_embeddings": 16_777_216,
}
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "factors": (),
}


@dataclass(frozen=True)
class ModelConfig:
    """One model's architecture.

    Attributes:
        architecture: "llama" | "qwen2" | "qwen3".
        num_heads, num_kv_heads: query and key/value heads (grouped-query attention).
        head_dim: width of a head; even, since RoPE turns pairs.
        rope_theta: RoPE base.
        rope_scaling: None, or {"rope_type": "linear" | "dynamic" | "llama3" | "yarn" | "factors", ...}
            with the numbers of Hugging Face configurations; "factors" holds "factors", one divisor per
            frequency (GGUF stores the Llama-3 scaling that way).
        attention_bias: q, k and v have a bias; output_bias: o_proj too; mlp_bias: gate, up and down too.
        qk_norm: RMSNorm over each head of q and k before RoPE (Qwen3).
        max_position_embeddings: trained context, in tokens.
        bos_token_id, eos_token_ids: None / empty when the source does not say.

    Raises:
        ModelFileError: a field is outside what this family can be.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2_048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelFileError(
                "architecture", repr(self.architecture), "one of " + ", ".join(ARCHITECTURES)
            )
        for name, most in _LIMITS.items():
            value = getattr(self, name)
            if not _is_int(value) or not 1 <= value <= most:
                raise ModelFileError(name, repr(value), f"a whole number from 1 to {most:,}")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ModelFileError("head_dim", self.head_dim, "an even number (RoPE turns pairs)")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not _is_number(value) or value <= 0:
                raise ModelFileError(name, repr(value), "a finite number above 0")
        _check_rope_scaling(self.rope_scaling, self.head_dim)
        for name in ("tie_word_embeddings", "attention_bias", "output_bias", "mlp_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ModelFileError(name, repr(getattr(self, name)), "true or false")
        tokens = [*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))]
        for token in tokens:
            # Some published configurations name ids past the embedding; those are never produced.
            if not _is_int(token) or token < 0:
                raise ModelFileError("bos/eos token id", repr(token), "a whole number of at least 0")

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record that :meth:`from_dict` reads back."""
        record = asdict(self)
        record["eos_token_ids"] = list(self.eos_token_ids)
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ModelConfig:
        """Read what :meth:`to_dict` wrote; unknown or missing fields are refused."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(record) - known)
        if unknown:
            raise ModelFileError("config", f"unknown fields {unknown}", "fields of ModelConfig")
        values = dict(record)
        try:
            values["eos_token_ids"] = tuple(values.get("eos_token_ids", ()))
            return cls(**values)
        except TypeError as error:
            raise ModelFileError("config", str(error), "a complete ModelConfig record") from error

    @classmethod
    def from_hf_dict(cls, record: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face ``config.json`` (both the old ``rope_scaling`` and the new
        ``rope_parameters`` spelling).

        Raises:
            ModelFileError: another model type, a feature this decoder lacks (sliding-window attention,
                partial rotary, another activation), or a field that is missing or out of range.
        """
        architecture = record.get("model_type")
        if architecture not in ARCHITECTURES:
            raise ModelFileError(
                "config.json model_type", repr(architecture), "one of " + ", ".join(ARCHITECTURES)
            )
        _refuse_unsupported(record)
        heads = _integer(record, "num_attention_heads")
        hidden = _integer(record, "hidden_size")
        if heads < 1:
            raise ModelFileError("config.json num_attention_heads", heads, "a whole number of at least 1")
        head_dim = record.get("head_dim")
        if head_dim is None:
            # Qwen3's default width is 128 whatever the hidden size (transformers, Qwen3Config).
            head_dim = 128 if architecture == "qwen3" else hidden // heads
        bias = bool(record.get("attention_bias", False))
        theta, scaling = _hf_rope(record)
        kv_heads = record.get("num_key_value_heads")
        return cls(
            architecture=architecture,
            vocab_size=_integer(record, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(record, "intermediate_size"),
            num_layers=_integer(record, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=record.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=record.get("tie_word_embeddings", False),
            attention_bias=architecture == "qwen2" or bias,
            output_bias=architecture != "qwen2" and bias,
            mlp_bias=architecture == "llama" and bool(record.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
            max_position_embeddings=record.get("max_position_embeddings", 2_048),
            bos_token_id=record.get("bos_token_id"),
            eos_token_ids=_token_ids(record.get("eos_token_id")),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, vocab_size: int, tied: bool, biases: Collection[str] = ()
    ) -> ModelConfig:
        """Read GGUF metadata (key -> Python value, arrays as sequences).

        Args:
            metadata: the key/value part of the file.
            vocab_size: rows of the embedding tensor (the metadata may leave it out).
            tied: the file has no "output.weight" tensor.
            biases: which of "qkv", "output", "mlp" biases the file has tensors for.
        """
        architecture = metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ModelFileError(
                "general.architecture", repr(architecture), "one of " + ", ".join(ARCHITECTURES)
            )
        prefix = f"{architecture}."

        def get(key: str, default: Any = None) -> Any:
            return metadata.get(prefix + key, default)

        def need(key: str) -> int:
            return _integer(metadata, prefix + key)

        heads, hidden = need("attention.head_count"), need("embedding_length")
        if heads < 1:
            raise ModelFileError(prefix + "attention.head_count", heads, "a whole number of at least 1")
        head_dim = get("attention.key_length", hidden // heads)
        if get("attention.value_length", head_dim) != head_dim:
            raise ModelFileError(
                prefix + "attention.value_length", get("attention.value_length"), f"key_length = {head_dim}"
            )
        if get("rope.dimension_count", head_dim) != head_dim:
            raise ModelFileError(
                prefix + "rope.dimension_count", get("rope.dimension_count"), f"head_dim = {head_dim}"
            )
        if get("expert_count", 0):
            raise ModelFileError(prefix + "expert_count", get("expert_count"), "no mixture of experts")
        ends = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        eos = [end for end in ends if end is not None]
        context = need("context_length")
        return cls(
            architecture=architecture,
            vocab_size=get("vocab_size", vocab_size),
            hidden_size=hidden,
            intermediate_size=need("feed_forward_length"),
            num_layers=need("block_count"),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", heads),
            head_dim=head_dim,
            rope_theta=get("rope.freq_base", 10_000.0),
            rope_scaling=_gguf_rope(get, context),
            # The key is required: a wrong epsilon gives a model that is subtly, silently wrong.
            rms_norm_eps=_number(metadata, prefix + "attention.layer_norm_rms_epsilon"),
            tie_word_embeddings=tied,
            attention_bias="qkv" in biases,
            output_bias="output" in biases,
            mlp_bias="mlp" in biases,
            qk_norm=architecture == "qwen3",
            max_position_embeddings=context,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _integer(record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if not _is_int(value):
        raise ModelFileError(key, "nothing" if value is None else repr(value), "a whole number")
    return int(value)  # type: ignore[arg-type]


def _number(record: Mapping[str, Any], key: str) -> float:
    value = record.get(key)
    if not _is_number(value):
        raise ModelFileError(key, "nothing" if value is None else repr(value), "a finite number")
    return float(value)  # type: ignore[arg-type]


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)  # type: ignore[return-value]


def _check_rope_scaling(scaling: dict[str, Any] | None, head_dim: int) -> None:
    if scaling is None:
        return
    kind = scaling.get("rope_type") if isinstance(scaling, dict) else scaling
    if kind not in ROPE_TYPES:
        raise ModelFileError("rope_scaling type", repr(kind), "default, " + ", ".join(ROPE_TYPES))
    for key in _ROPE_NUMBERS[kind]:
        value: Any = scaling.get(key)
        if not _is_number(value) or value <= 0:
            raise ModelFileError(f"rope_scaling {key}", repr(value), f"a number above 0 for {kind!r}")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ModelFileError(
            "rope_scaling high_freq_factor", scaling["high_freq_factor"], "more than low_freq_factor"
        )
    if kind == "dynamic" and head_dim <= 2:
        raise ModelFileError("head_dim", head_dim, "more than 2 for dynamic RoPE scaling")
    if kind == "factors":
        factors = scaling.get("factors")
        good = isinstance(factors, (list, tuple)) and len(factors) == head_dim // 2
        if not good or not all(_is_number(f) and f > 0 for f in factors):  # type: ignore[union-attr]
            raise ModelFileError("rope_scaling factors", "a bad list", f"{head_dim // 2} numbers above 0")


def _hf_rope(record: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    parameters = record.get("rope_parameters") or {}
    scaling = dict(parameters or record.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = record.get("rope_theta", 10_000.0)
    kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", kind)
    if scaling.pop("partial_rotary_factor", record.get("partial_rotary_factor", 1.0)) not in (1, None):
        raise ModelFileError("partial_rotary_factor", "less than 1", "1 (all of a head is rotated)")
    if kind in (None, "default"):
        return theta, None
    if kind == "yarn" and scaling.get("factor") is None and "original_max_position_embeddings" in scaling:
        original = scaling["original_max_position_embeddings"]
        scaling["factor"] = record.get("max_position_embeddings", 0) / original if original else None
    if kind in ("llama3", "yarn") and scaling.get("original_max_position_embeddings") is None:
        scaling["original_max_position_embeddings"] = record.get("max_position_embeddings")
    return theta, {"rope_type": kind, **scaling}


def _gguf_rope(get: Any, context: int) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none")
    if kind in ("none", ""):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelFileError("rope.scaling.type", repr(kind), "none, linear or yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": get("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = get("rope.scaling.original_context_length", context)
    return scaling


def _refuse_unsupported(record: Mapping[str, Any]) -> None:
    activation = record.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelFileError("config.json hidden_act", repr(activation), "'silu'")
    layers = record.get("num_hidden_layers")
    kinds = record.get("layer_types") or ()
    first_sliding = record.get("max_window_layers", 28)
    slides = any(kind != "full_attention" for kind in kinds)
    if not kinds and record.get("use_sliding_window") and _is_int(layers):
        slides = not _is_int(first_sliding) or layers > first_sliding  # type: ignore[operator]
    if slides:
        raise ModelFileError("config.json", "sliding-window attention", "full attention in every layer")
