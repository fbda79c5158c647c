"""The decoder of the Llama/Qwen2/Qwen3 family in torch: the meaning of every faster path.

B batch, T new positions (of a ragged step: of all its rows), d hidden size, H query heads, Hkv key/value
heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.cache.paged import PagedKV
from labkit.cache.static import StaticCache
from labkit.cache.views import KVView
from labkit.errors import InputError, require
from labkit.models.config import ModelConfig
from labkit.models.model import EMBEDDING, FINAL_NORM, HEAD, Weight, check_weights, layer_prefix
from labkit.nn.angles import Angles
from labkit.nn.attention import CausalAttention, PagedAttention, attention_kernels
from labkit.nn.linear import QuantLinear
from labkit.nn.norms import RMSNorm
from labkit.nn.rope import Rotary
from labkit.quant.formats import GroupedWeight, QuantWeight, concat_rows
from labkit.quant.packing import describe

Attend: TypeAlias = Callable[[int, Tensor, RMSNorm | None, RMSNorm | None], Tensor]
"""(layer, [..., (H + 2 Hkv) D], norms of the heads) to [..., H D]: rope, append and attention."""

_QUANTISED = (QuantWeight, GroupedWeight)


class DenseLinear(nn.Module):
    """``x @ weight.T + bias`` with a float weight [N, K]; no gradient, no random initialisation."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return F.linear(x, self.weight, self.bias)


class Projection(nn.Module):
    """Matrices that read the same input: one fused product where their formats allow, else one each.

    Args:
        names: canonical names, "....weight", in the order of the output columns.
        weights: one for each name.
        biases: one for each name, or all None.
        fuse: join the rows of equal formats into one weight.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        *,
        device: torch.device,
        dtype: torch.dtype,
        fuse: bool = True,
    ) -> None:
        super().__init__()
        rows = [int(weight.shape[0]) for weight in weights]
        joined = _join(weights) if fuse and len(weights) > 1 else None
        if joined is not None:
            bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
            self.parts = nn.ModuleList([_linear(joined, bias, device, dtype)])
            self.places = _places(names, rows)
        else:
            self.parts = nn.ModuleList(
                [_linear(weight, bias, device, dtype) for weight, bias in zip(weights, biases, strict=True)]
            )
            self.places = [(name, part, 0, n) for part, (name, n) in enumerate(zip(names, rows, strict=True))]
        self._only = self.parts[0] if len(self.parts) == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., sum of N], the outputs side by side."""
        if self._only is not None:
            return self._only(x)
        return torch.cat([part(x) for part in self.parts], -1)

    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """The matrices and biases again, one by one, under their canonical names."""
        for name, part, start, stop in self.places:
            linear: Any = self.parts[part]
            weight = linear.weight
            if start or stop != weight.shape[0]:
                if isinstance(weight, _QUANTISED):
                    weight = weight.select_rows(torch.arange(start, stop))
                else:
                    weight = weight[start:stop]
            yield name, weight.detach() if isinstance(weight, Tensor) else weight
            if linear.bias is not None:
                yield name.removesuffix("weight") + "bias", linear.bias[start:stop].detach()


class Layer(nn.Module):
    """One decoder layer: attention, then the gated MLP, each on a normalised input and added back."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: Mapping[str, Any],
        *,
        device: torch.device,
        dtype: torch.dtype,
        fuse: bool,
    ) -> None:
        super().__init__()
        self.index = index
        prefix = layer_prefix(index)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights[prefix + name].to(device), config.rms_norm_eps, dtype=dtype)

        def projection(block: str, *parts: str) -> Projection:
            names = [f"{prefix}{block}.{part}.weight" for part in parts]
            biases = [weights.get(name.removesuffix("weight") + "bias") for name in names]
            matrices = [weights[name] for name in names]
            return Projection(names, matrices, biases, device=device, dtype=dtype, fuse=fuse)

        self.input_norm = norm("input_layernorm.weight")
        self.mlp_norm = norm("post_attention_layernorm.weight")
        self.qkv = projection("self_attn", "q_proj", "k_proj", "v_proj")
        self.out = projection("self_attn", "o_proj")
        self.gate_up = projection("mlp", "gate_proj", "up_proj")
        self.down = projection("mlp", "down_proj")
        self.q_norm = norm("self_attn.q_norm.weight") if config.qk_norm else None
        self.k_norm = norm("self_attn.k_norm.weight") if config.qk_norm else None

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x [..., d] to the same; ``attend`` knows what the tokens attend to (labkit.nn.attention)."""
        qkv = self.qkv(self.input_norm(x))
        x = x + self.out(attend(self.index, qkv, self.q_norm, self.k_norm))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate).mul_(up))


class Decoder(nn.Module):
    """Token ids in, next-token logits out; inference only.

    Build it with :meth:`from_weights`. Attributes: ``config``, ``device``, ``dtype`` (activations),
    ``layers``, ``embedding`` (the table, quantised or float; also the head when tied).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        fuse: bool = True,
    ) -> None:
        super().__init__()
        floats = (torch.float16, torch.bfloat16, torch.float32)
        require(dtype in floats, "dtype", dtype, "float16, bfloat16 or float32")
        check_weights(config, weights, "weights")
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.layers = nn.ModuleList(
            Layer(config, i, weights, device=self.device, dtype=dtype, fuse=fuse)
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(weights[FINAL_NORM].to(self.device), config.rms_norm_eps, dtype=dtype)
        self.embedding = _placed(weights[EMBEDDING], self.device, dtype)
        tied = config.tie_word_embeddings
        self.head_linear = _linear(self.embedding if tied else weights[HEAD], None, self.device, dtype)
        self.rotary = Rotary(
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
            context=config.max_position_embeddings,
            device=self.device,
            dtype=dtype,
        )
        self.angles = Angles(config, self.device)

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        fuse: bool = True,
    ) -> Decoder:
        """Build from canonical weights (see :mod:`labkit.models.model`).

        Args:
            device, dtype: where and in which dtype activations live; float weights are converted.
            fuse: compute q, k, v in one product, gate and up in another, where formats allow.

        Raises:
            ModelFileError: a weight is missing, unknown or of the wrong shape.
        """
        return cls(config, weights, device=device, dtype=dtype, fuse=fuse)

    def new_cache(
        self,
        capacity: int,
        batch: int = 1,
        *,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
    ) -> StaticCache:
        """An empty cache of ``batch`` rows for this decoder; ``kv_dtype`` torch.int8 stores INT8."""
        return StaticCache(
            self.config,
            capacity,
            batch=batch,
            device=self.device,
            dtype=self.dtype,
            block_size=block_size,
            kv_dtype=kv_dtype,
        )

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, cache: StaticCache | None = None) -> Tensor:
        """Final hidden states [B, T, d] of ``tokens`` int64 [B, T], after the last norm.

        With a cache, the tokens stand behind the cached positions and are added to it.

        Raises:
            InputError: wrong shape or dtype, an id outside the vocabulary, or a full cache.
        """
        self._check_tokens(tokens)
        batch, length = tokens.shape
        if cache is None:
            tables = self.rotary.tables(0, length)
            return self._run(tokens, CausalAttention(self.config, *tables))
        cache.check_append(batch, length)
        x = self._run(tokens.reshape(-1), self._paged(cache.kv, cache.view(length), None))
        cache.advance(length)
        return x.view(batch, length, -1)

    @torch.inference_mode()
    def step(self, tokens: Tensor, kv: PagedKV, view: KVView, *, kernels: bool | None = None) -> Tensor:
        """Final hidden states [T, d] of one step: any mix of prompt chunks and decoding rows.

        Args:
            tokens: int64 [T], row after row as ``view`` has them. Ids that are on a GPU are not looked at.
            kv: the storage; the new keys and values are written to it.
            view: what the rows hold and where their tokens go.
            kernels: None lets the device decide who attends, see :class:`PagedAttention`.

        Raises:
            InputError: another number of tokens than the view's, an id outside the vocabulary, or a
                storage of another model, dtype, device or block size.
        """
        good = isinstance(tokens, Tensor) and tokens.dtype == torch.int64 and tokens.shape == (view.tokens,)
        require(good, "tokens", describe(tokens), f"int64 [{view.tokens}], as the view says")
        if tokens.device.type == "cpu":
            self._check_ids(tokens)
        return self._run(tokens, self._paged(kv, view, kernels))

    def _paged(self, kv: PagedKV, view: KVView, kernels: bool | None) -> PagedAttention:
        fits = kv.dtype == self.dtype and kv.device.type == self.device.type
        require(fits, "kv", f"{kv.dtype} on {kv.device}", f"{self.dtype} on {self.device}")
        return PagedAttention(self.config, kv, view, self.rotary, self.angles, kernels=kernels)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows [..., d] of the embedding table for token ids on the decoder's device."""
        if isinstance(self.embedding, Tensor):
            return F.embedding(tokens, self.embedding)
        return self.embedding.gather_rows(tokens, self.dtype)

    def _run(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens.to(self.device))
        with attention_kernels(self.device):
            for layer in self.layers:
                x = layer(x, attend)
        return self.norm(x)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., d]."""
        return self.head_linear(hidden)

    def forward(self, tokens: Tensor, cache: StaticCache | None = None, *, last_only: bool = False) -> Tensor:
        """Logits [B, T, V] in ``dtype``, or [B, 1, V] of the last position with ``last_only``."""
        hidden = self.hidden(tokens, cache)
        return self.head(hidden[:, -1:] if last_only else hidden)

    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """Every weight under its canonical name, unfused, one at a time."""
        yield EMBEDDING, self.embedding
        for module in self.layers:
            assert isinstance(module, Layer)
            prefix = layer_prefix(module.index)
            for projection in (module.qkv, module.out, module.gate_up, module.down):
                yield from projection.named_weights()
            yield prefix + "input_layernorm.weight", module.input_norm.weight.detach()
            yield prefix + "post_attention_layernorm.weight", module.mlp_norm.weight.detach()
            if module.q_norm is not None and module.k_norm is not None:
                yield prefix + "self_attn.q_norm.weight", module.q_norm.weight.detach()
                yield prefix + "self_attn.k_norm.weight", module.k_norm.weight.detach()
        yield FINAL_NORM, self.norm.weight.detach()
        if not self.config.tie_word_embeddings:
            weight: Any = self.head_linear.weight
            yield HEAD, weight.detach() if isinstance(weight, Tensor) else weight

    def weight_bytes(self) -> int:
        """Bytes of all weights as stored (packed codes, scales, offsets), dense copies not counted."""
        total = self.embedding.nbytes
        for module in self.modules():
            tied = self.config.tie_word_embeddings and module is self.head_linear
            if isinstance(module, DenseLinear | QuantLinear | RMSNorm) and not tied:
                bias = getattr(module, "bias", None)
                total += module.weight.nbytes + (0 if bias is None else bias.nbytes)
        return total

    def _check_tokens(self, tokens: Tensor) -> None:
        good = isinstance(tokens, Tensor) and tokens.dtype == torch.int64 and tokens.ndim == 2
        if not good or tokens.numel() == 0:
            raise InputError("tokens", describe(tokens), "int64 [B, T] with B and T at least 1")
        self._check_ids(tokens)

    def _check_ids(self, tokens: Tensor) -> None:
        low, high = (int(v) for v in tokens.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise InputError(
                "tokens", f"ids from {low} to {high}", f"ids from 0 to {self.config.vocab_size - 1}"
            )


def _places(names: Sequence[str], rows: Sequence[int]) -> list[tuple[str, int, int, int]]:
    places, start = [], 0
    for name, n in zip(names, rows, strict=True):
        places.append((name, 0, start, start + n))
        start += n
    return places


def _join(weights: Sequence[Any]) -> Weight | None:
    """One weight with the rows of all, or None when their formats differ."""
    if all(isinstance(weight, Tensor) for weight in weights):
        return torch.cat(list(weights)) if len({weight.dtype for weight in weights}) == 1 else None
    if all(isinstance(weight, QuantWeight) for weight in weights):
        try:
            return concat_rows(list(weights))
        except InputError:
            return None  # another format, group or column order: computed one by one
    return None


def _placed(weight: Weight, device: torch.device, dtype: torch.dtype) -> Weight:
    if isinstance(weight, Tensor):
        return weight.to(device, dtype).contiguous()
    return weight.to(device)


def _linear(weight: Weight, bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> nn.Module:
    placed = _placed(weight, device, dtype)
    if bias is not None:
        bias = bias.to(device, dtype)
    return DenseLinear(placed, bias) if isinstance(placed, Tensor) else QuantLinear(placed, bias)
