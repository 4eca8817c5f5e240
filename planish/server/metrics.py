"""What the server counts about itself. The parts that do the work write it; nothing here affects
decisions.

Counters only grow from the start of the process; gauges are current values. Keys are tenants' names
and kinds of requests (results.Done).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Events since the start. Belongs to the event loop."""

    # By tenant.
    sampled_tokens: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of prompts that samples were made for."""
    cached_prompt_tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens that the prefix cache had."""
    trained_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of training data in forward and forward_backward."""

    accepted: Counter[str] = field(default_factory=Counter)
    """Requests, by kind."""
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests, by kind and state: done, failed or refused."""
    samples: int = 0
    """Sample requests given to the engine."""
    sequences_at_samples: int = 0
    """The sum, over those requests, of the sequences in the engine. Divided by `samples` it is the
    mean batch.
    """
    snapshots: int = 0
    replayed: int = 0
    """Requests that a replay ran again."""
    loads: int = 0
    """Adapters loaded into memory."""
    unloads: int = 0
    """Adapters unloaded, because they were idle or others needed the room."""


@dataclass(frozen=True)
class Disk:
    """What the data directory holds besides checkpoints, in bytes."""

    database: int
    """Including its log."""
    bodies: int
    """Files of large requests and results."""
    body_files: int
    free: int


@dataclass(frozen=True)
class Metrics:
    """The counters and the current gauges."""

    counters: Counters

    # Gauges.
    queued: Mapping[tuple[str, str], int]
    """Unanswered requests, by kind and tenant."""
    sequences: int
    """Sequences in the engine."""
    waiting_sequences: int
    """Sample requests that wait for their turn."""
    training_operations: int
    waiting_training: int
    open_sessions: int
    open_models: int
    open_samplers: int
    adapters_in_memory: int
    adapter_bytes: int
    request_bytes: int
    """Size of the requests that are kept decoded."""
    result_bytes: int
    """Size of the results that are kept in memory."""
    resident_bytes: int
    """Memory of the process."""
    models_with_snapshot: int
    checkpoint_bytes: Mapping[str, int]
    """Size of the named checkpoints, by tenant."""
    unnamed_sampler_bytes: int
    """Size on disk of samplers without a name."""
    disk: Disk
    disk_is_full: bool


def resident_bytes() -> int:
    """Return the memory of this process; 0 if the system does not tell."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
