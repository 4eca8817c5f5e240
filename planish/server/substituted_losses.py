"""The counter of losses that were asked for and computed by another, for the page at /metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


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
