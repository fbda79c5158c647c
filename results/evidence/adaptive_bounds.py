"""Which bounds on the largest gap ``adaptive`` holds on the simulated cards, at what rate. Needs no GPU.

    python results/evidence/adaptive_bounds.py

Run from the root of the checkout with PYTHONPATH=. Documents come in among streams; 36 bounds on the H200
(simulated from measured) and 24 on the RTX 3050 (simulated from quoted), with two lanes and with one. Prints
a Markdown table; results: engine.md beside this file. A minute on two cores.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from labkit.engine.adaptive import Adaptive
from labkit.engine.cost_model import CostModel, h200, rtx3050
from labkit.engine.engine import Engine
from labkit.engine.metrics import Latency, Slo
from labkit.engine.policy import Policy
from labkit.engine.sim import Arrival, SimulatedExecutor, document_trace, replay


@dataclass(frozen=True)
class Case:
    """A card, a bound in seconds, and the lanes."""

    card: str
    bound: float
    lanes: bool

    @property
    def cost(self) -> CostModel:
        return h200() if self.card == "H200" else rtx3050()

    @property
    def trace(self) -> list[Arrival]:
        if self.card == "H200":
            return document_trace(streams=16, answer=1500, document=4096, at=0.05, documents=8, every=0.05)
        return document_trace(streams=4, answer=300, document=1500, at=0.5, documents=2, every=3.0)

    def run(self, policy: Policy) -> tuple[float, float]:
        """Largest gap of the streams, s; prompt tokens a second."""
        executor = SimulatedExecutor(self.cost, lanes=self.lanes, num_blocks=10_000)
        served = replay(Engine(executor, policy=policy), self.trace)
        longest = max(one.prompt_len for one in served)
        documents = [one for one in served if one.prompt_len == longest]
        spent = max(one.token_times[0] for one in documents) - min(one.arrival for one in documents)
        gap = Latency.of([one for one in served if one.prompt_len < longest]).itl.max
        assert gap is not None  # every stream has two tokens or more
        return gap, sum(one.prompt_len for one in documents) / spent


def measure(case: Case) -> tuple[float, float | None]:
    """Largest gap as a share of the bound; rate as a share of the best rung's that holds it, if one does."""
    policy = Adaptive(Slo(max_gap=case.bound))
    gap, rate = case.run(policy)
    rungs = [case.run(rung) for rung in Adaptive(Slo(max_gap=case.bound)).ladder]
    best = max((rate for gap, rate in rungs if gap <= case.bound), default=None)
    return gap / case.bound, None if best is None else min(rate / best, 1.0)


def main() -> None:
    bounds = {"H200": np.geomspace(3.4e-3, 30e-3, 36), "RTX 3050": np.geomspace(0.16, 1.5, 24)}
    groups = [(card, lanes) for card in bounds for lanes in (True, False)]
    cases = [Case(card, float(bound), lanes) for card, lanes in groups for bound in bounds[card]]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(cases, pool.map(measure, cases, chunksize=2), strict=True))
    print("| card | lanes | bounds | held | largest excess, % | mean of the best rung's rate, % | least |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for card, lanes in groups:
        ours = [found[case] for case in cases if (case.card, case.lanes) == (card, lanes)]
        excess = [100 * (gap - 1) for gap, _ in ours if gap > 1]
        shares = [100 * share for _, share in ours if share is not None]
        print(
            f"| {card} | {2 if lanes else 1} | {len(ours)} | {len(ours) - len(excess)} "
            f"| {max(excess, default=0):.1f} | {np.mean(shares):.0f} | {min(shares):.0f} |"
        )


if __name__ == "__main__":
    main()
