"""How far a rounded model is from the model it was made of, on the same tokens.

Perplexity needs only the text; the other figures compare all probabilities of both models, and
noise that both share (which words the text happens to hold) drops out of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from labkit.errors import require
from labkit.models.model import Model

_ROWS = 128  # rows of [rows, V] compared at once: bounds the temporaries


@dataclass(frozen=True)
class Fidelity:
    """One model against its reference.

    Attributes:
        perplexity: of the tokens but the first, in one window.
        change: relative change of the perplexity, 0.05 for 5 % more.
        noise: one standard error of the mean difference of log-likelihoods, token by token; for
            small values the same as the standard error of ``change``.
        kl: mean KL divergence of the next-token distributions, reference to model, nats a token.
        same_top: share of positions with the same most likely token.
        tokens: scored tokens.
    """

    perplexity: float
    change: float
    noise: float
    kl: float
    same_top: float
    tokens: int

    def row(self) -> dict[str, float | str]:
        """For ``labkit.tables``: shares in percent, ``origin`` measured."""
        found = asdict(self)
        for name in ("change", "noise", "same_top"):
            found[f"{name} %"] = 100 * found.pop(name)
        return found | {"origin": "measured"}


def log_probs(model: Model, ids: Sequence[int]) -> Tensor:
    """log P(next token) at every position of ``ids``: float32 [T, V] on the model's device.

    Raises:
        InputError: fewer than two tokens, or more than the model's context.
    """
    context = model.config.max_position_embeddings
    require(2 <= len(ids) <= context, "ids", f"{len(ids)} tokens", f"2 to {context} tokens")
    tokens = torch.tensor([list(ids)], dtype=torch.int64)
    return model.decoder(tokens)[0].float().log_softmax(-1)


def compare(model: Model, ids: Sequence[int], reference: Tensor) -> Fidelity:
    """Compare ``model`` with the reference whose :func:`log_probs` on the same ``ids`` are given.

    Raises:
        InputError: as :func:`log_probs`; or a reference of another shape.
    """
    mine = log_probs(model, ids)
    shape = list(reference.shape)
    require(reference.shape == mine.shape, "reference", f"shape {shape}", f"shape {list(mine.shape)}")
    reference = reference.to(mine.device)
    target = torch.tensor(list(ids[1:]), device=mine.device)[:, None]
    nll, original = (-table[:-1].gather(-1, target)[:, 0].double() for table in (mine, reference))
    difference, scored = nll - original, len(ids) - 1
    spread = float(difference.std()) if scored > 1 else math.nan
    kl, same = 0.0, 0
    for start in range(0, len(ids), _ROWS):
        old, new = reference[start : start + _ROWS], mine[start : start + _ROWS]
        kl += float((old.exp() * (old - new)).sum())
        same += int((old.argmax(-1) == new.argmax(-1)).sum())
    return Fidelity(
        perplexity=float(nll.mean().exp()),
        change=math.expm1(float(difference.mean())),
        noise=spread / math.sqrt(scored),
        kl=kl / len(ids),
        same_top=same / len(ids),
        tokens=scored,
    )
