"""Files with the verdicts of self-tests."""

import multiprocessing
from pathlib import Path

import pytest

from planish.model.kernels.verdicts import (
    Verdict,
    describe_exit,
    read_verdicts,
    verdict_file,
    write_verdicts,
)

VERDICTS = [Verdict("matmul", True), Verdict("norms", False, "differ by 0.5 from torch")]


def test_verdicts_are_read_back_unchanged(tmp_path: Path) -> None:
    path = verdict_file(tmp_path / "kernels", "cpu", "digest", "AMD EPYC", "2.13")
    assert read_verdicts(path) is None
    assert write_verdicts(path, VERDICTS)
    assert read_verdicts(path) == VERDICTS
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    (path.parent / "ordinary").touch()
    assert (
        path.stat().st_mode == (path.parent / "ordinary").stat().st_mode
    )  # other users may read it


def test_each_part_of_the_key_changes_the_file_name(tmp_path: Path) -> None:
    keys = [("a", "b"), ("ab", ""), ("a", "c"), ("b", "a"), ("a",)]
    paths = {verdict_file(tmp_path, "cpu", *key) for key in keys}
    paths.add(verdict_file(tmp_path, "gpu", "a"))
    assert len(paths) == len(keys) + 1
    assert verdict_file(tmp_path, "cpu", "a") in paths


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff\xfe",
        b'[{"family": "matmul", "pass',
        b"[]",
        b"{}",
        b"null",
        b'["matmul"]',
        b'[{"family": "matmul"}]',
        b'[{"family": "matmul", "passed": "yes", "reason": ""}]',
        b'[{"family": "matmul", "passed": true, "reason": null}]',
        b'[{"family": "matmul", "passed": true, "reason": "", "more": 1}]',
    ],
)
def test_a_damaged_file_holds_no_verdicts(tmp_path: Path, damaged: bytes) -> None:
    path = verdict_file(tmp_path, "cpu", "key")
    path.write_bytes(damaged)
    assert read_verdicts(path) is None
    assert write_verdicts(path, VERDICTS)
    assert read_verdicts(path) == VERDICTS


def test_a_failed_write_leaves_no_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert not write_verdicts(file / "verdicts.json", VERDICTS)
    taken = tmp_path / "verdicts.json"
    (taken / "inside").mkdir(parents=True)  # a folder cannot be replaced by a file
    assert not write_verdicts(taken, VERDICTS)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "verdicts.json"]


def _write_often(path: Path, count: int) -> None:
    for _ in range(count):
        write_verdicts(path, VERDICTS)


@pytest.mark.slow
def test_a_reader_never_sees_a_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.json"
    write_verdicts(path, VERDICTS)
    writers = [
        multiprocessing.get_context("fork").Process(target=_write_often, args=(path, 100))
        for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert read_verdicts(path) == VERDICTS
    for writer in writers:
        writer.join()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_exit_statuses_are_described_in_words() -> None:
    assert describe_exit(-4) == "illegal instruction in the self-test"
    assert describe_exit(-11) == "segmentation fault in the self-test"
    assert describe_exit(1) == "exit status 1 of the self-test"
