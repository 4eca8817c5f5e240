"""What is drawn of runs: which metrics, over which steps, in which panels.

A run is a directory with metrics.jsonl, or such a file. Files of other programs are welcome: rows
may lack a metric or a step, repeat a step (the later row counts), or hold what is no finite number;
runs may differ in length and in what they measure. A panel shows one quantity, for every run that
has it.
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
    name: str
    path: Path
    points: Mapping[str, Points]
    """By metric."""


@dataclass(frozen=True)
class Panel:
    """One quantity. Patterns are metric names in which * is any text; of a run, the first that it
    has is drawn.
    """

    title: str
    patterns: tuple[str, ...]
    draw_all: bool = False
    """Draw all patterns that a run has."""
    dull: float | None = None
    """The panel is left out where no value differs from this one."""

    def keys_of(self, run: Run) -> list[str]:
        """The metrics of a run that this panel shows."""
        found = [sorted(fnmatch.filter(run.points, pattern)) for pattern in self.patterns]
        chosen = found if self.draw_all else [keys for keys in found if keys][:1]
        return list(dict.fromkeys(key for keys in chosen for key in keys))

    def has_news(self, run: Run) -> bool:
        return any(
            value != self.dull for key in self.keys_of(run) for value in run.points[key].values()
        )


PANELS = (
    Panel("reward", ("env/all/reward/total", "reward/total")),
    Panel("test", ("*/env/all/correct", "*/env/all/reward/total")),
    Panel("groups with different rewards", ("env/all/by_group/frac_mixed",)),
    Panel("correct, well formed", ("env/all/correct", "env/all/format"), draw_all=True),
    Panel("entropy, nats a token", ("optim/entropy",)),
    Panel("KL between sampler and trainer", ("optim/kl_sample_train_v2",)),
    Panel("KL to the reference policy", ("kl_policy_base",)),
    Panel("KL to the teacher", ("teacher_kl", "test/teacher_kl"), draw_all=True),
    Panel("sampled tokens a turn", ("env/all/ac_tokens_per_turn",)),
    Panel("turns an episode", ("env/all/turns_per_episode",), dull=1.0),
    Panel("nats a learned token", ("train_mean_nll", "test/nll"), draw_all=True),
    Panel("bits a learned byte", ("train_mean_bpb", "test/bpb"), draw_all=True),
    Panel("pairs told apart", ("accuracy", "test/accuracy"), draw_all=True),
    Panel("margin of rewards", ("margin", "test/margin"), draw_all=True),
)
"""What is drawn by default, where a run has it."""


@dataclass(frozen=True)
class Curve:
    run: Run
    key: str
    run_index: int
    """The place of the run among all: its color."""
    key_index: int
    """The place of the metric in its panel: its line style."""
    x: list[float]
    y: list[float]
    smooth: list[float] | None


@dataclass(frozen=True)
class DrawnPanel:
    title: str
    curves: list[Curve]

    @property
    def keys(self) -> list[str]:
        """Its metrics, in the order of their line styles."""
        return [
            curve.key
            for curve in sorted({c.key: c for c in self.curves}.values(), key=lambda c: c.key_index)
        ]

    @property
    def is_logarithmic(self) -> bool:
        """Distances between policies go over many powers of ten."""
        values = [value for curve in self.curves for value in curve.y]
        return (
            all("kl" in curve.key for curve in self.curves)
            and min(values) > 0
            and max(values) / min(values) > 100
        )


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at `paths`, named by as much of their paths as tells them apart."""
    files = [_metrics_file(path) for path in paths]
    runs = []
    for name, file in zip(
        _short_names([file.resolve().parent for file in files]), files, strict=True
    ):
        points = points_of(read_rows(file))
        if not points:
            raise UserError(f"{file}: no step has been written yet; wait for the first one")
        runs.append(Run(name, file, points))
    return runs


def read_series(run: str | Path, metric: str) -> dict[float, float]:
    """Return the values of a metric by step, from a run directory or its metrics.jsonl.

    Steps whose row lacks the metric are left out, such as the final evaluation's for a metric of
    training. So the series has no gaps, and the last value is the newest one. Raises UserError if
    no row has the metric.
    """
    points = read_runs([Path(run).expanduser()])[0].points
    if metric not in points:
        similar = get_close_matches(metric, points) or sorted(points)[:5]
        raise UserError(f"{run} has no metric {metric}; it has {', '.join(similar)}")
    return dict(points[metric])


def points_of(rows: Iterable[Row]) -> dict[str, Points]:
    """Values by metric and step. Rows without a step, such as closing summaries, are left out."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        step = row.get("step", row.get("progress/batch"))
        if _is_number(step):
            for key, value in row.items():
                if key != "step" and _is_number(value):
                    found.setdefault(key, {})[step] = value
    return {key: dict(sorted(points.items())) for key, points in found.items()}


def drawn_panels(
    runs: Sequence[Run], metrics: Sequence[str] | None, smooth: int
) -> list[DrawnPanel]:
    """Panels with their curves. `metrics`: patterns, a panel each; None: those of `PANELS` that
    some run has.
    """
    return [
        DrawnPanel(
            panel.title,
            [curve for i, run in enumerate(runs) for curve in _curves(panel, runs, run, i, smooth)],
        )
        for panel in _chosen(runs, metrics)
    ]


def smoothed(points: Points, window: int) -> list[float]:
    """At each step the mean of the values of the last `window` steps, itself included."""
    items = list(points.items())
    means, first = [], 0
    for last, (step, _) in enumerate(items):
        while items[first][0] <= step - window:
            first += 1
        means.append(math.fsum(value for _, value in items[first : last + 1]) / (last + 1 - first))
    return means


def _chosen(runs: Sequence[Run], metrics: Sequence[str] | None) -> list[Panel]:
    available = sorted({key for run in runs for key in run.points})
    if metrics is None:
        panels = [panel for panel in PANELS if any(panel.has_news(run) for run in runs)]
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
        means = smoothed(points, smooth) if smooth > 1 else None
        curves.append(
            Curve(run, key, run_index, keys.index(key), list(points), list(points.values()), means)
        )
    return curves


def _metrics_file(path: Path) -> Path:
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        missing = f"there is no {METRICS} in it" if path.is_dir() else "there is no such run"
        raise UserError(f"{path}: {missing}; give the log_path of a run")
    return file


def _short_names(directories: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as make them differ."""
    for count in range(1, max(len(directory.parts) for directory in directories) + 1):
        names = ["/".join(directory.parts[-count:]) for directory in directories]
        if len(set(names)) == len(set(directories)):
            return names
    raise AssertionError("whole paths differ where directories do")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
