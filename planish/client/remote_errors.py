"""What a server refuses and how it fails, as errors that a script can catch.

UserError and its kin     the call is wrong: 4xx, or a failed result of category "user"
ServerUnreachableError    nobody answers, or not for longer than a restart takes
ServerFaultError          the server itself is at fault: 500, or a failed result of another category
EngineClosedError         the session has ended
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from planish.errors import CheckpointError, EngineClosedError, PlanishError, UserError
from planish.wire.client_errors import ERROR_CLASS, named_error

if TYPE_CHECKING:
    from httpx2 import Response

_MAX_SHOWN = 500
_SDK_REMEDY = ": set TINKER_API_KEY (header X-API-Key)"
_KEY_REMEDY = "give api_key, or set PLANISH_API_KEY (or TINKER_API_KEY) to a key of this server"


class ServerUnreachableError(PlanishError, ConnectionError):
    """No answer from the server. What it had acknowledged is kept there."""


class ServerFaultError(PlanishError, RuntimeError):
    """The server failed for a reason of its own; its log has the whole of it."""


class NoSuchEndpointError(UserError):
    """The server does not know one of planish's additions to the protocol."""


def body_of(response: Response) -> Mapping[str, Any]:
    """A JSON object, or none."""
    try:
        value = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def refusal(response: Response) -> PlanishError:
    """The error of an answer that is none: status 4xx or 5xx."""
    body = body_of(response)
    detail = body.get("detail") or response.text[:_MAX_SHOWN] or response.reason_phrase
    is_of_checkpoint = "checkpoints" in response.url.path or "weights" in response.url.path
    return _refused(
        response.status_code, str(detail), body, CheckpointError if is_of_checkpoint else UserError
    )


def failure(body: Mapping[str, Any]) -> PlanishError:
    """The error of a request that was done and failed: {"error", "category"}."""
    message = str(body.get("error"))
    if body.get("category") == "user":
        return named_error(message, body.get(ERROR_CLASS))
    return ServerFaultError(message)


def error_of_frame(header: Mapping[str, Any]) -> PlanishError:
    """The error of one request among many: refused, with a status, or failed."""
    if "status" in header:
        return _refused(int(header["status"]), str(header.get("detail")), header, UserError)
    return failure(header)


def _refused(
    status: int, message: str, body: Mapping[str, Any], default: type[UserError]
) -> PlanishError:
    match status:
        case 401 | 403:
            # The server names the variable of the tinker SDK, which the remedy names too.
            problem = message.removesuffix(_SDK_REMEDY)
            return UserError(f"{problem}; {_KEY_REMEDY}")
        case 404:
            return named_error(message, body.get(ERROR_CLASS), default)
        case 410:
            return EngineClosedError(
                f"the server has let go of it: {message}; make a new ServiceClient"
            )
        case _ if status < 500:
            return named_error(message, body.get(ERROR_CLASS))
    return ServerFaultError(f"the server answered {status}: {message}")
