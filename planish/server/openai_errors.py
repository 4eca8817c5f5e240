"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import Response

from planish.errors import UserError
from planish.server.errors import NotFound, retry_headers, status_of
from planish.server.exchange import answered

_log = logging.getLogger("planish.server")

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class UnsupportedParameterError(UserError):
    """A parameter that OpenAI knows, or a value of one, and that means nothing here."""

    code = "unsupported_parameter"

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"{name} is not supported here: {remedy}")
        self.param = name


class WrongParameterError(UserError):
    """A parameter with a value that it cannot have."""

    code = "invalid_value"

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.param = name


class ModelNotFoundError(NotFound):
    code = "model_not_found"
    param = "model"


def error_body(error: Exception) -> dict[str, Any]:
    """What the client is told; the server's log is told what is nobody's business but the server's."""
    status = status_of(error)
    message = str(error)
    if status == 500:
        _log.error("an OpenAI-compatible request failed", exc_info=error)
        message = f"a fault of the server ({type(error).__name__}); its log has the whole of it"
    code = "invalid_api_key" if status == 401 else getattr(error, "code", None)
    return body_of(message, status, getattr(error, "param", None), code)


def body_of(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> Response:
    return answered(error_body(error), status_of(error), retry_headers(error))
