"""Policies as a command line names them: ``mixed:64``, ``sliced:512@5ms``, ``dynamic:512@25%``.

A target in % is a share of what the baseline's chunk adds to a decode step, so that one list of policies
suits a laptop and a server: sliced gets that share as its budget; ticks, dynamic and adaptive aim at a gap
of a decode step and that share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.engine.adaptive import POLICIES, Adaptive
from labkit.engine.metrics import Slo
from labkit.engine.policy import Dynamic, Mixed, Policy, Sliced, Ticks
from labkit.errors import refuse, require

KINDS = {"beside": Sliced.name, "whole": Mixed.name}
"""Options of a policy that its name carries: sliced-beside runs its slices on the prefill lane, beside the
decode step; the chunk of mixed-whole counts the decode rows too."""

_FORM = re.compile(r"([a-z]+)(?:-([a-z]+))?(?::(\d+))?(?:@(\d+(?:\.\d+)?)(ms|%))?")
_TARGETS = {Ticks.name: "gap", Dynamic.name: "target_gap", Sliced.name: "budget", Adaptive.name: "slo"}


@dataclass(frozen=True)
class Scale:
    """What a baseline has shown: its middle decode step, and its largest gap, in seconds."""

    step: float
    gap: float

    @property
    def added(self) -> float:
        """What a chunk adds to a decode step."""
        return self.gap - self.step


@dataclass(frozen=True)
class PolicySpec:
    """A policy and its figures; a new :class:`Policy` is made for every run, since they remember.

    Attributes:
        name: key of labkit.engine.adaptive.POLICIES.
        chunk: prompt tokens of a piece of prefill work; None for the policy's own.
        target: a time: the gap that ticks, dynamic and adaptive aim at, the budget of sliced. None for
            their own.
        relative: ``target`` is a share of :attr:`Scale.added`, not seconds.
        kind: a key of :data:`KINDS`, or none.
    """

    name: str
    chunk: int | None = None
    target: float | None = None
    relative: bool = False
    kind: str = ""

    def __post_init__(self) -> None:
        require(self.name in POLICIES, "policy", repr(self.name), "one of " + ", ".join(POLICIES))
        require(self.chunk is None or self.chunk >= 1, "policy", self.label, "a chunk of at least 1 token")
        require(self.target is None or self.target > 0, "policy", self.label, "a target above 0")
        aims = self.target is None or self.name in _TARGETS
        require(aims, "policy", self.label, "@ with " + ", ".join(_TARGETS))
        kinds = ", ".join(f"{name}-{kind}" for kind, name in KINDS.items())
        require(not self.kind or KINDS.get(self.kind) == self.name, "policy", self.label, f"one of {kinds}")
        if self.name == Adaptive.name:
            require(self.chunk is None, "policy", self.label, "no chunk: its ladder has them")

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """One policy: NAME[-KIND][:CHUNK][@TARGET], the target in ms or %.

        Raises:
            InputError: anything else.
        """
        found = _FORM.fullmatch(text.strip())
        if found is None:
            refuse("policy", repr(text), "NAME[:CHUNK][@TARGET], such as mixed:64 or sliced:512@5ms")
        name, kind, chunk, target, unit = found.groups()
        value = None if target is None else float(target) / (100 if unit == "%" else 1000)
        return cls(name, None if chunk is None else int(chunk), value, unit == "%", kind or "")

    @property
    def label(self) -> str:
        """As the command line has it."""
        text = self.name + (f"-{self.kind}" if self.kind else "")
        text += "" if self.chunk is None else f":{self.chunk}"
        if self.target is not None:
            text += f"@{100 * self.target:g}%" if self.relative else f"@{1000 * self.target:g}ms"
        return text

    @property
    def overlaps(self) -> bool:
        """Whether it may use two lanes, so that overlap on and off differ."""
        return self.kind == "beside" or self.name == Adaptive.name or bool(POLICIES[self.name].overlaps)

    def seconds(self, scale: Scale | None) -> float | None:
        """Its target in seconds.

        Raises:
            InputError: a share, and nothing that it is a share of.
        """
        if not self.relative or self.target is None:
            return self.target
        if scale is None or scale.added <= 0:
            refuse("policy", self.label, "a target in ms: a baseline has shown no chunk beside decode steps")
        budget = self.target * scale.added
        return budget if self.name == Sliced.name else scale.step + budget

    def make(self, scale: Scale | None = None) -> Policy:
        """A policy that has seen nothing."""
        options: dict = {} if self.chunk is None else {"chunk": self.chunk}
        if (seconds := self.seconds(scale)) is not None:
            key = _TARGETS[self.name]
            options[key] = Slo(max_gap=seconds) if key == "slo" else seconds
        if self.kind:
            options[self.kind] = True
        if self.name == Adaptive.name:
            options.setdefault("slo", Slo(max_gap=0.05))
        return POLICIES[self.name](**options)


def parse_policies(text: str) -> tuple[PolicySpec, ...]:
    """Several, with commas between; each once.

    Raises:
        InputError: none, or one that is none.
    """
    found = tuple(dict.fromkeys(PolicySpec.parse(part) for part in text.split(",") if part.strip()))
    require(bool(found), "policy", repr(text), "at least one policy, such as serial:128,mixed:64")
    return found


def with_overlap(
    specs: Sequence[PolicySpec], overlap: bool | None, *, lanes: bool
) -> list[tuple[PolicySpec, bool]]:
    """The cells of a run: each policy with the overlap on and off, where that makes a difference.

    Args:
        specs: policies in order.
        overlap: True or False to have that alone; None for both.
        lanes: the executor has two lanes; without, there is nothing to turn on.
    """
    cells = []
    for spec in specs:
        if not spec.overlaps or not lanes:
            cells.append((spec, False))
            continue
        cells += [(spec, on) for on in ((False, True) if overlap is None else (overlap,))]
    return cells
