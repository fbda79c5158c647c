"""What goes wrong, in the form that OpenAI's clients read."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from labkit.errors import InputError

log = logging.getLogger("labkit.server")


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for people.
        param: field of the request that is to blame, such as "messages[0].role".
        code: for programs.
        retry_after: whole seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}."""
        return error_body(self.status, self.message, param=self.param, code=self.code)

    def response(self) -> JSONResponse:
        """With the headers that belong to it."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The one shape of every error. What a client sent and cannot be written as UTF-8 is replaced."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    else:
        kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    clean = [text if text is None else text.encode("utf-8", "replace").decode() for text in (message, param)]
    return {"error": {"message": clean[0], "type": kind, "param": clean[1], "code": code}}


def of_input(error: InputError, param: str | None = None) -> ApiError:
    """A refusal of the engine's or the tokenizer's."""
    return ApiError(HTTPStatus.BAD_REQUEST, str(error), param=param or error.argument, code="invalid_value")


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong with a body; fields that are not known come before wrong values."""
    named = [error for error in errors if error["type"] in ("unknown", "unsupported")]
    first = (named or list(errors))[0]
    param = _path(first["loc"][1:], first.get("ctx", {}).get("at", ""))
    kind, code = first["type"], "invalid_value"
    if kind == "json_invalid":
        return ApiError(
            HTTPStatus.BAD_REQUEST,
            f"the body is not JSON: {first.get('ctx', {}).get('error', 'malformed')}",
            code="invalid_json",
        )
    if kind == "unknown":
        message, code = f"Unrecognized request argument supplied: {param}", "unknown_parameter"
    elif kind == "missing":
        message = f"you must provide {param or 'a body'}"
        code = "missing_required_parameter"
    elif kind in ("unsupported", "refused"):
        message = f"{param}: {first['msg']}"
        code = "unsupported_parameter" if kind == "unsupported" else code
    else:
        message = f"{param or 'body'}: {first['msg']}; got {reprlib.repr(first.get('input'))}"
        code = "invalid_type" if kind.endswith("_type") else code
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param or None, code=code)


def install(app: FastAPI) -> None:
    """Every error of an app in the one shape, the framework's own too."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return of_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> JSONResponse:
        words = {
            HTTPStatus.NOT_FOUND: f"no such path: {request.method} {request.url.path}",
            HTTPStatus.METHOD_NOT_ALLOWED: f"not allowed here: {request.method} {request.url.path}",
        }
        message = words.get(HTTPStatus(error.status_code), str(error.detail))
        code = "invalid_json" if error.status_code == HTTPStatus.BAD_REQUEST else None
        body = error_body(error.status_code, message, code=code)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        message = f"the server has failed on this request: {type(error).__name__}"
        return JSONResponse(error_body(HTTPStatus.INTERNAL_SERVER_ERROR, message), 500)


def _path(loc: Sequence[Any], inside: str) -> str:
    """("messages", 0, "role") to "messages[0].role"."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path + (f".{inside}" if path and inside and not inside.startswith("[") else inside)
