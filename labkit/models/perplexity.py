"""Perplexity of a model on a text.

Definition used everywhere in the course. The text is encoded once, with no special token in front.
Windows of ``window`` tokens start at token 0, stride, 2 stride, ...; the last one may be shorter.
Each window is computed on its own. A token is scored in the first window that holds it behind at
least one other token, so with ``stride == window`` the first token of every window is not scored,
and with a smaller stride only the very first is not. The result is exp of the mean negative
log-likelihood (natural logarithm) of the scored tokens; log-softmax in float32, the mean in float64.
A smaller stride gives tokens more context and a lower figure: compare figures of one setting only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labkit import paths
from labkit.errors import InputError, require
from labkit.models.model import Model

CORPUS = "alice.txt"
_LOGIT_ROWS = 128  # rows of [rows, V] logits held at once


@dataclass(frozen=True)
class Result:
    """ppl = exp(nll); nll in nats a token over ``tokens`` scored tokens in ``windows`` windows."""

    ppl: float
    nll: float
    tokens: int
    windows: int


def corpus_text(name: str = CORPUS) -> str:
    """Text of a file in ``data/corpus`` (public domain; see the README there)."""
    path = paths.data_dir() / "corpus" / name
    if not path.is_file():
        raise InputError("corpus", name, "a file in data/corpus")
    return path.read_text(encoding="utf-8")


def perplexity(
    model: Model,
    text: str | Sequence[int] | None = None,
    *,
    window: int = 512,
    stride: int | None = None,
    max_tokens: int | None = None,
) -> Result:
    """Perplexity as the module defines it.

    Args:
        model: from :func:`labkit.models.zoo.load_model`.
        text: text, or token ids; None is the corpus of the course.
        window: tokens a window, 2 to the model's context.
        stride: tokens between window starts, 1 to window; None means window.
        max_tokens: use only that many tokens from the start.

    Raises:
        InputError: a bad option, or fewer than two tokens.
    """
    stride = window if stride is None else stride
    for name, value, low, high in (
        ("window", window, 2, model.config.max_position_embeddings),
        ("stride", stride, 1, window),
        ("max_tokens", 2 if max_tokens is None else max_tokens, 2, None),
    ):
        whole = isinstance(value, int) and not isinstance(value, bool)
        upper = math.inf if high is None else high
        expected = (
            f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        )
        require(whole and low <= value <= upper, name, repr(value), expected)
    if text is None:
        text = corpus_text()
    if isinstance(text, str):
        if model.tokenizer is None:
            raise InputError("text", "text, for a model without a tokenizer", "token ids")
        ids = model.tokenizer.encode(text, bos=False, special=False)
    else:
        ids = [int(i) for i in text]
    ids = ids[:max_tokens]
    require(len(ids) >= 2, "text", f"{len(ids)} tokens", "at least 2 tokens")
    tokens = torch.tensor(ids, dtype=torch.int64)
    total, count, windows = 0.0, 0, 0
    for start, stop, first in scored_windows(len(ids), window, stride):
        hidden = model.decoder.hidden(tokens[None, start:stop])[0]
        # Position p predicts token p + 1: rows first-1 .. stop-2 score tokens first .. stop-1.
        for row in range(first - 1, stop - 1, _LOGIT_ROWS):
            end = min(row + _LOGIT_ROWS, stop - 1)
            logits = model.decoder.head(hidden[row - start : end - start]).float()
            target = tokens[row + 1 : end + 1].to(logits.device)
            chosen = logits.gather(-1, target[:, None])[:, 0]
            total += float((logits.logsumexp(-1) - chosen).double().sum())
        count += stop - first
        windows += 1
    if not math.isfinite(total):
        raise InputError("model", "logits that are NaN or infinite", "finite logits", "use dtype float32")
    nll = total / count
    return Result(math.exp(nll) if nll < 700 else math.inf, nll, count, windows)


def scored_windows(length: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, stop, first scored token) of every window that scores something."""
    found, scored = [], 0
    for start in range(0, length, stride):
        stop = min(start + window, length)
        first = max(scored, start + 1)
        if first < stop:
            found.append((start, stop, first))
        scored = max(scored, stop)
        if stop == length:
            break
    return found
