"""Where a launch runs: in this process, or in a worker that may crash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from labkit.emulator.arguments import Buffer
from labkit.emulator.build import Built


class WorkerLost(Exception):
    """The process of a launch ended, or had to be ended; ``kind`` is the fault's."""

    def __init__(self, kind: str, message: str, seconds: float) -> None:
        super().__init__(message)
        self.kind = kind
        self.seconds = seconds


class Launcher(Protocol):
    """Runs launches of built kernels."""

    def signature(self, built: Built, entry: str) -> list[dict[str, Any]]:
        """Kinds and sizes of a kernel's parameters."""
        ...

    def launch(
        self, built: Built, request: dict[str, Any], buffers: Sequence[Buffer], limit: float | None
    ) -> dict[str, Any]:
        """Run one launch and return its outcome (see :class:`labkit.emulator.library.Launch`)."""
        ...


def placed(values: Sequence[Sequence[Any]], places: Sequence[tuple[int, int]]) -> list[Sequence[Any]]:
    """Argument values with buffers replaced by the regions they lie in."""
    return [
        ("pointer", places[value[1]][0], places[value[1]][1] + value[2]) if value[0] == "pointer" else value
        for value in values
    ]
