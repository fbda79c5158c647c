"""Did it change? Bootstrap intervals of medians that do not overlap, and a least effect.

The method, for one case on one device, runs in the order of their dates:

- The baseline of a run is the last :data:`WINDOW` runs before it, back to the last change at most.
- Of the run and of its baseline, the median and its 95 % interval by the percentile bootstrap (Efron):
  1,000 resamples of the samples. In the baseline runs are drawn first, then samples in each: runs
  differ by more than their samples do, and pooled samples alone would hide that.
- The run is a change point when the intervals do not overlap *and* the medians differ by at least the
  threshold (3 %). Two 95 % intervals apart are rarer than one test at 5 %: a report looks at hundreds of
  cases, and most of them should stay quiet. The draws are seeded by the samples' number: same files,
  same flags.

A run beside a busy neighbour is flagged as well, and the run after it once more: look at both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.errors import require

WINDOW = 5
RESAMPLES = 1000
THRESHOLD = 0.03
_MOST_SAMPLES = 200  # of one run in a resample: gaps of a jitter run come by the thousand


@dataclass(frozen=True)
class Change:
    """A change at a run: ``ratio`` is its median over the baseline's; above 1 is slower, or more."""

    ratio: float
    baseline: float

    @property
    def words(self) -> str:
        """Such as "slower (+12.3 %)": by how much the median is longer."""
        return self.said("slower", "faster")

    def said(self, more: str, less: str) -> str:
        """The same with other words, such as "more" and "less" of what is counted."""
        return f"{more if self.ratio > 1 else less} ({100 * (self.ratio - 1):+.1f} %)"


def interval(runs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the median of ``runs``, each a sequence of samples."""
    return _interval(tuple(tuple(run) for run in runs))


@functools.lru_cache(maxsize=4096)
def _interval(runs: tuple[tuple[float, ...], ...]) -> tuple[float, float]:
    thinned = [_thin(run) for run in runs]
    draw = np.random.default_rng(sum(len(run) for run in runs))
    medians = np.empty(RESAMPLES)
    picked = draw.integers(0, len(runs), size=(RESAMPLES, len(runs)))
    if len(runs) == 1:
        run = thinned[0]
        medians = np.median(run[draw.integers(0, len(run), size=(RESAMPLES, len(run)))], axis=1)
    else:
        for i, chosen in enumerate(picked):
            parts = [thinned[c][draw.integers(0, len(thinned[c]), len(thinned[c]))] for c in chosen]
            medians[i] = np.median(np.concatenate(parts))
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)


def _thin(run: Sequence[float]) -> np.ndarray:
    """At most so many samples, evenly out of the sorted ones: the median stays where it was."""
    ordered = np.sort(np.asarray(run, dtype=float))
    if len(ordered) <= _MOST_SAMPLES:
        return ordered
    return ordered[np.linspace(0, len(ordered) - 1, _MOST_SAMPLES).round().astype(int)]


def changes(
    runs: Sequence[Sequence[float]], *, threshold: float = THRESHOLD, exact: bool = False
) -> list[Change | None]:
    """For each run in order, its change against the baseline, or None.

    Args:
        runs: samples of each run, oldest first; none of them empty.
        threshold: least relative difference of the medians, such as 0.03.
        exact: the figures are counts; any difference is a change.

    Raises:
        InputError: an empty run, or a threshold that is not from 0 to 1.
    """
    require(all(len(run) > 0 for run in runs), "runs", "a run without samples", "samples in each")
    require(0 <= threshold <= 1, "threshold", threshold, "a share from 0 to 1, such as 0.03")
    found: list[Change | None] = []
    start = 0
    for i, run in enumerate(runs):
        before = runs[max(start, i - WINDOW) : i]
        change = _change(before, run, threshold, exact) if before else None
        if change is not None:
            start = i
        found.append(change)
    return found


def _change(
    before: Sequence[Sequence[float]], run: Sequence[float], threshold: float, exact: bool
) -> Change | None:
    old = float(np.median(np.concatenate([np.asarray(one, dtype=float) for one in before])))
    new = float(np.median(np.asarray(run, dtype=float)))
    if old == new:
        return None
    if old <= 0:
        return Change(float("inf"), old) if new > 0 else None
    ratio = new / old
    if not exact:
        if abs(ratio - 1) < threshold:
            return None
        low, high = interval([run])
        old_low, old_high = interval(before)
        if low <= old_high and old_low <= high:
            return None
    return Change(ratio, old)
