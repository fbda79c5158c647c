"""From logits to the next token: greedy, or drawn from a filtered softmax by a seed."""

from __future__ import annotations

import hashlib
import math
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from labkit.errors import refuse, require

MAX_LOGPROBS = 20  # the OpenAI API's limit

_MOST = sys.float_info.max


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one token is picked; the order of the steps is vLLM's (vllm/v1/sample/sampler.py).

    penalties → temperature → min-p → top-k → top-p → draw. transformers has min-p last, which differs
    where min-p removes part of the mass that top-p counts.

    Args:
        temperature: 0 takes the most likely token after penalties (the lowest id among equals) and
            leaves the filters unused; above 0 divides the logits.
        top_k: keep the k most likely tokens, exactly k: lower ids first among equals, so 1 is greedy
            (vLLM and transformers keep all equals of the k-th). 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose share of what min-p and top-k left is
            at least top_p; at least one.
        min_p: drop tokens less likely than min_p times the most likely.
        repetition_penalty: for tokens of prompt or output, positive logits are divided by it, others
            multiplied (CTRL, arXiv:1909.05858).
        presence_penalty: subtracted from the logit of each token that the output holds.
        frequency_penalty: the same, times how often the output holds it. The prompt counts for
            neither (OpenAI, vLLM).
        seed: of the draws; None takes one from the operating system.
        logprobs: None, or how many of the most likely tokens to report beside the chosen one's log
            probability (0 to 20). They are the model's own: log-softmax of the raw logits.

    Raises:
        InputError: a value out of range; names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, _MOST)
        _whole("top_k", self.top_k, 0, 1 << 31)
        _number("top_p", self.top_p, 0, 1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        seed = self.seed
        whole = isinstance(seed, int) and not isinstance(seed, bool) and -(1 << 63) <= seed < 1 << 64
        require(seed is None or whole, "seed", repr(seed), "a whole number of at most 64 bits, or None")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def penalised(self) -> bool:
        """Whether any penalty is on, so that earlier tokens matter."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_argmax(self) -> bool:
        """Whether :func:`greedy` of the raw logits is the whole answer."""
        return self.temperature == 0 and not self.penalised and self.logprobs is None


@dataclass(frozen=True, slots=True)
class Sampled:
    """One picked token.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability, of the raw logits; None unless asked for.
        top_logprobs: (id, logprob) of the most likely tokens, best first, lower ids first among
            equals; tokens of probability 0 are left out.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Picks the tokens of one request.

    It keeps no state between calls: output token i depends on the logits, the ids so far, the seed and
    i alone. So neighbours do not matter, and a request that was preempted and computed again draws the
    same tokens.

    Args:
        params: see :class:`Sampling`.
        vocab: only the first ``vocab`` logits can be picked (a padded head has more); None takes all.

    Attributes:
        seed: the seed in use, drawn here if ``params`` has none.
    """

    def __init__(self, params: Sampling | None = None, vocab: int | None = None) -> None:
        if vocab is not None:
            _whole("vocab", vocab, 1, 1 << 31)
        self.params = Sampling() if params is None else params
        self.vocab = vocab
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed

    def sample(
        self, logits: Tensor, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()
    ) -> Sampled:
        """Token ``len(output_ids)`` of the output.

        Args:
            logits: [V], any floating dtype and device; never changed.
            prompt_ids: ids of the prompt; read only under a repetition penalty.
            output_ids: ids picked before this one.

        Raises:
            InputError: a logit is NaN or +inf, or all are -inf: the model's weights or activations
                overflowed.
        """
        require(logits.ndim == 1 and len(logits) > 0, "logits", list(logits.shape), "one row [V]")
        row = logits.detach()[: self.vocab]
        if self.params.is_argmax:
            token = int(greedy(row))
            if token < 0:
                _overflowed()
            return Sampled(token)
        # float64 on the CPU: a seed means the same tokens on every device.
        values = row.to("cpu", torch.float64).numpy()
        if not math.isfinite(values.max()):  # NaN as soon as one logit is
            _overflowed()
        scores = self._with_penalties(values, prompt_ids, output_ids) if self.params.penalised else values
        if self.params.temperature == 0:
            token = int(scores.argmax())
        else:
            token = self._drawn(scores, uniform(self.seed, len(output_ids)))
        return self._reported(values, token)

    def _with_penalties(
        self, values: np.ndarray[Any, Any], prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> np.ndarray[Any, Any]:
        params, scores = self.params, values.copy()
        ids, counts = np.unique(np.asarray(output_ids, dtype=np.int64), return_counts=True)
        kept = ids < len(scores)
        ids, counts = ids[kept], counts[kept]
        if params.repetition_penalty != 1:
            prompt = np.asarray(prompt_ids, dtype=np.int64)
            seen = np.union1d(prompt[prompt < len(scores)], ids)
            old = scores[seen]
            scores[seen] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        scores[ids] -= params.frequency_penalty * counts + params.presence_penalty
        return scores

    def _drawn(self, scores: np.ndarray[Any, Any], point: float) -> int:
        """The token at ``point`` (0 ≤ point < 1) of the filtered distribution, laid out in order of ids."""
        params = self.params
        ids: np.ndarray[Any, Any] | None = None  # None: all
        # min-p and top-k keep a head of one ranking each, so their order does not matter: top-k first
        # leaves less to do.
        weights = scores
        if 0 < params.top_k < len(scores):
            ids = np.sort(_largest(scores, params.top_k))
            weights = scores[ids]
        weights = weights - weights.max()
        with np.errstate(over="ignore"):  # a tiny temperature
            weights /= params.temperature
        np.exp(weights, out=weights)
        if params.min_p > 0:
            kept = np.flatnonzero(weights >= params.min_p)  # the most likely token weighs 1
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        if params.top_p < 1:
            kept = _nucleus(weights, params.top_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        sums = torch.from_numpy(weights).cumsum(0).numpy()  # in order, as numpy's, in a third of the time
        # "right" passes over tokens of weight 0. The point is at most 1 - 2^-53, so the product is below
        # the last sum even rounded.
        place = int(sums.searchsorted(point * sums[-1], side="right"))
        return place if ids is None else int(ids[place])

    def _reported(self, values: np.ndarray[Any, Any], token: int) -> Sampled:
        wanted = self.params.logprobs
        if wanted is None:
            return Sampled(token)
        top = values.max()
        total = top + math.log(np.exp(values - top).sum())
        best = _largest(values, wanted) if wanted else ()
        listed = tuple((int(i), float(values[i] - total)) for i in best if values[i] > -math.inf)
        return Sampled(token, float(values[token] - total), listed)


def greedy(logits: Tensor) -> Tensor:
    """Most likely token of every row: int64 [...] from logits [..., V], on their device.

    The lowest id among equals; -1 for a row with NaN or +inf, or of -inf alone.
    """
    top, ids = logits.max(-1)  # NaN as soon as one logit is; torch returns the first maximum
    return torch.where(torch.isfinite(top), ids, -1)


def uniform(seed: int, index: int) -> float:
    """Number ``index`` of the seed's sequence, in [0, 1), a multiple of 2^-53; any order of calls."""
    key = (seed % (1 << 64)).to_bytes(8, "little") + index.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def _largest(values: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Ids of the ``count`` largest values, best first, lower ids first among equals."""
    ids = np.arange(len(values))
    if count < len(values):
        ids = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def _nucleus(weights: np.ndarray[Any, Any], top_p: float) -> np.ndarray[Any, Any]:
    """Places, in rising order, of the smallest set of largest weights that holds ``top_p`` of the sum."""
    total = weights.sum()
    # All weights below this floor together hold less than 1 - top_p, so they are outside whatever the
    # order: sorting a few hundred instead of a whole vocabulary.
    places = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    places = places[np.argsort(-weights[places], kind="stable")]
    enough = int(weights[places].cumsum().searchsorted(top_p * total, side="left"))
    return np.sort(places[: enough + 1])


def _overflowed() -> NoReturn:
    refuse("logits", "NaN or infinite values", "finite logits", "use dtype float32")


def _number(name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    limit = f"a number from {low} to {high}" if high < _MOST else f"a finite number of at least {low}"
    require(number and low <= value <= high, name, repr(value), limit)


def _whole(name: str, value: Any, low: int, high: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    limit = f"a whole number from {low} to {high}" if high < 1 << 31 else f"a whole number of at least {low}"
    require(whole and low <= value <= high, name, repr(value), limit)
