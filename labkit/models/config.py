"""Architecture of a Llama/Qwen2/Qwen3 model: one frozen record, validated once, read from three places."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from labkit.errors import ModelFileError
from labkit.models.fields import is_number, is_whole, number, shown, token_ids, truth, whole
from labkit.models.rope_scaling import ROPE_TYPES, check_scaling, check_theta, rope_from_gguf, rope_from_hf

__all__ = ["ARCHITECTURES", "ROPE_TYPES", "ModelConfig"]

ARCHITECTURES = ("llama", "qwen2", "qwen3")

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
                "architecture", shown(self.architecture), "one of " + ", ".join(ARCHITECTURES)
            )
        for name, most in _LIMITS.items():
            value = getattr(self, name)
            if not is_whole(value) or not 1 <= value <= most:
                raise ModelFileError(name, shown(value), f"a whole number from 1 to {most:,}")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ModelFileError("head_dim", self.head_dim, "an even number (RoPE turns pairs)")
        check_theta(self.rope_theta)
        if not is_number(self.rms_norm_eps) or not 0 < self.rms_norm_eps <= 1:
            raise ModelFileError("rms_norm_eps", shown(self.rms_norm_eps), "a number above 0, at most 1")
        check_scaling(self.rope_scaling, self.head_dim)
        for name in ("tie_word_embeddings", "attention_bias", "output_bias", "mlp_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ModelFileError(name, shown(getattr(self, name)), "true or false")
        token_ids(self.bos_token_id, "bos_token_id")
        token_ids(self.eos_token_ids, "eos_token_ids")
        if isinstance(self.bos_token_id, (list, tuple)) or not isinstance(self.eos_token_ids, tuple):
            raise ModelFileError("bos/eos token ids", "a list for one, or one for a list", "one and a tuple")

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
                "config.json model_type", shown(architecture), "one of " + ", ".join(ARCHITECTURES)
            )
        _refuse_unsupported(record)
        heads = whole(record, "num_attention_heads", least=1)
        hidden = whole(record, "hidden_size")
        head_dim = record.get("head_dim")
        if head_dim is None:
            # Qwen3's default width is 128 whatever the hidden size (transformers, Qwen3Config).
            head_dim = 128 if architecture == "qwen3" else hidden // heads
        bias = truth(record, "attention_bias")
        theta, scaling = rope_from_hf(record)
        kv_heads = record.get("num_key_value_heads")
        return cls(
            architecture=architecture,
            vocab_size=whole(record, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=whole(record, "intermediate_size"),
            num_layers=whole(record, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=record.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=record.get("tie_word_embeddings", False),
            attention_bias=architecture == "qwen2" or bias,
            output_bias=architecture != "qwen2" and bias,
            mlp_bias=architecture == "llama" and truth(record, "mlp_bias"),
            qk_norm=architecture == "qwen3",
            max_position_embeddings=record.get("max_position_embeddings", 2_048),
            bos_token_id=record.get("bos_token_id"),
            eos_token_ids=token_ids(record.get("eos_token_id"), "eos_token_id"),
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
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise ModelFileError(
                "general.architecture", shown(architecture), "one of " + ", ".join(ARCHITECTURES)
            )
        prefix = f"{architecture}."

        def need(key: str, default: int | None = None, *, least: int | None = None) -> int:
            return whole(metadata, prefix + key, default, least=least)

        heads, hidden = need("attention.head_count", least=1), need("embedding_length")
        head_dim = need("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if need(key, head_dim) != head_dim:
                raise ModelFileError(prefix + key, need(key), f"head_dim = {head_dim}")
        if need("expert_count", 0):
            raise ModelFileError(prefix + "expert_count", need("expert_count"), "no mixture of experts")
        ends = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
        eos = [whole(metadata, key, least=0) for key in ends if metadata.get(key) is not None]
        bos = "tokenizer.ggml.bos_token_id"
        context = need("context_length")
        return cls(
            architecture=architecture,
            vocab_size=need("vocab_size", vocab_size),
            hidden_size=hidden,
            intermediate_size=need("feed_forward_length"),
            num_layers=need("block_count"),
            num_heads=heads,
            num_kv_heads=need("attention.head_count_kv", heads),
            head_dim=head_dim,
            rope_theta=number(metadata, prefix + "rope.freq_base", 10_000.0),
            rope_scaling=rope_from_gguf(metadata, prefix, context),
            # The key is required: a wrong epsilon gives a model that is subtly, silently wrong.
            rms_norm_eps=number(metadata, prefix + "attention.layer_norm_rms_epsilon"),
            tie_word_embeddings=tied,
            attention_bias="qkv" in biases,
            output_bias="output" in biases,
            mlp_bias="mlp" in biases,
            qk_norm=architecture == "qwen3",
            max_position_embeddings=context,
            bos_token_id=whole(metadata, bos, least=0) if metadata.get(bos) is not None else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )


def _refuse_unsupported(record: Mapping[str, Any]) -> None:
    activation = record.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelFileError("config.json hidden_act", shown(activation), "'silu'")
    kinds = record.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ModelFileError("config.json layer_types", shown(kinds), "a list of names")
    layers, first_sliding = record.get("num_hidden_layers"), record.get("max_window_layers", 28)
    windowed = truth(record, "use_sliding_window")
    slides = any(kind != "full_attention" for kind in kinds or ())
    if not kinds and windowed and is_whole(layers):
        slides = not is_whole(first_sliding) or layers > first_sliding  # type: ignore[operator]
    if slides:
        raise ModelFileError("config.json", "sliding-window attention", "full attention in every layer")
