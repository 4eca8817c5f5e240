"""The page for Prometheus at /metrics.

    planish_..._total              counters since the start of the process
    planish_...                    gauges
    planish_http_request_seconds   a histogram by route and status (access.py)

A server without keys answers only programs on its own machine, on this page as on all endpoints. A
server with keys requires the key that is named `metrics` in the key file, as a bearer token or in
X-API-Key. Other keys are rejected, because the page names all tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from planish.errors import PlanishError
from planish.server.http.access import key_from_headers
from planish.server.http.context import authenticate, error_response
from planish.server.metrics import Counters, DiskUsage, Metrics


def metrics_route(http: CollectorRegistry) -> Route:
    """Return the route of the page. `http` has the metrics of HTTP requests. All other metrics are
    collected from the server when a client reads the page.
    """

    async def metrics(request: Request) -> Response:
        try:
            context = authenticate(request, key_from_headers(request.headers), is_metrics_page=True)
        except PlanishError as error:
            return error_response(error)
        measured = await context.server.metrics()
        content = generate_latest(http) + generate_latest(_Families(measured))  # type: ignore[arg-type]
        return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return Route("/metrics", metrics, methods=["GET"])


@dataclass(frozen=True)
class _Families:
    """Lets prometheus_client collect the metrics of the server."""

    measured: Metrics

    def collect(self) -> Iterator[Metric]:
        yield from families(self.measured)


def families(metrics: Metrics) -> Iterator[Metric]:
    """Yield each metric with its name and help."""
    counters = metrics.counters
    yield from _families(counters, CounterMetricFamily)
    yield SummaryMetricFamily(
        "planish_batch_sequences",
        "Number of sequences in the engine at the arrival of each sample request",
        count_value=counters.num_sample_requests,
        sum_value=counters.sum_of_running_sequences,
    )
    yield from _families(metrics, GaugeMetricFamily)
    yield from _families(metrics.disk, GaugeMetricFamily)


def _families(
    values: Counters | Metrics | DiskUsage,
    family_type: type[CounterMetricFamily | GaugeMetricFamily],
) -> Iterator[Metric]:
    for metric_field in fields(values):
        if not metric_field.metadata:
            continue
        value, labels = getattr(values, metric_field.name), metric_field.metadata["labels"]
        family = family_type(
            metric_field.metadata["name"], metric_field.metadata["help"], labels=labels
        )
        for key, count in value.items() if labels else [((), value)]:
            family.add_metric([key] if isinstance(key, str) else key, float(count))
        yield family


@dataclass(frozen=True, eq=False)
class SubstitutedLosses(Collector):
    """A collector that counts how often an engine computed a substitute for the requested loss."""

    counts: Mapping[tuple[str, str], int]
    """Maps (requested loss, computed loss) to a number of operations."""

    def collect(self) -> Iterator[Metric]:
        """Yield the counts as one counter with the labels `loss` and `computed`."""
        family = CounterMetricFamily(
            "planish_substituted_losses",
            "Number of operations that computed a substitute for the requested loss "
            "(--substitute-loss)",
            labels=("loss", "computed"),
        )
        for labels, count in dict(self.counts).items():
            family.add_metric(labels, count)
        yield family


@dataclass(frozen=True, eq=False)
class EngineSamples(Collector):
    """A collector that counts the requests that vLLM did not sample, because it lacks an option."""

    counts: Mapping[str, int]
    """Maps an option to a number of requests. See `VllmEngine.engine_samples`."""

    def collect(self) -> Iterator[Metric]:
        """Yield the counts as one counter with the label `option`."""
        family = CounterMetricFamily(
            "planish_engine_samples",
            "Number of sample requests that the engine answered in place of vLLM (--sampler)",
            labels=("option",),
        )
        for option, count in dict(self.counts).items():
            family.add_metric((option,), count)
        yield family


@dataclass(frozen=True)
class _ReplicaMetric:
    """A metric of each replica."""

    name: str
    help: str
    value: Callable[[Mapping[str, Any]], float]
    """Returns the value from the row of `ServedFleet.status`."""
    family: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily


_REPLICA_METRICS = (
    _ReplicaMetric(
        "planish_replica_up",
        "1 while the replica runs, otherwise 0",
        lambda row: row["state"] in ("running", "draining"),
    ),
    _ReplicaMetric(
        "planish_replica_models",
        "Number of training models whose home the replica is",
        lambda row: row["models"],
    ),
    _ReplicaMetric(
        "planish_replica_unfinished_tokens",
        "Number of prompt and sampled tokens that the replica has yet to compute, at most",
        lambda row: row["unfinished_tokens"],
    ),
    _ReplicaMetric(
        "planish_replica_resident_bytes",
        "Resident bytes of the replica's process",
        lambda row: row["resident_bytes"],
    ),
    _ReplicaMetric(
        "planish_replica_samples",
        "Number of sample requests that the replica has answered",
        lambda row: row["samples"],
        CounterMetricFamily,
    ),
    _ReplicaMetric(
        "planish_replica_micro_batches",
        "Number of micro-batches that the replica has computed for models of other replicas",
        lambda row: row["micro_batches"],
        CounterMetricFamily,
    ),
    _ReplicaMetric(
        "planish_replica_losses",
        "Number of times that the replica was lost",
        lambda row: row["losses"],
        CounterMetricFamily,
    ),
)


@dataclass(frozen=True, eq=False)
class ReplicaMetrics(Collector):
    """A collector of the metrics of each replica."""

    status: Callable[[], Sequence[Mapping[str, Any]]]
    """`ServedFleet.status`."""

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with the label `replica`."""
        rows = self.status()
        for metric in _REPLICA_METRICS:
            family = metric.family(metric.name, metric.help, labels=["replica"])
            for row in rows:
                family.add_metric([str(row["replica"])], float(metric.value(row)))
            yield family
