"""Reference solutions of chapter 09."""

from __future__ import annotations

import torch

from labkit.nn.linear import QuantLinear
from labkit.quant import quantize


def memory_bill(shape, bits, group, context):
    """Bytes of layers, of one table or two, and of the KV cache."""
    layers = shape.num_layers * shape.layer_weights * (bits + 16 / group) / 8
    tables = (1 if shape.tied_embeddings else 2) * shape.head_weights * (8 + 32 / 32) / 8
    cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * context
    return layers + tables + cache


# 1000 rows in 16 blocks: 63 rows each, the last block has 55.
def matmul_in_blocks(x, weight):
    """x [M, K] times weight [N, K] transposed, one block of rows at a time."""
    n = weight.shape[0]
    rows = -(-n // 16)  # rounded up, so that 16 blocks are always enough
    columns = [x @ weight.dequantize(rows=slice(start, start + rows)).T for start in range(0, n, rows)]
    return torch.cat(columns, dim=1)


def swap_linear(model, name, format, group_size):
    """Replace the nn.Linear called ``name`` by a QuantLinear of its rounded weight."""
    parent, _, last = name.rpartition(".")
    owner = model.get_submodule(parent)
    old = getattr(owner, last)
    bias = None if old.bias is None else old.bias.detach()
    setattr(owner, last, QuantLinear(quantize(old.weight.detach(), format, group_size), bias))
    return model


# An MLP part is three times as large as an attention part: what counts is damage for each byte.
def error_budget(parts, budget):
    """Indices of the parts that get W4."""
    order = sorted(range(len(parts)), key=lambda i: parts[i].cost / parts[i].extra_bytes, reverse=True)
    chosen = []
    for i in order:
        if parts[i].extra_bytes <= budget:
            chosen.append(i)
            budget -= parts[i].extra_bytes
    return chosen
