"""Errors of the OpenAI-compatible endpoints: {"error": {"message", "type", "param", "code"}}, as
OpenAI's clients expect.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from planish.errors import UserError
from planish.server.http.compatible_routes import Api
from planish.server.http.context import json_response, status_and_message
from planish.server.results import NotFound, client_error, retry_headers, status_of

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class UnsupportedParameterError(UserError):
    """A parameter of OpenAI's API, or a value of a parameter, that this server does not support."""

    code = "unsupported_parameter"

    def __init__(self, name: str, remedy: str) -> None:
        """`name` is the parameter, and `remedy` says what to give instead."""
        super().__init__(f"{name} is not supported here: {remedy}")
        self.param = name


class WrongParameterError(UserError):
    """A parameter with an invalid value."""

    code = "invalid_value"

    def __init__(self, name: str, message: str) -> None:
        """`name` is the parameter, and `message` the whole error message."""
        super().__init__(message)
        self.param = name


class ModelNotFoundError(NotFound):
    """There is no such model for this tenant."""

    code = "model_not_found"
    param = "model"


def openai_error_body(error: Exception) -> dict[str, Any]:
    """Return the body that reports an error to an OpenAI client."""
    status, message = status_and_message(error)
    code = "invalid_api_key" if status == 401 else getattr(error, "code", None)
    return make_openai_error_body(message, status, getattr(error, "param", None), code)


def make_openai_error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error for OpenAI clients."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def openai_error_response(error: Exception) -> Response:
    """Return the response for an error to an OpenAI client."""
    sent_error = client_error(error)
    return json_response(openai_error_body(error), status_of(sent_error), retry_headers(sent_error))


OPENAI_API = Api(
    "this server needs a key: give it to OpenAI's client as api_key or in OPENAI_API_KEY (header "
    "`Authorization: Bearer KEY`)",
    openai_error_response,
)
"""OpenAI's API."""
