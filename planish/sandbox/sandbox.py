"""Python programs, each in a sandbox of its own, many at once.

bubblewrap makes the sandbox: namespaces of its own for users, processes, network, IPC, host name
and control groups; a file system that holds a Python runtime and is read only; no environment; no
capabilities; a filter of system calls (planish/sandbox/system_calls.py). Limits are set within
(planish/sandbox/start.py). Under root, bubblewrap runs as nobody, since the kernel does not count
the processes of root.

Invariants: nothing is ever run without all of this, and a machine that cannot do it is refused.
When `run` returns, fails or is cancelled, every process of the program is dead. All that a program
can tell is what it prints.
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
from planish.sandbox.command import PROGRAM, START, START_SOURCE, sandbox_command
from planish.sandbox.errors import SandboxError, SandboxUnavailableError
from planish.sandbox.limits import Limits
from planish.sandbox.process import Ending, SandboxProcess
from planish.sandbox.python_runtime import find_runtime
from planish.sandbox.system_calls import compiled_filter

SELF_TEST = Path(__file__).with_name("self_test.py").read_text(encoding="utf-8")
NOBODY = 65534
SIGNAL_KILLED = 128 + 9
SIGNAL_CPU_TIME = 128 + 24
INSTALL = (
    "programs of a model run in a sandbox and never without one, and that needs bubblewrap; install it (Debian, Ubuntu: "
    "apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
)
ALLOW_NAMESPACES = (
    "let users make namespaces: sysctl user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1 (older Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); a container must be started with a seccomp profile that allows them"
)


@dataclass(frozen=True)
class Execution:
    """What a program did."""

    ending: Ending
    exit_code: int | None
    """128 + the number of the signal that ended it; None if it was ended from without."""
    stdout: bytes
    stderr: bytes
    seconds: float
    """From before the start to the end."""


class Sandbox:
    """Runs programs within `limits`, at most `concurrency` of them at once in an event loop.

    Making one refuses a machine that lacks what it needs (SandboxUnavailableError); `check` also
    tries whether it holds.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        concurrency: int | None = None,
        python: str | None = None,
    ) -> None:
        """`concurrency`: by default one for each processor. `python`: the interpreter, by default
        the one that runs this or, where that is closed to other users, the system's.
        """
        self.limits = limits or Limits()
        self.concurrency = (os.cpu_count() or 1) if concurrency is None else concurrency
        if self.concurrency < 1:
            raise UserError(f"concurrency={concurrency}: give at least 1")
        if sys.platform != "linux":
            raise SandboxUnavailableError(
                f"the sandbox for programs is made of Linux's namespaces; {sys.platform} has none"
            )
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxUnavailableError(INSTALL)
        self._bwrap = bwrap
        self._filter = compiled_filter(self.limits.processes > 1)
        self._is_root = os.geteuid() == 0
        self._runtime = find_runtime(python, self._is_root)
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
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
        """Run a program; `files` lie beside it, by their names, and may be imported or read.

        What the program does wrong is in the result. SandboxError: it was not run.
        """
        contents = {START: START_SOURCE}
        for name, text in {**(files or {}), "main.py": source}.items():
            if "/" in name or name in ("", ".", ".."):
                raise UserError(
                    f"files: {name!r} is not the name of a file; give names without a directory"
                )
            contents[f"{PROGRAM}/{name}"] = text.encode("utf-8", "surrogatepass")
        if any("\0" in argument for argument in arguments):
            raise UserError("arguments: a program's arguments cannot hold a NUL character")
        async with self._slot():
            return await self._run(contents, stdin.encode("utf-8", "surrogatepass"), arguments)

    async def check(self) -> None:
        """SandboxUnavailableError unless a program that tries to get out is held."""
        try:
            done = await self.run(
                SELF_TEST,
                arguments=[str(self.limits.processes), str(bool(self.limits.scratch_bytes))],
            )
        except SandboxError as error:
            raise SandboxUnavailableError(f"{error}; {ALLOW_NAMESPACES}") from error
        try:
            escapes = json.loads(done.stdout)
        except ValueError as error:
            raise SandboxUnavailableError(
                f"a trial program did not run in the sandbox ({done.ending}, exit code {done.exit_code}: "
                f"{last_line(done.stderr)}); give another interpreter or higher limits"
            ) from error
        if escapes:
            raise SandboxUnavailableError(
                f"the sandbox does not hold on this machine: a trial program got {', '.join(escapes)}; no program is run. "
                "Update the kernel, bubblewrap and libseccomp"
            )

    async def _run(
        self, contents: Mapping[str, bytes], stdin: bytes, arguments: Sequence[str]
    ) -> Execution:
        process = SandboxProcess(self.limits.output_bytes)
        # A task of its own, which no cancellation breaks off: between the start of a process and
        # its end there is no place where it may be forgotten.
        work = asyncio.create_task(self._execute(process, contents, stdin, arguments))
        try:
            return await asyncio.shield(work)
        finally:
            if not work.done():
                process.end(Ending.EXITED)
                await asyncio.wait([work])

    async def _execute(
        self,
        process: SandboxProcess,
        contents: Mapping[str, bytes],
        stdin: bytes,
        arguments: Sequence[str],
    ) -> Execution:
        began = time.monotonic()
        with contextlib.ExitStack() as held:
            descriptors = {
                path: held.enter_context(memory_file(content)) for path, content in contents.items()
            }
            filter_descriptor = held.enter_context(memory_file(self._filter))
            status_read, status_write = held.enter_context(status_pipe())
            command = sandbox_command(
                self._bwrap,
                self._runtime,
                self.limits,
                filter_descriptor=filter_descriptor,
                status_descriptor=status_write,
                file_descriptors=descriptors,
                arguments=arguments,
            )
            started = await self._start(
                command, [*descriptors.values(), filter_descriptor, status_write]
            )
            await process.finish(started, status_read, stdin, self.limits.wall_seconds)
        exit_code = process.exit_code if process.ending is Ending.EXITED else None
        if process.ending is Ending.EXITED and exit_code is None:
            raise SandboxError(
                f"bubblewrap could not make the sandbox ({last_line(bytes(process.stderr.held))})"
            )
        seconds = time.monotonic() - began
        # The kernel kills who ignores its signal, a second of CPU time later.
        ignored = exit_code == SIGNAL_KILLED and seconds >= self.limits.cpu_seconds + 1
        return Execution(
            Ending.CPU_TIME if exit_code == SIGNAL_CPU_TIME or ignored else process.ending,
            exit_code,
            bytes(process.stdout.held),
            bytes(process.stderr.held),
            seconds,
        )

    async def _start(
        self, command: Sequence[str], descriptors: Sequence[int]
    ) -> asyncio.subprocess.Process:
        as_nobody: dict[str, Any] = (
            {"user": NOBODY, "group": NOBODY, "extra_groups": []} if self._is_root else {}
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

    def _slot(self) -> asyncio.Semaphore:
        return self._slots.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency)
        )


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """A file without a name, to be read from its beginning."""
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
    """A pipe whose first end never waits."""
    read, write = os.pipe()
    try:
        os.set_blocking(read, False)
        yield read, write
    finally:
        os.close(read)
        os.close(write)


def last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
