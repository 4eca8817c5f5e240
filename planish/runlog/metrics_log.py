"""The logs that receive the metrics of each step.

The run directory's metrics.jsonl is the record: if it cannot be written, the run ends. A console
shows each step as a table or a line. W&B, Trackio and TensorBoard are copies of the record
(planish/runlog/metric_services.py):

* If a copy cannot be opened, the run does not start. If a copy fails later, one warning names it,
  and the run continues without it. When the run is resumed, the copy gets the steps it missed.
* A resumed run continues the same run at the service, and no step is logged there twice.
  TensorBoard replaces the steps that are trained again. W&B and Trackio cannot do that, so they
  keep the first values of those steps.

metric_logs.json in the run directory holds, for each copy, the run's id at the service and the
first step that the service lacks.
"""

import importlib.metadata
import json
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console

from planish.errors import UserError
from planish.files import Row, write_atomically
from planish.runlog.console import step_line
from planish.runlog.metric_services import SERVICES, Service, ServiceRunInfo
from planish.runlog.metrics_table import metrics_table
from planish.runlog.run_directory import CONFIG, METRIC_LOGS, RunDirectory

Metrics = Mapping[str, float | int]


class MetricLog(ABC):
    """A destination for the metrics of each step."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of one step."""

    @property
    def takes_rollouts(self) -> bool:
        """Whether `log_rollouts` sends something."""
        return False

    def log_rollouts(self, step: int, split: str, rows: Sequence[Row]) -> None:  # noqa: B027
        """Send rollouts of one step, as rows of *_rollouts.jsonl. Most logs take numbers only."""

    def close(self, *, failed: bool = False) -> None:  # noqa: B027  (most logs need no closing)
        """Finish writing. Callers must not call `log` afterwards. `failed` is true if the run ended
        with an error.
        """


@dataclass(eq=False)
class JsonlLog(MetricLog):
    """Writes metrics.jsonl of a run directory. It does not close the run directory."""

    run: RunDirectory

    def log(self, step: int, metrics: Metrics) -> None:
        self.run.log(step, metrics)


@dataclass(eq=False)
class TableLog(MetricLog):
    """Prints the main metrics of a step as a table."""

    console: Console
    num_steps: int

    def log(self, step: int, metrics: Metrics) -> None:
        self.console.print(metrics_table(step, self.num_steps, metrics, self.console.width))


@dataclass(eq=False)
class LineLog(MetricLog):
    """Prints a few metrics of a step on one line."""

    console: Console
    num_steps: int
    console_metrics: Mapping[str, str]
    """Maps the names of the metrics to formats such as "reward {:.3f}"."""

    def log(self, step: int, metrics: Metrics) -> None:
        line = step_line(step, self.num_steps, metrics, self.console_metrics)
        self.console.print(line, soft_wrap=True, markup=False)


@dataclass(eq=False)
class MetricLogs(MetricLog):
    """Writes to several logs. It is a context manager that closes them."""

    required: Sequence[MetricLog]
    """The logs whose errors are raised."""
    copies: dict[str, MetricLog]
    """The logs that are dropped when they raise, each with its name."""
    warn: Callable[[str], None]
    """Called with a message when a copy is dropped or a metric is left out."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of one step to all logs. JSON has no NaN or infinity, so such a value
        is left out and reported through `warn`; it does not end the run.
        """
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name in [name for name in metrics if name not in finite]:
            self.warn(f"step {step}: {name} is {metrics[name]} and is left out of the logs")
        for log in self.required:
            log.log(step, finite)
        self._send(step, lambda copy: copy.log(step, finite))

    @property
    def takes_rollouts(self) -> bool:
        return any(copy.takes_rollouts for copy in self.copies.values())

    def log_rollouts(self, step: int, split: str, rows: Sequence[Row]) -> None:
        """Send rollouts to the services that show them."""
        self._send(step, lambda copy: copy.log_rollouts(step, split, rows))

    def _send(self, step: int, send: Callable[[MetricLog], None]) -> None:
        for name, copy in list(self.copies.items()):
            try:
                send(copy)
            except Exception as error:  # services raise errors of any kind; none may end the run
                del self.copies[name]
                self.warn(
                    f"{name} failed at step {step}: {_error_text(error)}. Training continues "
                    f"without it. When the run is resumed, {name} receives the missing steps."
                )

    def close(self, *, failed: bool = False) -> None:
        for log in self.required:
            log.close(failed=failed)
        for name, copy in self.copies.items():
            try:
                copy.close(failed=failed)
            except Exception as error:
                self.warn(
                    f"{name} could not be closed: {_error_text(error)}. Its last steps may be "
                    "missing"
                )
        self.copies.clear()


class ServiceRecords:
    """Reads and writes metric_logs.json of a run directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, Row] = json.loads(path.read_text()) if path.exists() else {}

    def run_id(self, name: str) -> str | None:
        """Return the run's id at the service `name`; None if it was not used yet."""
        return self._entries.get(name, {}).get("id")

    def next_step(self, name: str) -> int:
        """Return the first step that the service `name` lacks."""
        return self._entries.get(name, {}).get("next_step", 0)

    def store(self, name: str, run_id: str, next_step: int) -> None:
        """Store the run's id at the service `name`, and the first step that the service lacks."""
        self._entries[name] = {"id": run_id, "next_step": next_step}
        write_atomically(self._path, json.dumps(self._entries, indent=2) + "\n")


@dataclass(eq=False)
class ServiceCopy(MetricLog):
    """A service's copy of a run's metrics. Each step is sent once, even if the run is resumed."""

    name: str
    service: Service
    run_id: str
    records: ServiceRecords
    first_missing_step: int
    """The first step that the service lacks."""
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        self._next_step = self.first_missing_step
        self._has_warned = False
        self.records.store(self.name, self.run_id, self.first_missing_step)

    def log(self, step: int, metrics: Metrics) -> None:
        if step >= self.first_missing_step:
            self._next_step = max(self._next_step, step + 1)
            self.records.store(self.name, self.run_id, self._next_step)
            self.service.log(step, metrics)
        elif not self._has_warned:
            self._has_warned = True
            self.warn(
                f"{self.name} cannot replace the steps {step} to {self.first_missing_step - 1}; "
                "it keeps their values from before the run was resumed"
            )

    @property
    def takes_rollouts(self) -> bool:
        return self.service.takes_rollouts

    def log_rollouts(self, step: int, split: str, rows: Sequence[Row]) -> None:
        """Send the rollouts, unless the service has them from before the run was resumed."""
        if step >= self.first_missing_step:
            self.service.log_rollouts(step, split, rows)

    def close(self, *, failed: bool = False) -> None:
        self.service.close(failed)


def require_loggers(loggers: Sequence[str]) -> None:
    """Raise UserError for an unknown or repeated name, or if a package is not installed. Call this
    before any work is done.
    """
    for name in loggers:
        if name not in SERVICES:
            raise UserError(
                f"loggers: there is no {name!r}; give any of {', '.join(sorted(SERVICES))}"
            )
        try:
            # W&B creates a directory ./wandb, which an import would accept as a module.
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise UserError(
                f"loggers: {name} is not installed; run: pip install 'planish[{name}]', or leave "
                "it out"
            ) from error
    if len(set(loggers)) < len(loggers):
        raise UserError(f"loggers: {', '.join(loggers)} has a name twice; give each name once")


def open_metric_logs(
    loggers: Sequence[str],
    run: RunDirectory,
    *,
    num_steps: int,
    console: Console | None = None,
    console_metrics: Mapping[str, str] | None = None,
    project: str | None = None,
    name: str | None = None,
) -> MetricLogs:
    """Open all logs of a run of `num_steps` steps. Call it after `run.resume_at`.

    `loggers` are any of "wandb", "trackio" and "tensorboard". The console shows tables, or with
    `console_metrics` one line per step (see LineLog). `project` and `name` are used at W&B and
    Trackio. They default to "planish" and the name of the run directory. Raise UserError if a
    logger is not installed or cannot be opened.
    """
    require_loggers(loggers)
    console = console or Console(highlight=False)

    def warn(text: str) -> None:
        console.print(f"WARNING: {text}", style="bold red", soft_wrap=True, markup=False)

    records = ServiceRecords(run.path / METRIC_LOGS)
    config = json.loads((run.path / CONFIG).read_text())
    rows = run.metrics()
    copies: dict[str, MetricLog] = {}
    with ExitStack() as stack:
        for logger in loggers:
            run_info = ServiceRunInfo(
                run.path,
                config,
                project,
                name or run.path.resolve().name,
                records.run_id(logger) or secrets.token_hex(4),
                min(records.next_step(logger), rows[-1]["step"] + 1 if rows else 0),
            )
            copies[logger] = _open_copy(logger, run_info, records, rows, warn)
            stack.callback(copies[logger].close)
        stack.pop_all()
    console_log = (
        TableLog(console, num_steps)
        if console_metrics is None
        else LineLog(console, num_steps, console_metrics)
    )
    return MetricLogs([JsonlLog(run), console_log], copies, warn)


def _open_copy(
    logger: str,
    run: ServiceRunInfo,
    records: ServiceRecords,
    rows: Sequence[Row],
    warn: Callable[[str], None],
) -> ServiceCopy:
    """Open a copy, and send it the recorded steps that it lacks."""
    try:
        service = SERVICES[logger](run)
        first_missing_step = (
            records.next_step(logger) if service.next_step is None else service.next_step
        )
        copy = ServiceCopy(logger, service, run.run_id, records, first_missing_step, warn)
        for row in rows:
            if row["step"] >= first_missing_step:
                copy.log(row["step"], {key: value for key, value in row.items() if key != "step"})
    except Exception as error:  # the service's library may raise anything: network, login, disk
        raise UserError(
            f"loggers: {logger} could not be started: {_error_text(error)}. "
            f"{SERVICES[logger].remedy}"
        ) from error
    return copy


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")
