"""Run Python programs concurrently, each in its own sandbox.

bubblewrap creates the sandbox: new namespaces for users, processes, network, IPC, host name and
control groups; a read-only file system that holds only a Python runtime; an empty environment; no
capabilities; a seccomp filter (planish/sandbox/system_calls.py). planish/sandbox/start.py sets the
resource limits inside. If planish runs as root, bubblewrap runs as nobody, because the kernel does
not apply RLIMIT_NPROC to root.

Invariants: no program ever runs without all of these restrictions, and a machine that cannot
enforce them is rejected. When `run` returns, fails or is cancelled, every process of the program is
dead. A program can pass information out only through its standard output, standard error and exit
code.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from planish.errors import UserError
from planish.sandbox.command import PROGRAM_DIRECTORY, START_PATH, START_SOURCE, sandbox_command
from planish.sandbox.errors import SandboxError, SandboxUnavailableError
from planish.sandbox.limits import Limits
from planish.sandbox.process import Ending, SandboxProcess
from planish.sandbox.python_runtime import find_runtime
from planish.sandbox.system_calls import compiled_filter

SELF_TEST_SOURCE = Path(__file__).with_name("self_test.py").read_text(encoding="utf-8")
NOBODY_ID = 65534
SIGKILL_EXIT_CODE = 128 + 9
SIGXCPU_EXIT_CODE = 128 + 24
INSTALL_MESSAGE = (
    "model-written programs run only in a sandbox, which needs bubblewrap; install it (Debian, "
    "Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
)
NAMESPACES_REMEDY = (
    "allow users to create namespaces: set sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1 (older Debian) and "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); start a container with a seccomp "
    "profile that allows namespaces"
)


@dataclass(frozen=True)
class Execution:
    """The result of one run."""

    ending: Ending
    exit_code: int | None
    """The program's exit code, 128 + N if signal N ended it, or None if planish killed it."""
    stdout: bytes
    stderr: bytes
    seconds: float
    """Wall time of the run, including the start of the sandbox."""


class Sandbox:
    """Runs programs within `limits`, at most `concurrency` of them at once per event loop.

    The constructor raises SandboxUnavailableError if the machine lacks a requirement. `check` also
    tests that the sandbox really isolates.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        concurrency: int | None = None,
        python: str | None = None,
    ) -> None:
        """Check that the machine has what the sandbox needs.

        `concurrency` is the number of CPUs by default. `python` is the path of the interpreter, by
        default the one that runs planish. If planish runs as root and other users cannot read its
        interpreter, the default is the system's interpreter.
        """
        self.limits = limits or Limits()
        self.concurrency = (os.cpu_count() or 1) if concurrency is None else concurrency
        if self.concurrency < 1:
            raise UserError(f"concurrency={concurrency}: give at least 1")
        if sys.platform != "linux":
            raise SandboxUnavailableError(
                f"the sandbox for programs needs Linux namespaces, which {sys.platform} lacks; run "
                "planish on Linux"
            )
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxUnavailableError(INSTALL_MESSAGE)
        self._bwrap = bwrap
        self._filter = compiled_filter(self.limits.processes > 1)
        self._is_root = os.geteuid() == 0
        self._runtime = find_runtime(python, self._is_root)
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    async def run(
        self,
        source: str,
        *,
        stdin: str = "",
        arguments: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
    ) -> Execution:
        """Run the program `source` and return its result, whether the program succeeds or fails.

        `stdin` is its input, and `arguments` are those of its command. `files` maps the names of
        additional files to their texts. The program can import or read these files from its own
        directory. Raises SandboxError if the program could not be run, and UserError for a bad
        argument.
        """
        content_by_path = {START_PATH: START_SOURCE}
        for name, text in {**(files or {}), "main.py": source}.items():
            if "/" in name or name in ("", ".", ".."):
                raise UserError(
                    f"files: {name!r} is not the name of a file; give names without a directory"
                )
            content_by_path[f"{PROGRAM_DIRECTORY}/{name}"] = text.encode("utf-8", "surrogatepass")
        if any("\0" in argument for argument in arguments):
            raise UserError("arguments: a NUL character cannot be part of an argument; remove it")
        async with self._semaphore():
            return await self._run(
                content_by_path, stdin.encode("utf-8", "surrogatepass"), arguments
            )

    async def check(self) -> None:
        """Run a program that tries to escape. Raises SandboxUnavailableError if any attempt
        succeeds.
        """
        try:
            execution = await self.run(
                SELF_TEST_SOURCE,
                arguments=[str(self.limits.processes), str(bool(self.limits.scratch_bytes))],
            )
        except SandboxError as error:
            raise SandboxUnavailableError(f"{error}; {NAMESPACES_REMEDY}") from error
        try:
            successful_escapes = json.loads(execution.stdout)
        except ValueError as error:
            raise SandboxUnavailableError(
                f"the test program did not run in the sandbox ({execution.ending}, exit code "
                f"{execution.exit_code}: {last_line(execution.stderr)}); give another interpreter "
                "(python) or higher limits"
            ) from error
        if successful_escapes:
            raise SandboxUnavailableError(
                "the sandbox does not isolate programs on this machine: a test program gained "
                f"{', '.join(successful_escapes)}. So planish runs no programs here; update the "
                "kernel, bubblewrap and libseccomp"
            )

    async def _run(
        self, content_by_path: Mapping[str, bytes], stdin: bytes, arguments: Sequence[str]
    ) -> Execution:
        process = SandboxProcess(self.limits.output_bytes)
        # A cancellation of this method must not interrupt `_execute`, which has to wait for the end
        # of the process. So `_execute` runs in a separate, shielded task.
        task = asyncio.create_task(self._execute(process, content_by_path, stdin, arguments))
        try:
            return await asyncio.shield(task)
        finally:
            if not task.done():
                # This method was cancelled, so kill the program. The argument does not matter,
                # because no caller is left to read the result.
                process.kill(Ending.EXITED)
                await asyncio.wait([task])
                # asyncio logs a traceback for an exception that is never retrieved. After a
                # cancellation no caller is left to receive the exception, so retrieve and drop it.
                if not task.cancelled():
                    task.exception()

    async def _execute(
        self,
        process: SandboxProcess,
        content_by_path: Mapping[str, bytes],
        stdin: bytes,
        arguments: Sequence[str],
    ) -> Execution:
        start_time = time.monotonic()
        with contextlib.ExitStack() as stack:
            descriptors = {
                path: stack.enter_context(memory_file(content))
                for path, content in content_by_path.items()
            }
            filter_descriptor = stack.enter_context(memory_file(self._filter))
            status_read, status_write = stack.enter_context(status_pipe())
            command = sandbox_command(
                self._bwrap,
                self._runtime,
                self.limits,
                filter_descriptor=filter_descriptor,
                status_descriptor=status_write,
                file_descriptors=descriptors,
                arguments=arguments,
            )
            bubblewrap = await self._start(
                command, [*descriptors.values(), filter_descriptor, status_write]
            )
            await process.finish(bubblewrap, status_read, stdin, self.limits.wall_seconds)
        exit_code = process.exit_code if process.ending is Ending.EXITED else None
        if process.ending is Ending.EXITED and exit_code is None:
            raise SandboxError(
                f"bubblewrap could not create the sandbox ({last_line(bytes(process.stderr.data))})"
            )
        seconds = time.monotonic() - start_time
        # If a program ignores SIGXCPU, the kernel kills it after one more second of CPU time.
        ignored_sigxcpu = exit_code == SIGKILL_EXIT_CODE and seconds >= self.limits.cpu_seconds + 1
        return Execution(
            Ending.CPU_TIME
            if exit_code == SIGXCPU_EXIT_CODE or ignored_sigxcpu
            else process.ending,
            exit_code,
            bytes(process.stdout.data),
            bytes(process.stderr.data),
            seconds,
        )

    async def _start(
        self, command: Sequence[str], descriptors: Sequence[int]
    ) -> asyncio.subprocess.Process:
        as_nobody: dict[str, Any] = (
            {"user": NOBODY_ID, "group": NOBODY_ID, "extra_groups": []} if self._is_root else {}
        )
        try:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=descriptors,
                env={},
                cwd="/",
                start_new_session=True,
                **as_nobody,
            )
        except OSError as error:
            raise SandboxError(f"bubblewrap did not start ({error})") from error

    def _semaphore(self) -> asyncio.Semaphore:
        return self._semaphores.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency)
        )


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """Create an anonymous in-memory file with `content`, and yield its descriptor. The file is
    positioned at its start, and closed at exit.
    """
    descriptor = os.memfd_create("planish")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def status_pipe() -> Iterator[tuple[int, int]]:
    """Create a pipe whose read end is non-blocking. Yield the descriptors (read end, write end),
    which are closed at exit.
    """
    read_end, write_end = os.pipe()
    try:
        os.set_blocking(read_end, False)
        yield read_end, write_end
    finally:
        os.close(read_end)
        os.close(write_end)


def last_line(output: bytes) -> str:
    """Return the last line of `output` for an error message, or a note that there is none."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
