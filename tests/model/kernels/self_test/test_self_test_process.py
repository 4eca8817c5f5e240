"""The processes of self-tests: what is a verdict, what is not, and who ends them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from planish.model.kernels.self_test.process import (
    SelfTestInterruptedError,
    WrongResultError,
    check_families,
    describe_exit,
    error_text,
    interrupt_self_tests,
    run_self_test,
)
from planish.model.kernels.self_test.verdicts import Verdict

FAMILIES = ("norms", "lora", "rope")
LAUNCH_FAILURE = """\
Traceback (most recent call last):
  File "<string>", line 3, in <module>
    torch.zeros(1, device="cuda")
    ~~~~~~~~~~~^^^^^^^^^^^^^^^^^^
torch.AcceleratorError: CUDA error: unspecified launch failure
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def program(directory: Path, text: str) -> list[str]:
    """Return the command of a test process that runs `text` for each family of its request.

    `text` can use `family` and `verdict(passed, reason)`.
    """
    path = directory / "program.py"
    path.write_text(
        textwrap.dedent(
            """\
            import json, os, signal, sys, time
            request = json.load(sys.stdin)
            def write(**line):
                print(json.dumps(line), flush=True)
            def verdict(passed=True, reason=""):
                write(verdict={"family": family, "passed": passed, "reason": reason})
            for family in request["families"]:
                write(begin=family)
            """
        )
        + textwrap.indent(textwrap.dedent(text), "    ")
    )
    return [sys.executable, str(path)]


def run(command: Sequence[str], seconds: float = 60, **options) -> list[Verdict]:
    return run_self_test(FAMILIES, lambda remaining, found: {}, command, seconds, {}, **options)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", "interrupt in the self-test: KeyboardInterrupt"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed in the self-test"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "terminated in the self-test"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "segmentation fault in the self-test"),
        (
            "raise OSError(28, 'No space left on device')",
            "exit status 1 of the self-test: OSError: [Errno 28] No space left on device",
        ),
        (
            "raise PermissionError(13, 'Permission denied', '/root/.triton/cache')",
            "exit status 1 of the self-test: PermissionError: [Errno 13] Permission denied: "
            "'/root/.triton/cache'",
        ),
        (
            "raise RuntimeError('CUDA error: unspecified launch failure\\nCompile with DSA')",
            "exit status 1 of the self-test: RuntimeError: CUDA error: unspecified launch "
            "failure\nCompile with DSA",
        ),
    ],
)
def test_an_outside_cause_is_no_lasting_verdict_and_fails_one_family(tmp_path, fault, reason):
    command = program(tmp_path, f"if family == 'lora':\n    {fault}\nverdict()")
    found = run(command)
    assert found == [Verdict("norms", True), Verdict("lora", False, reason), Verdict("rope", True)]
    assert [verdict.is_lasting for verdict in found] == [True, False, True]


def test_a_wrong_result_is_a_lasting_verdict(tmp_path):
    found = run(program(tmp_path, "verdict(family != 'lora', 'wrong result: x')"))
    assert found[1] == Verdict("lora", False, "wrong result: x")
    assert found[1].is_lasting


def test_a_hang_is_ended_and_is_no_lasting_verdict(tmp_path):
    text = "if family == 'lora':\n    time.sleep(600)\nverdict()"
    # The second process must start and end within the time limit, however busy the machine is.
    (failed,) = [verdict for verdict in run(program(tmp_path, text), 5) if not verdict.passed]
    assert failed == Verdict("lora", False, "timeout: no verdict within 5 seconds")
    assert not failed.is_lasting


@pytest.mark.parametrize("text", ["sys.exit()", "sys.exit(1)", "write(begin='other'); sys.exit()"])
def test_a_process_without_verdicts_fails_families(tmp_path, text):
    found = run(program(tmp_path, text))
    assert [verdict.family for verdict in found] == list(FAMILIES)
    assert not any(verdict.passed or verdict.is_lasting for verdict in found)


def test_a_command_that_does_not_exist_fails_all_families():
    found = run(["/nowhere/python"])
    assert not any(verdict.passed or verdict.is_lasting for verdict in found)
    assert "cannot be started" in found[0].reason


def test_a_reason_that_concerns_all_families_is_met_once(tmp_path):
    text = f"open({str(tmp_path / 'runs')!r}, 'a').write('1')\nraise OSError('no compiler')"
    found = run(program(tmp_path, text), concerns_all=lambda reason: "no compiler" in reason)
    assert {verdict.reason for verdict in found} == {
        "exit status 1 of the self-test: OSError: no compiler"
    }
    assert (tmp_path / "runs").read_text() == "1"


def test_the_whole_message_of_an_error_is_kept():
    """The last line of every error of CUDA is the same advice."""
    assert error_text(LAUNCH_FAILURE).startswith(
        ": torch.AcceleratorError: CUDA error: unspecified launch failure\nCUDA kernel errors"
    )
    assert error_text("illegal memory access\n") == ": illegal memory access"
    assert error_text("") == ""


def test_errors_of_a_family_end_the_process_if_the_device_may_be_lost(capsys):
    def test(family: str) -> None:
        if family == "norms":
            raise WrongResultError("the sum differs")
        if family == "lora":
            raise RuntimeError("CUDA error: unspecified launch failure\nCompile with DSA")

    with pytest.raises(SystemExit) as ended:
        check_families(FAMILIES, test, ends_on_error=True)
    assert ended.value.code == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("begin") for line in lines] == ["norms", None, "lora", None]
    assert lines[1]["verdict"]["reason"] == "wrong result: the sum differs"
    assert lines[3]["verdict"]["reason"].startswith("RuntimeError: CUDA error: unspecified launch")
    check_families(FAMILIES, test, ends_on_error=False)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"]["passed"]


WAITING = "open(os.environ['STARTED'], 'w').write(str(os.getpid()))\ntime.sleep(600)"


def wait_for(path: Path) -> int:
    """Return the number that another process writes to the file."""
    deadline = time.monotonic() + 300
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


def has_ended(pid: int) -> bool:
    """Return whether the process is gone or a zombie, after a wait of up to 300 seconds."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_an_interrupted_self_test_has_no_verdicts(tmp_path, monkeypatch):
    started = tmp_path / "started"
    monkeypatch.setenv("STARTED", str(started))
    raised: list[BaseException] = []

    def test() -> None:
        try:
            run(program(tmp_path, WAITING))
        except SelfTestInterruptedError as error:
            raised.append(error)

    thread = threading.Thread(target=test)
    thread.start()
    pid = wait_for(started)
    assert os.getpgid(pid) == pid  # Ctrl-C in a terminal does not reach the process.
    interrupt_self_tests()
    thread.join(300)
    assert raised
    assert has_ended(pid)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_self_test_ends_with_its_parent(tmp_path, number):
    """A real test process calls `end_with_parent` first."""
    started = tmp_path / "started"
    child = program(
        tmp_path,
        "from planish.model.kernels.self_test.process import end_with_parent\n"
        f"end_with_parent(request['parent'])\n{WAITING}",
    )
    parent = (
        "from planish.model.kernels.self_test.process import run_self_test\n"
        f"run_self_test({FAMILIES!r}, lambda *_: {{}}, {child!r}, 600, {{}})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        env={**os.environ, "STARTED": str(started), "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
    )
    pid = wait_for(started)
    process.send_signal(number)
    process.communicate(timeout=300)
    assert has_ended(pid)


@pytest.mark.slow
def test_ctrl_c_while_a_model_is_loaded_ends_its_self_test(tmp_path):
    """A terminal sends SIGINT to the process group of planish. The load runs in a thread."""
    started = tmp_path / "started"
    load = f"""
import time
from pathlib import Path
from planish.engine.base_models import BaseModels
from planish.engine.settings import EngineSettings
from planish.model.kernels.self_test.process import run_self_test
models = BaseModels(None, EngineSettings(device="cpu"), None)
models.directory = lambda name: Path(name)
models._load = lambda directory: run_self_test(
    {FAMILIES!r}, lambda *_: {{}}, {program(tmp_path, WAITING)!r}, 600, {{}}
)
try:
    models.get("model")
except KeyboardInterrupt:
    print("interrupted")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", load],
        env={**os.environ, "STARTED": str(started), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pid = wait_for(started)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert out == "interrupted\n"
    assert has_ended(pid)


def test_exit_statuses_are_described_in_words() -> None:
    assert describe_exit(-4) == "illegal instruction in the self-test"
    assert describe_exit(-11) == "segmentation fault in the self-test"
    assert describe_exit(1) == "exit status 1 of the self-test"
