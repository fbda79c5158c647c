"""The policy that picks among the others to hold a service level, and the table of all by name.

Like every policy it sees the scheduler's view and the works that have joined, and says what comes next; it
launches nothing, keeps no books and changes no token. It climbs and leaves the rungs of a ladder by what it
has seen on them, and sets the gap that the ticks of its own ladder aim at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from labkit.engine.metrics import Slo
from labkit.engine.policy import DECODE, Dynamic, Mixed, Overlap, Pick, Policy, Serial, Sliced, Ticks, View
from labkit.engine.work import SlicedPrefillWork, Work
from labkit.errors import require

_FAR = 512
"""Positions between two looks from which on they say how the cost of a prompt token grows."""

_OTHER = 1.25
"""Times a decode step's length from which on it is another situation."""

_SPARE_KNOWN, _SPARE_NEXT, _SPARE_FIRST = 0.02, 0.1, 0.25
"""Shares of the bound that a forecast leaves: for a rung that is known; for one that is not, above one of its
kind; and for the first of its kind. One failure doubles them, and so on."""

_AIM = 0.95
"""Share of the bounds on gaps that ticks aim at."""

_NEARLY = 1.05
"""Times the best pace with which a rung is kept: leaving costs the end of what is in flight."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What the gaps on a rung were.

    Attributes:
        worst: the largest, s.
        pace: seconds for a prompt token.
        added: the same, without the decode steps of these gaps.
        context: positions before these tokens in their prompts, the mean.
        step: a decode step at that time, s.
    """

    worst: float
    pace: float
    added: float
    context: float
    step: float


class _Rung:
    """What is known of a policy of the ladder."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.held: _Look | None = None  # the last in which it held the bounds, and prompts did not run out
        self.first: _Look | None = None  # the first such look since a prompt began
        self.growth: tuple[float, float] | None = None  # of gap and pace, see _growth
        self.failures = self.blocked_until = 0  # in a row; in looks

    def hold(self, look: _Look) -> None:
        """It has held."""
        if self.held is None or self.first is None or look.context < self.held.context:
            self.first = look
        first, self.held = self.first, look
        if look.context - first.context >= _FAR:
            self.growth = (
                _growth(first.context, first.worst, look.context, look.worst),
                _growth(first.context, first.pace, look.context, look.pace),
            )


def _growth(context: float, value: float, later: float, then: float) -> float:
    """g, where the values are as (1 + g · context); 0 for one that shrinks."""
    ratio = then / value
    return max(ratio - 1, 0.0) / max(later - ratio * context, _FAR)


def _grown(value: float, growth: float, context: float, ahead: float) -> float:
    """A value of one context, at another."""
    return value * (1 + growth * ahead) / (1 + growth * context)


class Adaptive(Policy):
    """Holds bounds on the largest gap, TPOT and TTFT by moving on a ladder of policies.

    It begins on the gentlest rung. After ``trial`` gaps (beside prefill) on a rung it looks:

    - one of them was above the bound on gaps, or their mean above the bound on TPOT: it leaves at once, and
      leaves the rung alone for ``memory`` looks, twice as many each time that it fails again;
    - a prompt has waited for half of its TTFT bound (or there is no such bound, so prompts are to be fast):
      it tries the next rung up that it does not know, if its gap should hold; where there is none it takes
      the known one with the most prompt tokens a second that should hold;
    - prompts are in good time: one rung down, towards smaller gaps.

    What the gap of a rung should be that is not known: a decode step, and its chunk at what a prompt token
    adds on the rung below. Of one that is known: its last, as much longer as it grows with the context, which
    attention reads for every token; a rung is left before that breaks the bound. A tenth of the bound is to
    be left (a fiftieth on a rung that is known, a quarter on the first of its kind), more after each failure.
    When a decode step has become 1.25 times as long or as short, what was known is not believed any more.

    Args:
        slo: the bounds; one that is None is met by anything.
        ladder: policies, the gentlest first. By default ticks that pause as long as the bounds allow,
            or not at all while prompts are in good time (sliced where there is one lane), then mixed steps of
            32 to 512 tokens, decode rows included.
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
        self._last: _Look | None = None  # on any rung
        self._growth = 0.0  # of the pace, on the rung that showed it last
        self._rows = 0  # that decode
        self._last_decode: float | None = None
        self._start(two_lanes=True)

    def _start(self, *, two_lanes: bool) -> None:
        """On the gentlest rung, knowing nothing."""
        self.two_lanes = two_lanes
        policies = self._given if self._given is not None else _usual(self.slo, two_lanes)
        self._rungs = [_Rung(policy) for policy in policies]
        self.rung = self._next = self.looks = 0
        self._gaps: list[float] = []  # on this rung, beside prefill
        self._tokens = self._positions = 0.0  # of prompts, in these; and the sum of their contexts
        self._lane_seconds = 0.0  # of these tokens' works, if they had a lane of their own
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
        self.wake = None
        self._rows = view.decoding
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
                found = self._ask(view) if view.prefill_runs else None
                return found if found == DECODE else None
            self.rung = self._next
            self._forget_gaps()
            late = self._last_decode is not None and view.now > self._last_decode + self._decode_seconds / 2
            if view.ready and late:
                return DECODE  # a pause of the old rung's, and a whole step of the new one's, would add up
        return self._ask(view)

    def _ask(self, view: View) -> Pick | None:
        found = self.current.pick(view)
        self.wake = self.current.wake
        return found

    def observe(self, work: Work, now: float) -> None:
        self.current.observe(work, now)
        if work.has_prefill:
            self._beside = True
            tokens = float(work.prompt_tokens)
            if isinstance(work, SlicedPrefillWork):
                tokens *= work.next_layers / work.num_layers
            elif work.lane == "prefill":
                self._lane_seconds += work.span
            self._tokens += tokens
            self._positions += tokens * work.prompt_context
        if work.has_decode:
            if self._last_decode is not None:
                gap = now - self._last_decode
                if self._beside:
                    self._gaps.append(gap)
                else:
                    self._decode_seconds += (gap - self._decode_seconds) / (4 if self._decode_seconds else 1)
            self._last_decode, self._beside = now, False

    def _look(self, view: View) -> None:
        gaps, slo, here, tokens = self._gaps, self.slo, self._rungs[self.rung], self._tokens
        if not gaps:
            return
        worst, mean = max(gaps), sum(gaps) / len(gaps)
        # Half a chunk at least: the rest of a prompt says little about whole ones.
        enough = len(gaps) >= self.trial and 0 < self._tokens_of(here.policy) <= 2 * tokens
        broken = (slo.max_gap is not None and worst > slo.max_gap) or (
            slo.tpot is not None and enough and mean > slo.tpot
        )
        if not broken and not enough:
            return
        self.looks += 1
        ahead = 0.0
        if tokens:
            step, context = self._decode_seconds, self._positions / tokens
            # Gaps begin and end somewhere in the works of another lane.
            pace = (self._lane_seconds or sum(gaps)) / tokens
            self._last = _Look(worst, pace, pace * max(1 - step / mean, 0.0), context, step)
            ahead = context + tokens  # where the next look will be, if it is at the same prompt
        if not broken and self._last and (view.prefill_waits or view.prefill_runs):
            here.hold(self._last)
            if here.growth is not None:
                self._growth = here.growth[1]
        waited = 0.0 if view.oldest is None else view.now - view.oldest
        in_time = slo.ttft is not None and waited <= slo.ttft / 2
        if isinstance(here.policy, Ticks) and self._given is None:
            if broken and here.policy.pauses:
                self._forget_gaps()  # it has learned from it by now
                return
            here.policy.gap = None if in_time else _aim(slo)
        if broken:
            here.failures += 1
            here.blocked_until = self.looks + self.memory * 2 ** min(here.failures - 1, 10)
            self._next = max(self.rung - 1, 0)
            if self.foresight:
                self._next = self._best(ahead) if self.rung else self._faster(worst, ahead)
        elif in_time:
            self._next = max(self.rung - 1, 0)
        else:
            here.failures = 0
            self._next = self._faster(worst, ahead)
        self._forget_gaps()

    def _forget_gaps(self) -> None:
        self._gaps.clear()
        self._tokens = self._positions = self._lane_seconds = 0.0

    def _tokens_of(self, policy: Policy) -> int:
        """Prompt tokens of its works."""
        return policy.beside(self._rows) if isinstance(policy, Mixed) else getattr(policy, "chunk", 1)

    def _known(self, rung: _Rung) -> _Look | None:
        """Its last look, if decode steps are still what they were."""
        look, step = rung.held, self._decode_seconds
        return look if look and step <= _OTHER * look.step and look.step <= _OTHER * step else None

    def _pace(self, rung: _Rung, look: _Look, ahead: float) -> float:
        """Seconds for a prompt token at another context."""
        growth = self._growth if rung.growth is None else rung.growth[1]
        return _grown(look.pace, growth, look.context, ahead)

    def _gap(self, index: int, ahead: float) -> tuple[float, float]:
        """What the largest gap of a rung should be, and the share of the bound to be left."""
        rung, step = self._rungs[index], self._decode_seconds
        policy = rung.policy
        if (look := self._known(rung)) is not None:
            if isinstance(policy, Ticks):  # only decode steps grow, and their pauses shrink
                return policy.gap if policy.gap and policy.pauses else look.worst, 0.0
            growth = self._growth if rung.growth is None else rung.growth[0]
            return _grown(look.worst, growth, look.context, ahead), _SPARE_KNOWN
        if isinstance(policy, Sliced):
            return step + policy.budget, _SPARE_FIRST
        if isinstance(policy, Ticks | Dynamic):
            return step, _SPARE_FIRST
        below = self._rungs[index - 1] if index else rung
        look = self._known(below) or self._last
        added = 0.0 if look is None else look.added * self._pace(below, look, ahead) / look.pace
        alike = type(below.policy) is type(policy) and below.held is not None
        return step + added * self._tokens_of(policy), _SPARE_NEXT if alike else _SPARE_FIRST

    def _holds(self, index: int, ahead: float) -> bool:
        """Whether a rung should hold the bound on gaps."""
        if self.slo.max_gap is None:
            return True
        gap, spare = self._gap(index, ahead)
        return gap <= (1 - spare * (1 + self._rungs[index].failures)) * self.slo.max_gap

    def _faster(self, worst: float, ahead: float) -> int:
        """The next rung up that is worth a try, or else the best of those that are known."""
        if not self.foresight:
            up, bound = min(self.rung + 1, len(self._rungs) - 1), self.slo.max_gap
            free = self._rungs[up].blocked_until <= self.looks
            return up if free and (bound is None or worst <= self.near * bound) else self.rung
        for index in range(self.rung + 1, len(self._rungs)):
            rung = self._rungs[index]
            if rung.blocked_until <= self.looks and self._known(rung) is None:
                if self._holds(index, ahead):
                    return index
                break
        return self._best(ahead)

    def _best(self, ahead: float) -> int:
        """Of the known rungs that should hold the bounds the one with the least seconds for a prompt token,
        this one if it is nearly that; without one the gentlest."""
        paces = {
            index: self._pace(rung, look, ahead)
            for index, rung in enumerate(self._rungs)
            if rung.blocked_until <= self.looks and (look := self._known(rung)) is not None
            if self._holds(index, ahead)
        }
        best = min(paces, key=paces.__getitem__, default=0)
        stays = self.rung in paces and paces[self.rung] <= _NEARLY * paces[best]
        return self.rung if stays else best


def _aim(slo: Slo) -> float | None:
    """Seconds of a gap to aim at, where gaps can be as long as is wanted."""
    bounds = [bound for bound in (slo.max_gap, slo.tpot) if bound is not None]
    return _AIM * min(bounds) if bounds else None


def _usual(slo: Slo, two_lanes: bool) -> tuple[Policy, ...]:
    aim = None if slo.ttft is not None else _aim(slo)  # a prompt that has just come is in good time
    gentle = Ticks(512, gap=aim) if two_lanes else Sliced(512, budget=(slo.max_gap or 0.05) / 4)
    return (gentle, *(Mixed(size, alone=512, whole=True) for size in (32, 64, 128, 256, 512)))


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
