"""Requests made up from the server's own OpenAPI description: no 500, and answers of the shapes it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from server_cases import NAME, ThreadServer

# What the description allows may still be too long, or 1.0 where a whole number is meant.
POSITIVE = schemathesis.GenerationMode.POSITIVE
RUN = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def described(tokenizer: Any) -> Iterator[Any]:
    with ThreadServer(tokenizer) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        status = server.wait_until_free()
        assert status["failure"] is None and not status["counters"]["finished"].get("error")


def run(operation: Any, mode: Any, seen: set[int]) -> None:
    """Made-up requests to one operation; their statuses are put into ``seen``."""

    @RUN
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if mode is POSITIVE and isinstance(case.body, dict):
            # So that many are taken, and none takes long.
            case.body |= {"model": NAME, "max_tokens": 2, "n": min(case.body.get("n") or 1, 2)}
            if "messages" in case.body:
                case.body["max_completion_tokens"] = None
        seen.add(case.call_and_validate(excluded_checks=[positive_data_acceptance]).status_code)

    ask()


def test_nothing_made_up_breaks_the_server(described: Any) -> None:
    """Not by schemathesis' own pytest plugin, which lags behind pytest."""
    statuses: dict[str, set[int]] = {}
    for result in described.get_all_operations():
        operation = result.ok()
        seen = statuses.setdefault(operation.path, set())
        modes = schemathesis.GenerationMode if operation.method == "post" else [POSITIVE]
        for mode in modes:
            run(operation, mode, seen)
    assert len(statuses) == 7 and all(200 in seen for path, seen in statuses.items() if "{" not in path)
    assert statuses["/v1/completions"] == statuses["/v1/chat/completions"] == {200, 400}


def test_the_description_names_every_endpoint_and_no_422(described: Any) -> None:
    paths = described.raw_schema["paths"]
    assert set(paths) == {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/health", "/status",
        "/metrics",
    }  # fmt: skip
    assert not [
        path for path, methods in paths.items() for one in methods.values() if "422" in one["responses"]
    ]
