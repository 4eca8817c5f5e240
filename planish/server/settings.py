"""What a server allows and keeps, and for how long. Every value is checked when it is made."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from planish.errors import UserError

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class ServerSettings:
    """Bytes, seconds and counts; all above 0."""

    # Memory.
    adapter_memory_bytes: int = 4 * _GIB
    """Of adapters, for training and sampling, that are in memory at once; others wait on disk. One
    adapter is always let in.
    """
    idle_seconds: float = 900
    """An adapter that was not used for so long leaves memory."""
    request_memory_bytes: int = 256 * _MIB
    """Of accepted requests that are kept decoded; others are read from the journal when their turn
    comes.
    """
    result_memory_bytes: int = 64 * _MIB
    """Of results that are kept in memory besides on disk."""

    # What runs at once.
    training_slots: int = 4
    """Training operations that are with the engine, which works on them by turns. The last place is
    for those of few tokens, which go between the others' micro-batches.
    """
    training_share: int = 2
    """Those of one tenant while others are about."""
    sampling_slots: int = 320
    """Sequences that are with the engine: those that it draws at once, and some to go on with."""
    sampling_share: int = 224
    """Those of one tenant while others are about: less than the engine draws at once, so that who
    comes is not behind all of them.
    """

    # TenantLimits of one key.
    max_queued_requests: int = 20_000
    max_queued_bytes: int = 2 * _GIB
    tokens_per_minute: int = 1 << 40
    """In prompts and training data, and drawn."""
    storage_bytes: int = 1 << 50
    """Of checkpoints that the key's owner saved."""

    # Time.
    gap_seconds: float = 600
    """A number that is missing is waited for so long; then the requests that wait behind it fail.
    Clients repeat a request for 5 minutes.
    """
    session_seconds: float = 24 * 3600
    """A session ends when nothing was heard of it for so long."""
    result_seconds: float = 6 * 3600
    """A result can be read for so long after it was made."""

    # Disk.
    result_bytes: int = 4 * _GIB
    """Of results; the oldest go first, but none within its first ten minutes."""
    ephemeral_bytes: int = 16 * _GIB
    """Of weights of samplers without a name; those that were used least recently go first."""
    reserve_bytes: int = 512 * _MIB
    """With less free space than this, nothing new is taken."""

    # How much is done again after a crash, at most about this.
    replay_seconds: float = 30
    """Of computing."""
    replay_bytes: int = 64 * _MIB
    """Of requests."""
    replay_requests: int = 20_000
    """Of any kind: each has a row in the database until a snapshot is behind it."""
    journal_bytes: int = 8 * _GIB
    """Of data in one gradient, which cannot be in a snapshot: with more, a forward_backward is
    refused until an optim_step.
    """

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
class HttpSettings:
    """How the routes behave."""

    poll_seconds: float = 22.0
    """How long a request for a result is held. Clients give up at 45 s, and ask again at once after
    a shorter wait.
    """
    tokenizer_directories: Mapping[str, Path] = field(default_factory=dict)
    """Where the tokenizer of each base model is, by the model's name."""
    keys: Mapping[str, str] | None = None
    """Maps each API key to the name of its tenant. None: the server asks for no key and serves
    programs of its own machine only, never a web page.
    """


def is_loopback(host: str) -> bool:
    """Whether an address, or a name of the URL, is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
