"""Compiles disk_shim.c, configures it in a server process, and controls it from the test.

The shim must be in LD_PRELOAD when a process starts. `preloaded()` sets the variable.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("disk_shim.c")


class _Fields(ctypes.Structure):
    _fields_ = [
        ("clock_offset", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("fail_at", ctypes.c_int64),
        ("fail_count", ctypes.c_int64),
        ("fail_errno", ctypes.c_int64),
        ("failed", ctypes.c_int64),
        ("ignores_syncs", ctypes.c_int64),
        ("sync_delay", ctypes.c_int64),
        ("allocation_size", ctypes.c_int64),
        ("allocations", ctypes.c_int64),
        ("fail_allocation", ctypes.c_int64),
        ("failed_allocations", ctypes.c_int64),
        ("is_busy", ctypes.c_int64),
        ("record_delay", ctypes.c_int64),
        ("failed_call", ctypes.c_char * 64),
    ]


class Shim:
    """The files through which a test controls the shim of one server, and what the shim records.

    The fields may be changed while the server runs. They survive its restarts.
    """

    def __init__(self, directory: Path, root: Path) -> None:
        """Create the files in `directory`. `root` is the directory whose file calls are seen."""
        directory.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve()
        self.control = directory / "control"
        self._directory = directory
        self._logs = 0
        with open(self.control, "w+b") as file:
            file.truncate(ctypes.sizeof(_Fields))
            self._map = mmap.mmap(file.fileno(), 0)
        self.fields = _Fields.from_buffer(self._map)

    @property
    def log(self) -> Path:
        """The file in which the present server process records its changes."""
        return self._directory / f"log {self._logs}"

    def begin_log(self) -> None:
        """Let the next server process record into a new log."""
        self.log.unlink(missing_ok=True)
        self._logs += 1

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """The arguments of `configure`."""
        return self.root, self.log, self.control

    def environment(self) -> dict[str, str]:
        """Return the variables with which a new program runs under the shim from its start."""
        return {
            "LD_PRELOAD": str(library()),
            "PLANISH_SHIM_ROOT": str(self.root),
            "PLANISH_SHIM_LOG": str(self.log),
            "PLANISH_SHIM_CONTROL": str(self.control),
        }

    def fail(self, at: int, error: int, count: int = 1) -> None:
        """Let `count` file calls fail with the errno `error`, beginning with the `at`th from now
        (from 1). If `error` is 0, the call kills the process instead.
        """
        self.fields.fail_at = 0
        self.fields.failed, self.fields.failed_call = 0, b""
        self.fields.fail_errno, self.fields.fail_count = error, count
        self.fields.fail_at = self.fields.calls + at

    def fail_allocation(self, at: int, size: int) -> None:
        """Let one allocation of at least `size` bytes fail: the `at`th from now (from 1)."""
        self.fields.fail_allocation = 0
        self.fields.allocations = self.fields.failed_allocations = 0
        self.fields.allocation_size = size
        self.fields.fail_allocation = at

    def heal(self) -> None:
        """Let no further call or allocation fail."""
        self.fields.fail_at = self.fields.fail_allocation = 0


def configure(root: Path, log: Path, control: Path) -> None:
    """Switch the shim on in this process. Raises RuntimeError if it is not loaded."""
    try:
        switch = ctypes.CDLL(None).shim_configure
    except AttributeError:
        raise RuntimeError("the shim is not in LD_PRELOAD of this process") from None
    if switch(*(os.fsencode(path) for path in (root, log, control))):
        raise RuntimeError(f"the shim could not use {log} and {control}")


def kill_between_calls(pid: int, shim: Shim) -> None:
    """Kill a process while no thread is between a file call and its record. The call would stay in
    the page cache, and the model of the disk would not know it: later syncs would not save it from
    a power loss.
    """
    with suppress(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGSTOP)
            while not (states := _thread_states(pid)) <= set("TtZX"):
                time.sleep(0.0002)
            if not shim.fields.is_busy or states <= set("ZX"):
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.001)


def _thread_states(pid: int) -> set[str]:
    """Return the letters of the states of a process's threads."""
    states = set[str]()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def compiler() -> str | None:
    """Return the C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc")


@cache
def library() -> Path | None:
    """Compile the shim once per version, and return its library. None without a compiler."""
    command = compiler()
    if command is None:
        return None
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"planish-disk-shim-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    target = directory / f"{digest}.so"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}")
        options = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([command, *options, "-o", partial, _SOURCE], check=True)
        partial.rename(target)
    return target


@contextmanager
def preloaded() -> Iterator[None]:
    """Let programs that start within the block load the shim, if there is a compiler."""
    before = os.environ.get("LD_PRELOAD")
    path = library()
    if path is not None:
        os.environ["LD_PRELOAD"] = " ".join([str(path), *([before] if before else [])])
    try:
        yield
    finally:
        if path is not None:
            os.environ.pop("LD_PRELOAD") if before is None else os.environ.update(LD_PRELOAD=before)
