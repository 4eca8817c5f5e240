"""What the server refuses, each with its HTTP status.

    ServerError          status, message, and after how many seconds a repetition may work
    |- BadRequest 400    the request is wrong, and will be
    |- Unauthorized 401  no key, or none that is known here
    |- NotFound 404      there is no such thing, or it is another tenant's; nobody can tell which;
                         NoSuchCheckpoint and NoSuchBaseModel are
    |- Conflict 409      it is so already (publishing twice). The SDK repeats a 409, so it is for
                         nothing else
    |- Gone 410          it was here: a session that ended, a result that has aged
    |- GivenUp 422       doing it ended the whole server, again and again (under_way.py)
    |- TooManyRequests 429   a limit of the key; the SDK sends the same request again later
    `- Unavailable 503   no disk space, stopping, or too much under way; the SDK sends the same
                         request again later

Any other ValueError, UserError and its kin among them, is 400 too; `status_of` knows every error.
"""

from __future__ import annotations

from planish.errors import (
    CheckpointError,
    EngineClosedError,
    PlanishError,
    StorageError,
    UnknownModelError,
    UserError,
)
from planish.wire.bodies import BodyTooLargeError

_STOPPING_SECONDS = 5.0


class ServerError(PlanishError):
    """The request was refused and nothing was changed."""

    status = 500

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds; for the header of that name."""


class BadRequest(ServerError, UserError):
    status = 400


class Unauthorized(ServerError):
    status = 401


class NotFound(ServerError):
    status = 404


class NoSuchCheckpoint(NotFound, CheckpointError):
    pass


class NoSuchBaseModel(NotFound, UnknownModelError):
    pass


class Conflict(ServerError):
    status = 409


class Gone(ServerError):
    status = 410


class GivenUp(ServerError):
    status = 422


class TooManyRequests(ServerError):
    status = 429


class Unavailable(ServerError):
    status = 503


def stopping() -> Unavailable:
    """For what is asked of a server that stops."""
    return Unavailable(
        "the server is stopping; it goes on with what it accepted at its next start",
        _STOPPING_SECONDS,
    )


def retry_headers(error: BaseException) -> dict[str, str]:
    """Those of an answer with this error: when to ask again, if that is known."""
    wait = error.retry_after if isinstance(error, ServerError) else None
    return {} if wait is None else {"Retry-After": f"{wait:g}"}


def status_of(error: BaseException) -> int:
    """The HTTP status that says what `error` says."""
    match error:
        case ServerError():
            return error.status
        case BodyTooLargeError():
            return 413
        case ValueError():  # also plain ones, as the constructors of planish.types raise
            return 400
        case StorageError() | EngineClosedError():
            return 503
        case _:
            return 500
