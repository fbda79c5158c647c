"""One policy on the document trace of the simulated RTX 3050: what chapter 13 asks again and again."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, cast

from labkit.bench import jitter_run, stages
from labkit.bench.jitter_cases import Options, preset
from labkit.bench.policy_specs import PolicySpec
from labkit.engine.metrics import Spread
from labkit.engine.policy import Policy


@dataclass(frozen=True)
class Trial:
    """A policy on the document trace; seconds, tokens a second.

    Attributes:
        max_gap, p99_gap: of the steady streams, while a document was computed.
        ttft: of a document, the mean of two.
        rate: prompt tokens a second.
        problem: why it does not count; empty if it does.
    """

    max_gap: float
    p99_gap: float
    ttft: float
    rate: float
    problem: str = ""


@dataclass(frozen=True)
class _Made:
    """Stands for a PolicySpec where there is a policy already."""

    policy: Policy

    @property
    def overlaps(self) -> bool:
        return self.policy.overlaps

    def make(self, scale: Any) -> Policy:
        return self.policy

    def seconds(self, scale: Any) -> None:
        return None


def trial(policy: str | PolicySpec | Policy, *, streams: int = 4, document: int = 1024) -> Trial:
    """Run one policy on the simulated RTX 3050: steady streams, and two documents inserted into them.

    Args:
        policy: such as "mixed:64"; or a new policy (they remember, so each is for one trial).
        streams: that decode. document: tokens of each.

    Raises:
        InputError: no such policy.
    """
    spec = PolicySpec.parse(policy) if isinstance(policy, str) else policy
    named = isinstance(spec, PolicySpec)
    options = _options(streams, document, cast(PolicySpec, spec) if named else None)
    stage = stages.simulated("rtx3050", options.need)
    given = spec if named else _Made(cast(Policy, spec))
    found = jitter_run.document_run(
        options, stage, cast(PolicySpec, given), True, _baseline(streams, document)
    )
    beside = Spread.of(gap.seconds for gap in found.gaps if gap.tag != "none")
    waits = [one.token_times[0] - one.arrival for one in found.prompts if one.token_times]
    problem = found.gate.reason
    if not waits or beside.max is None or beside.p99 is None:
        return Trial(0.0, 0.0, 0.0, 0.0, problem or "no document was computed beside a stream")
    mean = sum(waits) / len(waits)
    return Trial(beside.max, beside.p99, mean, jitter_run.prompt_rate([found]), problem)


def _options(streams: int, document: int, spec: PolicySpec | None) -> Options:
    chosen = replace(preset("rtx3050"), parts=("document",), streams=streams, document=document)
    return chosen if spec is None else replace(chosen, policies=(*chosen.policies, spec))


@functools.cache
def _baseline(streams: int, document: int) -> jitter_run.Baseline:
    options = _options(streams, document, None)
    stage = stages.simulated("rtx3050", options.need)
    return jitter_run.baseline_of(jitter_run.document_run(options, stage, options.baseline, False, None))
