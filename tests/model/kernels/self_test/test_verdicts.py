"""Files with the verdicts of self-tests."""

import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from planish.model.kernels.self_test.verdicts import (
    Verdict,
    delete_verdicts,
    load_verdicts,
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


LASTING = [Verdict("matmul", True), Verdict("norms", False, "wrong result: differs")]
PASSING = [
    Verdict("lora", False, "killed in the self-test"),
    Verdict("rope", False, "OSError: [Errno 28] No space left on device"),
]


def test_only_passed_and_wrong_results_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "verdicts-cpu-1.json"
    families = [verdict.family for verdict in (*LASTING, *PASSING)]
    tested: list[list[str]] = []

    def test(missing: Sequence[str], known: Mapping[str, Verdict]) -> list[Verdict]:
        tested.append(list(missing))
        assert set(known).isdisjoint(missing)
        return [verdict for verdict in (*LASTING, *PASSING) if verdict.family in missing]

    for _ in range(2):
        assert load_verdicts(path, families, test) == [*LASTING, *PASSING]
        assert read_verdicts(path) == LASTING
    assert tested == [families, ["lora", "rope"]]


def test_verdicts_on_families_of_other_models_stay(tmp_path: Path) -> None:
    path = tmp_path / "verdicts-gpu-1.json"
    write_verdicts(path, LASTING)
    found = load_verdicts(path, ["swiglu"], lambda missing, known: [Verdict("swiglu", True)])
    assert found == [Verdict("swiglu", True)]
    assert read_verdicts(path) == [*LASTING, *found]


def test_no_file_is_written_without_a_lasting_verdict(tmp_path: Path) -> None:
    path = tmp_path / "verdicts-gpu-1.json"
    load_verdicts(path, ["lora"], lambda missing, known: PASSING[:1])
    assert not path.exists()


def test_all_stored_verdicts_are_deleted(tmp_path: Path) -> None:
    for kind in ("cpu", "gpu"):
        write_verdicts(verdict_file(tmp_path, kind, "key"), VERDICTS)
    (tmp_path / "kernels-1.so").touch()
    assert delete_verdicts(tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kernels-1.so"]
    assert delete_verdicts(tmp_path / "missing") == 0
