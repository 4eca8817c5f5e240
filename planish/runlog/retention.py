"""Which of a run's periodic checkpoints are kept: the last n, and the best k by an evaluation
metric.

The checkpoint after b steps is measured by the evaluation in the metrics row of step b, since that
row has the evaluation of the weights before step b. A checkpoint without the metric in its row
counts only among the last n. Of checkpoints with equal values, the later one is better.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from planish.errors import UserError


@dataclass(frozen=True)
class Retention:
    """The checkpoints that are kept."""

    keep_last: int
    """The number of most recent checkpoints, at least 1: a run resumes at the newest."""
    keep_best: int = 0
    """The number of checkpoints with the best values of `metric`."""
    metric: str | None = None
    is_highest_best: bool = True

    def kept(self, batches: Collection[int], values: Mapping[int, float]) -> set[int]:
        """Return the checkpoints that are kept, of those after `batches` steps. `values` has the
        metric of the evaluated ones.
        """
        return {*sorted(batches)[-self.keep_last :], *self.best(batches, values)}

    def best(self, batches: Collection[int], values: Mapping[int, float]) -> list[int]:
        """Return the best `keep_best` checkpoints, the best one first."""
        sign = 1 if self.is_highest_best else -1
        evaluated = [batch for batch in batches if batch in values]
        evaluated.sort(key=lambda batch: (sign * values[batch], batch), reverse=True)
        return evaluated[: self.keep_best]

    def require_metric(self, metrics: Mapping[str, float]) -> None:
        """Raise UserError if the evaluation that measures a checkpoint has no `metric`."""
        if self.keep_best and self.metric not in metrics:
            raise UserError(
                f"best_metric={self.metric}: the evaluations have no such metric; give one of "
                f"{', '.join(sorted(metrics)) or 'none, as there is no evaluator'}"
            )


def metric_values(rows: Sequence[Mapping[str, float]], metric: str | None) -> dict[int, float]:
    """Return the values of a metric in the rows of metrics.jsonl, by step."""
    return {int(row["step"]): row[metric] for row in rows if metric is not None and metric in row}
