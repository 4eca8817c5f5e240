"""Converts error responses of a server to exceptions.

UserError, subclasses     the call is wrong: 4xx, or a failed result of category "user"
ServerUnreachableError    the server is not reachable, for longer than a restart takes
ServerFaultError          the server failed: 500, or a failed result of another category
EngineClosedError         the session has ended
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from planish.errors import CheckpointError, EngineClosedError, PlanishError, UserError
from planish.wire.client_errors import ERROR_CLASS, error_from_name
from planish.wire.json_pieces import JsonValue

if TYPE_CHECKING:
    from httpx2 import Response

_MAX_SHOWN_CHARACTERS = 500
_SDK_REMEDY = ": set TINKER_API_KEY (header X-API-Key)"
_KEY_REMEDY = "give api_key, or set PLANISH_API_KEY (or TINKER_API_KEY) to a key of this server"


class ServerUnreachableError(PlanishError, ConnectionError):
    """The server does not answer. It keeps the requests that it had accepted."""


class ServerFaultError(PlanishError, RuntimeError):
    """The server failed, and not because of the request. Its log has the details."""


class NoSuchEndpointError(UserError):
    """The server lacks an endpoint that planish adds to the tinker protocol."""


def json_body_of(response: Response) -> Mapping[str, Any]:
    """Return the JSON object in a response; {} if the body is something else."""
    try:
        value: JsonValue = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def error_from_response(response: Response) -> PlanishError:
    """Return the exception for a response with status 4xx or 5xx."""
    body = json_body_of(response)
    detail = body.get("detail") or response.text[:_MAX_SHOWN_CHARACTERS] or response.reason_phrase
    is_about_checkpoints = "checkpoints" in response.url.path or "weights" in response.url.path
    return _error_from_status(
        response.status_code,
        str(detail),
        body,
        CheckpointError if is_about_checkpoints else UserError,
    )


def error_from_result(body: Mapping[str, Any]) -> PlanishError:
    """Return the exception for the result of a failed request: {"error", "category"}."""
    message = str(body.get("error"))
    if body.get("category") == "user":
        return error_from_name(message, body.get(ERROR_CLASS))
    return ServerFaultError(message)


def error_from_frame(header: Mapping[str, Any]) -> PlanishError:
    """Return the exception for one request of a batch: rejected (with a status) or failed."""
    if "status" in header:
        return _error_from_status(
            int(header["status"]), str(header.get("detail")), header, UserError
        )
    return error_from_result(header)


def _error_from_status(
    status: int, message: str, body: Mapping[str, Any], default: type[UserError]
) -> PlanishError:
    match status:
        case 401 | 403:
            # The server's remedy names only the SDK's variable, so replace it by _KEY_REMEDY.
            return UserError(f"{message.removesuffix(_SDK_REMEDY)}; {_KEY_REMEDY}")
        case 404:
            return error_from_name(message, body.get(ERROR_CLASS), default)
        case 410:
            return EngineClosedError(
                f"the server has closed the session: {message}; make a new ServiceClient"
            )
        case _ if status < 500:
            return error_from_name(message, body.get(ERROR_CLASS))
        case _:
            return ServerFaultError(f"the server answered {status}: {message}")
