"""Faults outside the kernels while a GPU's self-test runs: what planish says, what it stores, and
what the next start tests again. The names of the GPU are simulated; the processes are real.
"""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from planish.model.kernels.self_test.verdicts import Verdict
from planish.model.kernels.triton import self_test
from planish.model.kernels.triton.families import HeadShape

pytest.importorskip("triton")

FAMILIES = ("norms", "lora", "rope")
HEADS = HeadShape(128, 4, torch.bfloat16)
BUSY = (
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable\\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)
Start = Callable[[], list[Verdict]]


@pytest.fixture
def start(tmp_path, monkeypatch) -> Callable[[str], Start]:
    """Return a function that makes starts of planish, each of which checks the kernels.

    The test processes run the given text for each family; `before` runs before the first one. The
    file `tested` gets a line for each process with its families.
    """
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PLANISH_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Simulated GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    real = self_test.run_checks

    def made(text: str, before: str = "") -> Start:
        path = tmp_path / "program.py"
        path.write_text(
            "import json, os, signal, sys\n"
            "request = json.load(sys.stdin)\n"
            f"open({str(tmp_path / 'tested')!r}, 'a').write(json.dumps(request['families']) + '\\n')\n"
            f"{before}\n"
            "for family in request['families']:\n"
            "    print(json.dumps({'begin': family}), flush=True)\n"
            + textwrap.indent(textwrap.dedent(text), "    ")
            + "\n    verdict = {'family': family, 'passed': True, 'reason': ''}\n"
            "    print(json.dumps({'verdict': verdict}), flush=True)\n"
        )
        monkeypatch.setattr(
            self_test, "run_checks", partial(real, command=(sys.executable, str(path)))
        )
        return lambda: self_test.check_kernels(
            tmp_path, {}, HEADS, torch.device("cuda:0"), FAMILIES
        )

    return made


def processes(directory: Path) -> list[Sequence[str]]:
    """Return the families of each test process, and forget them."""
    path = directory / "tested"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def stored(directory: Path) -> set[str]:
    """Return the families with a stored verdict."""
    return {
        verdict["family"]
        for path in (directory / "home" / "kernels").glob("verdicts-gpu-*.json")
        for verdict in json.loads(path.read_text())
    }


@pytest.mark.parametrize(
    ("fault", "reason", "remedy"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", "interrupt in the self-test", "next start tests"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed in the self-test", "next start tests"),
        (
            "raise OSError(28, 'No space left on device')",
            "No space left on device",
            "Make Triton's cache",
        ),
        (
            "raise PermissionError(13, 'Permission denied', '/root/.triton/cache')",
            "Permission denied",
            "Make Triton's cache",
        ),
        (
            "raise OSError(30, 'Read-only file system', '/root/.triton/cache')",
            "Read-only file system",
            "Make Triton's cache",
        ),
    ],
)
def test_the_next_start_repeats_what_a_fault_prevented(
    tmp_path, start, caplog, fault, reason, remedy
):
    """A fault of Triton's cache concerns all families that were not tested before it."""
    verdicts = start(f"if family == 'lora':\n    {fault}")()
    assert verdicts[0] == Verdict("norms", True)
    [lora] = [verdict for verdict in verdicts if verdict.family == "lora"]
    assert not lora.passed
    assert reason in lora.reason
    assert remedy in caplog.text
    passed = {verdict.family for verdict in verdicts if verdict.passed}
    assert stored(tmp_path) == passed
    processes(tmp_path)
    assert all(verdict.passed for verdict in start("")())
    assert processes(tmp_path) == [[family for family in FAMILIES if family not in passed]]
    assert stored(tmp_path) == set(FAMILIES)


def test_a_card_in_exclusive_mode_is_named_once_and_nothing_is_stored(tmp_path, start, caplog):
    verdicts = start("", before=f'raise RuntimeError("{BUSY}")')()
    assert not any(verdict.passed or verdict.is_lasting for verdict in verdicts)
    assert processes(tmp_path) == [list(FAMILIES)]
    assert caplog.text.count("busy or unavailable") == 1
    assert "nvidia-smi -c 0" in caplog.text
    assert "all GPU kernels of planish are off" in caplog.text
    assert stored(tmp_path) == set()
    assert all(verdict.passed for verdict in start("")())
    assert stored(tmp_path) == set(FAMILIES)


def test_verdicts_that_cannot_be_stored_are_used_and_found_again(tmp_path, start):
    """The cache is below a file, as unwritable for root as a read-only directory for others."""
    (tmp_path / "home").write_text("")
    check = start("")
    for _ in range(2):
        assert all(verdict.passed for verdict in check())
    assert processes(tmp_path) == [list(FAMILIES)] * 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_FSIZE")
def test_a_full_disk_leaves_no_part_of_a_file(tmp_path):
    """A limit of the size of files fails writes as a full disk does."""
    code = f"""
import resource
from pathlib import Path
from planish.model.kernels.self_test.verdicts import Verdict, write_verdicts
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
path = Path({str(tmp_path / "kernels" / "verdicts-gpu-1.json")!r})
assert not write_verdicts(path, [Verdict("norms", True)])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=170)
    assert list((tmp_path / "kernels").iterdir()) == []
