"""One request: what was asked, how far it has got, and how it ended.

Lengths count tokens from the start of the sequence (prompt, then output):

- ``prompt_len``: tokens of the prompt;
- ``cached_len``: those that the prefix cache served when the request was (last) admitted;
- ``computed_len``: tokens whose keys and values are written, by work that has *joined*;
- ``launched_len``: tokens handed to launched work, joined or not; equal to ``computed_len`` when nothing of
  the request is in flight.

All that is needed to go on after a preemption is ``token_ids`` (prompt and output so far): recomputing
them gives the same keys and values, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.cache.blocks import BlockTable
    from labkit.engine.sampling import Sampled, Sampler, SamplingParams
    from labkit.engine.text import TextStream


class Status(StrEnum):
    """Where a request is; the last three are final."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether the request has ended."""
        return self in _FINAL


_FINAL = frozenset({Status.FINISHED, Status.ABORTED, Status.FAILED})


class QueueFullError(RuntimeError):
    """No request is taken in for now: as many wait as the queue holds. Try again later.

    Attributes:
        limit: requests that the queue holds.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"the queue holds {limit} waiting requests and is full; try again later")


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. Changed by the scheduler and the engine only.

    Attributes:
        id: unique among the engine's live requests.
        prompt_ids: token ids of the prompt, at least one.
        params: how to sample, and when to stop.
        arrival: seconds on the executor's clock.
        priority: smaller is admitted first; among equals, the one that came first.
        salt: tenant; prefixes are shared within one only.
        status, finish_reason, error: see :class:`Status`; the reason is "stop", "length", "abort" or
            "error", and ``error`` then says what happened.
        cached_len, computed_len, launched_len: see the module's head.
        output_ids: tokens sampled so far. token_ids: prompt and output.
        token_times: when each output token was known, seconds on the executor's clock.
        finish_time: when it ended, on the same clock; None before.
        max_new: output tokens it may have: ``params.max_tokens``, or fewer where the pool ends before.
        order: place in the order of admission, kept by a preemption.
        table: its blocks; None while it has none.
        preemptions: times it was taken back to the queue.
        in_flight: launched works that name its blocks and have not joined.
        sampler: picks its tokens. end_ids: tokens that end it. stream: its TextStream; None where the
            engine has no tokenizer.
        logprobs: a Sampled for each output token, where ``params.logprobs`` asks for them.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0
    salt: str = ""
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: str = ""
    cached_len: int = 0
    computed_len: int = 0
    launched_len: int = 0
    output_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    finish_time: float | None = None
    max_new: int = 0
    order: int = 0
    table: BlockTable | None = None
    preemptions: int = 0
    in_flight: int = 0
    sampler: Sampler | None = None
    end_ids: frozenset[int] = frozenset()
    stream: TextStream | None = None
    logprobs: list[Sampled] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_ids = tuple(self.prompt_ids)
        self.token_ids = [*self.prompt_ids, *self.output_ids]
        self.max_new = self.max_new or self.params.max_tokens

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def busy(self) -> bool:
        """Whether launched work that names its blocks has not joined."""
        return self.in_flight > 0

    @property
    def text(self) -> str:
        """Text that is certain so far; empty where the engine has no tokenizer."""
        return "" if self.stream is None else self.stream.text

    @property
    def pending(self) -> int:
        """Known tokens that no work was launched for."""
        return len(self.token_ids) - self.launched_len

    @property
    def remaining(self) -> int:
        """Output tokens it may still get."""
        return self.max_new - len(self.output_ids)

    def add_token(self, token: int, time: float) -> None:
        """A sampled token, known at ``time``."""
        self.output_ids.append(token)
        self.token_ids.append(token)
        self.token_times.append(time)

    def end(self, status: Status, reason: str, time: float, error: str = "") -> None:
        """Set the final status; a request that has ended stays as it is."""
        if not self.status.final:
            self.status, self.finish_reason, self.finish_time, self.error = status, reason, time, error
