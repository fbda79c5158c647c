"""The runner: launches what the scheduler picks, joins it, samples; and finds out who is to blame.

One ``cycle``: launch until the policy picks nothing, wait as the policy says, finish what has joined.
Whatever goes wrong on the way ends the requests that it concerns, with a reason; all others go on with
the same tokens, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from labkit.cache.blocks import CacheError
from labkit.engine.executor import Executor, Output, Row
from labkit.engine.metrics import Counters
from labkit.engine.request import Request, Status
from labkit.engine.scheduler import Scheduler
from labkit.engine.work import Work


@dataclass(frozen=True, slots=True)
class Update:
    """News of one request from one step.

    Attributes:
        request: whose.
        tokens: new output tokens.
        text: new text, as far as it is certain.
        ended: nothing more comes; ``request.finish_reason`` says why.
    """

    request: Request
    tokens: tuple[int, ...]
    text: str
    ended: bool


class Runner:
    """Runs works; the scheduler keeps the books, the executor computes.

    Args:
        executor, scheduler: of one engine.

    Attributes:
        counters: totals.
        watch: called with every work, or slice of one, that has joined, and the clock; for timelines.
        ended: called with every request that has ended.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, ended: Callable[[Request], None]) -> None:
        self.executor, self.scheduler, self.ended = executor, scheduler, ended
        self.counters = Counters()
        self.watch: Callable[[Work, float], None] | None = None
        self._news: dict[Request, tuple[list[int], list[str]]] = {}

    def cycle(self) -> None:
        """Launch, wait, finish.

        Raises:
            RuntimeError: requests are left, and nothing can be launched: a defect of the scheduler.
        """
        if self.scheduler.can_grow:
            self._grow()
        tried = bool(self.scheduler.in_flight)
        while (work := self.scheduler.next_work()) is not None:
            tried = True
            if not self._launch(work):
                break
        if not tried and not self.scheduler.idle and not self.scheduler.can_grow:
            raise RuntimeError("the scheduler is stuck: requests are left, and there is no next work")
        self._count_cycle()
        for works in self._due():
            self._collect(works)

    def news(self) -> list[Update]:
        """What has happened since the last call, one entry a request."""
        updates = [
            Update(request, tuple(tokens), "".join(texts), request.status.final)
            for request, (tokens, texts) in self._news.items()
        ]
        self._news = {}
        self.counters.preemptions = self.scheduler.preemptions
        self.counters.prefix_cache_queries = self.scheduler.pool.cache.queries
        self.counters.prefix_cache_hits = self.scheduler.pool.cache.hits
        return updates

    def check_books(self) -> None:
        """With nothing to do, nobody holds a block.

        Raises:
            CacheError: somebody does.
        """
        used = self.scheduler.pool.blocks.num_used
        if self.scheduler.idle and used:
            raise CacheError([f"{used} blocks are in use though every request has ended"])

    # --- one cycle -----------------------------------------------------------------------------------------

    def _launch(self, work: Work) -> bool:
        try:
            if not work.prepared:
                work.prepare(self.executor)
            work.launch(self.executor)
        except Exception as error:
            self._recover([(work, error)])
            return False
        return True

    def _count_cycle(self) -> None:
        works = self.scheduler.in_flight
        decode = {work.lane for work in works if work.has_decode}
        prefill = {work.lane for work in works if work.has_prefill}
        both = bool(decode and prefill)
        streams = both and decode != prefill and self.executor.concurrent
        self.counters.count_step(prefill=bool(prefill), decode=bool(decode), two_streams=streams)

    def _due(self) -> Iterator[list[Work]]:
        """Works to wait for, then whatever else has joined by then."""
        # A work that was launched ahead of its time is waited for when its time has come.
        works = [work for work in self.scheduler.in_flight if not work.ahead]
        if not works:
            return
        if self.scheduler.policy.waits == "all":
            yield works
            return
        # One of a lane: what was launched before it joins before it.
        heads = list({work.lane: work for work in reversed(works)}.values())
        if len(heads) == 1 and self.scheduler.wake is None:
            yield heads
        else:
            Work.wait(heads, self.executor, self.scheduler.wake)
        for work in works:
            if work in self.scheduler.in_flight and work.done(self.executor):
                yield [work]

    def _collect(self, works: Sequence[Work]) -> None:
        """Join all of them, then finish them."""
        joined: list[tuple[Work, Sequence[Output]]] = []
        failed: list[tuple[Work, Exception]] = []
        for work in works:
            try:
                joined.append((work, work.finish(self.executor)))
            except Exception as error:
                failed.append((work, error))
        for work, outputs in joined:
            self._finish(work, outputs)
        if failed:
            self._recover(failed)

    def _finish(self, work: Work, outputs: Sequence[Output]) -> None:
        rows = self.scheduler.finish_work(work)
        if self.watch is not None:
            self.watch(work, self.executor.now())
        if work.complete:
            self.counters.prefill_tokens += work.prompt_tokens
        for other in self.scheduler.in_flight:
            if other.lane == work.lane:
                other.ahead = False
        now = self.executor.now()
        for row, output in zip(rows, outputs, strict=True):
            if row.request.status.final:
                continue  # aborted while it was computed, or ended while it ran ahead
            try:
                self._sample(row, output, now)
            except Exception as error:
                self._fail(row.request, error)

    def _sample(self, row: Row, output: Output, now: float) -> None:
        request = row.request
        token = output.token if row.greedy else None
        if token is None or token < 0:  # a negative one: the sampler says what is wrong
            assert request.sampler is not None
            sampled = request.sampler.sample(output.logits, request.prompt_ids, request.output_ids)
            token = sampled.token
            if request.params.logprobs is not None:
                request.logprobs.append(sampled)
        request.add_token(token, now)
        self.counters.output_tokens += 1
        tokens, texts = self._news.setdefault(request, ([], []))
        tokens.append(token)
        if token in request.end_ids:
            self.end(request, Status.FINISHED, "stop")
            return
        if request.stream is not None:
            texts.append(request.stream.put(token))
            if request.stream.stopped is not None:
                self.end(request, Status.FINISHED, "stop")
                return
        if request.remaining <= 0:
            self.end(request, Status.FINISHED, "length")

    # --- ends and failures ---------------------------------------------------------------------------------

    def end(self, request: Request, status: Status, reason: str, error: str = "") -> None:
        """End a request; text that was held back comes out."""
        _, texts = self._news.setdefault(request, ([], []))
        if request.stream is not None:
            try:
                texts.append(request.stream.finish())
                if reason == "length" and request.stream.stopped is not None:
                    reason = "stop"  # what was held back has completed a stop string
            except Exception as found:
                status, reason = Status.FAILED, "error"
                error = error or _text(found)
        self.scheduler.end(request, status, reason, error)
        self.counters.count_finish(reason)
        self.ended(request)

    def _fail(self, request: Request, error: Exception) -> None:
        if not request.status.final:
            self.end(request, Status.FAILED, "error", _text(error))

    def _grow(self) -> None:
        """Enlarge the pool. Where memory is short, those that would only have fitted into the larger one
        end, or end earlier."""
        scheduler = self.scheduler
        try:
            scheduler.pool.grow()
        except Exception as error:
            for request in [*scheduler.waiting, *scheduler.running]:
                request.max_new = min(request.max_new, scheduler.pool.capacity - request.prompt_len + 1)
                if request.max_new < 1:
                    self._fail(request, error)
                elif request.remaining <= 0:
                    self.end(request, Status.FINISHED, "length")

    def _recover(self, failed: list[tuple[Work, Exception]]) -> None:
        """Works have failed: find the requests that are to blame, and compute the others' rows again.

        First everything else that is in flight is joined, so that the retries are alone. What had been fed
        by a failed work has computed nonsense: it is dropped and picked anew.
        """
        broken = [work for work, _ in failed]
        for work in [work for work in self.scheduler.in_flight if work not in broken]:
            fed = any(row.fed for row in work.rows) and work.ahead
            try:
                outputs = work.finish(self.executor)
            except Exception as error:
                failed.append((work, error))
                continue
            if fed:
                self.scheduler.drop_work(work)
            else:
                self._finish(work, outputs)
        for work, cause in failed:
            self.scheduler.drop_work(work)
            rows = [row for row in work.rows if not row.request.status.final and not row.fed]
            if len(rows) == 1 and len(work.rows) == 1:
                self._fail(rows[0].request, cause)
                continue
            for row in rows:
                self._retry(work.alone(row))

    def _retry(self, work: Work) -> None:
        request = work.rows[0].request
        self.scheduler.start_work(work)
        try:
            work.prepare(self.executor)
            work.launch(self.executor)
            outputs = work.finish(self.executor)
        except Exception as error:
            self.scheduler.drop_work(work)
            self._fail(request, error)
        else:
            self._finish(work, outputs)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
