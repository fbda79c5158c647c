"""The engine: requests in, tokens and text out, for one caller, many threads, or an event loop.

One ``step`` is one cycle of its :class:`Runner`; which works a cycle holds is the policy's choice, and which
requests they hold the scheduler's.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from labkit.engine.adaptive import make_policy
from labkit.engine.executor import Executor
from labkit.engine.metrics import Counters, Latency, Snapshot
from labkit.engine.policy import Policy
from labkit.engine.pool import Admission
from labkit.engine.request import QueueFullError, Request, Status
from labkit.engine.runner import Runner, Update
from labkit.engine.sampling import Sampler, SamplingParams
from labkit.engine.scheduler import Scheduler
from labkit.engine.text import Streams, TextStream
from labkit.errors import InputError, require

if TYPE_CHECKING:
    from labkit.models.model import Model


class Engine:
    """Continuous batching over one executor.

    One thread at a time may call ``step`` (others wait); ``add_request`` and ``abort`` may be called from
    any thread at any time and are taken up by the next step.

    Args:
        source: an executor, or a model, which gets a torch executor on its own device.
        tokenizer: for prompts that are text, and for text out; a model's own by default.
        policy: a name of labkit.engine.adaptive.POLICIES, or a policy.
        admission, prefix_cache: see :class:`Pool`. queue_limit, overlap: see :class:`Scheduler`.
        remembered: ended requests kept for :meth:`snapshot`.
        options: of the executor that a model gets.

    Attributes:
        executor: who computes. scheduler: the books. runner: the loop; its ``watch`` sees every work.
    """

    def __init__(
        self,
        source: Executor | Model,
        *,
        tokenizer: Any = None,
        policy: str | Policy = "mixed",
        admission: Admission = "peak",
        prefix_cache: bool = True,
        queue_limit: int | None = None,
        overlap: bool = True,
        remembered: int = 1000,
        **options: Any,
    ) -> None:
        if hasattr(source, "prepare"):
            require(not options, "options", ", ".join(options), "none, with an executor")
            self.executor = cast(Executor, source)
        else:
            from labkit.engine.executor_for import executor_for

            self.executor = executor_for(source, **options)
            tokenizer = tokenizer or getattr(source, "tokenizer", None)
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            self.executor,
            make_policy(policy),
            admission=admission,
            prefix_cache=prefix_cache,
            queue_limit=queue_limit,
            overlap=overlap,
        )
        self.runner = Runner(self.executor, self.scheduler, self._has_ended)
        self.remembered: deque[Request] = deque(maxlen=remembered)
        self._live: dict[str, Request] = {}
        self._inbox: deque[Request] = deque()
        self._aborts: deque[Request] = deque()
        self._boxes: dict[Request, deque[Update]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._driver: asyncio.Future[Any] | None = None

    # --- requests ------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        arrival: float | None = None,
    ) -> Request:
        """Queue a request; the steps that follow work on it.

        Args:
            prompt: token ids, or text where there is a tokenizer.
            params: how to sample and when to stop; greedy by default.
            request_id: unique among live requests; by default a number.
            priority: smaller is started first. Those of larger numbers wait for as long as smaller come.
            salt: tenant; only prompts of one tenant share cached prefixes.
            arrival: seconds on the executor's clock; now by default.

        Raises:
            InputError: an empty or over-long prompt, ids outside the vocabulary, an id in use.
            QueueFullError: as many wait as may.
        """
        params = SamplingParams() if params is None else params
        request_id = f"{next(self._numbers)}" if request_id is None else request_id
        require(request_id not in self._live, "request_id", repr(request_id), "one that is not in use")
        require(isinstance(salt, str), "salt", repr(salt), "text")
        arrival = self.executor.now() if arrival is None else arrival
        request = Request(request_id, self._ids(prompt), params, arrival, priority, salt)
        request.sampler = Sampler(params, self.executor.vocab_size)
        request.end_ids = params.end_ids(self.executor.eos_ids)
        if self.tokenizer is not None:
            streams = cast(Streams, self.tokenizer)
            request.stream = TextStream(streams, params.stop, include_stop=params.include_stop)
        else:
            require(not params.stop, "stop", params.stop, "no texts, as the engine has no tokenizer")
        self.scheduler.check(request, waiting=len(self._inbox))
        self._live[request_id] = request
        self._inbox.append(request)
        self._try_take_up()
        return request

    def abort(self, request: Request | str) -> None:
        """End a request at any moment, with reason "abort"; one that has ended stays as it is."""
        found = self._live.get(request) if isinstance(request, str) else request
        if found is not None:
            self._aborts.append(found)
            self._try_take_up()

    @property
    def idle(self) -> bool:
        """Whether every request has ended and no work is in flight."""
        return self.scheduler.idle and not self._inbox and not self._aborts

    def set_policy(self, policy: str | Policy, **options: Any) -> None:
        """Another policy, from the moment at which nothing of the old one's is in flight."""
        self.scheduler.policy = make_policy(policy, **options)

    def set_overlap(self, overlap: bool) -> None:
        """Let prefill work have its own lane, or not, from the next work on."""
        self.scheduler.two_lanes = overlap and self.executor.lanes

    @property
    def counters(self) -> Counters:
        """Totals since the start; they only grow."""
        return self.runner.counters

    # --- the loop ------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """One cycle; news of every request that got tokens or ended. Nothing to do: an empty list."""
        with self._lock:
            self._take_up()
            self.runner.cycle()
            self._take_up()
            self.runner.check_books()
            updates = self.runner.news()
            for update in updates:
                if (box := self._boxes.get(update.request)) is not None:
                    box.append(update)
        if self._aborts:  # one came after the last look, while the lock was held
            self._try_take_up()
        return updates

    def run(self) -> None:
        """Steps until every request has ended."""
        while not self.idle:
            self.step()

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Request]:
        """A batch to its end; the requests in the order of the prompts, each with its finish reason.

        A prompt that cannot be taken fails alone, with reason "error". More prompts than the queue holds
        are put in as others leave.
        """
        prompts = list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        require(len(each) == len(prompts), "params", f"{len(each)} for {len(prompts)} prompts", "one each")
        requests = []
        for prompt, one in zip(prompts, each):
            while (request := self._try_add(prompt, one)) is None:
                self.step()
            requests.append(request)
        while not all(request.status.final for request in requests):
            self.step()
        return requests

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Update]:
        """Add a request and step until it has ended; its news as they come. Closing it early aborts it.

        Other requests go on meanwhile. ``options`` as for :meth:`add_request`.
        """
        request = self.add_request(prompt, params, **options)
        box = self._boxes[request] = deque()
        return self._follow(request, box)

    async def astream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Update]:
        """The same for coroutines: any number at once, on one event loop. Steps run in a thread, started
        by whoever waits for news; leaving the loop early, or being cancelled, aborts the request."""
        request = self.add_request(prompt, params, **options)
        box = self._boxes[request] = deque()
        try:
            while True:
                while box:
                    update = box.popleft()
                    yield update
                    if update.ended:
                        return
                if self._driver is None or self._driver.done():
                    self._driver = asyncio.ensure_future(asyncio.to_thread(self.step))
                # Shielded: the step goes on for the others when this coroutine is cancelled.
                await asyncio.shield(self._driver)
        finally:
            self._boxes.pop(request, None)
            self.abort(request)

    def snapshot(self, *, latency: bool = True) -> Snapshot:
        """The state now, for /status. ``latency`` False leaves the spreads empty, which makes it cheap.

        Not to be called while another thread steps.
        """
        scheduler, blocks = self.scheduler, self.scheduler.pool.blocks
        by_status = [request.status for request in scheduler.running]
        return Snapshot(
            policy=scheduler.policy.name,
            executor=self.executor.name,
            overlap=scheduler.two_lanes and scheduler.policy.overlaps,
            concurrent=self.executor.concurrent,
            waiting=len(scheduler.waiting) + len(self._inbox),
            prefilling=by_status.count(Status.PREFILL),
            decoding=by_status.count(Status.DECODE),
            blocks=blocks.num_blocks,
            blocks_free=blocks.num_free,
            blocks_idle=blocks.num_idle,
            block_size=blocks.block_size,
            counters=self.counters.copy(),
            latency=Latency.of(list(self.remembered) if latency else []),
        )

    # --- inside --------------------------------------------------------------------------------------------

    def _take_up(self) -> None:
        """Requests and aborts that came since; the lock is held."""
        while self._inbox:
            request = self._inbox.popleft()
            self.scheduler.add(request)
            self.counters.prompt_tokens += request.prompt_len
        while self._aborts:
            request = self._aborts.popleft()
            if not request.status.final:
                self.runner.end(request, Status.ABORTED, "abort")

    def _try_take_up(self) -> None:
        """The same now, unless a step runs: it does so at its end."""
        if self._lock.acquire(blocking=False):
            try:
                self._take_up()
            finally:
                self._lock.release()

    def _has_ended(self, request: Request) -> None:
        self._live.pop(request.id, None)
        self.remembered.append(request)

    def _follow(self, request: Request, box: deque[Update]) -> Iterator[Update]:
        try:
            while True:
                while box:
                    update = box.popleft()
                    yield update
                    if update.ended:
                        return
                self.step()
        finally:
            self._boxes.pop(request, None)
            self.abort(request)

    def _try_add(self, prompt: str | Sequence[int], params: SamplingParams | None) -> Request | None:
        """A request, failed where the prompt cannot be taken; None while the queue is full."""
        try:
            return self.add_request(prompt, params)
        except QueueFullError:
            return None
        except InputError as error:
            now = self.executor.now()
            request = Request(f"{next(self._numbers)}", (), params or SamplingParams(), now)
            request.end(Status.FAILED, "error", now, str(error))
            self.counters.count_finish("error")
            return request

    def _ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            require(self.tokenizer is not None, "prompt", "text", "token ids: the engine has no tokenizer")
            return tuple(self.tokenizer.encode(prompt))
        ids = tuple(int(token) for token in prompt)
        vocab = self.executor.vocab_size
        bad = next((token for token in ids if not 0 <= token < vocab), None)
        require(bad is None, "prompt", f"token id {bad}", f"ids from 0 to {vocab - 1}")
        return ids
