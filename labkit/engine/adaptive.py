"""The policy that picks among the others to hold a service level, and the table of all by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from labkit.engine.metrics import Slo
from labkit.engine.policy import DECODE, Dynamic, Mixed, Overlap, Pick, Policy, Serial, Sliced, Ticks, View
from labkit.engine.work import SlicedPrefillWork, Work
from labkit.errors import require


class _Rung:
    """What is known of a policy of the ladder."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.worst: float | None = None  # gap when it was looked at last, s
        self.rate = 0.0  # prompt tokens a second, likewise
        self.token_seconds = 0.0  # what one of them costs, likewise; 0: not known
        self.failures = self.blocked_until = 0  # in a row; in looks


class Adaptive(Policy):
    """Holds bounds on the largest gap, TPOT and TTFT by moving on a ladder of policies.

    It begins on the gentlest rung. After ``trial`` gaps (beside prefill) on a rung it looks:

    - one of them was above the bound on gaps, or their mean above the bound on TPOT: it leaves at once, and
      leaves the rung alone for ``memory`` looks, twice as many each time that it fails again;
    - a prompt has waited for half of its TTFT bound (or there is no such bound, so prompts are to be fast):
      it tries the next rung up that it does not know, if its gap should hold; where there is none it takes
      the known one with the most prompt tokens a second;
    - prompts are in good time: one rung down, towards smaller gaps.

    What a rung's gap should be: a decode step, and its chunk at what a prompt token costs on the rung below.
    Tokens of larger pieces cost less, so climbing shows no gap beyond the bound; only from ticks and sliced,
    whose chunks are long, it may show one.

    Args:
        slo: the bounds; one that is None is met by anything.
        ladder: policies, the gentlest first. By default ticks (sliced where there is one lane), then mixed
            with chunks of 16 to 512 tokens.
        trial: gaps to see before it looks.
        memory: looks for which a rung that broke a bound is left alone.
        foresight: False tries a rung without asking what its gap should be, as soon as no gap of the one
            below was near the bound.
        near: what is near, as a share of the bound.
    """

    name = "adaptive"

    def __init__(
        self,
        slo: Slo,
        ladder: Sequence[Policy] | None = None,
        *,
        trial: int = 4,
        memory: int = 16,
        foresight: bool = True,
        near: float = 0.6,
    ) -> None:
        require(ladder is None or len(ladder) > 0, "ladder", "empty", "at least one policy")
        require(trial >= 1 and memory >= 0, "trial", trial, "at least 1, and a memory of at least 0")
        self.slo, self.trial, self.memory, self.foresight, self.near = slo, trial, memory, foresight, near
        self._given = None if ladder is None else tuple(ladder)
        self._decode_seconds = 0.0  # of a gap without prefill
        self._token_seconds = 0.0  # what a prompt token costs on this rung; 0: not known yet
        self._last_decode: float | None = None
        self._start(two_lanes=True)

    def _start(self, *, two_lanes: bool) -> None:
        """On the gentlest rung, knowing nothing."""
        self.two_lanes = two_lanes
        policies = self._given if self._given is not None else _usual(self.slo, two_lanes)
        self._rungs = [_Rung(policy) for policy in policies]
        self.rung = self._next = self.looks = 0
        self._gaps: list[float] = []  # on this rung, beside prefill
        self._tokens = 0.0  # of prompts, in these
        self._beside = False

    @property
    def ladder(self) -> tuple[Policy, ...]:
        """The policies, the gentlest first."""
        return tuple(rung.policy for rung in self._rungs)

    @property
    def current(self) -> Policy:
        """The policy of the rung."""
        return self._rungs[self.rung].policy

    @property
    def waits(self) -> Literal["all", "first"]:  # type: ignore[override]
        return self.current.waits

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        return self.current.overlaps

    def pick(self, view: View) -> Pick | None:
        if not view.decoding:
            self._last_decode = None  # nobody waits: what comes next is no gap
        self._beside |= view.prefill_runs
        idle = not view.in_flight and view.partial is None
        if idle and self._given is None and view.two_lanes != self.two_lanes:
            self._start(two_lanes=view.two_lanes)
        if self._next == self.rung:
            self._look(view)
        if self._next != self.rung and view.partial is None:
            if view.in_flight:  # the rung is left when nothing of it is under way; decode goes on meanwhile
                found = self.current.pick(view) if view.prefill_runs else None
                return found if found == DECODE else None
            self.rung = self._next
            self._token_seconds = 0.0
            self._forget_gaps()
        return self.current.pick(view)

    def observe(self, work: Work, now: float) -> None:
        self.current.observe(work, now)
        if work.has_prefill:
            self._beside = True
            seconds, tokens = work.seconds, float(work.prompt_tokens)
            if isinstance(work, SlicedPrefillWork):
                seconds, tokens = work.slice_seconds, tokens * work.next_layers / work.num_layers
            elif work.has_decode:
                seconds -= self._decode_seconds
            self._tokens += tokens
            self._token_seconds = max(seconds, 0.0) / tokens
        if work.has_decode:
            if self._last_decode is not None:
                gap = now - self._last_decode
                if self._beside:
                    self._gaps.append(gap)
                else:
                    self._decode_seconds += (gap - self._decode_seconds) / (4 if self._decode_seconds else 1)
            self._last_decode, self._beside = now, False

    def _look(self, view: View) -> None:
        gaps, slo, here = self._gaps, self.slo, self._rungs[self.rung]
        if not gaps:
            return
        worst, mean = max(gaps), sum(gaps) / len(gaps)
        enough = len(gaps) >= self.trial and self._tokens > 0
        broken = (slo.max_gap is not None and worst > slo.max_gap) or (
            slo.tpot is not None and enough and mean > slo.tpot
        )
        if not broken and not enough:
            return
        self.looks += 1
        here.worst, here.rate = worst, self._tokens / sum(gaps)
        here.token_seconds = self._token_seconds
        waited = 0.0 if view.oldest is None else view.now - view.oldest
        if broken:
            here.failures += 1
            here.blocked_until = self.looks + self.memory * 2 ** min(here.failures - 1, 10)
            self._next = max(self.rung - 1, 0)
            if self.foresight:
                self._next = self._best() if self.rung else self._faster(worst)
        elif slo.ttft is not None and waited <= slo.ttft / 2:
            self._next = max(self.rung - 1, 0)
        else:
            here.failures = 0
            self._next = self._faster(worst)
        self._forget_gaps()

    def _forget_gaps(self) -> None:
        self._gaps.clear()
        self._tokens = 0.0

    def _faster(self, worst: float) -> int:
        """The next rung up that is worth a try, or else the best of those that are known."""
        bound = self.slo.max_gap
        if not self.foresight:
            up = min(self.rung + 1, len(self._rungs) - 1)
            free = self._rungs[up].blocked_until <= self.looks
            return up if free and (bound is None or worst <= self.near * bound) else self.rung
        for index in range(self.rung + 1, len(self._rungs)):
            rung = self._rungs[index]
            if rung.blocked_until > self.looks:
                continue
            if rung.worst is None or (bound is not None and rung.worst > bound):
                if bound is None or self._expected(index) <= bound:
                    return index
                break
        return self._best()

    def _best(self) -> int:
        """Of the known rungs that hold the bounds the one with the highest rate; without one the gentlest."""
        bound = self.slo.max_gap
        known = [
            index
            for index, rung in enumerate(self._rungs)
            if rung.worst is not None and rung.blocked_until <= self.looks
            if bound is None or rung.worst <= bound
        ]
        return max(known, key=lambda index: self._rungs[index].rate, default=0)

    def _expected(self, index: int) -> float:
        """Seconds of a gap on a rung that is not known, from the one below or else from this one."""
        policy = self._rungs[index].policy
        if isinstance(policy, Sliced):
            return self._decode_seconds + policy.budget
        if isinstance(policy, Ticks | Dynamic):
            return self._decode_seconds
        token_seconds = self._rungs[index - 1].token_seconds or self._token_seconds
        return self._decode_seconds + token_seconds * getattr(policy, "chunk", 0)


def _usual(slo: Slo, two_lanes: bool) -> tuple[Policy, ...]:
    gentle = Ticks(512) if two_lanes else Sliced(512, budget=(slo.max_gap or 0.05) / 4)
    return (gentle, *(Mixed(chunk, alone=512) for chunk in (16, 32, 64, 128, 256, 512)))


POLICIES: dict[str, type[Policy]] = {
    kind.name: kind for kind in (Serial, Overlap, Ticks, Dynamic, Mixed, Sliced, Adaptive)
}
"""All policies by name."""


def make_policy(policy: str | Policy, **options: Any) -> Policy:
    """A policy by its name; one that is a policy already comes back as it is.

    Args:
        policy: a key of :data:`POLICIES`, or a policy.
        options: of its constructor, such as ``chunk``; "adaptive" without ``slo`` holds a gap of 50 ms.

    Raises:
        InputError: a name that is not known, or options beside a policy that is made already.
    """
    if isinstance(policy, Policy):
        require(not options, "options", options, "none, with a policy that is made already")
        return policy
    require(policy in POLICIES, "policy", repr(policy), "one of " + ", ".join(POLICIES))
    if policy == Adaptive.name:
        options.setdefault("slo", Slo(max_gap=0.05))
    return POLICIES[policy](**options)
