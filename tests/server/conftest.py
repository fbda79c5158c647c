"""Servers that tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_cases import ProcessServer, ThreadServer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer()


@pytest.fixture(scope="session")
def smollm2_server(smollm2_path: Path) -> Iterator[ProcessServer]:
    """``labkit serve`` with the default model; that it ends well is part of every test that uses it."""
    line = ("-m", "labkit.cli", "serve", "--port", "0", "--invariant", "--max-batch", "8")
    more = ("--max-context", "2048", "--device", "cpu")
    with ProcessServer(*line, *more, LABKIT_API_KEY="a key of the environment") as server:
        yield server
        assert server.end(signal.SIGTERM) == 0


@pytest.fixture
def tiny(tokenizer: Any) -> Iterator[ThreadServer]:
    with ThreadServer(tokenizer) as server:
        yield server
