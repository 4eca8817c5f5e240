"""The server's counters and gauges. Each part of the server updates its own counters, and no
decision depends on them.

Counters only grow from the start of the process; gauges are current values. A field that `metric`
or `counter` declares is shown at /metrics under the declared name. The labels are tenants' names,
and kinds and states of requests (results.Done).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def metric(name: str, text: str, *labels: str, **default: Any) -> Any:
    """Return a field that is shown at /metrics. With `labels`, the field maps label values to
    counts.
    """
    return field(metadata={"name": name, "help": text, "labels": labels}, **default)


def counter(name: str, text: str, *labels: str) -> Any:
    """Return a field of `Counters` that is shown at /metrics and starts at 0, or with `labels` as
    an empty Counter.
    """
    default = {"default_factory": Counter} if labels else {"default": 0}
    return metric(name, text, *labels, **default)


@dataclass
class Counters:
    """Counts of events since the start. Only code in the event loop may change them."""

    sampled_tokens: Counter[str] = counter(
        "planish_sampled_tokens", "Number of sampled tokens", "tenant"
    )
    prompt_tokens: Counter[str] = counter(
        "planish_prompt_tokens", "Number of prompt tokens in sample requests", "tenant"
    )
    cached_prompt_tokens: Counter[str] = counter(
        "planish_cached_prompt_tokens",
        "Number of prompt tokens found in the prefix cache",
        "tenant",
    )
    trained_tokens: Counter[str] = counter(
        "planish_trained_tokens",
        "Number of tokens in the data of forward and forward_backward",
        "tenant",
    )
    accepted_requests: Counter[str] = counter(
        "planish_requests_accepted", "Number of accepted requests by kind", "kind"
    )
    answered_requests: Counter[tuple[str, str]] = counter(
        "planish_requests_answered",
        "Number of answered requests by kind and state",
        "kind",
        "state",
    )
    num_sample_requests: int = 0
    """Sample requests given to the engine."""
    sum_of_running_sequences: int = 0
    """The number of sequences in the engine at the start of each sample request, summed over all
    sample requests. Divided by `num_sample_requests`, it is the mean batch size.
    """
    num_preemptions: int = counter(
        "planish_preemptions",
        "Number of times that a sample left the KV cache because others needed the memory",
    )
    num_snapshots: int = counter("planish_snapshots", "Number of model snapshots written")
    replayed_requests: int = counter(
        "planish_replayed_requests", "Number of requests replayed to load a model"
    )
    adapter_loads: int = counter(
        "planish_adapter_loads", "Number of times an adapter was loaded into memory"
    )
    adapter_unloads: int = counter(
        "planish_adapter_unloads",
        "Number of times an adapter was unloaded because it was idle or another needed the memory",
    )


@dataclass(frozen=True)
class DiskUsage:
    """The data directory without checkpoints: sizes in bytes, and the free space of its disk."""

    database_bytes: int = metric(
        "planish_database_bytes",
        "Bytes of the database with journal and results, including its log",
    )
    body_bytes: int = metric(
        "planish_body_bytes", "Bytes of the files of large requests and results"
    )
    num_body_files: int = metric(
        "planish_body_files", "Number of files of large requests and results"
    )
    free_bytes: int = metric(
        "planish_disk_free_bytes", "Free bytes on the disk of the data directory"
    )


@dataclass(frozen=True)
class Metrics:
    """The counters and the current gauges."""

    counters: Counters
    disk: DiskUsage
    queued_requests: Mapping[tuple[str, str], int] = metric(
        "planish_requests_queued", "Number of accepted requests without an answer", "kind", "tenant"
    )
    checkpoint_bytes: Mapping[str, int] = metric(
        "planish_checkpoint_bytes", "Bytes of named checkpoints on disk", "tenant"
    )
    running_sequences: int = metric(
        "planish_sequences_running", "Number of sequences in the engine"
    )
    waiting_sequences: int = metric(
        "planish_samples_waiting", "Number of sample requests that wait for a slot"
    )
    preempted_sequences: int = metric(
        "planish_sequences_preempted",
        "Number of preempted sequences in the engine, which wait for memory of the KV cache",
    )
    running_training_operations: int = metric(
        "planish_training_running", "Number of training operations in the engine"
    )
    waiting_training_operations: int = metric(
        "planish_training_waiting", "Number of training operations that wait for a slot"
    )
    open_sessions: int = metric("planish_sessions_open", "Number of open sessions")
    open_models: int = metric("planish_models_open", "Number of models that accept requests")
    open_samplers: int = metric("planish_samplers_open", "Number of open samplers")
    adapters_in_memory: int = metric("planish_adapters_resident", "Number of adapters in memory")
    adapter_bytes: int = metric("planish_adapter_bytes", "Bytes of memory of all adapters")
    request_bytes: int = metric("planish_request_bytes", "Bytes of memory of decoded requests")
    result_bytes: int = metric("planish_result_bytes", "Bytes of memory of results")
    resident_bytes: int = metric("planish_resident_bytes", "Resident bytes of the server process")
    models_with_snapshot: int = metric(
        "planish_snapshot_models", "Number of models with a snapshot"
    )
    unnamed_sampler_bytes: int = metric(
        "planish_unnamed_sampler_bytes", "Bytes of the weights of unnamed samplers on disk"
    )
    disk_is_full: bool = metric(
        "planish_disk_full",
        "1 while the server rejects new work because the disk is full, otherwise 0",
    )
