"""What the server takes and answers: plain values, which the routes turn into bodies."""

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
)
from planish.types import Checkpoint
from planish.wire.bodies import BodyTooLargeError

T = TypeVar("T")

Media = Literal["protobuf", "json"]
Category = Literal["user", "server", "unknown"]


@dataclass(frozen=True)
class Tenant:
    """Whoever holds one key."""

    name: str


@dataclass(frozen=True)
class Accepted:
    """A request that will be answered, whatever happens to this process."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: Sequence[str] = ()


@dataclass(frozen=True)
class Done:
    """The result, as the wire has it: protobuf (ForwardBackwardOutput, SampleResponse) or a JSON
    object, by `media`.
    """

    kind: str
    """create_model, load_weights, forward, forward_backward, optim_step, save_weights,
    save_weights_for_sampler, unload_model, sample.
    """
    media: Media
    content: bytes


@dataclass(frozen=True)
class Failed:
    """The request failed by itself; others go on."""

    message: str
    category: Category
    error_class: str | None = None
    """As planish/wire/client_errors.py names it."""


@dataclass(frozen=True)
class TryAgain:
    """Not done yet."""


Outcome = Done | Failed | TryAgain


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list: `items` are those from `offset` on, at most `limit`, of `total`."""

    items: Sequence[T]
    offset: int
    limit: int
    total: int


@dataclass(frozen=True)
class SessionSpec:
    """What a client says of itself when it begins a session."""

    tags: Sequence[str] = ()
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    sdk_version: str = ""
    display_name: str | None = None


@dataclass(frozen=True)
class SessionRecord:
    session_id: str
    spec: SessionSpec
    training_run_ids: Sequence[str]
    sampler_ids: Sequence[str]
    created: datetime
    ended: datetime | None


@dataclass(frozen=True)
class TrainingRun:
    """One model, in memory or not."""

    training_run_id: str
    base_model: str
    model_owner: str
    lora_rank: int
    last_request_time: datetime
    user_metadata: Mapping[str, str]
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None


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


class Abandoned(ServerError):
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
