"""The settings of a server. The constructor of each class checks its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from planish.errors import UserError

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class _PositiveSettings:
    """A group of settings. Every value must be a number above 0, else UserError."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            is_integer = setting.type == "int"
            if (
                isinstance(value, bool)
                or not isinstance(value, int if is_integer else (int, float))
                or not value > 0
            ):
                raise UserError(
                    f"{setting.name}={value!r}: give a "
                    f"{'whole ' if is_integer else ''}number above 0"
                )


@dataclass(frozen=True)
class MemorySettings(_PositiveSettings):
    """How much memory the adapters, requests and results of a server use."""

    adapter_memory_bytes: int = 4 * _GIB
    """Memory for adapters, for training and sampling together. Adapters that do not fit stay on
    disk. An adapter larger than this limit is loaded alone.
    """
    adapter_idle_timeout: float = 900
    """An adapter that is not used for this long is moved to disk."""
    request_memory_bytes: int = 256 * _MIB
    """Memory for the decoded operations of accepted requests. The size of an operation is taken
    from its journaled body. Beyond the limit, an operation is read from the journal when its turn
    comes.
    """
    result_memory_bytes: int = 64 * _MIB
    """Memory for recent results, which are also on disk."""


@dataclass(frozen=True)
class SlotSettings(_PositiveSettings):
    """How many operations and sequences run in the engine at once. Others wait in fair queues."""

    training_slots: int = 4
    """Training operations in the engine at once. One slot is reserved for small operations, which
    run between the micro-batches of the large operations.
    """
    max_training_slots_per_tenant: int = 2
    """Training slots of one tenant while other tenants are active."""
    sampling_slots: int = 320
    """Sequences in the engine at once. The default is more than a batch, so that the engine always
    has waiting sequences for a free place in the batch.
    """
    max_sampling_slots_per_tenant: int = 224
    """Sequences of one tenant while other tenants are active. The default is less than a batch, so
    that the first sequence of another tenant need not wait until this tenant's sequences end.
    """


@dataclass(frozen=True)
class TenantSettings(_PositiveSettings):
    """Limits for each tenant."""

    max_queued_requests: int = 20_000
    """Unanswered requests."""
    max_queued_bytes: int = 2 * _GIB
    """Size of the bodies of all unanswered requests."""
    max_tokens_per_minute: int = 1 << 40
    """Tokens of prompts, training data and samples. The default is practically unlimited."""
    max_storage_bytes: int = 1 << 50
    """Size of everything that a tenant stores: named checkpoints, snapshots of its models, and the
    records of its sessions and runs. By default, practically unlimited.
    """
    max_sessions: int = 5000
    """Sessions, open and ended. When a new session exceeds the limit, the oldest ended sessions are
    removed.
    """
    max_models: int = 1000
    """Open training models."""
    max_samplers: int = 10_000
    """Open samplers of base models and checkpoints. The same limit applies separately to the
    unnamed samplers that the tenant's models publish. The least recently used of these are closed.
    """
    max_rejected_request_bytes: int = 16 * _MIB
    """Size of the rows of rejected and failed requests in the database. A row counts as 512 bytes
    plus its message. At this limit, the oldest rows are deleted earlier than `result_retention`.
    """


@dataclass(frozen=True)
class TimeSettings(_PositiveSettings):
    """How long a server waits, and how long it keeps results and sessions."""

    missing_request_timeout: float = 600
    """How long the server waits for a missing sequence number, in seconds. After that, the waiting
    requests with higher numbers fail. The default is longer than the 5 minutes for which clients
    retry a request.
    """
    session_timeout: float = 24 * 3600
    """A session ends when its client has sent nothing for this long, in seconds."""
    result_retention: float = 6 * 3600
    """How long a result can be read, in seconds."""
    engine_stall_timeout: float = 900
    """The server ends with status 70 if its engine has work and makes no progress for this long, in
    seconds. Each matmul, each step of a sampler and each micro-batch is progress. The loading of
    base models and the compilation of CPU kernels are not watched.
    """
    expiry_delay: float = 86400
    """An expired checkpoint is deleted when the server has run for this long since it expired, in
    seconds. This protects checkpoints from a clock that is wrong for a while.
    """


@dataclass(frozen=True)
class DiskSettings(_PositiveSettings):
    """How much disk space a server uses."""

    max_result_bytes: int = 4 * _GIB
    """Size of all results on disk. Beyond it, the oldest results are deleted. No result is deleted
    in its first ten minutes.
    """
    max_unnamed_sampler_bytes: int = 16 * _GIB
    """Size of all unnamed samplers on disk. Beyond it, the least recently used ones are closed and
    deleted.
    """
    min_free_disk_bytes: int = 512 * _MIB
    """Free disk space to keep. With less free space, the server accepts no new work."""

    max_checkpoints_per_run: int = 1 << 40
    """Checkpoints of each kind (training, sampler, external) to keep for each training run. Beyond
    it, the oldest ones that are not published are deleted. By default, practically unlimited.
    """

    max_gradient_request_bytes: int = 8 * _GIB
    """Size of the requests that contribute to one gradient. A snapshot cannot contain a gradient,
    so the journal keeps these requests. Beyond the limit, every forward_backward is rejected until
    the next optim_step.
    """


@dataclass(frozen=True)
class ReplaySettings(_PositiveSettings):
    """A model takes a snapshot when its requests since the last snapshot reach one of these limits.

    So after a crash, the server replays at most about this much work.
    """

    max_replay_seconds: float = 30
    """Device time of the requests since the last snapshot."""
    max_replay_bytes: int = 64 * _MIB
    """Size of the bodies of the requests since the last snapshot."""
    max_replay_requests: int = 20_000
    """Requests of any kind since the last snapshot. Each request has a row in the database until a
    snapshot includes it.
    """


@dataclass(frozen=True)
class ServerSettings(
    # In a dataclass, the fields of the last base class come first, so this order is reversed.
    ReplaySettings,
    DiskSettings,
    TimeSettings,
    TenantSettings,
    SlotSettings,
    MemorySettings,
):
    """Limits of a server, in bytes, seconds and counts. Every value is above 0.

    Each base class is one group of settings. A component that needs only one group takes an
    argument of that class.
    """


@dataclass(frozen=True)
class HttpSettings:
    """Settings of the HTTP routes."""

    poll_seconds: float = 22.0
    """How long the server holds a poll for a result open (long polling). Clients give up after 45
    seconds. If the poll ends earlier without a result, the client polls again at once.
    """
    tokenizer_directories: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """The directory of each base model's tokenizer, by the model's name."""
    tenants_by_key: Mapping[str, str] | None = None
    """Maps each API key to the name of its tenant. None: no key is needed. The server then accepts
    only requests from its own machine, and none from web pages.
    """
    allowed_origins: tuple[str, ...] = ()
    """The origins of web pages whose requests are accepted (CORS). "*" means every page."""
    public_url: str | None = None
    """The URL at which clients reach the server, for download links. None: the URL of the request.
    """
    truncate_max_tokens: bool = False
    """Whether `max_tokens` of OpenAI clients is lowered to what the model's context leaves."""
