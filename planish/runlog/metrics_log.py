"""Where the metrics of a run go, step by step.

The run directory's metrics.jsonl is the record: if it cannot be written, the run ends. A console
shows each step as a table or a line. W&B, Trackio and TensorBoard are copies of the record
(planish/runlog/metric_services.py):

* A copy that cannot be opened is an error at the start. One that fails later is named once, loudly,
  and left out; the run goes on, and the copy catches up with the record when the run is resumed.
* A resumed run continues the same run there, and no step is in a copy twice. TensorBoard takes back
  the steps that are done again; W&B and Trackio cannot, and keep them as they were first.

metric_logs.json in the run directory holds, for each copy, the run's id there and the first step
that it was not told.
"""

import importlib.metadata
import json
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from rich.console import Console

from planish.errors import UserError
from planish.files import Row, write_whole
from planish.runlog.console import step_line
from planish.runlog.metric_services import SERVICES, CopiedRun, Service
from planish.runlog.metrics_table import metrics_table
from planish.runlog.run_directory import CONFIG, METRIC_LOGS, RunDirectory

Metrics = Mapping[str, float | int]


class MetricLog(ABC):
    """Takes the metrics of each step."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self, *, failed: bool = False) -> None:  # noqa: B027  (nothing to do is the usual case)
        """Bring to its place what was logged; nothing is logged after it. `failed`: the run ended
        by an error.
        """


class JsonlLog(MetricLog):
    """metrics.jsonl of a run directory, which stays its owner's to close."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run

    def log(self, step: int, metrics: Metrics) -> None:
        self.run.log(step, metrics)


class TableLog(MetricLog):
    """All metrics of a step as a table."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps

    def log(self, step: int, metrics: Metrics) -> None:
        self.console.print(metrics_table(step, self.steps, metrics, self.console.width))


class LineLog(MetricLog):
    """A few metrics of a step on a line; `shown` maps their names to how they are written, such as
    "reward {:.3f}".
    """

    def __init__(self, console: Console, steps: int, shown: Mapping[str, str]) -> None:
        self.console = console
        self.steps = steps
        self.shown = shown

    def log(self, step: int, metrics: Metrics) -> None:
        self.console.print(
            step_line(step, self.steps, metrics, self.shown), soft_wrap=True, markup=False
        )


class MetricLogs(MetricLog):
    """Several logs as one; a context manager that closes them."""

    def __init__(
        self, own: Sequence[MetricLog], copies: Mapping[str, MetricLog], warn: Callable[[str], None]
    ) -> None:
        """What `own` raises is raised. What one of the named `copies` raises is told to `warn`, and
        the copy is left out.
        """
        self._own = own
        self._copies = dict(copies)
        self._warn = warn

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def log(self, step: int, metrics: Metrics) -> None:
        """A number that JSON does not have is not worth the run: it is told to `warn`, and left
        out.
        """
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name in [name for name in metrics if name not in finite]:
            self._warn(f"{name} is {metrics[name]} in step {step}, and is left out")
        for log in self._own:
            log.log(step, finite)
        for name, copy in list(self._copies.items()):
            try:
                copy.log(step, finite)
            except Exception as error:  # whatever a service raises, it is not worth the run
                del self._copies[name]
                self._warn(
                    f"{name} failed at step {step} and gets nothing more from this process: {_text(error)}. "
                    "Training goes on; when the run is resumed, it is told what it missed."
                )

    def close(self, *, failed: bool = False) -> None:
        for log in self._own:
            log.close(failed=failed)
        for name, copy in self._copies.items():
            try:
                copy.close(failed=failed)
            except Exception as error:
                self._warn(
                    f"{name} failed to finish, its last steps may be missing there: {_text(error)}"
                )
        self._copies.clear()


class Memory:
    """metric_logs.json of a run directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, Row] = json.loads(path.read_text()) if path.exists() else {}

    def run_id(self, name: str) -> str | None:
        return self._entries.get(name, {}).get("id")

    def next_step(self, name: str) -> int:
        return self._entries.get(name, {}).get("next_step", 0)

    def keep(self, name: str, run_id: str, next_step: int) -> None:
        self._entries[name] = {"id": run_id, "next_step": next_step}
        write_whole(self._path, json.dumps(self._entries, indent=2) + "\n")


class Copy(MetricLog):
    """A service's copy of a run's record: told each step once, over all processes of the run."""

    def __init__(
        self,
        name: str,
        service: Service,
        run_id: str,
        memory: Memory,
        told: int,
        warn: Callable[[str], None],
    ) -> None:
        """`told`: the first step that the service does not have."""
        self._name = name
        self._service = service
        self._run_id = run_id
        self._memory = memory
        self._told = self._next_step = told
        self._warn = warn
        self._skipped = False
        memory.keep(name, run_id, told)

    def log(self, step: int, metrics: Metrics) -> None:
        if step >= self._told:
            self._next_step = max(self._next_step, step + 1)
            self._memory.keep(self._name, self._run_id, self._next_step)
            self._service.log(step, metrics)
        elif not self._skipped:
            self._skipped = True
            self._warn(
                f"{self._name} keeps its steps {step} to {self._told - 1} as they were before the run was resumed"
            )

    def close(self, *, failed: bool = False) -> None:
        self._service.close(failed)


def require_loggers(loggers: Sequence[str]) -> None:
    """UserError for a name that is none, or whose package is not installed; to be called before any
    work.
    """
    for name in loggers:
        if name not in SERVICES:
            raise UserError(
                f"loggers: there is no {name!r}; give any of {', '.join(sorted(SERVICES))}"
            )
        try:
            # a directory ./wandb, as W&B itself makes, would pass for the module
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise UserError(
                f"loggers: {name} is not installed; run: pip install 'planish[{name}]', or leave it out"
            ) from error
    if len(set(loggers)) < len(loggers):
        raise UserError(f"loggers: {', '.join(loggers)} names one twice; give each once")


def open_metric_logs(
    loggers: Sequence[str],
    run: RunDirectory,
    *,
    steps: int,
    console: Console | None = None,
    shown: Mapping[str, str] | None = None,
    project: str | None = None,
    name: str | None = None,
) -> MetricLogs:
    """Everything that the metrics of a run of `steps` steps go to. Call it after `run.resume_at`.

    `loggers`: of "wandb", "trackio" and "tensorboard". The console shows tables, or with `shown` a
    line a step (see LineLog). `project` and `name` are those at W&B and Trackio; by default
    "planish" and the name of the run directory. Raises UserError when one of the loggers is not
    there or cannot be opened.
    """
    require_loggers(loggers)
    console = console or Console(highlight=False)

    def warn(text: str) -> None:
        console.print(f"WARNING: {text}", style="bold red", soft_wrap=True, markup=False)

    memory = Memory(run.path / METRIC_LOGS)
    config = json.loads((run.path / CONFIG).read_text())
    rows = run.metrics()
    copies: dict[str, MetricLog] = {}
    with ExitStack() as opened:
        for logger in loggers:
            copied = CopiedRun(
                run.path,
                config,
                project,
                name or run.path.resolve().name,
                memory.run_id(logger) or secrets.token_hex(4),
                min(memory.next_step(logger), rows[-1]["step"] + 1 if rows else 0),
            )
            copies[logger] = _open_copy(logger, copied, memory, rows, warn)
            opened.callback(copies[logger].close)
        opened.pop_all()
    own_console = TableLog(console, steps) if shown is None else LineLog(console, steps, shown)
    return MetricLogs([JsonlLog(run), own_console], copies, warn)


def _open_copy(
    logger: str, run: CopiedRun, memory: Memory, rows: Sequence[Row], warn: Callable[[str], None]
) -> Copy:
    """The copy, told all of the record that it does not have."""
    try:
        service = SERVICES[logger](run)
        told = memory.next_step(logger) if service.next_step is None else service.next_step
        copy = Copy(logger, service, run.run_id, memory, told, warn)
        for row in rows:
            if row["step"] >= told:
                copy.log(row["step"], {key: value for key, value in row.items() if key != "step"})
    except Exception as error:  # of a library that is not ours: network, login, a disk, a setting
        raise UserError(
            f"loggers: {logger} could not be started: {_text(error)}. {SERVICES[logger].remedy}"
        ) from error
    return copy


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")
