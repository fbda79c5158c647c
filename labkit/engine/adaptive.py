"""The policy that picks among the others to hold a service level, and the table of all by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from labkit.engine.metrics import Slo
from labkit.engine.policy import Dynamic, Mixed, Overlap, Pick, Policy, Serial, Sliced, Ticks, View
from labkit.engine.work import Work
from labkit.errors import require


class Adaptive(Policy):
    """Holds bounds on the largest gap, TPOT and TTFT by moving on a ladder of policies.

    It begins on the gentlest rung. After ``trial`` gaps (with prefill in them) on a rung it looks:

    - one of them was above the bound on gaps, or their mean above the bound on TPOT: one rung down at once;
      the rung left behind is not tried again before ``memory`` further looks have passed;
    - a prompt has waited for half of its TTFT bound (or there is no such bound, so prompts are to be fast)
      and no gap came near the bound: one rung up;
    - prompts are in good time: one rung down, towards smaller gaps.

    Args:
        slo: the bounds; one that is None is met by anything.
        ladder: policies, the gentlest first, the fastest prefill last.
        trial: gaps to see before it looks.
        memory: looks for which a rung that broke a bound is left alone.
        near: share of the bound on gaps beyond which it does not climb.
    """

    name = "adaptive"

    def __init__(
        self,
        slo: Slo,
        ladder: Sequence[Policy] | None = None,
        *,
        trial: int = 4,
        memory: int = 16,
        near: float = 0.6,
    ) -> None:
        if ladder is None:
            budget = (slo.max_gap or 0.05) / 4
            ladder = (
                Sliced(512, budget=budget),
                Mixed(32, alone=512),
                Mixed(128, alone=512),
                Overlap(256),
                Overlap(512),
            )
        require(len(ladder) > 0, "ladder", "empty", "at least one policy")
        require(trial >= 1 and memory >= 0, "trial", trial, "at least 1, and a memory of at least 0")
        self.slo, self.ladder = slo, tuple(ladder)
        self.trial, self.memory, self.near = trial, memory, near
        self.rung = self._next = 0
        self.looks = 0
        self._blocked_until = [0] * len(self.ladder)  # looks
        self._gaps: list[float] = []  # on this rung, with prefill in them
        self._last_decode: float | None = None
        self._prefilled = False

    @property
    def current(self) -> Policy:
        """The policy of the rung."""
        return self.ladder[self.rung]

    @property
    def waits(self) -> Literal["all", "first"]:  # type: ignore[override]
        return self.current.waits

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        return self.current.overlaps

    def pick(self, view: View) -> Pick | None:
        if not view.decoding:
            self._last_decode = None  # nobody waits: what comes next is no gap
        if self._next == self.rung:
            self._look(view)
        if self._next != self.rung and view.partial is None:
            if view.in_flight:
                return None  # the rung is left when nothing of it is under way
            self.rung = self._next
            self._gaps.clear()
        return self.current.pick(view)

    def observe(self, work: Work, now: float) -> None:
        self.current.observe(work, now)
        self._prefilled |= work.has_prefill
        if work.has_decode:
            if self._prefilled and self._last_decode is not None:
                self._gaps.append(now - self._last_decode)
            self._last_decode, self._prefilled = now, False

    def _look(self, view: View) -> None:
        gaps, slo = self._gaps, self.slo
        if not gaps:
            return
        worst, mean = max(gaps), sum(gaps) / len(gaps)
        if (slo.max_gap is not None and worst > slo.max_gap) or (
            slo.tpot is not None and len(gaps) >= self.trial and mean > slo.tpot
        ):
            self._blocked_until[self.rung] = self.looks + self.memory
            self._move(-1)
        elif len(gaps) >= self.trial:
            waited = 0.0 if view.oldest is None else view.now - view.oldest
            hurry = slo.ttft is None or waited > slo.ttft / 2
            if not hurry:
                self._move(-1)
            elif slo.max_gap is None or worst <= self.near * slo.max_gap:
                self._move(+1)
            else:
                self._move(0)

    def _move(self, by: int) -> None:
        self.looks += 1
        self._gaps.clear()
        rung = min(max(self.rung + by, 0), len(self.ladder) - 1)
        if by <= 0 or self._blocked_until[rung] <= self.looks:
            self._next = rung


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
