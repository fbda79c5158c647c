"""Fixtures of the runtime's own tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from runtime_cases import Planted


@pytest.fixture(scope="session")
def planted() -> Planted:
    """Planted faults in a child process: some of them would take this one down."""
    return Planted("faults.cu", "planted", time_limit=1.0)


@pytest.fixture(scope="session")
def _planted_here() -> Planted:
    return Planted("faults.cu", "planted", isolate=False)


@pytest.fixture(params=["forward", "reversed"])
def either_order(_planted_here: Planted, request: pytest.FixtureRequest) -> Iterator[Planted]:
    """Those that end well, in this process, with a block's threads run in either order."""
    _planted_here.kernel.trace((1,), (64,), _planted_here.arguments("clean_reverse", 0)[1])
    _planted_here.reverse_threads(request.param == "reversed")
    yield _planted_here
    _planted_here.reverse_threads(False)
