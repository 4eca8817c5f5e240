"""A run directory survives torn lines, a full disk, two processes, and other options."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planish.errors import CheckpointError, DamagedFileError, StorageError, UserError
from planish.files import read_rows, write_atomically
from planish.runlog.run_directory import (
    CheckpointRecord,
    RunDirectory,
    checkpoint_of,
    request_stop,
    resume_points,
    weights_of,
)

CONFIG = {"batch_size": 4, "max_steps": 10}


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_rows_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    with RunDirectory(tmp_path / "run", CONFIG) as run:
        run.log(0, {"reward/total": 0.25})
        assert read_rows(run.path / "metrics.jsonl") == [{"step": 0, "reward/total": 0.25}]
    assert json.loads((tmp_path / "run/config.json").read_text()) == CONFIG


def test_a_stop_request_is_kept_from_the_moment_the_run_has_its_directory(tmp_path):
    with RunDirectory(tmp_path, CONFIG):
        pass
    request_stop(tmp_path)
    with RunDirectory(tmp_path, CONFIG) as run:
        assert not run.take_stop_request()
        request_stop(tmp_path)  # while the model loads
        run.record_command()
        assert run.take_stop_request()


def test_step_is_the_first_key(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as run:
        run.log(3, {"a": 1.0})
    assert lines(tmp_path / "metrics.jsonl")[0].startswith('{"step": 3')


def test_numbers_of_other_libraries_become_plain(tmp_path):
    numpy = pytest.importorskip("numpy")
    with RunDirectory(tmp_path, CONFIG) as run:
        run.log(0, {"a": numpy.float32(0.5), "b": numpy.int64(2)})
        assert run.metrics() == [{"step": 0, "a": 0.5, "b": 2}]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_is_rejected_by_name(tmp_path, value):
    with RunDirectory(tmp_path, CONFIG) as run, pytest.raises(ValueError, match="optim/lr.*step 7"):
        run.log(7, {"optim/lr": value})
    assert read_rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_kill_at_any_byte_of_the_last_row_loses_at_most_that_row(tmp_path, cut):
    with RunDirectory(tmp_path, CONFIG) as run:
        run.log(0, {"reward/total": 0.25})
        run.log(1, {"reward/total": 0.5})
    path = tmp_path / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    before = read_rows(path)
    with RunDirectory(tmp_path, CONFIG) as run:
        assert run.metrics() == before
        run.log(2, {"reward/total": 0.75})
    expected = [0, 1, 2] if cut == 1 else [0, 2]
    assert [row["step"] for row in read_rows(path)] == expected
    assert path.read_bytes().endswith(b"}\n")


def test_a_damaged_line_inside_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
    with pytest.raises(DamagedFileError, match="line 2"):
        read_rows(path)


def test_resume_drops_exactly_the_steps_that_are_done_again(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as run:
        for step in range(5):
            run.log(step, {"reward/total": step / 10})
            if step == 2:
                run.log_checkpoint(
                    CheckpointRecord(
                        name="000003", batch=3, state_path="planish://a/weights/000003"
                    )
                )
    with RunDirectory(tmp_path, CONFIG) as run:
        [record] = run.resume_points()
        run.resume_at(record.batch)
        for step in range(record.batch, 6):
            run.log(step, {"reward/total": 1.0})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert [row["reward/total"] for row in read_rows(tmp_path / "metrics.jsonl")] == [
        0.0,
        0.1,
        0.2,
        1.0,
        1.0,
        1.0,
    ]


def test_checkpoints_behind_the_resumed_one_are_dropped(tmp_path):
    """The run resumes from the earlier one because their states are gone. They will be saved
    again.
    """
    with RunDirectory(tmp_path, CONFIG) as run:
        for batch in (2, 4, 5):
            run.log_checkpoint(CheckpointRecord(f"{batch:06d}", batch, state_path=f"s{batch}"))
        run.resume_at(4)
        assert [record.batch for record in run.resume_points()] == [4, 2]


def test_the_resume_point_is_the_last_row_with_a_state(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as run:
        run.log_checkpoint(CheckpointRecord("000002", 2, state_path="s2"))
        run.log_checkpoint(CheckpointRecord("000004", 4, state_path="s4", extra={"elapsed": 1.5}))
        run.log_checkpoint(CheckpointRecord("000005", 5, sampler_path="only-weights"))
    assert resume_points(tmp_path)[0] == CheckpointRecord(
        "000004", 4, state_path="s4", extra={"elapsed": 1.5}
    )
    with pytest.raises(
        UserError,
        match=r"'runs/typo' is neither the path of a checkpoint .* nor the directory of a run",
    ):
        checkpoint_of("runs/typo")
    assert (checkpoint_of(str(tmp_path)), weights_of(str(tmp_path))) == ("s4", "only-weights")
    for of in (checkpoint_of, weights_of):
        assert of("planish://a/weights/x") == "planish://a/weights/x"
    (tmp_path / "checkpoints.jsonl").write_text('{"name": "a row of another program"}\n')
    for of, what in ((checkpoint_of, "state"), (weights_of, "weights")):
        with pytest.raises(CheckpointError, match=f"^{tmp_path}: the run in it saved no {what}"):
            of(str(tmp_path))


def test_fields_with_the_value_none_are_omitted(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as run:
        run.log_checkpoint(CheckpointRecord("final", 7, state_path="s", final=True))
    assert read_rows(tmp_path / "checkpoints.jsonl") == [
        {"name": "final", "batch": 7, "state_path": "s", "final": True}
    ]


def test_a_directory_stays_where_it_was_when_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunDirectory("runs/mine", CONFIG) as run:
        monkeypatch.chdir("/")
        assert run.path == tmp_path / "runs" / "mine"
    with pytest.raises(UserError, match="log_path is empty"):
        RunDirectory("", CONFIG)


def test_other_options_are_rejected_by_name(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as run:
        run.log(0, {"a": 1.0})
    with pytest.raises(UserError, match=r"batch_size was 4, is 8.*another log_path"):
        RunDirectory(tmp_path, {**CONFIG, "batch_size": 8})
    with RunDirectory(tmp_path, {**CONFIG, "max_steps": 20}, may_change=["max_steps"]):
        assert json.loads((tmp_path / "config.json").read_text())["max_steps"] == 20


def test_options_may_be_corrected_before_the_first_row(tmp_path):
    RunDirectory(tmp_path, CONFIG).close()
    with RunDirectory(tmp_path, {**CONFIG, "batch_size": 8}):
        assert json.loads((tmp_path / "config.json").read_text())["batch_size"] == 8


def test_nested_options_are_rejected_by_their_own_name(tmp_path):
    def open_run(size, path="here"):
        return RunDirectory(tmp_path, {"log_path": path, "data": {"size": size, "name": "sums"}})

    with open_run(4) as run:
        run.log(0, {"a": 1.0})
    with pytest.raises(UserError, match=r"options: data\.size was 4, is 8; give"):
        open_run(8)
    open_run(4, path="there").close()


def test_options_in_a_list_are_rejected_by_their_own_name(tmp_path):
    def open_run(size):
        return RunDirectory(tmp_path, {"parts": [{"size": 1}, {"size": size}], "names": ["a", "b"]})

    with open_run(4) as run:
        run.log(0, {"a": 1.0})
    with pytest.raises(UserError, match=r"options: parts\.1\.size was 4, is 8; give"):
        open_run(8)


def test_files_of_an_unknown_run_are_not_taken_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(UserError, match=r"no config\.json"):
        RunDirectory(tmp_path, CONFIG)


@pytest.mark.slow
def test_two_processes_cannot_write_one_run(tmp_path):
    code = (
        f"from planish.runlog.run_directory import RunDirectory; RunDirectory({str(tmp_path)!r}, "
        f"{CONFIG!r})"
    )
    with RunDirectory(tmp_path, CONFIG):
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "another process is writing this run" in second.stderr
    third = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert third.returncode == 0, third.stderr


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomically(path, "old")

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageError, match=r"config\.json.*No space left.*free space"):
        write_atomically(path, "new and longer")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_storage_error(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as run:
        run.log(0, {"a": 1.0})
        run._metrics.close()
        run._metrics._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        with pytest.raises(StorageError, match="free space"):
            run.log(1, {"a": 2.0})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0]


class HalfFull(io.FileIO):
    """A disk that once has room for only three more bytes."""

    room = 3

    def write(self, line) -> int:
        some, self.room = line[: self.room], len(line)
        return super().write(some)


def test_a_row_for_which_there_was_no_room_leaves_nothing(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as run:
        run.log(0, {"a": 1.0})
        run._metrics.close()
        run._metrics._file = HalfFull(tmp_path / "metrics.jsonl", "ab")
        with pytest.raises(StorageError, match="free space"):
            run.log(1, {"a": 2.0})
        run.log(1, {"a": 3.0})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 1.0}, {"step": 1, "a": 3.0}]


def test_metrics_are_on_disk_before_the_checkpoint_that_they_lead_to(tmp_path, monkeypatch):
    with RunDirectory(tmp_path, CONFIG) as run:
        run.log(0, {"a": 1.0})
        known_at_sync = {}

        def synced(handle: int) -> None:
            known_at_sync.setdefault(handle, read_rows(tmp_path / "checkpoints.jsonl"))

        monkeypatch.setattr(os, "fsync", synced)
        run.log_checkpoint(CheckpointRecord("000001", 1, state_path="s1"))
        assert known_at_sync[run._metrics._file.fileno()] == []


@pytest.mark.parametrize(
    ("file", "row"),
    [("metrics.jsonl", '{"stfp": 1}'), ("checkpoints.jsonl", '{"name": "a", "batch": "2"}')],
)
def test_an_invalid_metrics_row_is_named(tmp_path, file, row):
    with RunDirectory(tmp_path, CONFIG) as run:
        run.log(0, {"a": 1.0})
        run.log_checkpoint(CheckpointRecord("a", 1, state_path="tinker://run/weights/a"))
    with open(tmp_path / file, "a") as rows:
        rows.write(row + "\n")
    with (
        RunDirectory(tmp_path, CONFIG) as run,
        pytest.raises(DamagedFileError, match=f"{file}: the row.*remove"),
    ):
        run.resume_at(1)
    assert lines(tmp_path / file)[-1] == row
