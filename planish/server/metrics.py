"""What the server counts about itself. Written by those who do the work, read by whoever watches;
nothing here decides anything.

Counters only grow, from the start of the process; gauges are of now. Names of tenants are keys, as
are kinds of requests (answers.Done).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Counters:
    """What has happened. Belongs to the event loop."""

    # By tenant.
    sampled_tokens: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    """Of prompts that samples were drawn for."""
    cached_prompt_tokens: Counter[str] = field(default_factory=Counter)
    """Those of them that the prefix cache knew."""
    trained_tokens: Counter[str] = field(default_factory=Counter)
    """Of data that went forward, or forward and backward."""

    accepted: Counter[str] = field(default_factory=Counter)
    """RequestLog, by kind."""
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """RequestLog, by kind and state: done, failed or refused."""
    draws: int = 0
    """Sample requests given to the engine,"""
    sequences_at_draws: int = 0
    """and the sum of how many sequences it had then: their quotient is the mean batch."""
    snapshots: int = 0
    replayed: int = 0
    """RequestLog that were done again to bring a model back."""
    loads: int = 0
    """Of adapters into memory."""
    unloads: int = 0
    """Of adapters that were idle or in the way."""


@dataclass(frozen=True)
class Disk:
    """What the data directory holds beside checkpoints, in bytes."""

    database: int
    """With its log."""
    bodies: int
    """Files of large requests and results."""
    body_files: int
    free: int


@dataclass(frozen=True)
class Metrics:
    counters: Counters

    # Gauges.
    queued: Mapping[tuple[str, str], int]
    """Accepted and not answered requests, by kind and tenant."""
    sequences: int
    """With the engine now,"""
    waiting_sequences: int
    """and requests that wait for their turn."""
    training_operations: int
    waiting_training: int
    open_sessions: int
    open_models: int
    open_samplers: int
    adapters_in_memory: int
    adapter_bytes: int
    request_bytes: int
    """Of requests that are kept decoded."""
    result_bytes: int
    """Of results that are kept in memory."""
    resident_bytes: int
    """Of the process."""
    models_with_snapshot: int
    checkpoint_bytes: Mapping[str, int]
    """Of named checkpoints, by tenant."""
    ephemeral_bytes: int
    """Of samplers without a name, on disk."""
    disk: Disk
    disk_is_full: bool


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
