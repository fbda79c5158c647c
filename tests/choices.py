"""Random decisions that can be recorded, replayed and shrunk: a fuzzed run is its list of numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Whole numbers from a seed, or from a list that was recorded; zero is always the dull choice."""

    def __init__(self, seed: int | None = None, replay: Sequence[int] = ()) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._replay = replay
        self.drawn: list[int] = []

    def below(self, bound: int) -> int:
        """A number from 0 to bound − 1; 0 where the list has ended."""
        if self._random is not None:
            value = int(self._random.random() * bound)
        else:
            at = len(self.drawn)
            value = self._replay[at] % bound if at < len(self._replay) else 0
        self.drawn.append(value)
        return value

    def chance(self, one_in: int) -> bool:
        """True once in ``one_in`` draws."""
        return self.below(one_in) == one_in - 1

    def pick(self, values: Sequence[T]) -> T:
        """One of the values; the first is the dull one."""
        return values[self.below(len(values))]


def shrink(drawn: Sequence[int], fails: Callable[[list[int]], bool], *, tries: int = 3000) -> list[int]:
    """A shorter list of smaller numbers that still fails.

    Args:
        drawn: a list that fails.
        fails: whether a list does.
        tries: at most so many lists are tried.
    """
    best = list(drawn)

    def better(candidate: list[int]) -> bool:
        nonlocal tries, best
        tries -= 1
        if tries < 0 or not fails(candidate):
            return False
        best = candidate
        return True

    improved = True
    while improved and tries > 0:
        improved = False
        length = max(len(best) // 2, 1)
        while length:  # leave out runs of choices, from the end
            for at in range(len(best) - length, -1, -length):
                improved |= better(best[:at] + best[at + length :])
            length //= 2
        for at in range(len(best)):  # then make the choices that are left duller
            smaller = range(min(best[at], 8))
            improved |= any(better([*best[:at], value, *best[at + 1 :]]) for value in smaller)
    while best and best[-1] == 0:  # a list that has ended gives zeros
        best.pop()
    return best
