"""Each step's metrics reach the run directory, the console and the services once, whatever happens
to a service.
"""

import importlib
import importlib.metadata
import io
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from planish.errors import StorageError, UserError
from planish.files import read_rows
from planish.runlog.metric_services import SERVICES, Service, ServiceRunInfo
from planish.runlog.metrics_log import MetricLogs, open_metric_logs, require_loggers
from planish.runlog.run_directory import RunDirectory

# The first process logs steps 0 to 4, the second steps 3 to 6, of which a service without a way
# back takes 5 and 6.
EACH_STEP_ONCE = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.03), (6, 6.03)]
CONFIG = {"learning_rate": 1e-4, "nested": {"a": [1, 2]}}


class Recorder(Service):
    """A service that stores what it gets, over several processes of a run."""

    remedy = "See the recorder."
    told: list[tuple[str, int, float]]
    opened: list[ServiceRunInfo]
    closed: list[bool]
    fails_at: int | None

    def __init__(self, run: ServiceRunInfo) -> None:
        self.run_id = run.run_id
        self.opened.append(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("network is unreachable")
        self.told.append((self.run_id, step, metrics["a"]))

    def close(self, failed: bool) -> None:
        self.closed.append(failed)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    class Fresh(Recorder):
        told, opened, closed, fails_at = [], [], [], None

    monkeypatch.setitem(SERVICES, "wandb", Fresh)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    return Fresh


def log_steps(
    directory: Path, start: int, end: int, loggers: tuple[str, ...] = ("wandb",), **options: Any
) -> str:
    """Act as one process of a run: resume at `start`, log the steps up to `end`, and return the
    printed text.
    """
    out = io.StringIO()
    with RunDirectory(directory, CONFIG) as run:
        run.resume_at(start)
        with open_metric_logs(
            loggers, run, num_steps=20, console=Console(file=out, width=200), **options
        ) as logs:
            for step in range(start, end):
                logs.log(step, {"a": step + start / 100})
    return out.getvalue()


def steps_of(recorder: type[Recorder]) -> list[int]:
    return [step for _, step, _ in recorder.told]


def test_record_and_console_are_always_there(tmp_path):
    printed = log_steps(tmp_path, 0, 2, loggers=())
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1]
    assert "step 0/20" in printed
    assert "step 1/20" in printed
    assert not (tmp_path / "metric_logs.json").exists()


def test_the_console_can_show_a_line_a_step(tmp_path):
    printed = log_steps(
        tmp_path, 0, 2, loggers=(), console_metrics={"a": "[a] {:.1f}", "b": "b {}"}
    )
    assert printed.splitlines() == ["step  0/20 | [a] 0.0", "step  1/20 | [a] 1.0"]


def test_a_service_gets_the_plain_config_and_names(tmp_path, recorder):
    log_steps(tmp_path / "my-run", 0, 1)
    log_steps(tmp_path / "other", 0, 1, project="sums", name="first")
    assert [(run.config, run.project, run.name) for run in recorder.opened] == [
        (CONFIG, None, "my-run"),
        (CONFIG, "sums", "first"),
    ]
    assert recorder.opened[0].run_id != recorder.opened[1].run_id
    assert recorder.closed == [False, False]


def test_a_resumed_run_continues_the_same_run_without_doubled_steps(tmp_path, recorder):
    log_steps(tmp_path, 0, 5)
    printed = log_steps(tmp_path, 3, 7)
    assert steps_of(recorder) == [0, 1, 2, 3, 4, 5, 6]
    assert len({run_id for run_id, _, _ in recorder.told}) == 1
    assert printed.count("cannot replace the steps 3 to 4") == 1


def test_a_logger_added_later_receives_earlier_steps(tmp_path, recorder):
    log_steps(tmp_path, 0, 3, loggers=())
    log_steps(tmp_path, 3, 5)
    assert [(step, value) for _, step, value in recorder.told] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 3.03),
        (4, 4.03),
    ]


def test_a_failing_logger_is_named_once_and_the_run_continues(tmp_path, recorder):
    recorder.fails_at = 2
    printed = log_steps(tmp_path, 0, 5)
    assert steps_of(recorder) == [0, 1]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert printed.count("WARNING: wandb failed at step 2") == 1
    assert "ConnectionError: network is unreachable" in printed


def test_after_a_failure_a_resumed_run_tells_what_was_missed(tmp_path, recorder):
    recorder.fails_at = 2
    log_steps(tmp_path, 0, 5)
    recorder.fails_at = None
    log_steps(tmp_path, 5, 6)
    # Step 2 may have arrived before its failure was known; a step is rather missed than told twice.
    assert steps_of(recorder) == [0, 1, 3, 4, 5]


def test_a_logger_that_cannot_finish_does_not_end_the_run(tmp_path, recorder, monkeypatch):
    def close(self: Recorder, failed: bool) -> None:
        raise TimeoutError("upload")

    monkeypatch.setattr(recorder, "close", close)
    assert "wandb could not be closed" in log_steps(tmp_path, 0, 2)


def test_a_service_learns_that_the_run_failed(tmp_path, recorder):
    quiet = Console(file=io.StringIO())
    with (
        pytest.raises(ZeroDivisionError),
        RunDirectory(tmp_path, CONFIG) as run,
        open_metric_logs(["wandb"], run, num_steps=2, console=quiet),
    ):
        raise ZeroDivisionError
    assert recorder.closed == [True]


def test_a_row_rejected_by_the_record_reaches_no_logger(tmp_path, recorder, monkeypatch):
    def full(self: RunDirectory, step: int, metrics: Mapping[str, float]) -> None:
        raise StorageError("no space")

    monkeypatch.setattr(RunDirectory, "log", full)
    quiet = Console(file=io.StringIO())
    with (
        RunDirectory(tmp_path, CONFIG) as run,
        open_metric_logs(["wandb"], run, num_steps=2, console=quiet) as logs,
        pytest.raises(StorageError, match="no space"),
    ):
        logs.log(0, {"a": 1.0})
    assert recorder.told == []


def test_a_metric_that_is_not_finite_is_named_and_left_out_everywhere(tmp_path, recorder):
    printed = io.StringIO()
    with (
        RunDirectory(tmp_path, CONFIG) as run,
        open_metric_logs(["wandb"], run, num_steps=2, console=Console(file=printed)) as logs,
    ):
        logs.log(0, {"a": 1.0, "b": float("nan"), "c": float("-inf")})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 1.0}]
    assert recorder.told[0][1:] == (0, 1.0)
    assert "WARNING: step 0: b is nan and is left out" in printed.getvalue()
    assert "WARNING: step 0: c is -inf and is left out" in printed.getvalue()


def test_a_logger_that_cannot_start_is_an_error_that_closes_the_others(
    tmp_path, recorder, monkeypatch
):
    class Broken(Recorder):
        remedy = "Log in with `broken login`."

        def __init__(self, run: ServiceRunInfo) -> None:
            raise PermissionError("no API key.")

    monkeypatch.setitem(SERVICES, "trackio", Broken)
    message = r"trackio could not be started: PermissionError: no API key\. Log in"
    with RunDirectory(tmp_path, CONFIG) as run, pytest.raises(UserError, match=message):
        open_metric_logs(["wandb", "trackio"], run, num_steps=2)
    assert recorder.closed == [False]


def test_a_missing_logger_is_rejected_with_the_install_command(monkeypatch, tmp_path):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wandb").mkdir()  # as W&B makes one; Python would take it for a package
    with pytest.raises(
        UserError, match=r"wandb is not installed; run: pip install 'planish\[wandb\]'"
    ):
        require_loggers(["wandb"])


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        (["neptune"], "no 'neptune'; give any of"),
        (["wandb", "wandb"], "wandb, wandb has a name twice"),
    ],
)
def test_invalid_names_are_rejected(loggers, message, recorder):
    with pytest.raises(UserError, match=message):
        require_loggers(loggers)


def test_importing_the_logs_loads_no_service():
    code = (
        "import planish.runlog.metrics_log, sys; assert not {'torch', 'wandb', 'trackio', "
        "'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_several_copies_are_independent():
    class Failing(MetricLogs):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise OSError

    told: list[int] = []

    class Good(MetricLogs):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            told.append(step)

    warnings: list[str] = []
    good, bad = Good([], {}, warnings.append), Failing([], {}, warnings.append)
    logs = MetricLogs([], {"bad": bad, "good": good}, warnings.append)
    for step in range(3):
        logs.log(step, {})
    assert told == [0, 1, 2]
    assert len(warnings) == 1


def test_tensorboard_shows_each_step_once_also_after_a_resumption(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_steps(tmp_path, 0, 5, loggers=("tensorboard",))
    log_steps(tmp_path, 3, 7, loggers=("tensorboard",))
    shown = events.EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    expected = [(step, pytest.approx(step + (0.03 if step >= 3 else 0.0))) for step in range(7)]
    assert [(event.step, event.value) for event in shown.Scalars("a")] == expected
    [text] = shown.Tensors("config/text_summary")
    assert b'"learning_rate": 0.0001' in text.tensor_proto.string_val[0]


PROCESS = """
import sys
from planish.runlog.metrics_log import open_metric_logs
from planish.runlog.run_directory import RunDirectory

directory, logger, start, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
# The types are what the recipes' Config writes; Trackio reserves names that begin with "_".
builder = {"__chz_type__": "planish.recipes:Builder", "batch_size": 8}
config = {"__chz_type__": "planish.recipes:Config", "learning_rate": 1e-4, "builder": builder}
with RunDirectory(directory, config) as run:
    run.resume_at(start)
    with open_metric_logs([logger], run, num_steps=20, name="first") as logs:
        for step in range(start, end):
            logs.log(step, {"a": step + start / 100})
"""


def process(
    directory: Path, logger: str, start: int, end: int, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run one process of a run, since W&B reads its settings once per process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB", "TRACKIO"))
    }
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        PROCESS,
        str(directory),
        logger,
        str(start),
        str(end),
    ]
    return subprocess.run(command, capture_output=True, text=True, env={**kept, **environment})


@pytest.mark.slow
def test_wandb_keeps_each_step_once_also_after_a_resumption(tmp_path):
    pytest.importorskip("wandb")
    for start, end in ((0, 5), (3, 7)):
        done = process(tmp_path, "wandb", start, end, WANDB_MODE="offline", HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    records = [record for file in files for record in wandb_records(file)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.project, run.display_name) for run in runs} == {("planish", "first")}
    assert len({run.run_id for run in runs}) == 1
    history = [
        record.history for record in records if record.WhichOneof("record_type") == "history"
    ]
    values = [
        {"".join(item.nested_key) or item.key: float(item.value_json) for item in row.item}
        for row in history
    ]
    assert [(row["_step"], row["a"]) for row in values] == EACH_STEP_ONCE


def wandb_records(path: Path) -> Iterator[Any]:
    """Return the records of W&B's offline file: blocks of 32 KiB that contain chunks of crc, length
    and kind (1 and 4 end a record).
    """
    record_type: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, position, record = path.read_bytes(), 7, b""
    while position < len(data):
        left = 32768 - position % 32768
        _, length, kind = (
            struct.unpack("<IHB", data[position : position + 7]) if left >= 7 else (0, 0, 0)
        )
        if kind == 0:
            position += left
            continue
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record_type.FromString(record)
            record = b""


@pytest.mark.slow
def test_wandb_without_a_login_says_how_to_log_in(tmp_path):
    pytest.importorskip("wandb")
    home = {name: str(tmp_path) for name in ("HOME", "XDG_CONFIG_HOME", "WANDB_CONFIG_DIR")}
    done = process(tmp_path / "run", "wandb", 0, 1, NETRC=str(tmp_path / "netrc"), **home)
    assert done.returncode != 0
    assert "UserError: loggers: wandb could not be started: " in done.stderr
    assert "wandb login" in done.stderr
    assert read_rows(tmp_path / "run/metrics.jsonl") == []


def test_trackio_keeps_each_step_once_also_after_a_resumption(tmp_path):
    pytest.importorskip("trackio", reason="make test-extras runs it")
    for start, end in ((0, 5), (3, 7)):
        done = process(
            tmp_path / "run", "trackio", start, end, TRACKIO_DIR=str(tmp_path / "trackio")
        )
        assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(tmp_path / "trackio/planish.db")) as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by step"
        ).fetchall()
    assert [(step, json.loads(metrics)["a"]) for _, step, metrics in rows] == EACH_STEP_ONCE
    [name] = {name for name, _, _ in rows}
    assert name.startswith("first-")


ROLLOUTS = """
import json, sys
from planish.runlog.metrics_log import open_metric_logs
from planish.runlog.run_directory import RunDirectory

directory, rows = sys.argv[1], json.loads(sys.argv[2])
for start in (0, 1):
    with RunDirectory(directory, {"a": 1}) as run:
        run.resume_at(0)
        with open_metric_logs(["trackio"], run, num_steps=3, name="first") as logs:
            assert logs.takes_rollouts
            for step in range(start + 2):
                logs.log_rollouts(step, "train", [{**row, "iteration": step} for row in rows])
                logs.log(step, {"a": step})
"""
ROLLOUT = {
    "iteration": 0,
    "group_idx": 3,
    "traj_idx": 1,
    "tags": ["sums"],
    "total_reward": 0.5,
    "advantage": -0.25,
    "stop_reason": "completed",
    "turns": [
        {
            "observation": "What is 1 + 1?",
            "answer": "<b>2</b>",
            "answer_tokens": 4,
            "metrics": {"correct": 1.0},
            "logs": {"truth": "2"},
        }
    ],
}


def test_trackio_has_each_rollout_once_as_a_trace(tmp_path):
    pytest.importorskip("trackio", reason="make test-extras runs it")
    done = subprocess.run(
        [sys.executable, "-c", ROLLOUTS, str(tmp_path / "run"), json.dumps([ROLLOUT])],
        capture_output=True,
        text=True,
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},
    )
    assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(tmp_path / "trackio/planish.db")) as database:
        query = "select step, key, messages, metadata from traces order by step"
        found = database.execute(query).fetchall()
    assert [row[:2] for row in found] == [(step, "rollouts/train") for step in range(3)]
    assert json.loads(found[0][2]) == [
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "<b>2</b>"},
    ]
    metadata = json.loads(found[0][3])
    assert (metadata["reward"], metadata["advantage"], metadata["group"]) == (0.5, -0.25, 3)
    assert (metadata["correct"], metadata["truth"], metadata["ending"]) == (1.0, "2", "completed")
