"""Users at a door with a queue limit: the real scheduler on the simulated clock, and clients that come again.

Every user is one arrival of a Poisson process. At the door the same rule holds as in
:mod:`labkit.server.door`: as many answers may be under way as run and wait together; others are sent away
(429), and their client's retry policy says whether and when they come again.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.bench.traces import cold_prompts
from labkit.engine.cost_model import rtx3050
from labkit.engine.engine import Engine
from labkit.engine.metrics import Latency, Slo, goodput, span
from labkit.engine.policy import Mixed
from labkit.engine.request import Request
from labkit.engine.sim import Arrival, SimulatedExecutor
from labkit.errors import require

ROWS, PROMPT, ANSWER, CHUNK = 8, 24, 24, 64
"""Answers that run at once; tokens of each prompt and answer; prompt tokens of a step."""

VOCAB = 32_000

Retry = Callable[[int, float, random.Random], float | None]
"""(attempts so far, Retry-After in seconds, dice) → seconds until the next attempt; None gives up."""


@dataclass(frozen=True)
class User:
    """One user, as labkit.engine.metrics reads it: waiting outside counts, and so does every attempt.

    Attributes:
        arrival: seconds of the first attempt. attempts: requests sent.
        request: in the engine; None where the user was never let in.
    """

    arrival: float
    attempts: int
    request: Request | None

    @property
    def token_times(self) -> Sequence[float]:
        """When each output token was there."""
        return () if self.request is None else self.request.token_times

    @property
    def finish_reason(self) -> str | None:
        """As the engine has it; None for who was never let in."""
        return None if self.request is None else self.request.finish_reason


@dataclass(frozen=True)
class Outcome:
    """What became of everybody.

    Attributes:
        users: in order of arrival.
        refusals: seconds of every 429.
        tokens: generated. origin: of every figure here.
    """

    users: tuple[User, ...]
    refusals: tuple[float, ...]
    tokens: int
    origin: str

    @property
    def latency(self) -> Latency:
        """Of those that were let in, from the first attempt on."""
        return Latency.of(self.users)

    @property
    def tokens_s(self) -> float:
        """Output tokens a second."""
        return self.tokens / span(self.users)

    def in_time(self, seconds: float) -> list[User]:
        """Users whose first token came within so many seconds."""
        slo = Slo(ttft=seconds)
        return [user for user in self.users if slo.met(user)]

    def goodput(self, seconds: float) -> float:
        """Of those, so many a second."""
        return goodput(self.users, Slo(ttft=seconds))

    @property
    def sent_away(self) -> int:
        """Users that were never let in."""
        return sum(user.request is None for user in self.users)


def never(attempts: int, after: float, dice: random.Random) -> float | None:
    """A client that takes no for an answer."""
    return None


def crowd(rate: float, count: int, *, seed: int = 14) -> list[Arrival]:
    """``count`` users, ``rate`` a second; prompts of :data:`PROMPT` tokens, answers of :data:`ANSWER`."""
    return cold_prompts([PROMPT] * count, rate, answer=ANSWER, seed=seed, vocab=VOCAB, first=0)


def serve(
    arrivals: Sequence[Arrival],
    queue: int | None,
    retry: Retry | Sequence[Retry] = never,
    *,
    newest_first: bool = False,
    retry_after: float = 1.0,
) -> Outcome:
    """All users to their end.

    Args:
        queue: answers that may wait beyond the :data:`ROWS` that run; None for any number.
        retry: of every client, or one each.
        newest_first: whoever came last is started first; else whoever came first.
        retry_after: what a 429 says.

    Raises:
        InputError: no arrivals, a queue below 0, another number of policies, a negative wait.
    """
    require(len(arrivals) > 0, "arrivals", "none", "at least one")
    require(queue is None or queue >= 0, "queue", queue, "at least 0, or None for no limit")
    policies = [retry] * len(arrivals) if callable(retry) else list(retry)
    require(len(policies) == len(arrivals), "retry", f"{len(policies)} policies", f"{len(arrivals)}")
    cost = rtx3050()
    executor = SimulatedExecutor(cost, max_rows=ROWS, vocab_size=VOCAB, num_blocks=1 << 14)
    engine = Engine(executor, policy=Mixed(CHUNK), prefix_cache=False, remembered=0)
    dice = [random.Random(f"retry {number}") for number in range(len(arrivals))]
    attempts = [0] * len(arrivals)
    requests: list[Request | None] = [None] * len(arrivals)
    coming = [(one.time, number) for number, one in enumerate(arrivals)]
    heapq.heapify(coming)
    refusals: list[float] = []
    live: list[Request] = []
    while coming or not engine.idle:
        # Whoever comes within a step finds the door as it was when the step began.
        while coming and coming[0][0] <= executor.now():
            time, number = heapq.heappop(coming)
            attempts[number] += 1
            if queue is None or len(live) < ROWS + queue:
                one, priority = arrivals[number], -number if newest_first else 0
                request = engine.add_request(one.prompt, one.params, arrival=time, priority=priority)
                requests[number] = request
                live.append(request)
                continue
            refusals.append(time)
            wait = policies[number](attempts[number], retry_after, dice[number])
            require(wait is None or wait > 0, "retry", wait, "seconds above 0, or None")
            if wait is not None:
                heapq.heappush(coming, (time + wait, number))
        live = [request for request in live if not request.status.final]
        if engine.idle and coming:
            executor.idle(coming[0][0])
        else:
            engine.step()
    users = [User(a.time, n, request) for a, n, request in zip(arrivals, attempts, requests, strict=True)]
    return Outcome(tuple(users), tuple(refusals), engine.counters.output_tokens, cost.origin)
