"""From a request to a call: models, places, prompts, lengths; and everything that the endpoints share."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from labkit import __version__
from labkit.engine.engine import Engine
from labkit.engine.request import QueueFullError
from labkit.errors import InputError
from labkit.server.call import Ask, Call, Piece
from labkit.server.door import Door
from labkit.server.errors import ApiError, of_input
from labkit.server.logprobs import TokenTexts
from labkit.server.loop import EngineFailedError, EngineLoop
from labkit.server.metrics import EngineCollector, Meters
from labkit.server.prompts import Prompts
from labkit.server.schemas import Generation
from labkit.server.settings import Settings


class Service:
    """One engine behind one server.

    Args:
        engine: used by the service alone.
        settings: see there.

    Attributes:
        loop: the engine's thread. door: who is let in. meters: what is counted.
        fingerprint: changes when answers may: version, model, executor, options.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        executor = engine.executor
        self.texts = TokenTexts(engine.tokenizer)
        self.prompts = Prompts(engine.tokenizer, executor.vocab_size)
        self.door = Door(executor.max_rows, settings.max_queue)
        self.loop = EngineLoop(engine, self._heard, lambda call: self.door.leave(call.left))
        collector = EngineCollector(
            lambda: self.loop.state, lambda: self.door.draining, lambda: self.loop.failure is not None
        )
        self.meters = Meters(collector)
        self.created = int(time.time())
        facts = [__version__, settings.model, executor.name, executor.block_size, dict(settings.options)]
        self.fingerprint = "fp_" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:10]

    def stop(self) -> None:
        """End the engine's thread, and those of the prompts."""
        self.loop.stop()
        self.prompts.close()

    @property
    def capacity(self) -> int:
        """Tokens of a sequence, prompt and answer."""
        return self.engine.scheduler.pool.capacity

    def check_model(self, name: str) -> None:
        """Refuse names that are not served.

        Raises:
            ApiError: 404.
        """
        if name != self.settings.model:
            message = f"the model {name[:200]!r} does not exist here; this server has {self.settings.model!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    def asks(self, prompts: Sequence[tuple[int, ...]], body: Generation, param: str) -> list[Ask]:
        """The choices of a request: n of each prompt, in the order of the prompts.

        Raises:
            ApiError: 400: too long; names both lengths.
        """
        asks = []
        for ids in prompts:
            params = self._params(len(ids), body, param)
            for i in range(body.n or 1):
                own = params if params.seed is None else replace(params, seed=params.seed + i)
                asks.append(Ask(ids, own))
        return asks

    async def submit(self, call: Call) -> None:
        """Give a call to the engine.

        Raises:
            ApiError: it was refused.
        """
        try:
            await self.loop.submit(call)
        except InputError as error:
            raise of_input(error) from None
        except QueueFullError as error:
            wait = self.door.retry_after(len(call.asks))
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS, str(error), code="queue_full", retry_after=wait
            ) from None
        except EngineFailedError as error:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), code="engine_failed") from None

    def _params(self, length: int, body: Generation, param: str) -> Any:
        most, asked = self.capacity, body.most_tokens
        wanted = 1 if asked is None else asked
        if length + wanted > most:
            parts = f"{length} of the prompt and {wanted} of the answer"
            message = f"this model's context is {most} tokens, and {length + wanted} were asked for: {parts}"
            blamed = param if length >= most or asked is None else "max_tokens"
            code = "context_length_exceeded"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, param=blamed, code=code)
        bad = next((id for id in body.stop_token_ids or () if id >= self.prompts.vocab_size), None)
        if bad is not None:
            message = f"stop_token_ids: got {bad}; expected ids below {self.prompts.vocab_size}"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, param="stop_token_ids", code="invalid_value")
        try:
            return body.params(most - length if asked is None else asked)
        except InputError as error:
            raise of_input(error) from None

    def _heard(self, call: Call, piece: Piece) -> None:
        self.meters.heard(piece)
        if piece.reason is not None:
            self.door.leave(ended=True)
