"""The peer of the engine: transformers' continuous batching, on random weights of the same shape.

bfloat16, not quantised, as that project serves a model; greedy, no end token, no shared blocks, CUDA graphs.
Its times are its own time stamps, one a token, on the clock that the arrivals are taken from.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from inspect import signature
from types import TracebackType
from typing import Any

from labkit.bench.stages import Need, Stage
from labkit.errors import require

_PATIENCE = 60.0
"""Seconds for one set of prompts."""

_DTYPE = "bfloat16"


def why_not(stage: Stage) -> str:
    """Why it cannot run, or an empty string."""
    if not stage.on_gpu:
        return "on a GPU only"
    return "" if util.find_spec("transformers") else "transformers is not installed"


@dataclass(frozen=True)
class PeerRequest:
    """A labkit.engine.metrics.Timed."""

    arrival: float
    token_times: Sequence[float]
    finish_reason: str | None


class Peer:
    """A model and its manager; leave the context to stop the manager's thread.

    Args:
        model: key of data/quoted/models.json.
        need: how much runs at once.
        device: where.
        graphs: CUDA graphs.

    Attributes:
        how: how it runs, in words. vocab_size: ids are below it.
    """

    def __init__(self, model: str, need: Need, *, device: str = "cuda", graphs: bool = True) -> None:
        self.model = _random_model(model, device)
        self.vocab_size = self.model.config.vocab_size
        self.need, self.graphs = need, graphs
        words = "CUDA graphs" if graphs else "no graphs"
        version = metadata.version("transformers")
        self.how = f"transformers {version}, continuous batching, {_DTYPE}, paged SDPA, {words}"
        self._stack = contextlib.ExitStack()
        self._manager: Any = None

    def __enter__(self) -> Peer:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        # Block sharing off: repeats would find their prompts. Versions that switch to flash attention by
        # themselves would take it from the network.
        options: dict[str, Any] = {
            "use_cuda_graph": self.graphs,
            "max_memory_percent": 0.3,
            "max_requests_per_batch": self.need.rows,
            "allow_block_sharing": False,
        }
        if "auto_switch_to_flash" in signature(ContinuousBatchingConfig).parameters:
            options["auto_switch_to_flash"] = False
        batching = ContinuousBatchingConfig(**options)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = self._stack.enter_context(
            self.model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=batching, timeout=5
            )
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._manager = self.model = None

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[PeerRequest]:
        """All prompts at once, to their ends.

        Raises:
            InputError: it has stopped, or takes too long.
        """
        arrival = time.perf_counter()
        ids = self._manager.add_requests(
            [list(one) for one in prompts], max_new_tokens=tokens, record_timestamps=True
        )
        found: dict[str, PeerRequest] = {}
        while len(found) < len(ids):
            late = time.perf_counter() - arrival > _PATIENCE
            require(not late, "peer", f"{len(found)} of {len(ids)} answers in {_PATIENCE:.0f} s", "all")
            one = self._manager.get_result(timeout=1)
            if one is None:
                require(self._manager.is_running(), "peer", "its thread has stopped", "answers")
            elif one.is_finished():
                reason = "length" if one.error is None else "error"
                found[one.request_id] = PeerRequest(arrival, tuple(one.timestamps or ()), reason)
        return [found[name] for name in ids]


def _random_model(model: str, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from labkit.bench.random_model import config_of

    config = config_of(model)
    require(config.architecture == "qwen2", "model", model, "a Qwen2.5 shape, for the peer")
    theirs = Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        eos_token_id=None,
    )
    with torch.device(device):
        found = AutoModelForCausalLM.from_config(
            theirs, dtype=getattr(torch, _DTYPE), attn_implementation="paged|sdpa"
        )
    return found.eval()
