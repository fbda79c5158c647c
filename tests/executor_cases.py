"""Requests, executors and a plain loop to check them by, for a CPU and a GPU alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from labkit.cache.blocks import BlockAllocator
from labkit.cache.paged import PagedKV
from labkit.cache.views import ViewBuilder
from labkit.engine.engine import Engine
from labkit.engine.executor_torch import TorchBatch, TorchExecutor, TorchHandle, TorchOutput
from labkit.engine.request import Request
from labkit.engine.sampling import Sampler, SamplingParams
from labkit.models.sampling import greedy
from labkit.models.step_model import Layers, StepModel
from labkit.models.step_weights import Products, step_weights
from labkit.nn.attention import query_tile

POLICIES = ("serial", "overlap", "ticks", "dynamic", "mixed", "sliced", "adaptive")


def pool(layers: Any, *, num_blocks: int = 40, **options: Any) -> PagedKV:
    """A pool in which everything is NaN, or the largest code, until it is written."""
    kv = PagedKV(layers.config, num_blocks=num_blocks, dtype=layers.dtype, device=layers.device, **options)
    for layer in kv.layers:
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            if tensor is not None:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 127)
    return kv


def step_model(decoder: Any, products: Products, *, max_context: int = 128) -> StepModel:
    """The kernels' layers of a decoder."""
    weights = step_weights(decoder, products=products)
    return StepModel(decoder.config, weights, max_context=max_context, products=products)


class Reference:
    """Logits of any prefix, one token after the other in a pool of its own: what every schedule must give."""

    def __init__(self, layers: Layers, **options: Any) -> None:
        self.layers = layers
        self.kv = pool(layers, num_blocks=40, **options)
        self.builder = ViewBuilder(layers.device, self.kv.block_size, query_tile(layers.config.group))
        self._table = BlockAllocator(self.kv.num_blocks, self.kv.block_size).allocate(8 * 40)
        self._done: tuple[int, ...] = ()  # the sequence whose keys and values lie in the pool
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[V] on the CPU, after the last of ``ids``."""
        ids = tuple(ids)
        if ids in self._known:
            return self._known[ids]
        if ids[: len(self._done)] != self._done:
            self._done = ()  # another sequence: from its beginning
        for at in range(len(self._done), len(ids)):
            view = self.builder.build([self._table], [1], starts=[at])
            tokens = torch.tensor([ids[at]], device=self.layers.device)
            hidden = self.layers.forward(tokens, self.kv, view)
            self._done = ids[: at + 1]
            if self._done not in self._known:
                self._known[self._done] = self.layers.logits(hidden)[0].cpu()
        return self._known[ids]

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy continuation."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(greedy(self.logits(ids))))
        return ids[len(prompt) :]


class Checked(TorchExecutor):
    """Compares the logits of every row that samples with a reference, bit for bit.

    Attributes:
        differences: prefixes whose logits were others.
        compared: rows looked at.
    """

    reference: Reference

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.differences: list[tuple[int, ...]] = []
        self.compared = 0
        self._newest: TorchHandle | None = None

    def launch(self, batch: TorchBatch) -> TorchHandle:
        self._newest = super().launch(batch)
        return self._newest

    def join(self, handle: TorchHandle) -> Sequence[TorchOutput]:
        outputs = super().join(handle)
        rows = [row for row in handle.batch.rows if row.samples]
        for row, output in zip(rows, outputs) if outputs else ():
            ids = row.request.token_ids[: row.stop]
            if len(ids) < row.stop or row.request.status.final:
                continue  # it was fed, and ended meanwhile
            self.compared += 1
            right = self.reference.logits(ids)
            # A step that was fed has overwritten the logits; its token says what they were.
            kept = handle.batch.graphs is None or handle is self._newest
            same = torch.equal(output.logits.cpu(), right) if kept else True
            if output.token is not None:
                same = same and output.token == int(greedy(right))
            if not same:
                self.differences.append(tuple(ids))
        return outputs


def prompts_of(seed: int, vocab: int, *, count: int = 6, longest: int = 40) -> list[list[int]]:
    """Random prompts; some begin alike, so that the prefix cache has work."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocab) for _ in range(draw.randrange(1, longest))] for _ in range(count)]
    for place in range(1, count):
        if draw.random() < 0.5:
            shared = prompts[0][: draw.randrange(len(prompts[0]) + 1)]
            prompts[place] = [*shared, *prompts[place]][:longest]
    return prompts


def run(engine: Engine, prompts: Sequence[Sequence[int]], counts: Sequence[int], seed: int) -> list[Request]:
    """Requests that come in the middle of others, to their end; the policy may change on the way."""
    draw = random.Random(seed)
    requests = []
    for prompt, count in zip(prompts, counts, strict=True):
        requests.append(engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True)))
        for _ in range(draw.randrange(4)):
            engine.step()
        if draw.random() < 0.3:
            engine.set_policy(draw.choice(POLICIES))
    engine.run()
    return requests


def check_drawn_tokens(ours: Checked, policy: str, prompts: Sequence[list[int]], count: int) -> None:
    """Requests that join one by one, their tokens drawn: those of the reference's logits, step for step."""
    params = SamplingParams(max_tokens=count, temperature=2.0, seed=3)
    engine = Engine(ours, policy=policy)
    requests = []
    for prompt in prompts:
        requests.append(engine.add_request(prompt, params))
        engine.step()
        engine.step()
    engine.run()
    assert ours.differences == []
    for prompt, request in zip(prompts, requests, strict=True):
        ids, sampler = list(prompt), Sampler(params, 300)
        for _ in range(count):
            logits = ours.reference.logits(ids)
            ids.append(sampler.sample(logits, prompt, ids[len(prompt) :]).token)
        assert request.output_ids == ids[len(prompt) :]
