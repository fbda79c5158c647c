"""Generate text with one model and one request: prefill, then one token a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from labkit.errors import InputError, require
from labkit.models.model import Model
from labkit.models.sampling import Sampler, Sampling

Prompt: TypeAlias = str | Sequence[Mapping[str, str]] | Sequence[int]

_PREFILL_CHUNK = 512  # bounds the activations of a long prompt


@dataclass
class Stats:
    """What one generation did; grows while it runs.

    Attributes:
        prompt_tokens, new_tokens: counts; an end token that stops the answer is counted as new.
        prefill_s: seconds from start to the first token (measured, monotonic clock).
        decode_s: seconds of the later steps.
        stop_reason: "" while running, then "eos", "max_tokens" or "context".
        tokens: ids generated so far.
    """

    prompt_tokens: int
    tokens: list[int]
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stop_reason: str = ""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second after the first."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s and self.new_tokens > 1 else 0.0


class Generation:
    """An iterator over pieces of text, with :attr:`stats` beside it. Joined pieces are the answer."""

    def __init__(self, pieces: Iterator[str], stats: Stats) -> None:
        self._pieces, self.stats = pieces, stats

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def text(self) -> str:
        """Run to the end and return what is left of the answer."""
        return "".join(self)


def generate(
    model: Model,
    prompt: Prompt,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int | None = None,
    chat: bool = True,
    stop_at_eos: bool = True,
) -> Generation:
    """Stream the continuation of a prompt.

    Args:
        model: from :func:`labkit.models.zoo.load_model`.
        prompt: text; or messages for the chat template; or token ids, taken as they are.
        max_tokens: most tokens to generate, end token included; the context length limits it too.
        temperature: 0 is greedy.
        seed: see :class:`Sampling`.
        chat: text is one user message for the model's chat template; False continues the bare text.
        stop_at_eos: False generates on past the end token (for measurements).

    Returns:
        An iterator of non-empty str; a character whose bytes are not all there is held back.

    Raises:
        InputError: at once, before anything is computed: a prompt that encodes to no token or does
            not fit the context, or a bad option.
    """
    whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
    require(whole and max_tokens >= 1, "max_tokens", repr(max_tokens), "a whole number of at least 1")
    sampler = Sampler(Sampling(temperature=temperature, seed=seed))
    ids = prompt_ids(model, prompt, chat=chat)
    context = model.config.max_position_embeddings
    require(
        len(ids) < context,
        "prompt",
        f"{len(ids)} tokens",
        f"fewer than the context of {context}",
        "shorten it",
    )
    stats = Stats(len(ids), [])
    return Generation(
        _pieces(model, ids, min(max_tokens, context - len(ids)), max_tokens, sampler, stats, stop_at_eos),
        stats,
    )


def prompt_ids(model: Model, prompt: Prompt, *, chat: bool = True) -> list[int]:
    """Token ids that :func:`generate` starts from; see there."""
    tokenizer = model.tokenizer
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
        ids: list[int] = [int(i) for i in prompt]  # type: ignore[arg-type]
    else:
        if tokenizer is None:
            raise InputError("prompt", "text, for a model without a tokenizer", "a list of token ids")
        if not isinstance(prompt, str):
            ids = tokenizer.apply_chat(prompt)  # type: ignore[arg-type]
        else:
            # Checked before the template wraps it: the wrapping alone is never empty.
            body = tokenizer.encode(prompt, bos=False)
            if not body:
                raise InputError(
                    "prompt",
                    "empty text" if not prompt else f"text without any token ({prompt[:40]!r})",
                    "text that encodes to at least one token",
                    "write a prompt; some control bytes have no token in this vocabulary",
                )
            ids = (
                tokenizer.apply_chat([{"role": "user", "content": prompt}])
                if chat
                else tokenizer.encode(prompt)
            )
    if not ids:
        raise InputError("prompt", "no tokens", "at least one token")
    return ids


def _pieces(
    model: Model, ids: list[int], limit: int, asked: int, sampler: Sampler, stats: Stats, stop_at_eos: bool
) -> Iterator[str]:
    decoder, tokenizer = model.decoder, model.tokenizer
    ends = set(model.config.eos_token_ids) | set(tokenizer.eos_ids if tokenizer else ())
    if not stop_at_eos:
        ends = set()
    text: Any = tokenizer.stream() if tokenizer else None
    began = time.perf_counter()
    cache = decoder.new_cache(len(ids) + limit)
    tokens = torch.tensor([ids], dtype=torch.int64)
    for start in range(0, len(ids), _PREFILL_CHUNK):
        hidden = decoder.hidden(tokens[:, start : start + _PREFILL_CHUNK], cache)
    logits = decoder.head(hidden[:, -1])
    step = torch.empty(1, 1, dtype=torch.int64)
    while True:
        token = sampler.sample(logits[0], ids, stats.tokens).token
        stats.tokens.append(token)
        stats.new_tokens += 1
        # Time in the caller's hands between two pieces is not the model's.
        spent = time.perf_counter() - began
        if stats.new_tokens == 1:
            stats.prefill_s = spent
        else:
            stats.decode_s += spent
        done = token in ends
        if text is not None and not done and (piece := text.put(token)):
            yield piece
        if done:
            stats.stop_reason = "eos"
            break
        if stats.new_tokens == limit:
            stats.stop_reason = "max_tokens" if limit == asked else "context"
            break
        began = time.perf_counter()
        step[0, 0] = token
        logits = decoder(step, cache)[:, -1]
    if text is not None and (rest := text.finish()):
        yield rest
