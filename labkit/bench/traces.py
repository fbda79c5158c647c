"""What the serving benchmarks send: prompts from a seed, and open-loop arrivals by a Poisson process."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from labkit.engine.sampling import SamplingParams
from labkit.engine.sim import Arrival
from labkit.errors import require


def prompt(seed: int, number: int, length: int, vocab: int) -> tuple[int, ...]:
    """Random ids; two prompts of other numbers share no prefix worth a cached block.

    Args:
        seed, number: the same two give the same prompt, on every executor.
        length: tokens, at least 1.
        vocab: ids are below it.

    Raises:
        InputError: no token, or no vocabulary.
    """
    require(length >= 1, "length", length, "at least 1 token")
    require(vocab >= 1, "vocab", vocab, "at least 1 id")
    draw = random.Random(f"{seed} {number}")
    return tuple(draw.randrange(vocab) for _ in range(length))


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times from 0 on, in seconds: ``count`` of them, exponential gaps of mean 1 / ``rate``.

    Raises:
        InputError: no arrivals, or a rate that is not above 0.
    """
    require(count >= 1, "count", count, "at least 1")
    require(rate > 0 and math.isfinite(rate), "rate", rate, "requests a second, above 0")
    draw = random.Random(f"{seed} poisson")
    times, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def lengths(count: int, least: int, most: int, seed: int) -> list[int]:
    """``count`` lengths between two, both included; their logarithms are spread evenly, as short prompts
    are the more frequent ones."""
    require(1 <= least <= most, "lengths", (least, most), "at least 1, the smaller one first")
    draw = random.Random(f"{seed} lengths")
    low, high = math.log(least), math.log(most)
    return [min(max(round(math.exp(draw.uniform(low, high))), least), most) for _ in range(count)]


def cold_prompts(
    sizes: Sequence[int], rate: float, *, answer: int, seed: int, vocab: int, first: int
) -> list[Arrival]:
    """Prompts that nobody has seen, arriving open loop: whoever is slow gets a queue, not a rest.

    Args:
        sizes: tokens of each, in order of arrival.
        rate: arrivals a second.
        answer: tokens that each writes.
        seed: of times and tokens. vocab: see :func:`prompt`.
        first: number of the first prompt.
    """
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    times = poisson(len(sizes), rate, seed)
    return [
        Arrival(time, prompt(seed, first + number, size, vocab), params)
        for number, (time, size) in enumerate(zip(times, sizes, strict=True))
    ]
