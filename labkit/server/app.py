"""The application: endpoints over one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from labkit import __version__
from labkit.engine.engine import Engine
from labkit.server import errors, replies, status
from labkit.server.chat import chat
from labkit.server.completions import complete
from labkit.server.gate import Gate
from labkit.server.metrics import CONTENT_TYPE
from labkit.server.schemas import ChatRequest, CompletionRequest
from labkit.server.service import Service
from labkit.server.settings import Settings


def make_app(engine: Engine, settings: Settings) -> tuple[ASGIApp, Service]:
    """The ASGI application over any engine, and the service behind it.

    The engine's thread runs from the application's start-up to its shut-down (ASGI's "lifespan"); nothing
    else may use the engine meanwhile.
    """
    service = Service(engine, settings)
    return Gate(_routes(service), settings, service.meters), service


def _routes(service: Service) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.loop.start()
        yield
        await asyncio.to_thread(service.stop)

    # The pages that show the description load scripts from elsewhere; the description itself stays.
    app = FastAPI(
        title="labkit serve",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    errors.install(app)

    def streamed(kind: str) -> dict[int | str, dict[str, Any]]:
        described: dict[str, Any] = {"text/event-stream": {}}
        words = f"The {kind}; with stream: true, chunks as server-sent events."
        return {200: {"content": described, "description": words}}

    @app.post(
        "/v1/completions",
        response_model=replies.Completion,
        responses={**streamed("completion"), **replies.ERRORS},
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, or several."""
        return await complete(service, request, body)

    @app.post(
        "/v1/chat/completions",
        response_model=replies.ChatCompletion,
        responses={**streamed("answer"), **replies.ERRORS},
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await chat(service, request, body)

    @app.get("/v1/models", response_model=replies.Models, responses=replies.ERRORS)
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [status.model(service)]}

    @app.get("/v1/models/{name:path}", response_model=replies.Model, responses=replies.ERRORS)
    async def model(name: str) -> dict[str, Any]:
        """One model by name."""
        service.check_model(name)
        return status.model(service)

    @app.get("/health", response_model=replies.Health, responses=replies.ERRORS)
    async def health() -> dict[str, str]:
        """Whether requests are taken; needs no key."""
        return status.health(service)

    @app.get("/status", response_model=dict[str, Any], responses=replies.ERRORS)
    async def state() -> dict[str, Any]:
        """Policy, overlap, blocks, queue, versions."""
        return status.status(service)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.meters.text(), headers={"content-type": CONTENT_TYPE})

    return app
