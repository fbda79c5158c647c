"""Prompts to token ids, in threads of their own: a long text delays neither the engine nor other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from labkit.errors import InputError
from labkit.server.errors import of_input

_T = TypeVar("_T")


class Prompts:
    """Encodes for one engine.

    Args:
        tokenizer: a labkit.models.tokenizer.Tokenizer, or None where only token ids can be taken.
        vocab_size: ids of prompts are below it.
        workers: texts that are encoded at once.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, *, workers: int = 2) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="labkit-prompts")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def of_completion(
        self, prompts: Sequence[str | tuple[int, ...]], *, echo: bool
    ) -> tuple[list[tuple[int, ...]], list[str]]:
        """Ids of each prompt, and the text to put in front of its answers ("" without echo).

        Raises:
            ApiError: 400: a text without tokens, an id outside the vocabulary.
        """

        def work() -> tuple[list[tuple[int, ...]], list[str]]:
            ids = [self._encoded(p) if isinstance(p, str) else self._checked(p) for p in prompts]
            if not echo:
                return ids, [""] * len(ids)
            return ids, [p if isinstance(p, str) else self._tokens().decode(p) for p in prompts]

        return await self._elsewhere(work, "prompt")

    async def of_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Ids of a conversation in the model's chat template.

        Raises:
            ApiError: 400: no template, or messages that it refuses.
        """
        return await self._elsewhere(lambda: tuple(self._tokens().apply_chat(messages)), "messages")

    async def _elsewhere(self, work: Callable[[], _T], param: str) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except InputError as error:
            raise of_input(error, param) from None

    def _tokens(self) -> Any:
        if self.tokenizer is None:
            raise InputError("prompt", "text for a model with no tokenizer", "token ids, to /v1/completions")
        return self.tokenizer

    def _encoded(self, text: str) -> tuple[int, ...]:
        ids = tuple(self._tokens().encode(text))
        if not ids:
            words = "an empty text" if not text else f"{text[:40]!r}, which this vocabulary has no tokens for"
            raise InputError("prompt", words, "at least one token")
        return ids

    def _checked(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        bad = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise InputError("prompt", f"token id {bad}", f"ids from 0 to {self.vocab_size - 1}")
        return ids
