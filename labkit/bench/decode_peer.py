"""The peer of the decode step: a gpt-fast style model under torch.compile, tinygemm's int4 products.

bfloat16, q k v and gate up fused, a static cache, SDPA with a mask over the whole of it, greedy. It is
compiled whole and then captured in a CUDA graph of a step, so that no work of the host is in its time
either: torch.compile's own graphs ("reduce-overhead") leave some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.bench import timing
from labkit.bench.random_model import RandomModel
from labkit.models.model import layer_prefix
from labkit.nn.rope import Rotary
from labkit.quant.formats import QuantWeight, concat_rows

MODE = "max-autotune-no-cudagraphs"
DTYPE = torch.bfloat16
_INNER_K_TILES = 8
_GROUPS = (32, 64, 128, 256)


def why_not(model: RandomModel) -> str:
    """Why it cannot run this model, or an empty string."""
    config = model.config
    if not model.device.startswith("cuda"):
        return "CUDA only"
    if model.format != "w4":
        return "tinygemm has W4 only"
    if model.group not in _GROUPS:
        return f"group size {model.group}; tinygemm has 32, 64, 128 and 256"
    if config.qk_norm or config.output_bias or config.mlp_bias:
        return "no norms of heads and no biases but those of q, k and v"
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if any(width % (16 * _INNER_K_TILES) for width in widths):
        return "tinygemm needs K % 128 == 0"
    return ""


class Int4Linear(nn.Module):
    """tinygemm: bfloat16 [M, K] -> [M, N]."""

    def __init__(self, weight: QuantWeight) -> None:
        super().__init__()
        self.group = weight.group_size
        codes = (weight.codes() + 8).to(torch.uint8)
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        self.packed = _kept(self, "packed", torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_K_TILES))
        scales = weight.scales.t().bfloat16()
        both = torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous()
        self.scales = _kept(self, "scales", both)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, self.packed, self.group, self.scales)


def _kept(module: nn.Module, name: str, value: Tensor) -> Tensor:
    """A buffer: what the compiler takes as the model's own memory."""
    module.register_buffer(name, value, persistent=False)
    return value


class _Layer(nn.Module):
    def __init__(self, model: RandomModel, index: int, batch: int, capacity: int) -> None:
        super().__init__()
        config, weights, prefix = model.config, model.layer(index), layer_prefix(index)
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps

        def joined(*names: str) -> Int4Linear:
            return Int4Linear(concat_rows([weights[f"{prefix}{name}.weight"] for name in names]))

        qkv = [f"self_attn.{part}_proj" for part in "qkv"]
        self.qkv, self.out = joined(*qkv), joined("self_attn.o_proj")
        self.gate_up, self.down = joined("mlp.gate_proj", "mlp.up_proj"), joined("mlp.down_proj")
        bias = [weights[f"{prefix}{name}.bias"] for name in qkv] if config.attention_bias else []
        self.bias = _kept(self, "bias", torch.cat(bias).to(DTYPE)) if bias else None
        self.input_norm = _kept(self, "input_norm", weights[prefix + "input_layernorm.weight"].to(DTYPE))
        after = weights[prefix + "post_attention_layernorm.weight"].to(DTYPE)
        self.mlp_norm = _kept(self, "mlp_norm", after)
        shape = (batch, config.num_kv_heads, capacity, config.head_dim)
        self.keys, self.values = (
            _kept(self, name, torch.zeros(shape, dtype=DTYPE, device=model.device))
            for name in ("keys", "values")
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        batch, width = x.shape
        qkv = self.qkv(F.rms_norm(x, (width,), self.input_norm, self.eps))
        if self.bias is not None:
            qkv = qkv + self.bias
        parts = qkv.view(batch, -1, self.head_dim)
        turned, new = parts.split((self.heads + self.kv_heads, self.kv_heads), 1)
        low, high = turned.chunk(2, -1)
        turned = turned * cos + torch.cat((high, low), -1) * sin
        q, k = turned.split((self.heads, self.kv_heads), 1)
        self.keys.index_copy_(2, position, k[:, :, None])
        self.values.index_copy_(2, position, new[:, :, None])
        # One position sees all keys, so the query heads of a group are rows of one product.
        q = q.reshape(batch, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        x = x + self.out(y.reshape(batch, -1))
        gate, up = self.gate_up(F.rms_norm(x, (width,), self.mlp_norm, self.eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class PeerModel(nn.Module):
    """The model; ``position`` [1] is that of all rows, ``tokens`` [B] the next inputs."""

    def __init__(self, model: RandomModel, batch: int, capacity: int) -> None:
        super().__init__()
        config = model.config
        self.eps = config.rms_norm_eps
        self.layers = nn.ModuleList(_Layer(model, i, batch, capacity) for i in range(config.num_layers))
        table = model.embedding()
        head = model.head_weight(table)
        self.embedding = _kept(self, "embedding", table.to(DTYPE))
        self.norm = _kept(self, "norm", model.norm().to(DTYPE))
        if isinstance(head, QuantWeight):
            self.head: Any = Int4Linear(head)
        else:
            self.head = self.embedding if head is table else _kept(self, "head", head.to(DTYPE))
        rotary = Rotary(
            config.head_dim, config.rope_theta, config.rope_scaling,
            context=config.max_position_embeddings, device=model.device, dtype=DTYPE,
        )  # fmt: skip
        cos, sin = rotary.tables(0, capacity)  # [S, 1, D]
        self.cos, self.sin = _kept(self, "cos", cos.contiguous()), _kept(self, "sin", sin.contiguous())
        self.places = _kept(self, "places", torch.arange(capacity, device=model.device))
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=model.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=model.device)

    def logits(self, tokens: Tensor, position: Tensor) -> Tensor:
        """[B] -> [B, V]."""
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[position], self.sin[position]
        mask = (self.places <= position)[None, None, None]
        for layer in self.layers:
            x = layer(x, cos, sin, mask, position)
        x = F.rms_norm(x, (x.shape[-1],), self.norm, self.eps)
        return F.linear(x, self.head) if isinstance(self.head, Tensor) else self.head(x)

    def next_tokens(self, tokens: Tensor, position: Tensor) -> Tensor:
        """[B] -> [B]."""
        return self.logits(tokens, position).argmax(-1)


class Peer:
    """A step of the peer, ready to be timed.

    Attributes:
        how: how it runs, in words.
    """

    def __init__(self, model: RandomModel, batch: int, capacity: int, mode: str = MODE) -> None:
        self.model = PeerModel(model, batch, capacity)
        compiled = torch.compile(self.model.next_tokens, mode=mode, fullgraph=True, dynamic=False)
        run = torch.no_grad()(lambda: self._step(compiled))
        self.place(0)
        for _ in range(3):
            run()
        self.advance, self.how = _captured(run, mode)

    def _step(self, next_tokens: Callable[[Tensor, Tensor], Tensor]) -> None:
        model = self.model
        model.tokens.copy_(next_tokens(model.tokens, model.position))
        model.position += 1

    @torch.no_grad()
    def place(self, position: int) -> None:
        """Say how many positions every row holds."""
        self.model.position.fill_(position)

    @torch.no_grad()
    def forward(self, tokens: Tensor, position: int) -> Tensor:
        """Logits [B, V] without compiling, for a check."""
        return self.model.logits(tokens, torch.tensor([position], device=tokens.device))


def _captured(run: Callable[[], None], mode: str) -> tuple[Callable[[], None], str]:
    try:
        replay = timing.captured(run)
    except RuntimeError as error:
        torch.cuda.synchronize()
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return run, f'torch.compile(mode="{mode}"), steps launched: capture failed ({reason[:120]})'
    return replay, f'torch.compile(mode="{mode}"), CUDA graph of a step'
