"""Ragged steps of a decoder over paged KV: models, sequences and a schedule, for a CPU and a GPU alike."""

from __future__ import annotations

from typing import Any

import torch

from labkit.cache.blocks import BlockAllocator, BlockTable
from labkit.cache.paged import PagedKV
from labkit.cache.views import ViewBuilder
from labkit.models.decoder import Decoder
from labkit.nn.attention import query_tile

MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "attention_bias": False, "num_kv_heads": 2},
    "llama": {"architecture": "llama", "num_heads": 3, "num_kv_heads": 3, "attention_bias": False},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 24},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}


class Runner:
    """Sequences that are computed by steps of a decoder, in blocks that other sequences have used."""

    def __init__(
        self, decoder: Decoder, *, num_blocks: int = 40, kernels: bool | None = None, **options: Any
    ):
        self.decoder, self.kernels = decoder, kernels
        self.kv = PagedKV(
            decoder.config, num_blocks=num_blocks, dtype=decoder.dtype, device=decoder.device, **options
        )
        for layer in self.kv.layers:
            for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
                if tensor is not None:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 127)
        self.allocator = BlockAllocator(num_blocks, self.kv.block_size)
        self.builder = ViewBuilder(decoder.device, self.kv.block_size, query_tile(decoder.config.group))
        # Every other block, backwards: no sequence lies in consecutive ones.
        held = [self.allocator.allocate(self.kv.block_size) for _ in range(num_blocks)]
        for table in held[1::2] + held[::2]:
            self.allocator.free(table)

    def step(self, work: list[tuple[BlockTable, torch.Tensor, int]]) -> list[torch.Tensor]:
        """(table, token ids, tokens before) of each row to its logits [count, V]."""
        tables = [table for table, _, _ in work]
        counts = [len(ids) for _, ids, _ in work]
        view = self.builder.build(tables, counts, starts=[start for _, _, start in work])
        hidden = self.decoder.step(
            torch.cat([ids for _, ids, _ in work]), self.kv, view, kernels=self.kernels
        )
        return list(self.decoder.head(hidden).split(counts))


def rows_of(config: Any, lengths: tuple[int, ...] = (30, 41, 17, 5)) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return [torch.randint(0, config.vocab_size, (length,), generator=source) for length in lengths]


SCHEDULE = (
    # (row, new tokens) of every step: prompts in chunks beside decoding rows, rows that join and wait.
    [(0, 13), (1, 20)],
    [(0, 1), (1, 12), (2, 3)],
    [(2, 9), (0, 1)],
    [(3, 5)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 4), (1, 8), (0, 14)],
)


def run_schedule(runner: Runner, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits [length, V] of every row, computed by the schedule."""
    tables = [runner.allocator.allocate(len(ids)) for ids in rows]
    done, logits = [0] * len(rows), [[] for _ in rows]  # type: ignore[var-annotated]
    for step in SCHEDULE:
        work = [(tables[row], rows[row][done[row] : done[row] + count], done[row]) for row, count in step]
        for (row, count), one in zip(step, runner.step(work), strict=True):
            logits[row].append(one)
            done[row] += count
    assert done == [len(ids) for ids in rows]
    return [torch.cat(one) for one in logits]


def off(logits: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Root mean square error of the middle position."""
    difference = torch.cat(logits).float().cpu() - torch.cat(exact).float().cpu()
    return float(difference.square().mean(-1).sqrt().median())
