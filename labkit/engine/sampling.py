"""What a request asks for: how its tokens are picked, and where its answer ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from labkit.errors import require
from labkit.models.sampling import Sampled, Sampler, Sampling

__all__ = ["Sampled", "Sampler", "SamplingParams"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Sampling):
    """The fields of :class:`labkit.models.sampling.Sampling`, and when to end.

    Args:
        max_tokens: most tokens of output, at least 1; an end token counts.
        stop: a text or several; the answer ends before the first of them (finish reason "stop").
        include_stop: leave the stop text at the end of the answer.
        stop_token_ids: ids that end the answer; like an end token they have no text.
        ignore_eos: generate on past the model's end tokens; ``stop_token_ids`` still count.

    Raises:
        InputError: a value out of range; names it.
    """

    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.max_tokens
        whole = isinstance(most, int) and not isinstance(most, bool)
        require(whole and most >= 1, "max_tokens", repr(most), "a whole number of at least 1")
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        for text in stop:
            require(
                isinstance(text, str) and text != "", "stop", repr(text), "texts of at least one character"
            )
        ids = _tuple("stop_token_ids", self.stop_token_ids)
        for token in ids:
            whole = isinstance(token, int) and not isinstance(token, bool)
            require(whole and token >= 0, "stop_token_ids", repr(token), "token ids")
        for name in ("include_stop", "ignore_eos"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, repr(value), "True or False")
        object.__setattr__(self, "stop", tuple(dict.fromkeys(stop)))
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(ids)))

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Ids that end this answer, for a model whose end tokens are ``eos_ids``."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_ids)


def _tuple(name: str, value: object) -> tuple:
    require(isinstance(value, (list, tuple)), name, repr(value), "a list")
    return tuple(value)  # type: ignore[arg-type]
