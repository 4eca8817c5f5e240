"""The settings of a server. Every value is checked when the settings are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from planish.errors import UserError

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class _Positive:
    """Settings that are all numbers above 0."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            whole = each.type == "int"
            if (
                isinstance(value, bool)
                or not isinstance(value, int if whole else (int, float))
                or not value > 0
            ):
                raise UserError(
                    f"{each.name}={value!r}: give a {'whole ' if whole else ''}number above 0"
                )


@dataclass(frozen=True)
class MemorySettings(_Positive):
    """How much memory a server uses besides the engine."""

    adapter_memory_bytes: int = 4 * _GIB
    """Adapters in memory at once, for training and sampling; others wait on disk. One adapter is
    always loaded.
    """
    idle_seconds: float = 900
    """An adapter leaves memory when it was not used for this long."""
    request_memory_bytes: int = 256 * _MIB
    """Accepted requests that are kept decoded; others are read from the journal when their turn
    comes.
    """
    result_memory_bytes: int = 64 * _MIB
    """Results that are kept in memory as well as on disk."""


@dataclass(frozen=True)
class SlotSettings(_Positive):
    """How much work the engine gets at once. The rest waits in fair queues."""

    training_slots: int = 4
    """Training operations in the engine at once. The last slot is for operations of few tokens,
    which run between the micro-batches of the others.
    """
    max_training_slots_per_tenant: int = 2
    """Training slots of one tenant while others are active."""
    sampling_slots: int = 320
    """Sequences in the engine at once: a full batch, and some that wait to join it."""
    max_sampling_slots_per_tenant: int = 224
    """Sequences of one tenant while other tenants are active. The default is less than a batch, so
    that newcomers need not wait until this tenant's sequences end.
    """


@dataclass(frozen=True)
class TenantSettings(_Positive):
    """What one tenant may use."""

    max_queued_requests: int = 20_000
    max_queued_bytes: int = 2 * _GIB
    tokens_per_minute: int = 1 << 40
    """Tokens in prompts and training data, and sampled tokens."""
    storage_bytes: int = 1 << 50
    """Size of everything that a tenant stores: named checkpoints, snapshots of its models, and the
    records of its sessions and runs.
    """
    max_sessions: int = 5000
    """Sessions, open and ended. Ended ones are removed early to make room."""
    max_models: int = 1000
    """Open training models."""
    max_samplers: int = 10_000
    """Open samplers of base models and checkpoints. Of the unnamed samplers that models publish,
    just as many are kept: the least recently used are closed.
    """
    rejected_request_bytes: int = 16 * _MIB
    """Rows of rejected and failed requests in the database. Each counts as 512 bytes and its
    message. Beyond this, the oldest are deleted before `result_retention`.
    """


@dataclass(frozen=True)
class TimeSettings(_Positive):
    """How long a server waits, and how long it keeps things."""

    missing_request_timeout: float = 600
    """How long the server waits for a missing sequence number, in seconds. After that, the requests
    with higher numbers fail. Clients retry a request for 5 minutes.
    """
    session_timeout: float = 24 * 3600
    """A session ends when its client has sent nothing for this long, in seconds."""
    result_retention: float = 6 * 3600
    """How long a result can be read, in seconds."""
    expiry_delay: float = 3600
    """Expired checkpoints, results and sessions are deleted only when the system's clock has run
    for this long without a jump, in seconds. The time before the server's start does not count.
    """


@dataclass(frozen=True)
class DiskSettings(_Positive):
    """How much disk space a server uses."""

    result_bytes: int = 4 * _GIB
    """Size of all results on disk. The oldest are deleted first, but none in its first ten minutes.
    """
    unnamed_sampler_bytes: int = 16 * _GIB
    """Size on disk of samplers without a name. The least recently used are deleted first."""
    min_free_disk_bytes: int = 512 * _MIB
    """With less free space than this, no new work is accepted."""

    journal_bytes: int = 8 * _GIB
    """Data of one gradient, which no snapshot can hold. A forward_backward beyond it is rejected
    until the next optim_step.
    """


@dataclass(frozen=True)
class ReplaySettings(_Positive):
    """When a model takes a snapshot: as soon as it reaches one of these limits.

    So a crash makes the server replay about this much at most.
    """

    replay_seconds: float = 30
    """Device time of the requests since the last snapshot."""
    replay_bytes: int = 64 * _MIB
    """Size of the bodies of these requests."""
    replay_requests: int = 20_000
    """Requests of any kind. Each has a row in the database until a snapshot covers it."""


@dataclass(frozen=True)
class ServerSettings(
    # A dataclass takes the fields of its last base first.
    ReplaySettings,
    DiskSettings,
    TimeSettings,
    TenantSettings,
    SlotSettings,
    MemorySettings,
):
    """Limits of a server, in bytes, seconds and counts. Every value is above 0.

    A part of the server that needs one group of settings takes the group's class.
    """


RENAMED_SETTINGS = {
    "gap_seconds": "missing_request_timeout",
    "session_seconds": "session_timeout",
    "result_seconds": "result_retention",
    "reserve_bytes": "min_free_disk_bytes",
    "training_share": "max_training_slots_per_tenant",
    "sampling_share": "max_sampling_slots_per_tenant",
    "ephemeral_bytes": "unnamed_sampler_bytes",
}
"""Old names of settings, which `planish serve --set` accepts for one more release."""


@dataclass(frozen=True)
class HttpSettings:
    """How the routes behave."""

    poll_seconds: float = 22.0
    """How long the server holds a poll for a result open (long polling). Clients give up after 45
    seconds. If the poll ends earlier without a result, the client polls again at once.
    """
    tokenizer_directories: Mapping[str, Path] = field(default_factory=dict)
    """The directory of each base model's tokenizer, by the model's name."""
    keys: Mapping[str, str] | None = None
    """Maps each API key to the name of its tenant. None: no key is needed. The server then accepts
    only requests from its own machine, and none from web pages.
    """
