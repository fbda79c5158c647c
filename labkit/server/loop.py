"""The engine's own thread. Calls come in through one queue, news go out through their event loops.

Nothing of the engine is touched from anywhere else. The thread sleeps while there is nothing to do. If the
engine itself breaks (not a request: these fail alone), every call ends with the reason, and so does every
call that comes later: the process is to be restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import sub
from typing import TypeAlias

from labkit.engine.engine import Engine
from labkit.engine.metrics import Snapshot, tpot
from labkit.engine.request import Request
from labkit.engine.runner import Update
from labkit.server.call import Call, Piece

log = logging.getLogger("labkit.server")

_FRESH = 0.05
"""Seconds that a snapshot may be old while the engine works."""


class EngineFailedError(RuntimeError):
    """The engine has broken down; the process is to be restarted."""


@dataclass(frozen=True)
class _Submit:
    call: Call
    taken: asyncio.Future[None]


@dataclass(frozen=True)
class _Cancel:
    call: Call


@dataclass(frozen=True)
class _AbortAll:
    reason: str


_Message: TypeAlias = _Submit | _Cancel | _AbortAll | None  # None: stop


class _Choice:
    """One request of the engine, and what its client has been told."""

    __slots__ = ("call", "number", "reported", "request", "told", "why")

    def __init__(self, call: Call, number: int, request: Request) -> None:
        self.call, self.number, self.request = call, number, request
        self.told = self.reported = 0  # tokens, log probabilities
        self.why = ""  # it was aborted


class EngineLoop:
    """Steps one engine in a thread.

    Args:
        engine: used by this thread alone from :meth:`start` on.
        heard: called with every piece of news, on the event loop of its call.
        refused: called there with a call that was not taken.

    Attributes:
        state: a recent snapshot: at most a few steps old, and of now when the engine is idle.
        failure: why the engine broke down; None while it is well.
    """

    def __init__(
        self, engine: Engine, heard: Callable[[Call, Piece], None], refused: Callable[[Call], None]
    ) -> None:
        self.engine, self._heard, self._refused = engine, heard, refused
        self.failure: str | None = None
        self.state: Snapshot = engine.snapshot(latency=False)
        self._looked = time.monotonic()
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._choices: dict[Request, _Choice] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="labkit-engine", daemon=True)

    # --- from event loops ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def stop(self) -> None:
        """Abort what is left and end the thread; waits for the step that runs. Idempotent."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    async def submit(self, call: Call) -> None:
        """Hand a call over; comes back when the engine has taken all of its choices.

        Raises:
            InputError, QueueFullError: the engine's; then none of them was taken.
            EngineFailedError: it has broken down.
        """
        taken: asyncio.Future[None] = call.loop.create_future()
        taken.add_done_callback(lambda done: self._refused(call) if done.exception() else None)
        self._inbox.put(_Submit(call, taken))
        try:
            await asyncio.shield(taken)  # whoever stops waiting, the outcome is heard of
        except asyncio.CancelledError:
            self.cancel(call)
            raise

    def cancel(self, call: Call) -> None:
        """End what is left of a call; its choices end with reason "abort"."""
        self._inbox.put(_Cancel(call))

    def abort_all(self, reason: str) -> None:
        """End everything; clients are told the reason."""
        self._inbox.put(_AbortAll(reason))

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._break_down(error)

    def _work(self) -> None:
        engine = self.engine
        while True:
            message: _Message
            if engine.idle:
                message = self._inbox.get()
                if self._obey(message):
                    return
            with contextlib.suppress(queue.Empty):
                while True:
                    if self._obey(self._inbox.get_nowait()):
                        return
            # Also where requests have ended before they began: their news come out of a step.
            self._tell(engine.step())

    def _obey(self, message: _Message) -> bool:
        """Do what was asked; True to stop."""
        if isinstance(message, _Submit):
            self._take(message)
        elif isinstance(message, _Cancel):
            self._abort(message.call, "the client has left")
        else:
            self._abort(None, "the server is stopping" if message is None else message.reason)
            if message is None:
                self._stopped = True
                self._tell(self.engine.step())
                return True
        return False

    def _take(self, message: _Submit) -> None:
        call, taken = message.call, []
        arrival = self.engine.executor.now() - (time.monotonic() - call.received)
        try:
            for number, ask in enumerate(call.asks):
                request = self.engine.add_request(ask.prompt, ask.params, arrival=arrival)
                taken.append(_Choice(call, number, request))
        except Exception as error:
            for choice in taken:  # nobody is told: the call has failed as a whole
                self.engine.abort(choice.request)
            _post(call, _settle, message.taken, error)
            return
        self._choices.update({choice.request: choice for choice in taken})
        _post(call, _settle, message.taken, None)

    def _abort(self, call: Call | None, why: str) -> None:
        for choice in list(self._choices.values()):
            if call is None or choice.call is call:
                choice.why = why
                self.engine.abort(choice.request)

    def _tell(self, updates: list[Update]) -> None:
        pieces = [
            (choice.call, self._piece(choice, update)) for update in updates if (choice := self._of(update))
        ]
        ended = any(update.ended for update in updates)
        now = time.monotonic()
        if ended or self.engine.idle or now - self._looked > _FRESH:
            # Before the news go out: who has read the last of an answer finds its blocks given back.
            self.state, self._looked = self.engine.snapshot(latency=False), now
        self._send(pieces)

    def _of(self, update: Update) -> _Choice | None:
        choices = self._choices
        return choices.pop(update.request, None) if update.ended else choices.get(update.request)

    def _piece(self, choice: _Choice, update: Update) -> Piece:
        request = update.request
        times = request.token_times
        first = choice.told == 0 and bool(times)
        begin = max(choice.told, 1)
        gaps = tuple(map(sub, times[begin:], times[begin - 1 :]))
        choice.told = len(times)
        logprobs: tuple = ()
        offsets: tuple[int, ...] = ()
        if request.params.logprobs is not None:
            start, stop = choice.reported, len(request.logprobs)
            if request.stream is None:
                offsets = (0,) * (stop - start)
            else:
                stop = max(start, min(stop, request.stream.num_visible))
                offsets = tuple(request.stream.offsets[start:stop])
            logprobs = tuple(request.logprobs[start:stop])
            choice.reported = stop
        ended = update.ended and request.finish_time is not None
        return Piece(
            choice.number,
            update.text,
            len(update.tokens),
            logprobs,
            offsets,
            reason=request.finish_reason if update.ended else None,
            error=request.error or choice.why,
            cached=request.cached_len,
            ttft=times[0] - request.arrival if first else None,
            gaps=gaps,
            tpot=tpot(request) if ended else None,
            seconds=request.finish_time - request.arrival
            if ended and request.finish_time is not None
            else None,
        )

    def _send(self, pieces: list[tuple[Call, Piece]]) -> None:
        """One wake-up for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, Piece]]] = {}
        for call, piece in pieces:
            by_loop.setdefault(call.loop, []).append((call, piece))
        for some in by_loop.values():
            _post(some[0][0], self._hand_over, some)

    def _hand_over(self, pieces: list[tuple[Call, Piece]]) -> None:
        for call, piece in pieces:
            call.put(piece)
            self._heard(call, piece)

    def _break_down(self, error: Exception) -> None:
        """End every call with what happened; from now on nothing is taken."""
        log.critical("the engine has broken down", exc_info=error)
        self.failure = f"{type(error).__name__}: {error}"
        why = f"the engine has broken down ({self.failure})"
        self._send(
            [(one.call, Piece(one.number, reason="error", error=why)) for one in self._choices.values()]
        )
        self._choices.clear()
        while not self._stopped and (message := self._inbox.get()) is not None:
            if isinstance(message, _Submit):
                _post(message.call, _settle, message.taken, EngineFailedError(why))


def _settle(taken: asyncio.Future[None], error: Exception | None) -> None:
    if not taken.done():
        if error is None:
            taken.set_result(None)
        else:
            taken.set_exception(error)


def _post(call: Call, function: Callable, *arguments: object) -> None:
    """Call a function on the call's event loop, if that still runs."""
    with contextlib.suppress(RuntimeError):  # it was closed
        call.loop.call_soon_threadsafe(function, *arguments)
