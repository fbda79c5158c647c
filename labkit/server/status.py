"""What the server says of itself: health, status, models."""

from __future__ import annotations

import time
from dataclasses import asdict
from http import HTTPStatus
from importlib import metadata
from typing import Any

from labkit import __version__
from labkit.server.errors import ApiError
from labkit.server.service import Service

_PACKAGES = ("torch", "fastapi", "uvicorn", "tokenizers")


def health(service: Service) -> dict[str, str]:
    """ "ok".

    Raises:
        ApiError: 503: the engine has broken down, or the server is draining.
    """
    if service.loop.failure is not None:
        message = f"the engine has broken down: {service.loop.failure}"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="engine_failed")
    service.door.check()
    return {"status": "ok"}


def status(service: Service) -> dict[str, Any]:
    """Policy, overlap and its counters, blocks, queue, versions."""
    state, door = service.loop.state, service.door
    counters = asdict(state.counters)
    return {
        "model": service.settings.model,
        "options": dict(service.settings.options),
        "executor": state.executor,
        "policy": state.policy,
        "overlap": state.overlap,
        "overlap_asked_for": service.settings.overlap,
        "two_streams": state.concurrent,
        "prefill_decode_overlap_steps": counters["prefill_decode_overlap_steps"],
        "prefill_decode_stream_overlap_steps": counters["prefill_decode_stream_overlap_steps"],
        "context": service.capacity,
        "blocks": {
            "total": state.blocks,
            "used": state.blocks_used,
            "idle": state.blocks_idle,
            "free": state.blocks_free,
            "size": state.block_size,
        },
        "queue": {
            "waiting": state.waiting,
            "prefilling": state.prefilling,
            "decoding": state.decoding,
            "under_way": door.live,
            "most_waiting": door.waiting,
            "most_under_way": door.most,
        },
        "counters": counters,
        "draining": door.draining,
        "failure": service.loop.failure,
        "uptime_seconds": round(time.time() - service.created, 1),
        "system_fingerprint": service.fingerprint,
        "versions": {"labkit": __version__, **_versions()},
    }


def model(service: Service) -> dict[str, Any]:
    """The one model, as /v1/models lists it; ``max_model_len`` is vLLM's extension."""
    return {
        "id": service.settings.model,
        "object": "model",
        "created": service.created,
        "owned_by": "labkit",
        "max_model_len": service.capacity,
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
