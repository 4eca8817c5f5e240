"""One run directory, read again and again while the run writes it.

A `RunReader` knows nothing of HTTP. It reads what was added since the last call, never locks or
writes a file of the run, and never raises because of a damaged file: `problems` says in words what
could not be read, and everything else is used.
"""

import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from planish.console.metric_table import STEP_SECONDS, MetricTable
from planish.console.rollout_table import RolloutTable, rows_of_summary
from planish.console.row_tail import Row, RowTail, parse_object
from planish.console.run_state import state_of
from planish.reports.rollout_index import INDEX
from planish.runlog.run_directory import CHECKPOINTS, CODE_DIFF, CONFIG, METRICS

REWARDS = (
    "env/all/reward/total",
    "reward/total",
    "test/env/all/correct",
    "train_mean_nll",
    "loss_per_token",
)
"""The metrics that stand for a run in the list of runs; the first that the run has."""
_SPARKLINE_POINTS = 60
_MAX_CONFIG_BYTES = 4 << 20
_SUMMARIES = "_rollout_summaries.jsonl"
_TEXT_FILE = re.compile(r"[A-Za-z0-9_./-]+_rollouts\.jsonl")
_MAX_TEXT_BYTES = 64 << 20


class RunReader:
    """Reads one run directory. Its methods may be called from several threads."""

    def __init__(self, path: Path, run_id: str, *, max_read_bytes: int | None = None) -> None:
        """`max_read_bytes` limits what one `refresh_metrics` reads of the metrics."""
        self.path = path
        self.id = run_id
        self.metrics = MetricTable()
        self.rollouts = RolloutTable()
        self.checkpoints: list[Row] = []
        self.config: Row = {}
        self.lock = threading.RLock()
        self._metric_rows = RowTail(path / METRICS, max_read_bytes)
        self._index_rows = RowTail(path / INDEX)
        self._checkpoint_rows = RowTail(path / CHECKPOINTS)
        self._summary_rows: dict[Path, RowTail] = {}
        self._generations: dict[str, int] = {}
        self._config_version: tuple[int, int] | None = None
        self._config_problem: str | None = None

    def refresh_metrics(self) -> None:
        """Read new rows of the metrics and checkpoints, and the config if it has changed."""
        with self.lock:
            rows = self._metric_rows.read()
            if self._is_started_over("metrics", self._metric_rows):
                self.metrics = MetricTable()
            self.metrics.add(rows)
            rows = self._checkpoint_rows.read()
            if self._is_started_over("checkpoints", self._checkpoint_rows):
                self.checkpoints = []
            self.checkpoints += rows
            self._read_config()

    def refresh_rollouts(self) -> None:
        """Read new rows of the index of rollouts, or the summaries of a run without an index."""
        with self.lock:
            rows = self._index_rows.read()
            if self._is_started_over("rollouts", self._index_rows):
                self.rollouts = RolloutTable()
            self.rollouts.add(rows)
            if not (self.path / INDEX).exists():
                self._read_summaries()

    @property
    def config_version(self) -> tuple[int, int] | None:
        """Time and size of config.json when it was read; None if there is none."""
        return self._config_version

    def _is_started_over(self, name: str, tail: RowTail) -> bool:
        before = self._generations.get(name, 0)
        self._generations[name] = tail.generation
        return tail.generation != before

    def _read_config(self) -> None:
        path = self.path / CONFIG
        try:
            status = path.stat()
            version = (status.st_mtime_ns, status.st_size)
            if version == self._config_version:
                return
            if status.st_size > _MAX_CONFIG_BYTES:
                raise OSError(0, f"it has {status.st_size} bytes")
            config = parse_object(path.read_bytes())
        except FileNotFoundError:
            self.config, self._config_version = {}, None
            self._config_problem = f"there is no {CONFIG}, so the options of the run are unknown"
            return
        except OSError as error:
            self._config_problem = f"{CONFIG} cannot be read ({error.strerror})"
            return
        self._config_version = version
        self.config = config or {}
        self._config_problem = None if config is not None else f"{CONFIG} is not a JSON object"

    def _read_summaries(self) -> None:
        for path in sorted(
            [*self.path.glob(f"*{_SUMMARIES}"), *self.path.glob(f"iteration_*/*{_SUMMARIES}")],
            key=lambda path: path.parent.name if path.parent != self.path else path.name,
        ):
            tail = self._summary_rows.get(path)
            if tail is None:
                tail = self._summary_rows[path] = RowTail(path)
            self.rollouts.add([rows_of_summary(row) for row in tail.read()])

    def is_partly_read(self) -> bool:
        """Return whether `refresh_metrics` has left rows for the next call."""
        return self._metric_rows.unread_bytes > 0

    def problems(self) -> list[str]:
        """Return messages about files that are missing or damaged. Empty if all is well."""
        with self.lock:
            tails = (self._metric_rows, self._checkpoint_rows, self._index_rows)
            messages = [message for tail in tails for message in tail.problems()]
            if self._config_problem is not None:
                messages.append(self._config_problem)
            if self.rollouts.num_invalid:
                messages.append(
                    f"{self.rollouts.num_invalid} rows of {INDEX} have no step, group or sample; "
                    "they are left out"
                )
            if not self.metrics.num_rows:
                messages.append(
                    f"{METRICS} has no step yet"
                    if (self.path / METRICS).exists()
                    else f"there is no {METRICS}; a run writes it with its first step"
                )
            return messages

    def summary(self) -> Row:
        """Return what the list of runs shows of this run."""
        with self.lock:
            metrics = self.metrics
            reward = next((name for name in REWARDS if name in metrics.columns), None)
            spark = metrics.series(reward, _SPARKLINE_POINTS) if reward else None
            seconds = metrics.values(STEP_SECONDS)[1]
            return {
                "id": self.id,
                "path": str(self.path),
                "model": _text(self.config.get("model_name")),
                "recipe": _text(self.config.get("recipe_name"))
                or _text(self.config.get("__chz_type__")).rpartition(":")[0],
                "state": self.state(),
                "step": metrics.last_step,
                "num_steps": self._num_steps(),
                "reward_name": reward,
                "reward": metrics.last(reward) if reward else None,
                "sparkline": [] if spark is None else spark.y,
                "seconds": float(np.sum(seconds)) if len(seconds) else None,
                "updated": self.updated(),
                "num_checkpoints": len(self.checkpoints),
                "num_problems": len(self.problems()),
            }

    def state(self) -> str:
        """Return the state of the run (run_state.py)."""
        seconds = self.metrics.values(STEP_SECONDS)[1]
        return state_of(
            self.path,
            self.checkpoints,
            self.metrics.last_step,
            self.updated(),
            float(seconds[-1]) if len(seconds) else None,
        )

    def updated(self) -> float | None:
        """Return the time of the last change of the metrics; None if there are none."""
        return _modified(self.path / METRICS)

    def _num_steps(self) -> int | None:
        """Return the number of steps that the run will have, from the progress that it logs."""
        for name in ("progress/done_frac", "progress"):
            steps, fractions = self.metrics.values(name)
            # The rows of the last step and of the final evaluation both have the fraction 1.
            before_end = np.flatnonzero((fractions > 0) & (fractions < 1))
            if len(before_end):
                row = before_end[-1]
                return round(float((steps[row] + 1) / fractions[row]))
        return None

    def flat_config(self) -> dict[str, Any]:
        """Return the options by dotted names."""
        with self.lock:
            return dict(_flatten(self.config))

    def code_diff(self) -> str:
        """Return which code made the run; "" if it is not recorded."""
        try:
            with open(self.path / CODE_DIFF, "rb") as file:
                return file.read(1 << 20).decode(errors="replace")
        except OSError:
            return ""

    def texts(self, row: Mapping[str, Any]) -> Row:
        """Return the texts of the rollout of an index row, as rollout_rows.py describes them.
        Raises LookupError with a message if they cannot be read.
        """
        file, offset, num_bytes = row.get("file"), row.get("offset"), row.get("bytes")
        if not file or offset is None or num_bytes is None:
            raise LookupError(
                "the texts of this rollout were not written; runs write them with "
                "rollout_json_export=True, which is the default"
            )
        path = self._text_path(str(file))
        if not 0 < num_bytes <= _MAX_TEXT_BYTES:
            raise LookupError(f"the index says that this rollout has {num_bytes} bytes")
        try:
            with open(path, "rb") as texts:
                texts.seek(int(offset))
                found = parse_object(texts.read(int(num_bytes)))
        except OSError as error:
            raise LookupError(f"{file} cannot be read ({error.strerror})") from error
        key = ("iteration", "group_idx", "traj_idx")
        expected = (row["step"], row["group"], row["sample"])
        if found is None or tuple(map(found.get, key)) != expected:
            raise LookupError(
                f"{file} has another rollout at this place: the run has rewritten the file, or it "
                "is damaged; load the page again"
            )
        return found

    def _text_path(self, file: str) -> Path:
        """Return the path of a text file. An index may name any file, so only rollout files inside
        the run directory are read.
        """
        path = self.path / file
        root = self.path.resolve()
        if not _TEXT_FILE.fullmatch(file) or not path.resolve().is_relative_to(root):
            raise LookupError(f"the index names {file!r}, which is no rollout file of this run")
        return path


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [
            item
            for name, part in value.items()
            for item in _flatten(part, f"{prefix}.{name}" if prefix else name)
        ]
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return _flatten({str(index): part for index, part in enumerate(value)}, prefix)
    return [(prefix, value)] if prefix else []


def config_text(value: Any) -> str:
    """Return an option's value as JSON text, for comparison and display."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
