"""A capture is not ended by what the garbage collector finds meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from labkit.bench.timing import captured

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _an_eager_collector() -> Iterator[None]:
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Engine:
    """Holds a graph, and itself: only the collector finds it once it is let go."""

    def __init__(self, x: torch.Tensor) -> None:
        self.replay = captured(lambda: x.add_(1))
        self.itself = self


def test_graphs_that_nobody_holds_do_not_end_a_capture() -> None:
    x = torch.zeros(8, device="cuda")
    gc.collect()
    gc.set_threshold(100_000, 50, 50)
    for _ in range(3):
        Engine(x)
    x.zero_()
    collected = []

    def work() -> None:
        if torch.cuda.is_current_stream_capturing():
            gc.set_threshold(1, 1, 1)
            collected.append([[index] for index in range(2_000)])  # each a chance for the collector
        x.add_(1)

    replay = captured(work)
    assert len(collected) == 1
    before = float(x[0])
    replay()
    assert float(x[0]) == before + 1
