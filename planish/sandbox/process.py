"""Supervises one bubblewrap process: writes its input, reads its output up to a limit, and kills it
at its time limit.

The process exits on its own, or `kill` kills it: when its time is up, when it prints too much, or
when the caller is cancelled. `kill` kills the init process of the program's PID namespace. The
kernel then kills every other process of that namespace, and bubblewrap, which runs outside, exits.
`kill` never kills bubblewrap itself, because a namespace that bubblewrap has just made could then
survive. Before bubblewrap has reported the pid of the init process, `kill` only records the
request, and the kill follows the report. Output is read until the pipes close. Then `finish` waits
for the init process, which exits after all other processes of the program.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

BLOCK_BYTES = 1 << 16


class Ending(StrEnum):
    """Why a run ended."""

    EXITED = "exited"
    """The program exited or died of a signal; see the exit code."""
    CPU_TIME = "cpu_time"
    """The program exceeded `Limits.cpu_seconds`."""
    WALL_TIME = "wall_time"
    """The program exceeded `Limits.wall_seconds`."""
    OUTPUT = "output"
    """The program printed more than `Limits.output_bytes`."""


@dataclass
class Capture:
    """The first `max_bytes` bytes of a stream. `on_overflow` is called if the stream has more."""

    max_bytes: int
    on_overflow: Callable[[], None]
    data: bytearray = field(default_factory=bytearray)

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read `stream` to its end, and drop the bytes after the first `max_bytes`."""
        while block := await stream.read(BLOCK_BYTES):
            remaining = self.max_bytes - len(self.data)
            self.data += block[:remaining]
            if len(block) > remaining:
                self.on_overflow()


class SandboxProcess:
    """A running bubblewrap process. `kill` may be called before the process has started."""

    def __init__(self, output_bytes: int) -> None:
        self.ending = Ending.EXITED
        self.exit_code: int | None = None
        """The program's exit code as bubblewrap reported it; None if the program did not exit."""
        self.stdout = Capture(output_bytes, lambda: self.kill(Ending.OUTPUT))
        self.stderr = Capture(output_bytes, lambda: self.kill(Ending.OUTPUT))
        self._status_buffer = b""
        self._kill_requested = False
        self._has_ended = False
        self._init_pidfd: int | None = None
        """A pidfd of the namespace's init process. Unlike a pid, it never names a later process."""

    async def finish(
        self,
        process: asyncio.subprocess.Process,
        status_descriptor: int,
        stdin: bytes,
        wall_seconds: float,
    ) -> None:
        """Write `stdin`, read the output, and return when no process of the program is left.

        `status_descriptor`: the non-blocking end of the pipe to which bubblewrap writes its status.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        loop = asyncio.get_running_loop()
        timer = loop.call_later(wall_seconds, self.kill, Ending.WALL_TIME)
        loop.add_reader(status_descriptor, self._read_status, status_descriptor)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(write_stdin(process.stdin, stdin))
                tasks.create_task(self.stdout.read(process.stdout))
                tasks.create_task(self.stderr.read(process.stderr))
                tasks.create_task(process.wait())
        finally:
            timer.cancel()
            self.kill(Ending.EXITED)
            await process.wait()
            loop.remove_reader(status_descriptor)
            self._has_ended = True
            self._read_status(status_descriptor)
            if self._init_pidfd is not None:
                await wait_for_exit(self._init_pidfd)
                os.close(self._init_pidfd)
                self._init_pidfd = None

    def kill(self, ending: Ending) -> None:
        """Kill the program. If it has not started yet, it is killed as soon as it starts.

        Of several calls, the first one sets `ending`.
        """
        if self.ending is Ending.EXITED:
            self.ending = ending
        self._kill_requested = True
        if self._init_pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)

    def _read_status(self, status_descriptor: int) -> None:
        """Read the complete lines of bubblewrap's status. Bubblewrap may still be writing the last
        line, which is kept for the next call.
        """
        with contextlib.suppress(BlockingIOError):
            self._status_buffer += os.read(status_descriptor, BLOCK_BYTES)
        *lines, self._status_buffer = self._status_buffer.split(b"\n")
        for entry in map(json.loads, lines):
            # Once bubblewrap has exited, another process may have been given this pid.
            if "child-pid" in entry and not self._has_ended:
                with contextlib.suppress(ProcessLookupError):
                    self._init_pidfd = os.pidfd_open(entry["child-pid"])
            self.exit_code = entry.get("exit-code", self.exit_code)
        if self._kill_requested:
            self.kill(self.ending)


async def wait_for_exit(pidfd: int) -> None:
    """Wait until the process of `pidfd` has exited."""
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    loop.add_reader(pidfd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(pidfd)


async def write_stdin(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write `data` to a program's input, and close the input. It is no error if the program stops
    reading early.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.close()
        await stream.wait_closed()
