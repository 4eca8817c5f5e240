"""The values that the server takes and returns, and the errors that it raises, with their statuses.

    ServerError          status, message, and after how many seconds a retry may succeed
    |- BadRequest 400    the request is invalid
    |- Unauthorized 401  no key, or an unknown one
    |- NotFound 404      the named object does not exist, or belongs to another tenant. The message
    |                    is the same for both. NoSuchCheckpoint and NoSuchBaseModel are subclasses
    |- Conflict 409      a public checkpoint was published again, or a private one unpublished. No
    |                    other error has status 409, because the SDK retries requests with it
    |- Gone 410          the object existed: a session that ended, a result that expired
    |- Abandoned 422     the request crashed the server repeatedly (crash_guard.py)
    |- KeyReused 422     the idempotency key belongs to a request with another body
    |- TooManyRequests 429   the tenant has reached a limit; the SDK retries later
    `- Unavailable 503   no disk space, stopping, or overloaded; the SDK retries later

Any other ValueError, such as UserError, has status 400 too. `status_of` returns the status of any
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, Literal, TypeVar

from planish.errors import (
    CheckpointError,
    EngineClosedError,
    PlanishError,
    StorageError,
    UnknownModelError,
    UserError,
    is_out_of_memory,
    shortened,
)
from planish.types import Checkpoint
from planish.wire.bodies import BodyTooLargeError

T = TypeVar("T")

Media = Literal["protobuf", "json"]
Category = Literal["user", "server", "unknown"]


@dataclass(frozen=True)
class Tenant:
    """The owner of one or more API keys with the same name."""

    name: str


@dataclass(frozen=True)
class Accepted:
    """A request that will be answered even if the process crashes."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: Sequence[str] = ()


@dataclass(frozen=True)
class Done:
    """An encoded result. `media` says whether `content` is protobuf (a ForwardBackwardOutput or a
    SampleResponse) or a JSON object.
    """

    kind: str
    """create_model, load_weights, forward, forward_backward, optim_step, save_weights,
    save_weights_for_sampler, unload_model, sample.
    """
    media: Media
    content: bytes


@dataclass(frozen=True)
class Failed:
    """The request failed. Other requests are not affected."""

    message: str
    """At most MAX_MESSAGE characters; a longer message is shortened."""
    category: Category
    error_class: str | None = None
    """The name of the error in planish/wire/client_errors.py."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", shortened(self.message))


@dataclass(frozen=True)
class TryAgain:
    """The request has no answer yet. The client must poll again."""


Outcome = Done | Failed | TryAgain


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list: at most `limit` of `total` items, from `offset` on."""

    items: Sequence[T]
    offset: int
    limit: int
    total: int


@dataclass(frozen=True)
class SessionSpec:
    """The description that a client gives when it creates a session."""

    tags: Sequence[str] = ()
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    sdk_version: str = ""
    display_name: str | None = None


@dataclass(frozen=True)
class SessionRecord:
    """A session with the ids of its training runs and samplers."""

    session_id: str
    spec: SessionSpec
    training_run_ids: Sequence[str]
    sampler_ids: Sequence[str]
    created: datetime
    ended: datetime | None


@dataclass(frozen=True)
class TrainingRun:
    """One training run: a model that a tenant created, whether the model is open or closed."""

    training_run_id: str
    base_model: str
    model_owner: str
    lora_rank: int
    last_request_time: datetime
    user_metadata: Mapping[str, str]
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None


_STOPPING_RETRY_SECONDS = 5.0


class ServerError(PlanishError):
    """The request was rejected, and nothing changed."""

    status = 500

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        """A retry may succeed after `retry_after` seconds; None if that is not known."""
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds, for the header Retry-After."""


class BadRequest(ServerError, UserError):
    """The request is invalid."""

    status = 400


class Unauthorized(ServerError):
    """The key is missing or unknown."""

    status = 401


class NotFound(ServerError):
    """The object does not exist, or belongs to another tenant."""

    status = 404


class NoSuchCheckpoint(NotFound, CheckpointError):
    """The checkpoint does not exist, or this tenant may not read it."""


class NoSuchBaseModel(NotFound, UnknownModelError):
    """The base model is not served."""


class Conflict(ServerError):
    """The checkpoint is already in the requested state, for example public."""

    status = 409


class Gone(ServerError):
    """The session, model, sampler or result existed, and has ended or expired."""

    status = 410


class Abandoned(ServerError):
    """The request crashed the server repeatedly, and is not run again."""

    status = 422


class KeyReused(ServerError, UserError):
    """The header X-Idempotency-Key belongs to an earlier request with another body."""

    status = 422

    def __init__(self) -> None:
        """The message is the same for all requests."""
        super().__init__(
            "X-Idempotency-Key: an earlier request with this key had another body; give each "
            "request its own key, and send the key again only to repeat the request"
        )


class TooManyRequests(ServerError):
    """The tenant has reached one of its limits."""

    status = 429


class Unavailable(ServerError):
    """The server cannot accept the request now."""

    status = 503


def stopping() -> Unavailable:
    """Return the error for requests to a server that is stopping."""
    return Unavailable(
        "the server is stopping; send the request again. Accepted requests of the SDK resume at the "
        "next start",
        _STOPPING_RETRY_SECONDS,
    )


OUT_OF_MEMORY = "the server is out of memory; send the request again later"
_MEMORY_RETRY_SECONDS = 1.0


def client_error(error: Exception) -> Exception:
    """Return the error to send to a client: Unavailable if the server's memory did not suffice,
    otherwise `error`.
    """
    return Unavailable(OUT_OF_MEMORY, _MEMORY_RETRY_SECONDS) if is_out_of_memory(error) else error


def retry_headers(error: BaseException) -> dict[str, str]:
    """Return the Retry-After header for an error, if it has one."""
    wait = error.retry_after if isinstance(error, ServerError) else None
    return {} if wait is None else {"Retry-After": f"{wait:g}"}


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    match error:
        case ServerError():
            return error.status
        case BodyTooLargeError():
            return 413
        case ValueError():  # for example from the constructors of planish.types
            return 400
        case StorageError() | EngineClosedError():
            return 503
        case _:
            return 500
