"""The self-test of the CPU kernels runs once per machine, in separate processes that may crash."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planish.errors import UserError
from planish.model.kernels.cpp import ops, self_test
from planish.model.kernels.cpp.self_test import FAMILIES, verdicts_of
from planish.model.kernels.self_test import verdicts
from planish.model.kernels.self_test.verdicts import Verdict, read_verdicts

PROGRAM = """
import json, os, signal, sys, time
request = json.load(sys.stdin)
library, families = request["library"], request["families"]
with open(library + ".calls", "a") as calls:
    calls.write(str(int(request["uses_amx"])) + " " + " ".join(families) + "\\n")
uses_amx = request["uses_amx"]
for family in families:
    print(json.dumps({"begin": family}), flush=True)
    fate = os.environ.get("FATE_" + family, "")
    if fate == "trap":
        os.kill(os.getpid(), signal.SIGILL)
    elif fate == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fate == "hang":
        time.sleep(60)
    elif fate == "error":
        sys.exit("ImportError: no torch")
    reason = "" if fate != "wrong" else "wrong result: differs"
    verdict = {"family": family, "passed": not reason, "reason": reason}
    print(json.dumps({"verdict": verdict}), flush=True)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a library in its own cache, tested by a fake program with given answers."""
    program = tmp_path / "stated_verdicts.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(self_test, "COMMAND", (sys.executable, str(program)))
    (tmp_path / "kernels").mkdir()
    return tmp_path / "kernels" / "kernels-0.so"


def calls(library: Path) -> list[str]:
    path = Path(f"{library}.calls")
    return path.read_text().splitlines() if path.exists() else []


def verdict_files(library: Path) -> list[Path]:
    return sorted(library.parent.glob("verdicts-cpu-*.json"))


def failed(found: list[Verdict]) -> dict[str, str]:
    return {verdict.family: verdict.reason for verdict in found if not verdict.passed}


def test_the_self_test_runs_once_per_machine(library, monkeypatch):
    first = verdicts_of(library, True)
    assert [verdict.family for verdict in first] == list(FAMILIES)
    assert not failed(first)
    monkeypatch.setattr(subprocess, "Popen", None)  # the second time, no process is started
    assert verdicts_of(library, True) == first
    assert len(verdict_files(library)) == 1


def test_the_self_test_runs_again_for_another_cpu_torch_or_library(library, monkeypatch):
    verdicts_of(library, False)
    monkeypatch.setattr(self_test.platform, "machine", lambda: "another")
    verdicts_of(library, False)
    monkeypatch.setattr(torch, "__version__", "9.9")
    verdicts_of(library, False)
    verdicts_of(library.with_name("kernels-1.so"), False)
    assert len(verdict_files(library)) == 4
    assert len(calls(library)) == 3


@pytest.mark.parametrize("content", [b"", b"[{"])
def test_a_damaged_verdict_file_is_written_again(library, content):
    first = verdicts_of(library, False)
    (path,) = verdict_files(library)
    path.write_bytes(content)
    assert verdicts_of(library, False) == first
    assert read_verdicts(path) == first
    assert len(calls(library)) == 2


def test_with_a_read_only_cache_verdicts_last_for_the_process(library, monkeypatch):
    def refuse(*_: object) -> bool:
        return False

    monkeypatch.setattr(verdicts, "write_verdicts", refuse)
    assert not failed(verdicts_of(library, False))
    assert not verdict_files(library)


def test_a_crash_in_one_cpu_family_fails_only_that_family(library, monkeypatch):
    monkeypatch.setenv("FATE_lora", "trap")
    monkeypatch.setenv("FATE_norms", "wrong")
    monkeypatch.setenv("FATE_rope", "trap")
    found = verdicts_of(library, True)
    said = "illegal instruction in the self-test"
    assert failed(found) == {"lora": said, "norms": "wrong result: differs", "rope": said}
    assert [line.split()[:2] for line in calls(library)] == [
        ["0", "amx"],
        ["1", "attention"],
        ["1", "swiglu"],
    ]
    # The next start tests only the families that crashed, with the known verdict on AMX.
    monkeypatch.delenv("FATE_lora")
    assert failed(verdicts_of(library, True)) == {"norms": "wrong result: differs", "rope": said}
    assert calls(library)[3] == "1 lora rope"


def test_if_amx_fails_the_other_families_are_tested_without_it(library, monkeypatch):
    monkeypatch.setenv("FATE_amx", "trap")
    assert failed(verdicts_of(library, True)) == {"amx": "illegal instruction in the self-test"}
    assert [line.split()[:2] for line in calls(library)] == [["0", "amx"], ["0", "matmul"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fate", "reason", "count"),
    [
        ("killed", "killed in the self-test", 1),
        ("hang", "timeout: no verdict within 2 seconds", 1),
        ("error", "exit status 1 of the self-test: ImportError: no torch", 1),
    ],
)
def test_a_failure_of_the_environment_is_tested_again_next_time(
    fate, reason, count, library, monkeypatch
):
    monkeypatch.setattr(self_test, "TIMEOUT", 2 if fate == "hang" else 60)
    monkeypatch.setenv("FATE_lora", fate)
    found = failed(verdicts_of(library, False))
    assert found == dict.fromkeys(FAMILIES[2 : 2 + count], reason)
    monkeypatch.delenv("FATE_lora")
    assert not failed(verdicts_of(library, False))
    assert calls(library)[-1] == "0 lora"


@pytest.fixture
def loaded_anew():
    ops.load_library.cache_clear()
    yield
    ops.load_library.cache_clear()


@pytest.mark.usefixtures("loaded_anew")
@pytest.mark.parametrize(
    ("family", "refused"),
    [("norms", {"norms", "decode"}), ("sampling", {"sampling"}), ("decode", {"decode"})],
)
def test_torch_replaces_a_failed_cpu_family(family, refused, monkeypatch, caplog):
    known = [Verdict(each, each != family, "differs" * (each == family)) for each in FAMILIES]
    monkeypatch.setattr(ops, "verdicts_of", lambda *_: known[1:])
    with caplog.at_level(logging.WARNING):
        found = ops.load_library()
    if found is None:
        pytest.skip("this machine has no AVX2 or no C++ compiler")
    assert found.torch_families == refused
    assert not ops.is_supported(family)
    assert ops.is_supported("matmul")
    (record,) = caplog.records
    assert f"{family} (differs)" in record.message
    assert "PLANISH_KERNELS=torch" in record.message
    monkeypatch.setenv("PLANISH_KERNELS", "native")
    ops.load_library.cache_clear()
    with pytest.raises(UserError, match=rf"PLANISH_KERNELS=native.*{family} \(differs\)"):
        ops.load_library()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.usefixtures("loaded_anew")
def test_a_library_that_crashes_on_loading_is_not_used(tmp_path, monkeypatch, caplog):
    source, path = tmp_path / "library.cpp", tmp_path / "library.so"
    source.write_text(
        'extern "C" { int has_amx() { return 1; } void use_amx(int) {}\n'
        "int amx_self_test() { __builtin_trap(); } }"
    )
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    monkeypatch.setattr(ops, "_library", lambda: (path, ops.Library(str(path))))
    with caplog.at_level(logging.WARNING):
        assert ops.load_library() is None
    assert "amx (illegal instruction in the self-test)" in caplog.text
    assert "rms_norm_f" in caplog.text


@pytest.mark.slow
def test_the_real_self_test_passes_with_emulated_amx(emulated_library, tmp_path):
    """The emulator ends a process that uses AMX without permission."""
    copy = tmp_path / emulated_library.name
    os.symlink(emulated_library, copy)
    assert not failed(verdicts_of(copy, True))
