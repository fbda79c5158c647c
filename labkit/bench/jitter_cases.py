"""What ``labkit bench jitter`` runs: options, and sizes that suit a machine."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.bench import stages
from labkit.bench.policy_specs import PolicySpec, parse_policies
from labkit.bench.stages import Need
from labkit.errors import require

PARTS = ("document", "cold")

_BASELINE = PolicySpec("serial", 128)
_SWEEP = (
    "serial:128,serial:512,overlap:128,overlap:512,ticks:128,ticks:512,ticks:512@15%,ticks:512@50%,"
    "dynamic:512@25%,dynamic:512@50%,"
    "mixed:32,mixed:64,mixed:128,mixed:256,mixed-whole:64,mixed-whole:128,mixed-whole:256,"
    "sliced:512@10%,sliced:512@25%,sliced-beside:512@25%,adaptive@50%"
)


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        where: "cpu", "cuda", or a key of labkit.bench.stages.SIMULATED.
        policies: in order. The baseline is put in front if it is missing.
        baseline: what others are compared with, and what relative targets refer to.
        overlap: True or False for one of them; None for both.
        parts: of :data:`PARTS`.
        streams, stream_prompt: steady streams, and tokens of their prompts.
        most: tokens of a stream, at most: one that ends early fails the gate.
        warm, rest: tokens of every stream before the first document, and after each.
        documents, document: how many, and tokens of each.
        cold, cold_lengths, cold_answer: prompts of the trace, their tokens (from, to), tokens they write.
        load: arrivals, as a share of the prompt tokens a second that the baseline got through.
        rate: arrivals a second instead.
        repeats: runs of each cell, in turns.
        ttft, gap: bounds of the service level in seconds: on the TTFT of cold prompts, on their TPOT and on
            the streams' gaps. None for 4 times what the longest cold prompt takes the baseline, and half of
            the baseline's largest gap.
        seed: of prompts and arrivals.
        model: shape of the random weights on a GPU.
    """

    where: str = "h200"
    policies: tuple[PolicySpec, ...] = parse_policies(_SWEEP)
    baseline: PolicySpec = _BASELINE
    overlap: bool | None = None
    parts: tuple[str, ...] = PARTS
    streams: int = 16
    stream_prompt: int = 32
    most: int = 2048
    warm: int = 16
    rest: int = 16
    documents: int = 2
    document: int = 4096
    cold: int = 24
    cold_lengths: tuple[int, int] = (64, 2048)
    cold_answer: int = 16
    load: float = 0.5
    rate: float | None = None
    repeats: int = 1
    ttft: float | None = None
    gap: float | None = None
    seed: int = 0
    model: str = stages.MODEL

    def __post_init__(self) -> None:
        known = set(self.parts) <= set(PARTS) and bool(self.parts)
        require(known, "parts", self.parts, " or ".join(PARTS))
        for name in ("streams", "stream_prompt", "warm", "rest", "documents", "document", "cold", "repeats"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(
            1 <= self.cold_lengths[0] <= self.cold_lengths[1], "cold_lengths", self.cold_lengths, "FROM-TO"
        )
        require(self.cold_answer >= 1, "cold_answer", self.cold_answer, "at least 1")
        require(self.load > 0, "load", self.load, "a share above 0")
        require(self.rate is None or self.rate > 0, "rate", self.rate, "requests a second above 0")
        least = self.warm + self.rest * self.documents
        require(self.most > least, "most", self.most, f"more than the {least} tokens before and between")
        require(not self.baseline.relative, "baseline", self.baseline.label, "a policy without a share")

    @property
    def need(self) -> Need:
        """What it asks of a stage."""
        chunks = [spec.chunk or 512 for spec in (self.baseline, *self.policies)]
        longest = max(self.stream_prompt + self.most, self.document, self.cold_lengths[1] + self.cold_answer)
        # Cold prompts may queue up: room for all of them, so that none waits for a stream to end.
        rows = self.streams + (self.cold if "cold" in self.parts else 1)
        beside = max(self.document, self.cold * (self.cold_lengths[1] + self.cold_answer))
        tokens = self.streams * (self.stream_prompt + self.most) + beside
        return Need(rows=rows, context=longest, tokens=tokens, chunk=max(chunks))

    @property
    def cells(self) -> tuple[PolicySpec, ...]:
        """Policies, the baseline first."""
        return tuple(dict.fromkeys((self.baseline, *self.policies)))


def preset(where: str) -> Options:
    """Sizes that suit a machine: some seconds simulated, a minute on an H200, 20 s on a CPU."""
    if where == "cpu":
        return Options(
            where,
            policies=parse_policies("serial:32,dynamic:64@50%,mixed:8,mixed:32,sliced:64@25%"),
            baseline=PolicySpec("serial", 32),
            streams=2, stream_prompt=8, most=160, warm=3, rest=2, documents=1, document=64,
            cold=3, cold_lengths=(16, 48), cold_answer=2,
        )  # fmt: skip
    if where == "rtx3050":
        # 28 prompt tokens beside 4 rows fill one tile of 32 rows of the article's kernel.
        sweep = parse_policies(_SWEEP.replace("mixed:32", "mixed:28,mixed:60"))
        return Options(
            where, policies=sweep, streams=4, document=1024, cold_lengths=(32, 512), cold=16
        )  # fmt: skip
    return Options(where, cold=16, repeats=2) if where == "cuda" else Options(where)
