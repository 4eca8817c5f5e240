"""Runs a program in a sandboxed worker process that answers requests. The process is killed if a
request takes too long.

The worker is for libraries that evaluate model-written answers, such as a computer algebra system.
An answer may compute 9^{9^{9^{9}}}, which cannot be interrupted within a process. An answer may
also be code, because some libraries pass answers to `eval`. So the worker runs in a sandbox like
that of planish/sandbox/sandbox.py: new namespaces, no network, a seccomp filter, an empty
environment, and a read-only file system with a small /tmp. Unlike that sandbox, the worker sees the
installed packages and the system's libraries, and it answers many requests. Code in an answer
cannot reach this machine. But it could change the worker's replies to later requests.

The process starts at the first request. Its main program is worker_program.py, whose docstring
describes the protocol, and the interface that a program must have.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from planish.errors import PlanishError
from planish.processes.background import BackgroundThread
from planish.processes.interruption import blocked_interrupts
from planish.sandbox.command import (
    ENVIRONMENT,
    ISOLATION_OPTIONS,
    SCRATCH_DIRECTORY,
    START_PATH,
    START_SOURCE,
)
from planish.sandbox.errors import SandboxUnavailableError
from planish.sandbox.limits import MIB
from planish.sandbox.python_runtime import PACKAGE_DIRECTORIES
from planish.sandbox.sandbox import INSTALL_MESSAGE, NAMESPACES_REMEDY, memory_file
from planish.sandbox.system_calls import compiled_filter

START_TIMEOUT_SECONDS = 120.0
MEMORY_BYTES = 4096 * MIB
SCRATCH_BYTES = 64 * MIB
"""Size of /tmp, which some libraries need: matplotlib does not load without a cache directory."""
WORKER_PROGRAM = Path(__file__).with_name("worker_program.py")
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
LINKER_CACHE = "/etc/ld.so.cache"
RESOURCE_LIMITS = {
    "RLIMIT_AS": (MEMORY_BYTES, MEMORY_BYTES),
    "RLIMIT_FSIZE": (SCRATCH_BYTES, SCRATCH_BYTES),
    "RLIMIT_CORE": (0, 0),
    "RLIMIT_MEMLOCK": (0, 0),
    "RLIMIT_MSGQUEUE": (0, 0),
}


class WorkerError(PlanishError):
    """A request has no result: the program failed, took too long, or ended."""


class WorkerEndedError(WorkerError):
    """The worker process ended instead of answering."""


class WorkerStartError(PlanishError):
    """The worker's program could not be loaded, or its `start` function failed."""


class WorkerProcess:
    """A sandboxed worker process. Requests of several threads run one after the other."""

    def __init__(self, program: Path, arguments: Sequence[str] = ()) -> None:
        self._program = program
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._may_end_thread = threading.Event()
        self._lock = threading.Lock()

    def request(self, message: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Return the program's answer to a request, both JSON objects. Raises WorkerError if the
        program fails, takes more than `timeout_seconds` or ends. Raises WorkerStartError if it
        cannot be started. Raises SandboxUnavailableError if this machine lacks something that the
        sandbox needs.
        """
        with self._lock:
            try:
                process = self._ensure_running()
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # if the process has ended, _receive reports that
                    process.stdin.write(json.dumps([timeout_seconds, message]).encode() + b"\n")
                reply = self._receive(process, timeout_seconds)
            except BaseException:
                # After Ctrl-C or a timeout, the late answer would be read as the answer to the next
                # request.
                self._stop()
                raise
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process. Another request would start a new one."""
        with self._lock:
            self._stop()

    def _ensure_running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()  # clean up a process that ended between requests
        with ExitStack() as stack:
            start_descriptor = stack.enter_context(memory_file(START_SOURCE))
            filter_descriptor = stack.enter_context(memory_file(compiled_filter(False)))
            command = _command(start_descriptor, filter_descriptor, self._program, self._arguments)
            # A terminal sends Ctrl-C to the whole process group, but only this process should react
            # and kill the worker. So bubblewrap starts with SIGINT and SIGTERM blocked. bubblewrap
            # stays in our process group, so other signals to the group, such as SIGHUP from a
            # closed terminal, still end the worker.
            with blocked_interrupts():
                self._process = process = self._start_in_thread(
                    command, (start_descriptor, filter_descriptor)
                )
        try:
            reply = self._receive(process, START_TIMEOUT_SECONDS)
        except WorkerEndedError as error:
            raise SandboxUnavailableError(
                "the sandbox did not start; standard error shows the reason. If bubblewrap lacks a "
                f"permission, {NAMESPACES_REMEDY}"
            ) from error
        except WorkerError as error:
            reply = {"error": str(error)}
        if "error" in reply:
            raise WorkerStartError(reply["error"])
        return process

    def _start_in_thread(
        self, command: Sequence[str], descriptors: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """Start a process in a thread that lives until `_stop`.

        With --die-with-parent, Linux kills bubblewrap when the thread that started bubblewrap ends.
        A caller's thread may end long before the next request.
        """
        process_future: Future[subprocess.Popen[bytes]] = Future()
        self._may_end_thread = may_end = threading.Event()

        def run() -> None:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    env={},
                    cwd="/",
                    pass_fds=descriptors,
                )
            except BaseException as error:
                process_future.set_exception(error)
                return
            process_future.set_result(process)
            may_end.wait()

        BackgroundThread(run, "planish-worker-process", stop=may_end.set)
        return process_future.result()

    def _receive(self, process: subprocess.Popen[bytes], timeout_seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        poller = select.poll()  # select.select rejects file descriptors above 1023
        poller.register(process.stdout, select.POLLIN)
        if not poller.poll(timeout_seconds * 1000):
            raise WorkerError(f"the program gave no answer within {timeout_seconds:g} s")
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise WorkerEndedError("the process ended without an answer")
        return json.loads(line)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        self._may_end_thread.set()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _command(
    start_descriptor: int, filter_descriptor: int, program: Path, arguments: Sequence[str]
) -> Sequence[str]:
    """Return the command that starts bubblewrap.

    `start_descriptor` and `filter_descriptor`: the open files of start.py and the seccomp filter.
    """
    bwrap = shutil.which("bwrap")
    if sys.platform != "linux" or bwrap is None:
        raise SandboxUnavailableError(INSTALL_MESSAGE)
    options = list(ISOLATION_OPTIONS)
    options += ["--size", str(SCRATCH_BYTES), "--tmpfs", SCRATCH_DIRECTORY]
    package_directories = [
        path for path in sys.path if Path(path).name in PACKAGE_DIRECTORIES and Path(path).is_dir()
    ]
    options += ["--setenv", "PYTHONPATH", os.pathsep.join(package_directories)]
    for name, value in ENVIRONMENT.items():
        # Leave LD_LIBRARY_PATH unset, because the system's libraries are mounted at their usual
        # paths, where the dynamic linker finds them.
        if name != "LD_LIBRARY_PATH":
            options += ["--setenv", name, value]
    for path in sorted(
        {*_python_directories(), *package_directories, str(WORKER_PROGRAM), str(program.resolve())}
    ):
        options += ["--ro-bind", path, path]
    options += ["--ro-bind-try", LINKER_CACHE, LINKER_CACHE]
    options += ["--dev-bind", "/dev/null", "/dev/null"]
    options += ["--ro-bind-data", str(start_descriptor), START_PATH]
    options += ["--remount-ro", "/", "--chdir", "/", "--seccomp", str(filter_descriptor)]
    limits_command = [sys.executable, "-I", "-S", START_PATH, json.dumps(RESOURCE_LIMITS)]
    # -P: files next to the program must not shadow installed modules.
    python = [sys.executable, "-P", str(WORKER_PROGRAM), str(program.resolve()), *arguments]
    return [bwrap, *options, "--", *limits_command, *python]


def _python_directories() -> Iterator[str]:
    """Yield the directories that Python and compiled packages read."""
    for path in (*SYSTEM_LIBRARIES, sys.prefix, sys.base_prefix, sys.exec_prefix):
        if Path(path).is_dir():
            yield path
    executable = Path(sys.executable)
    while executable.is_symlink():  # a virtual environment's python is a link to another python
        executable = executable.parent / os.readlink(executable)
        yield str(executable.parent)
