"""The scheduler: two verbs, ``next_work`` and ``finish_work``, and the books between them.

It owns the pool of blocks, and is the only one that changes it. The rules:

- The queue is in order: nobody is started before those in front, so everybody's turn comes.
- A request is started when the pool says that it fits (see :mod:`labkit.engine.pool`). When a block is
  missing all the same, which admission "peak" rules out, the youngest gives its blocks back and is computed
  again later; so the oldest always goes on.
- Half of a chunk's tokens are the oldest prompt's, the rest goes to those that need least: no long prompt
  takes a whole chunk while others wait, and none of n tokens takes more than ⌈2n / chunk⌉ chunks once it is
  the oldest.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection

from labkit.engine.executor import Executor, Lane, Row
from labkit.engine.policy import Pick, Policy, View, share
from labkit.engine.pool import Admission, Pool
from labkit.engine.request import QueueFullError, Request, Status
from labkit.engine.work import DecodeWork, MixedWork, PrefillWork, SlicedPrefillWork, Work
from labkit.errors import require


class Scheduler:
    """Decides nothing about computing, and everything about who holds what.

    Args:
        executor: asked for its sizes only; nothing is launched here.
        policy: says what comes next; can be replaced at any time.
        admission, prefix_cache: of the :class:`Pool`.
        queue_limit: requests that may wait; None for any number.
        overlap: give prefill work its own lane where the policy asks for it and the executor has one.

    Attributes:
        pool: who holds which blocks.
        waiting: requests in the order of their turn. running: started ones, in the same order.
        in_flight: launched works that have not joined, in the order of launches.
        partial: a sliced prefill between two slices.
        wake: clock at which the policy wants to be asked again, whatever has joined by then; None: no such.
        preemptions: requests taken back so far.
    """

    def __init__(
        self,
        executor: Executor,
        policy: Policy,
        *,
        admission: Admission = "peak",
        prefix_cache: bool = True,
        queue_limit: int | None = None,
        overlap: bool = True,
    ) -> None:
        require(queue_limit is None or queue_limit >= 1, "queue_limit", queue_limit, "at least 1, or None")
        self.executor = executor
        self.queue_limit = queue_limit
        self.two_lanes = overlap and executor.lanes
        self.pool = Pool(executor, admission=admission, prefix_cache=prefix_cache)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.in_flight: list[Work] = []
        self.partial: SlicedPrefillWork | None = None
        self.wake: float | None = None
        self.preemptions = 0
        self._policy, self._next_policy = policy, policy
        self._orders = 0

    # --- requests come and go ------------------------------------------------------------------------------

    def check(self, request: Request, *, waiting: int = 0) -> None:
        """Refuse what could never be started; ``waiting`` requests are on their way to the queue.

        Raises:
            InputError: a prompt that is empty, or longer than one sequence can ever be.
            QueueFullError: the queue is full.
        """
        length, most = request.prompt_len, self.pool.capacity
        require(length > 0, "prompt", "no tokens", "at least one token")
        fix = "shorten it, or start the engine with a larger pool or a model of longer context"
        require(length <= most, "prompt", f"{length} tokens", f"at most {most} tokens", fix)
        if self.queue_limit is not None and len(self.waiting) + waiting >= self.queue_limit:
            raise QueueFullError(self.queue_limit)

    def add(self, request: Request) -> None:
        """Put a request that was checked into the queue."""
        # The last token needs no slot: nothing attends to it.
        most = self.pool.capacity - request.prompt_len + 1
        request.max_new = min(request.params.max_tokens, most)
        self._orders += 1
        request.order = self._orders
        insort(self.waiting, request, key=_turn)

    def end(self, request: Request, status: Status, reason: str, error: str = "") -> None:
        """End a request at any moment; blocks that launched work names come back at its join."""
        if request.status.final:
            return
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.end(status, reason, self.executor.now(), error)
        self.pool.end(request)
        self._drop_unwanted()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.running or self.in_flight or self.partial)

    @property
    def policy(self) -> Policy:
        """The policy in use; a new one takes over when nothing of the old one's is in flight."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._next_policy = policy

    @property
    def can_grow(self) -> bool:
        """Whether the pool is to grow, and nothing stands in its way now."""
        return bool(self.pool.wanted) and not self.in_flight and self.partial is None

    # --- the two verbs -------------------------------------------------------------------------------------

    def next_work(self) -> Work | None:
        """The work to launch now; None when it is time to wait for one in flight, or for requests."""
        self.wake = None
        if self.in_flight and self.pool.wanted and self.partial is None:
            return None  # until nothing is: then the pool can grow
        if self._policy is not self._next_policy:
            if self.in_flight:
                return None
            self._policy = self._next_policy
        self._admit()
        view = self.view()
        pick = self._policy.pick(view)
        work = self._build(pick, view)
        if work is None and pick is not None:
            # Rows that were ready have found no block: whatever else there is goes first.
            pick = self._policy.pick(view := self.view(ready=0))
            work = self._build(pick, view)
        if work is not None:
            self.start_work(work)
        elif pick is None:
            self.wake = self._policy.wake
        return work

    def finish_work(self, work: Work) -> list[Row]:
        """A work, or a slice of one, has joined.

        Returns:
            The rows that sample, in the order of the work's outputs; requests that ended meanwhile are
            among them. Empty while layers are left.
        """
        self._remove(work)
        self._policy.observe(work, self.executor.now())
        if not work.complete:
            assert isinstance(work, SlicedPrefillWork)
            self.partial = work
            self._drop_unwanted()
            return []
        for row in work.rows:
            request = row.request
            request.in_flight -= 1
            if request.status.final:
                self.pool.joined(request)
                continue
            request.computed_len = row.stop
            self.pool.publish(row)
            if row.samples and request.status is Status.PREFILL:
                request.status = Status.DECODE
                self.pool.gave_back = True  # it grows in step now: the peak may be lower
        return [row for row in work.rows if row.samples]

    def start_work(self, work: Work) -> None:
        """Mark a work as launched: its rows' blocks stay until it has joined or was dropped."""
        if isinstance(work, SlicedPrefillWork) and work is self.partial:
            self.partial = None
        else:
            for row in work.rows:
                row.request.in_flight += 1
                row.request.launched_len = row.stop
        self.in_flight.append(work)

    def drop_work(self, work: Work) -> None:
        """A work that has failed, or that nobody wants: as if it had never been launched.

        The executor runs nothing of it any more (see :mod:`labkit.engine.executor`).
        """
        self._remove(work)
        for row in work.rows:
            request = row.request
            request.in_flight -= 1
            if request.status.final:
                self.pool.joined(request)
            else:
                request.launched_len = min(request.launched_len, row.start)

    # --- what is seen --------------------------------------------------------------------------------------

    def view(self, *, ready: int | None = None) -> View:
        """What the policy sees; ``ready`` replaces the number of rows that can decode."""
        decoding = idle = prompt_tokens = 0
        oldest = self.waiting[0].arrival if self.waiting else None
        for request in self.running:
            if request.status is Status.DECODE:
                decoding += 1
                idle += not request.in_flight
            else:
                if not request.in_flight:
                    prompt_tokens += request.pending
                if not request.output_ids and (oldest is None or request.arrival < oldest):
                    oldest = request.arrival
        return View(
            now=self.executor.now(),
            ready=idle if ready is None else ready,
            decoding=decoding,
            prompt_tokens=prompt_tokens,
            oldest=oldest,
            in_flight=tuple(self.in_flight),
            partial=self.partial,
            ahead=bool(self._fed_requests()),
            num_layers=self.executor.num_layers,
            two_lanes=self.two_lanes,
        )

    # --- admission and preemption --------------------------------------------------------------------------

    def _admit(self) -> None:
        # Who did not fit is asked again only when something has come back since.
        while self.waiting and self.pool.gave_back and len(self.running) < self.executor.max_rows:
            request = self.waiting[0]
            if not self.pool.fits(request, self.running):
                self.pool.gave_back = False
                return
            self.waiting.pop(0)
            self.pool.start(request)
            request.status = Status.PREFILL
            insort(self.running, request, key=_turn)

    def _preempt(self, wanting: Request) -> bool:
        """Take the youngest idle request's blocks back; False when no idle one is younger.

        So the oldest always gets its block, once nothing is in flight.
        """
        for victim in reversed(self.running):
            if _turn(victim) <= _turn(wanting):
                return False
            if not victim.busy:
                break
        else:
            return False
        self.running.remove(victim)
        self.pool.take_back(victim)
        victim.status = Status.WAITING
        victim.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, victim, key=_turn)
        return True

    # --- building works ------------------------------------------------------------------------------------

    def _build(self, pick: Pick | None, view: View) -> Work | None:
        if pick is None:
            return None
        lane: Lane = pick.lane if self.two_lanes else "decode"
        if pick.kind == "decode":
            fed = self._fed_requests()
            rows = self._decode_rows(fed)
            if not rows:
                return None
            work = DecodeWork(rows, lane)
            work.ahead = bool(fed)
            return work
        if self.partial is not None:  # begun under this policy or another: it goes first
            self.partial.next_layers = pick.layers if pick.kind == "slice" else view.num_layers
            return self.partial
        if pick.kind == "mixed":
            rows = self._decode_rows([])
            chunks = self._chunk_rows(min(pick.tokens, self.executor.max_tokens - len(rows)), len(rows))
            if rows:
                return MixedWork([*rows, *chunks], lane, len(rows)) if chunks else DecodeWork(rows, lane)
        else:
            chunks = self._chunk_rows(min(pick.tokens, self.executor.max_tokens), 0)
        if not chunks:
            return None
        if pick.kind == "slice":
            sliced = SlicedPrefillWork(chunks, lane, view.num_layers)
            sliced.next_layers = pick.layers
            return sliced
        return PrefillWork(chunks, lane)

    def _decode_rows(self, fed: Collection[Request]) -> list[Row]:
        """A step for everyone that decodes and is idle, and for ``fed``, whose token is still computed."""
        rows, fed = [], set(fed)
        for request in [one for one in self.running if one.status is Status.DECODE]:
            if request.status is not Status.DECODE or (request.in_flight and request not in fed):
                continue  # taken back for a row before it; or in flight
            stop = request.launched_len + 1
            if self._extend(request, stop):
                rows.append(Row(request, stop - 1, stop, samples=True, fed=request in fed))
        return rows

    def _extend(self, request: Request, stop: int) -> bool:
        """A slot for its next token; blocks of younger requests are taken back if it must be."""
        while not self.pool.extend(request, stop):
            # Where the pool is about to grow, it sits out until then, and nobody is taken back.
            if self.pool.wanted or not self._preempt(request):
                return False
        return True

    def _fed_requests(self) -> list[Request]:
        """Who can take the next decode step while the last is in flight: everyone who goes on at all."""
        if not self.executor.feeds or self._policy is not self._next_policy:
            return []
        works = [work for work in self.in_flight if work.lane == "decode"]
        if len(works) != 1 or not isinstance(works[0], DecodeWork):
            return []
        fed: list[Request] = []
        for row in works[0].rows:
            request = row.request
            if request.status.final or request.remaining <= 1:
                continue
            if not request.params.is_argmax or request.table is None:
                return []  # its token is drawn on the host: it would miss every other step
            fed.append(request)
        return fed if self.pool.can_extend_by_one(fed) else []

    def _chunk_rows(self, budget: int, others: int) -> list[Row]:
        prompts = [one for one in self.running if one.status is Status.PREFILL and not one.in_flight]
        prompts = prompts[: max(self.executor.max_rows - others, 0)]
        rows = []
        for request, count in zip(prompts, share(budget, [one.pending for one in prompts])):
            if count:
                stop = request.launched_len + count
                samples = stop == len(request.token_ids)
                rows.append(Row(request, request.launched_len, stop, samples))
        return rows

    # --- works in flight -----------------------------------------------------------------------------------

    def _drop_unwanted(self) -> None:
        """Nobody waits any more for the slices that a partial prefill has left."""
        if self.partial is not None and all(row.request.status.final for row in self.partial.rows):
            self.drop_work(self.partial)

    def _remove(self, work: Work) -> None:
        if work is self.partial:
            self.partial = None
        elif work in self.in_flight:
            self.in_flight.remove(work)


def _turn(request: Request) -> tuple[int, int]:
    return request.priority, request.order
