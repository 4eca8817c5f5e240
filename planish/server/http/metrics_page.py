"""The page for Prometheus at /metrics.

    planish_..._total       counters since the start of the process
    planish_...             gauges
    planish_http_request_seconds   a histogram by route and status (access.py)

On a server without keys, the page is for this machine like everything else. With keys it needs the
key that is named `metrics` in the key file, as a bearer token or in X-API-Key: the page names all
tenants, so no tenant's own key opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from planish.errors import PlanishError
from planish.server.http.access import given_key
from planish.server.http.context import RequestContext, context_of, refused
from planish.server.metrics import Counters, Metrics
from planish.server.results import Unauthorized

READER = "metrics"
"""The tenant whose key opens the page."""


def metrics_route(http: CollectorRegistry) -> Route:
    """Return the route. `http` has the metrics of requests; everything else is asked of the server
    when the page is read.
    """

    async def metrics(request: Request) -> Response:
        try:
            context = context_of(request, given_key(request.headers))
            _check_reader(context)
        except PlanishError as error:
            return refused(error)
        measured = await context.server.metrics()
        content = generate_latest(http) + generate_latest(_Families(measured))  # type: ignore[arg-type]
        return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return Route("/metrics", metrics, methods=["GET"])


def _check_reader(context: RequestContext) -> None:
    if context.state.settings.keys is not None and context.tenant.name != READER:
        raise Unauthorized(
            f"this page is for the server's operator: it needs a key with the name {READER} in the "
            "key file"
        )


@dataclass(frozen=True)
class _Families:
    """Lets prometheus_client collect the metrics of the server."""

    measured: Metrics

    def collect(self) -> Iterator[Metric]:
        yield from families(self.measured)


def families(measured: Metrics) -> Iterator[Metric]:
    """Yield each metric with its name and help."""
    counted = measured.counters
    for name, text, by_tenant in _TENANT_COUNTERS:
        yield _counter(
            name, text, ("tenant",), {(tenant,): n for tenant, n in by_tenant(counted).items()}
        )
    yield _counter(
        "planish_requests_accepted",
        "Accepted requests by kind",
        ("kind",),
        {(kind,): n for kind, n in counted.accepted.items()},
    )
    yield _counter(
        "planish_requests_answered",
        "Answered requests by kind and state",
        ("kind", "state"),
        counted.answered,
    )
    yield SummaryMetricFamily(
        "planish_batch_sequences",
        "Sequences in the engine whenever it gets a sample request",
        count_value=counted.samples,
        sum_value=counted.sequences_at_samples,
    )
    for name, text, value in _COUNTERS:
        yield CounterMetricFamily(name, text, value=value(counted))
    queued = GaugeMetricFamily(
        "planish_requests_queued", "Accepted requests without an answer", labels=("kind", "tenant")
    )
    for labels, count in measured.queued.items():
        queued.add_metric(labels, count)
    yield queued
    kept = GaugeMetricFamily(
        "planish_checkpoint_bytes", "Named checkpoints on disk", labels=("tenant",)
    )
    for tenant, size in measured.checkpoint_bytes.items():
        kept.add_metric([tenant], size)
    yield kept
    for name, text, value in _GAUGES:
        yield GaugeMetricFamily(name, text, value=float(value(measured)))


def _counter(
    name: str, text: str, labels: Iterable[str], counts: Mapping[tuple[str, ...], int]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


_TENANT_COUNTERS: tuple[tuple[str, str, Callable[[Counters], Mapping[str, int]]], ...] = (
    ("planish_sampled_tokens", "Sampled tokens", lambda c: c.sampled_tokens),
    (
        "planish_prompt_tokens",
        "Tokens of prompts of sample requests",
        lambda c: c.prompt_tokens,
    ),
    (
        "planish_cached_prompt_tokens",
        "Prompt tokens found in the prefix cache",
        lambda c: c.cached_prompt_tokens,
    ),
    (
        "planish_trained_tokens",
        "Tokens of training data in forward and forward_backward",
        lambda c: c.trained_tokens,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Counters], int]], ...] = (
    ("planish_snapshots", "Snapshots of models", lambda c: c.snapshots),
    (
        "planish_replayed_requests",
        "Requests that were replayed to load a model",
        lambda c: c.replayed,
    ),
    ("planish_adapter_loads", "Adapters loaded into memory", lambda c: c.loads),
    ("planish_adapter_unloads", "Adapters unloaded, idle or to make room", lambda c: c.unloads),
)
_GAUGES: tuple[tuple[str, str, Callable[[Metrics], int]], ...] = (
    ("planish_sequences_running", "Sequences in the engine", lambda m: m.sequences),
    (
        "planish_samples_waiting",
        "Sample requests that wait for their turn",
        lambda m: m.waiting_sequences,
    ),
    (
        "planish_training_running",
        "Training operations in the engine",
        lambda m: m.training_operations,
    ),
    (
        "planish_training_waiting",
        "Training operations that wait for their turn",
        lambda m: m.waiting_training,
    ),
    ("planish_sessions_open", "Sessions", lambda m: m.open_sessions),
    ("planish_models_open", "Models that take requests", lambda m: m.open_models),
    ("planish_samplers_open", "Samplers", lambda m: m.open_samplers),
    ("planish_adapters_resident", "Adapters in memory", lambda m: m.adapters_in_memory),
    ("planish_adapter_bytes", "Memory of adapters", lambda m: m.adapter_bytes),
    (
        "planish_request_bytes",
        "Memory of requests that are kept decoded",
        lambda m: m.request_bytes,
    ),
    ("planish_result_bytes", "Memory of results", lambda m: m.result_bytes),
    ("planish_resident_bytes", "Memory of the process", lambda m: m.resident_bytes),
    ("planish_snapshot_models", "Models with a snapshot", lambda m: m.models_with_snapshot),
    (
        "planish_ephemeral_bytes",
        "Weights on disk of unnamed samplers",
        lambda m: m.unnamed_sampler_bytes,
    ),
    (
        "planish_database_bytes",
        "The database with journal and results, and its log",
        lambda m: m.disk.database,
    ),
    ("planish_body_bytes", "Files of large requests and results", lambda m: m.disk.bodies),
    (
        "planish_body_files",
        "Number of files of large requests and results",
        lambda m: m.disk.body_files,
    ),
    ("planish_disk_free_bytes", "Free space in the data directory", lambda m: m.disk.free),
    (
        "planish_disk_full",
        "1 while new work is rejected for lack of disk space",
        lambda m: m.disk_is_full,
    ),
)


@dataclass(frozen=True, eq=False)
class SubstitutedLosses(Collector):
    """Collects the counts of an engine: operations by the loss that was asked for and its
    substitute.
    """

    counts: Mapping[tuple[str, str], int]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "planish_substituted_losses",
            "Gradients of another loss than was asked for (--substitute-loss)",
            labels=("loss", "computed"),
        )
        for labels, count in dict(self.counts).items():
            family.add_metric(labels, count)
        yield family
