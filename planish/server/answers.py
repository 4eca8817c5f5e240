"""What the core takes and answers: plain values, which the routes turn into bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, Literal, TypeVar

from planish.types import Checkpoint

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
