"""A vLLM server in processes of this machine, which end with this program."""

import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from planish.errors import UserError

_SUPERVISOR = """
import ctypes, os, signal, subprocess, sys, threading
from contextlib import suppress
with suppress(AttributeError):  # elsewhere than on Linux
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
def signal_group(number):
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)
def end():
    os.read(0, 1)
    signal_group(signal.SIGTERM)
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        signal_group(signal.SIGKILL)
threading.Thread(target=end, daemon=True).start()
status = child.wait()
signal_group(signal.SIGKILL)
with suppress(ChildProcessError):
    while True:
        os.waitpid(-child.pid, 0)  # a killed process still takes a moment to end
os._exit(status if status >= 0 else 128 - status)
"""
"""Runs a command in a process group of its own, and ends the group when stdin is closed. The kernel
closes stdin even if this program is killed, so no vLLM process outlives the program.
"""
_NUM_LOG_LINES = 15


class VllmProcess:
    """A started vLLM server and its child processes."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log_file: Path
    ) -> None:
        """Start `command`. Its output goes to `log_file`."""
        self._log_file = log_file
        with log_file.open("wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-c", _SUPERVISOR, *command],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for this program, which ends vLLM itself
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
            )
        # It also runs at exit.
        self.end = weakref.finalize(self, _end, self._supervisor)
        """Ends all processes, and returns when they have ended."""

    @property
    def status(self) -> int | None:
        """The exit status, or None while the server runs."""
        return self._supervisor.poll()

    def describe_end(self) -> str:
        """Return how the server has ended, with the last lines of its output."""
        lines = self._log_file.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:]
        return f"vLLM has ended with exit status {self.status}. Its last lines:\n" + "\n".join(
            lines
        )


def _end(supervisor: subprocess.Popen[bytes]) -> None:
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    supervisor.wait()


def check_installed(python: str) -> None:
    """Raise UserError unless vLLM is installed for this interpreter."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        is_installed = subprocess.run([python, "-c", program], check=False).returncode == 0
    except OSError:
        is_installed = False
    if not is_installed:
        raise UserError(
            f"sampler='vllm': vLLM is not installed for {python}. Install it in an environment of "
            "its own (python -m venv vllm-env; vllm-env/bin/pip install vllm), and set "
            "PLANISH_VLLM_PYTHON=vllm-env/bin/python; or give the URL of a running vLLM server"
        )


def free_port() -> int:
    """Return a port that no program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
