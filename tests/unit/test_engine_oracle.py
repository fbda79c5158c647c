"""The engine over the shadow KV: thousands of fuzzed runs, and broken engines that they must catch."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from engine_oracle import OracleExecutor, Parts, Run, failure

from labkit.engine import pool as pool_module
from labkit.engine.admission import Claim, future_peak
from labkit.engine.executor import Row
from labkit.engine.pool import Pool
from labkit.engine.request import Status
from labkit.engine.runner import Runner
from labkit.engine.scheduler import Scheduler
from labkit.engine.work import SlicedPrefillWork

# Another first seed gives other runs: LABKIT_ORACLE_SEED=10000 pytest tests/unit/test_engine_oracle.py
FIRST_SEED = int(os.environ.get("LABKIT_ORACLE_SEED", "0"))
RUNS, PART = 4_000, 500

EVENTS = {
    "abort": 50,
    "aborted in flight": 5,
    "cleared": 5,
    "error": 50,
    "fault in join": 5,
    "fault in launch": 5,
    "fault in logits": 5,
    "fault in prepare": 5,
    "fault in text": 5,
    "fed rows": 50,
    "grown": 20,
    "hits": 50,
    "length": 50,
    "overlaps": 50,
    "policy switched": 50,
    "preempted": 5,
    "slices": 50,
    "stop": 50,
    "transient faults": 5,
}


@pytest.mark.parametrize("part", range(RUNS // PART))
def test_every_token_is_exact_and_every_block_comes_back(part: int) -> None:
    seen: Counter[str] = Counter()
    first = FIRST_SEED + part * PART
    for seed in range(first, first + PART):
        try:
            seen += Run(seed).go()
        except Exception as found:
            pytest.fail(f"seed {seed}: {found!r}")
    assert {event: seen[event] for event, least in EVENTS.items() if seen[event] < least} == {}


def test_a_seed_is_one_run() -> None:
    assert Run(11).go() == Run(11).go()


# --- broken engines ------------------------------------------------------------------------------------


class PublishBeforeJoin(Scheduler):
    def start_work(self, work) -> None:
        super().start_work(work)
        for row in work.rows:
            if not row.fed:  # its token is not known yet
                self.pool.publish(row)


class FreeBeforeJoin(Pool):
    def end(self, request) -> None:
        self._free(request)


class PreemptBusy(Scheduler):
    def _preempt(self, wanting) -> bool:
        flying = {request: request.in_flight for request in self.running}
        for request in self.running:
            request.in_flight = 0
        taken = super()._preempt(wanting)
        for request, count in flying.items():
            request.in_flight = count
        return taken


class PreemptKeepsLengths(Pool):
    def take_back(self, request) -> None:
        length = request.computed_len
        super().take_back(request)
        request.computed_len = request.launched_len = length

    def start(self, request) -> None:
        kept = request.launched_len
        super().start(request)
        request.computed_len = request.launched_len = max(kept, request.launched_len)


class ChunkTooFar(Scheduler):
    def _chunk_rows(self, budget, others) -> list[Row]:
        rows = super()._chunk_rows(budget, others)
        return [
            Row(row.request, row.start + 1, row.stop, row.samples) if row.count > 1 else row for row in rows
        ]


class SamplesEarly(Scheduler):
    def _chunk_rows(self, budget, others) -> list[Row]:
        rows = super()._chunk_rows(budget, others)
        return [Row(row.request, row.start, row.stop, samples=True) for row in rows]


class StepTooFar(Scheduler):
    def finish_work(self, work) -> list[Row]:
        rows = super().finish_work(work)
        for row in work.rows:
            if work.complete and row.count > 2 and not row.samples:
                row.request.computed_len += 1
                row.request.launched_len += 1
        return rows


class SaltForgotten(Pool):
    def start(self, request) -> None:
        salt, request.salt = request.salt, ""
        super().start(request)
        request.salt = salt


class DropForgotten(Scheduler):
    def drop_work(self, work) -> None:
        launched = {row.request: row.request.launched_len for row in work.rows}
        super().drop_work(work)
        for request, length in launched.items():
            request.launched_len = length


class EndLeaks(Pool):
    def joined(self, request) -> None:
        if not request.busy:
            self._ended.pop(request, None)


class SlotForgotten(Pool):
    def extend(self, request, stop) -> bool:
        return super().extend(request, stop - 1)


class FedDrawn(Scheduler):
    """Feeds rows whose token the host draws."""

    def _fed_requests(self):
        params = [request.params for request in self.running]
        hidden = [one for one in params if not one.is_argmax]
        for one in hidden:
            object.__setattr__(one, "temperature", 0.0)
        fed = super()._fed_requests()
        for one in hidden:
            object.__setattr__(one, "temperature", 1.0)
        return fed


class FedTooLong(Scheduler):
    """Feeds a row whose answer has its last token already: one slot beyond its claim."""

    def _fed_requests(self):
        for request in self.running:
            request.max_new += 1
        fed = super()._fed_requests()
        for request in self.running:
            request.max_new -= 1
        return fed


class LockStepPeak(Pool):
    """The textbook's peak: every prompt begins to grow at once."""

    def fits(self, request, running) -> bool:
        def textbook(claims, num_blocks, block_size, *, lag=0):
            settled = [Claim(one.blocks, one.length, one.growth, True) for one in claims]
            return future_peak(settled, block_size, lag=lag) <= num_blocks

        before, pool_module.peak_fits = pool_module.peak_fits, textbook
        try:
            return super().fits(request, running)
        finally:
            pool_module.peak_fits = before


class GrowAnyTime(Scheduler):
    @property
    def can_grow(self) -> bool:
        return bool(self.pool.wanted)


class LayerTwice(SlicedPrefillWork):
    def _joined(self, seconds) -> None:
        super()._joined(seconds)
        if self.layer < self.num_layers:
            self.layer -= self.layer > 1


class SlicesTwice(Scheduler):
    def _build(self, pick, view):
        work = super()._build(pick, view)
        if type(work) is SlicedPrefillWork and not work.prepared:
            cut = LayerTwice(work.rows, work.lane, work.num_layers)
            cut.next_layers = work.next_layers
            return cut
        return work


class AnyOrder(Runner):
    """Joins the decode work first, whatever is ahead of it on its lane."""

    def _due(self):
        works = [work for work in self.scheduler.in_flight if not work.ahead]
        if self.scheduler.policy.waits == "all":
            yield from super()._due()
        elif works:
            yield [next((work for work in works if work.has_decode), works[0])]


class NoWait(OracleExecutor):
    """Comes back from a join before the work has run, as where one stream does not wait for another."""

    def __init__(self, *args, **sizes) -> None:
        self.late: list = []
        super().__init__(*args, **sizes)

    def join(self, handle):
        if handle.end is None and handle.last:
            self.late.append(handle)
            return [self._answer(row, out) for row, out in zip(self._sampling(handle.batch), handle.outputs)]
        return super().join(handle)

    def _advance(self, until):
        super()._advance(until)
        for handle in [one for one in self.late if one.end is not None]:
            self.late.remove(handle)
            super().join(handle)

    def settle(self):
        while self.late:
            self._advance(self._next_end())


class OtherRow(OracleExecutor):
    def join(self, handle):
        return list(reversed(super().join(handle)))


class NobodyElseRetried(Runner):
    def _recover(self, failed) -> None:
        for work, error in failed:
            self.scheduler.drop_work(work)
            for row in work.rows:
                self._fail(row.request, error)


class RetriedBesideOthers(Runner):
    """Takes what was fed by a failed work for good."""

    def _recover(self, failed) -> None:
        for work in self.scheduler.in_flight:
            work.ahead = False
        super()._recover(failed)


class AbortForgotten(Runner):
    def end(self, request, status, reason, error="") -> None:
        if status is not Status.ABORTED or not request.busy:
            super().end(request, status, reason, error)


MUTANTS = {
    "published before the join": Parts(scheduler=PublishBeforeJoin),
    "freed before the join": Parts(pool=FreeBeforeJoin),
    "wait missing": Parts(executor=NoWait),
    "preempted in flight": Parts(scheduler=PreemptBusy),
    "preempted, not recomputed": Parts(pool=PreemptKeepsLengths),
    "chunk leaves a token out": Parts(scheduler=ChunkTooFar),
    "chunk samples before the prompt's end": Parts(scheduler=SamplesEarly),
    "computed counted too far": Parts(scheduler=StepTooFar),
    "salt forgotten": Parts(pool=SaltForgotten),
    "dropped work counts as launched": Parts(scheduler=DropForgotten),
    "ended request's blocks leak": Parts(pool=EndLeaks),
    "no slot for the new token": Parts(pool=SlotForgotten),
    "drawn token fed": Parts(scheduler=FedDrawn),
    "fed beyond the last token": Parts(scheduler=FedTooLong),
    "peak in lock step": Parts(pool=LockStepPeak),
    "grown in flight": Parts(scheduler=GrowAnyTime),
    "a layer computed twice": Parts(scheduler=SlicesTwice),
    "joined out of order": Parts(runner=AnyOrder),
    "another row's token": Parts(executor=OtherRow),
    "a fault fails the whole batch": Parts(runner=NobodyElseRetried),
    "what a failed work fed is kept": Parts(runner=RetriedBesideOthers),
    "abort in flight forgotten": Parts(runner=AbortForgotten),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_engine_is_caught(name: str) -> None:
    assert any(failure(seed, MUTANTS[name]) is not None for seed in range(3_000)), "nothing was found"
