"""The server's counters and gauges. Each part of the server updates its own counters, and no
decision depends on them.

Counters only grow from the start of the process; gauges are current values. A field that `metric`
or `described` declares is shown at /metrics under the declared name. The labels are tenants' names,
and kinds and states of requests (results.Done).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def described(name: str, text: str, *labels: str) -> Mapping[str, Any]:
    """Return the metadata of a field that is shown at /metrics. With `labels`, the field maps label
    values to counts.
    """
    return {"name": name, "help": text, "labels": labels}


def metric(name: str, text: str, *labels: str, **default: Any) -> Any:
    """Return a field that is shown at /metrics."""
    return field(metadata=described(name, text, *labels), **default)


@dataclass
class Counters:
    """Counts of events since the start. Only code in the event loop may change them."""

    sampled_tokens: Counter[str] = field(
        default_factory=Counter,
        metadata=described("planish_sampled_tokens", "Sampled tokens", "tenant"),
    )
    prompt_tokens: Counter[str] = field(
        default_factory=Counter,
        metadata=described(
            "planish_prompt_tokens", "Tokens of prompts of sample requests", "tenant"
        ),
    )
    cached_prompt_tokens: Counter[str] = field(
        default_factory=Counter,
        metadata=described(
            "planish_cached_prompt_tokens", "Prompt tokens found in the prefix cache", "tenant"
        ),
    )
    trained_tokens: Counter[str] = field(
        default_factory=Counter,
        metadata=described(
            "planish_trained_tokens",
            "Tokens of training data in forward and forward_backward",
            "tenant",
        ),
    )
    accepted: Counter[str] = field(
        default_factory=Counter,
        metadata=described("planish_requests_accepted", "Accepted requests by kind", "kind"),
    )
    answered: Counter[tuple[str, str]] = field(
        default_factory=Counter,
        metadata=described(
            "planish_requests_answered", "Answered requests by kind and state", "kind", "state"
        ),
    )
    samples: int = 0
    """Sample requests given to the engine."""
    sequences_at_samples: int = 0
    """The number of sequences in the engine at the start of each sample request, summed over all
    sample requests. Divided by `samples`, it is the mean batch size.
    """
    snapshots: int = metric("planish_snapshots", "Snapshots of models", default=0)
    replayed: int = metric(
        "planish_replayed_requests", "Requests that were replayed to load a model", default=0
    )
    loads: int = metric("planish_adapter_loads", "Adapters loaded into memory", default=0)
    unloads: int = metric(
        "planish_adapter_unloads", "Adapters unloaded, idle or to make room", default=0
    )


@dataclass(frozen=True)
class Disk:
    """The data directory without checkpoints: sizes in bytes, and the free space of its disk."""

    database: int = metric(
        "planish_database_bytes", "The database with journal and results, and its log"
    )
    bodies: int = metric("planish_body_bytes", "Files of large requests and results")
    body_files: int = metric("planish_body_files", "Number of files of large requests and results")
    free: int = metric("planish_disk_free_bytes", "Free space in the data directory")


@dataclass(frozen=True)
class Metrics:
    """The counters and the current gauges."""

    counters: Counters
    disk: Disk
    queued: Mapping[tuple[str, str], int] = metric(
        "planish_requests_queued", "Accepted requests without an answer", "kind", "tenant"
    )
    checkpoint_bytes: Mapping[str, int] = metric(
        "planish_checkpoint_bytes", "Named checkpoints on disk", "tenant"
    )
    sequences: int = metric("planish_sequences_running", "Sequences in the engine")
    waiting_sequences: int = metric(
        "planish_samples_waiting", "Sample requests that wait for their turn"
    )
    training_operations: int = metric(
        "planish_training_running", "Training operations in the engine"
    )
    waiting_training: int = metric(
        "planish_training_waiting", "Training operations that wait for their turn"
    )
    open_sessions: int = metric("planish_sessions_open", "Sessions")
    open_models: int = metric("planish_models_open", "Models that take requests")
    open_samplers: int = metric("planish_samplers_open", "Samplers")
    adapters_in_memory: int = metric("planish_adapters_resident", "Adapters in memory")
    adapter_bytes: int = metric("planish_adapter_bytes", "Memory of adapters")
    request_bytes: int = metric("planish_request_bytes", "Memory of requests that are kept decoded")
    result_bytes: int = metric("planish_result_bytes", "Memory of results")
    resident_bytes: int = metric("planish_resident_bytes", "Memory of the process")
    models_with_snapshot: int = metric("planish_snapshot_models", "Models with a snapshot")
    unnamed_sampler_bytes: int = metric(
        "planish_ephemeral_bytes", "Weights on disk of unnamed samplers"
    )
    disk_is_full: bool = metric(
        "planish_disk_full", "1 while new work is rejected for lack of disk space"
    )


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 on a system without /proc."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
