"""The data of plots: which metrics of which runs are drawn, in which panels.

A run is a directory with metrics.jsonl, or such a file. Files of other programs can be read too.
Rows may lack a metric or a step, and may contain values that are not finite numbers. If a step
occurs twice, the later row counts. Runs may differ in length and in their metrics. A panel shows
one quantity, for every run that has it.
"""

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

from planish.errors import UserError
from planish.files import Row, read_rows
from planish.runlog.run_directory import METRICS

Points = Mapping[float, float]
"""Values over steps, in the order of the steps."""


@dataclass(frozen=True)
class Run:
    """The metrics of one run."""

    name: str
    path: Path
    points: Mapping[str, Points]
    """Maps each metric's name to its values."""


@dataclass(frozen=True)
class Panel:
    """A plot of one quantity. `patterns` are metric names in which * matches any text. Of each run,
    the metrics of the first matching pattern are drawn.
    """

    title: str
    patterns: tuple[str, ...]
    draw_all: bool = False
    """Whether to draw the metrics of all matching patterns instead."""
    trivial_value: float | None = None
    """The panel is left out if all of its values equal this one."""

    def keys_of(self, run: Run) -> list[str]:
        """Return the metrics of a run that this panel shows."""
        found = [sorted(fnmatch.filter(run.points, pattern)) for pattern in self.patterns]
        selected = found if self.draw_all else [keys for keys in found if keys][:1]
        return list(dict.fromkeys(key for keys in selected for key in keys))

    def is_informative(self, run: Run) -> bool:
        """Return whether the run has a value for this panel that differs from `trivial_value`."""
        return any(
            value != self.trivial_value
            for key in self.keys_of(run)
            for value in run.points[key].values()
        )


PANELS = (
    Panel("reward", ("env/all/reward/total", "reward/total")),
    Panel("test", ("*/env/all/correct", "*/env/all/reward/total")),
    Panel("groups with different rewards", ("env/all/by_group/frac_mixed",)),
    Panel("correct, well formed", ("env/all/correct", "env/all/format"), draw_all=True),
    Panel("entropy, nats per token", ("optim/entropy",)),
    Panel("KL between sampler and trainer", ("optim/kl_sample_train_v2",)),
    Panel("KL to the reference policy", ("kl_policy_base",)),
    Panel("KL to the teacher", ("teacher_kl", "test/teacher_kl"), draw_all=True),
    Panel("sampled tokens per turn", ("env/all/ac_tokens_per_turn",)),
    Panel("turns per episode", ("env/all/turns_per_episode",), trivial_value=1.0),
    Panel("nats per learned token", ("train_mean_nll", "test/nll"), draw_all=True),
    Panel("bits per learned byte", ("train_mean_bpb", "test/bpb"), draw_all=True),
    Panel("pairs told apart", ("accuracy", "test/accuracy"), draw_all=True),
    Panel("margin of rewards", ("margin", "test/margin"), draw_all=True),
)
"""The default panels. Each is drawn if a run has its metrics."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run: values `y` at steps `x`."""

    run: Run
    key: str
    run_index: int
    """The index of the run, which determines the color."""
    key_index: int
    """The index of the metric in its panel, which determines the line style."""
    x: list[float]
    y: list[float]
    smoothed_y: list[float] | None
    """The running mean of `y`; None without smoothing."""


@dataclass(frozen=True)
class PlottedPanel:
    """A panel with the curves of all runs."""

    title: str
    curves: list[Curve]

    @property
    def keys(self) -> list[str]:
        """The metrics of the panel, in the order of their line styles."""
        return [
            curve.key
            for curve in sorted({c.key: c for c in self.curves}.values(), key=lambda c: c.key_index)
        ]

    @property
    def is_logarithmic(self) -> bool:
        """Whether the y axis is logarithmic: only for KL values that span a factor of over 100."""
        values = [value for curve in self.curves for value in curve.y]
        return (
            all("kl" in curve.key for curve in self.curves)
            and min(values) > 0
            and max(values) / min(values) > 100
        )


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs at `paths`. Each run's name is the shortest end of its path that is unique.
    Raises UserError if a path has no metrics.
    """
    files = [_metrics_file(path) for path in paths]
    runs = []
    for name, file in zip(
        _short_names([file.resolve().parent for file in files]), files, strict=True
    ):
        points = points_by_metric(read_rows(file))
        if not points:
            raise UserError(f"{file}: no step has been written yet; wait for the first one")
        runs.append(Run(name, file, points))
    return runs


def read_series(run: str | Path, metric: str) -> dict[float, float]:
    """Return the values of a metric by step, from a run directory or its metrics.jsonl.

    Steps whose row lacks the metric are left out. For example, the row of the final evaluation has
    no training metrics. So the series has no gaps. Raises UserError if no row has the metric.
    """
    points = read_runs([Path(run).expanduser()])[0].points
    if metric not in points:
        similar = get_close_matches(metric, points) or sorted(points)[:5]
        raise UserError(f"{run} has no metric {metric}; it has {', '.join(similar)}")
    return dict(points[metric])


def points_by_metric(rows: Iterable[Row]) -> dict[str, Points]:
    """Return the values by metric and step. Rows without a step, such as summaries, are ignored."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        step = row.get("step", row.get("progress/batch"))
        if _is_number(step):
            for key, value in row.items():
                if key != "step" and _is_number(value):
                    found.setdefault(key, {})[step] = value
    return {key: dict(sorted(points.items())) for key, points in found.items()}


def panels_to_draw(
    runs: Sequence[Run], metrics: Sequence[str] | None, smooth: int
) -> list[PlottedPanel]:
    """Return the panels with their curves. `metrics` are patterns, one for each panel. With None,
    the panels are those of `PANELS` that some run has. `smooth` is a number of steps; see
    `running_means`.
    """
    return [
        PlottedPanel(
            panel.title,
            [curve for i, run in enumerate(runs) for curve in _curves(panel, runs, run, i, smooth)],
        )
        for panel in _select_panels(runs, metrics)
    ]


def running_means(points: Points, window: int) -> list[float]:
    """Return for each step the mean over the last `window` steps, which include that step."""
    items = list(points.items())
    smoothed_y, first = [], 0
    for last, (step, _) in enumerate(items):
        while items[first][0] <= step - window:
            first += 1
        smoothed_y.append(
            math.fsum(value for _, value in items[first : last + 1]) / (last + 1 - first)
        )
    return smoothed_y


def _select_panels(runs: Sequence[Run], metrics: Sequence[str] | None) -> list[Panel]:
    available = sorted({key for run in runs for key in run.points})
    if metrics is None:
        panels = [panel for panel in PANELS if any(panel.is_informative(run) for run in runs)]
        if not panels:
            raise UserError(
                f"none of the usual metrics is there; name some of: {', '.join(available)}"
            )
        return panels
    for pattern in metrics:
        if not fnmatch.filter(available, pattern):
            raise UserError(f"metrics={pattern}: no run has it; there are: {', '.join(available)}")
    return [Panel(pattern, (pattern,), draw_all=True) for pattern in metrics]


def _curves(
    panel: Panel, runs: Sequence[Run], run: Run, run_index: int, smooth: int
) -> list[Curve]:
    keys = list(dict.fromkeys(key for run in runs for key in panel.keys_of(run)))
    curves = []
    for key in panel.keys_of(run):
        points = run.points[key]
        smoothed_y = running_means(points, smooth) if smooth > 1 else None
        curves.append(
            Curve(
                run,
                key,
                run_index,
                keys.index(key),
                list(points),
                list(points.values()),
                smoothed_y,
            )
        )
    return curves


def _metrics_file(path: Path) -> Path:
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        missing = f"there is no {METRICS} in it" if path.is_dir() else "there is no such run"
        raise UserError(f"{path}: {missing}; give the log_path of a run")
    return file


def _short_names(directories: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many parts as make the names differ."""
    for count in range(1, max(len(directory.parts) for directory in directories) + 1):
        names = ["/".join(directory.parts[-count:]) for directory in directories]
        if len(set(names)) == len(set(directories)):
            return names
    raise AssertionError("whole paths differ where directories do")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
