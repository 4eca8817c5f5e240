"""Errors in the form of Anthropic's API: {"type": "error", "error": {"type", "message"},
"request_id"}. The header `request-id` has the same id.
"""

from __future__ import annotations

import secrets
from typing import Any

from starlette.responses import Response

from planish.errors import ContextLengthError
from planish.server.http.compatible_routes import Api
from planish.server.http.context import json_response, status_and_message
from planish.server.http.openai_errors import WrongParameterError
from planish.server.results import client_error, retry_headers, status_of

_UNAVAILABLE, _OVERLOADED = 503, 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    _OVERLOADED: "overloaded_error",
}
_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
"""Details of errors by parameter. With these, Anthropic's tool runner sends whole conversations."""
REQUEST_ID_HEADER = "request-id"


class PromptTooLongError(WrongParameterError):
    """The prompt exceeds the model's context. Agents look for the wording, and then shorten the
    conversation.
    """

    code = ContextLengthError.code

    def __init__(self, num_tokens: int, maximum: int, explanation: str = "") -> None:
        """`num_tokens`: the tokens of the prompt. `maximum`: the most tokens a prompt may have."""
        super().__init__(
            "messages", f"prompt is too long: {num_tokens} tokens > {maximum} maximum{explanation}"
        )


def error_body(error: Exception, request_id: str | None = None) -> dict[str, Any]:
    """Return the body that reports an error."""
    _, message = status_and_message(error)
    body = _body(message, _status_of(error), request_id)
    details = _DETAILS.get(getattr(error, "param", None) or "")
    return body if details is None else {**body, "error": {**body["error"], "details": details}}


def _status_of(error: Exception) -> int:
    status = status_of(client_error(error))
    # Clients know 529 as "try again later", and treat 503 as a fault of the network.
    return _OVERLOADED if status == _UNAVAILABLE else status


def _body(message: str, status: int, request_id: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": message}}
    return body if request_id is None else {**body, "request_id": request_id}


def error_response(message: str, status: int) -> Response:
    """Return a response that reports an error."""
    request_id = _new_request_id()
    headers = {REQUEST_ID_HEADER: request_id}
    return json_response(_body(message, status, request_id), status, headers)


def _response_of(error: Exception) -> Response:
    request_id = _new_request_id()
    headers = {REQUEST_ID_HEADER: request_id, **retry_headers(client_error(error))}
    return json_response(error_body(error, request_id), _status_of(error), headers)


def _add_request_id(response: Response) -> None:
    response.headers.setdefault(REQUEST_ID_HEADER, _new_request_id())


def _new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


ANTHROPIC_API = Api(
    "this server needs a key: give it to Anthropic's client as api_key or in ANTHROPIC_API_KEY "
    "(header `x-api-key: KEY`)",
    _response_of,
    _add_request_id,
)
"""Anthropic's API."""
