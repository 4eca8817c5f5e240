"""The metrics of one run by column, and the series that charts draw.

A row of metrics.jsonl has only the metrics of its step, so each column has steps of its own. Rows
of the public cookbook may lack a step; their `progress/batch` counts instead. If a step occurs
twice, the later row counts.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeGuard

import numpy as np

from planish.console.row_tail import Row

STEP_SECONDS = "time/total"
_BLOCK_ROWS = 4096
_MAX_INT = 1 << 63


@dataclass(frozen=True)
class Series:
    """Points of one metric, at most as many as were asked for.

    If the metric has more points, each point stands for a bucket of neighbouring steps: `y` is
    their mean, and `low` and `high` are their extremes. Otherwise `low` and `high` are None.
    """

    x: np.ndarray
    steps: np.ndarray
    """The step of each point; the last one of a bucket."""
    y: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None
    num_points: int
    """The number of points before the reduction."""

    def to_json(self) -> dict[str, Any]:
        """Return the series with lists of numbers."""
        return {
            "x": self.x,
            "steps": self.steps,
            "y": self.y,
            "low": self.low,
            "high": self.high,
            "num_points": self.num_points,
        }


@dataclass
class MetricTable:
    """All metrics of one run."""

    columns: dict[str, "Column"] = field(default_factory=dict)
    num_rows: int = 0
    last_step: float | None = None

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows in the order of the file."""
        for start in range(0, len(rows), _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            if not self._add_alike(block):
                for row in block:
                    self._add_row(row)

    def _add_alike(self, rows: Sequence[Row]) -> bool:
        """Add rows that have the same names, whole columns at once. Return False, and add nothing,
        if the rows differ or have no usable steps.
        """
        names = [name for name in rows[0] if name != "step"]
        if len(set(map(len, rows))) > 1 or len(names) < 2 or len(names) == len(rows[0]):
            return False
        try:
            steps = tuple(map(itemgetter("step"), rows))
            columns = list(zip(*map(itemgetter(*names), rows), strict=True))
        except KeyError:
            return False
        if not _are_numbers(steps) or not all(map(math.isfinite, steps)):
            return False
        self._note_steps(steps)
        numbers = array("d", steps)  # converted once: an array is extended by an array at once
        for name, values in zip(names, columns, strict=True):
            self._add_column(name, numbers, values)
        return True

    def _add_row(self, row: Row) -> None:
        step = _step(row)
        if step is not None:
            self._note_steps((step,))
            for name, value in row.items():
                if name != "step":
                    self._add_column(name, (step,), (value,))

    def _note_steps(self, steps: Sequence[float]) -> None:
        self.num_rows += len(steps)
        self.last_step = steps[-1]

    def _add_column(self, name: str, steps: Sequence[float], values: Sequence[Any]) -> None:
        if not _are_numbers(values):
            pairs = [pair for pair in zip(steps, values, strict=True) if is_number(pair[1])]
            if not pairs:
                return
            steps, values = zip(*pairs, strict=True)
        column = self.columns.setdefault(name, Column())
        column.steps.extend(steps)
        column.values.extend(values)

    def values(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the (steps, values) of a metric, by step; empty if the run has no such metric.
        Values that are not finite are left out.
        """
        column = self.columns.get(name)
        return column.by_step() if column is not None else (np.empty(0), np.empty(0))

    def steps_without_value(self, name: str) -> np.ndarray:
        """Return the steps at which the value of a metric is NaN or infinite."""
        column = self.columns.get(name)
        if column is None:
            return np.empty(0)
        return np.array(column.steps)[~np.isfinite(np.array(column.values))]

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric; None if there is none."""
        values = self.values(name)[1]
        return float(values[-1]) if len(values) else None

    def seconds_at(self, steps: np.ndarray) -> np.ndarray | None:
        """Return the seconds of training until the end of each step, without pauses between two
        processes of a run. None if the run has no times.
        """
        timed_steps, seconds = self.values(STEP_SECONDS)
        if not len(timed_steps):
            return None
        ends = np.cumsum(seconds)
        places = np.searchsorted(timed_steps, steps, side="right") - 1
        return np.where(places >= 0, ends[np.maximum(places, 0)], 0.0)

    def series(
        self,
        name: str,
        max_points: int,
        *,
        by_time: bool = False,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> Series:
        """Return the points of a metric with x from `low` to `high`. x is the step, or with
        `by_time` the seconds of training.
        """
        steps, values = self.values(name)
        x = self.seconds_at(steps) if by_time else steps
        if x is None:
            x, steps, values = steps[:0], steps[:0], values[:0]
        inside = (x >= low) & (x <= high)
        if not inside.all():
            # One more point on each side, so that lines reach the edges of a zoomed chart.
            inside[:-1] |= inside[1:]
            inside[1:] |= inside[:-1]
            x, steps, values = x[inside], steps[inside], values[inside]
        return _reduced(x, steps, values, max_points)


@dataclass
class Column:
    """The values of one metric in the order of the file."""

    steps: array = field(default_factory=lambda: array("d"))
    values: array = field(default_factory=lambda: array("d"))
    _sorted: tuple[int, np.ndarray, np.ndarray] | None = None

    def by_step(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) in increasing order of steps, each step once."""
        if self._sorted is None or self._sorted[0] != len(self.steps):
            steps, values = np.array(self.steps), np.array(self.values)
            if np.any(steps[1:] <= steps[:-1]):
                order = np.argsort(steps, kind="stable")
                steps, values = steps[order], values[order]
                is_last = np.append(steps[1:] != steps[:-1], True)
                steps, values = steps[is_last], values[is_last]
            finite = np.isfinite(values)
            self._sorted = len(self.steps), steps[finite], values[finite]
        return self._sorted[1:]


def _step(row: Row) -> float | None:
    step = row.get("step", row.get("progress/batch"))
    return step if is_number(step) and math.isfinite(step) else None


def _are_numbers(values: Sequence[Any]) -> bool:
    """Return whether `is_number` holds for all values. It calls no Python function for each."""
    types = set(map(type, values))
    if not types <= {int, float}:
        return False
    if int not in types:
        return True
    integers = values if types == {int} else [value for value in values if type(value) is int]
    return min(integers) > -_MAX_INT and max(integers) < _MAX_INT


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number that fits into a float, and no bool."""
    kind = type(value)
    return kind is float or (kind is int and -_MAX_INT < value < _MAX_INT)


def _reduced(x: np.ndarray, steps: np.ndarray, y: np.ndarray, max_points: int) -> Series:
    count = len(x)
    if count <= max_points:
        return Series(x, steps, y, None, None, count)
    starts = np.arange(max_points) * count // max_points
    sizes = np.diff(np.append(starts, count))
    ends = starts + sizes - 1
    return Series(
        np.add.reduceat(x, starts) / sizes,
        steps[ends],
        np.add.reduceat(y, starts) / sizes,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
        count,
    )
