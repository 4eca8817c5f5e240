"""One process of bubblewrap from start to end: input given, output held up to a limit, everything
killed in time.

It ends by itself, or `end` kills it: when its time is up, when it prints too much, when its caller
is cancelled. What is killed is the first process of the program's namespace, with which the kernel
kills all others; bubblewrap outside then ends by itself. Killed first, it might leave a namespace
behind that it has just made, so its telling of the process's number is waited for. Output is read
until its pipes close; then the first process is waited for, which goes when no other of the program
is left.
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
    """How a run came to its end."""

    EXITED = "exited"
    """By itself, or by a signal: see the exit code."""
    CPU_TIME = "cpu_time"
    WALL_TIME = "wall_time"
    OUTPUT = "output"
    """It printed more than it may."""


@dataclass
class Capture:
    """The beginning of a stream, and what to do when there is more than `most`."""

    most: int
    at_most: Callable[[], None]
    held: bytearray = field(default_factory=bytearray)

    async def read(self, stream: asyncio.StreamReader) -> None:
        while block := await stream.read(BLOCK_BYTES):
            room = self.most - len(self.held)
            self.held += block[:room]
            if len(block) > room:
                self.at_most()


class SandboxProcess:
    """bubblewrap as it runs. It may be told to end before it has begun."""

    def __init__(self, output_bytes: int) -> None:
        self.ending = Ending.EXITED
        self.exit_code: int | None = None
        """Of the program, as bubblewrap saw it; None if it never came to that."""
        self.stdout = Capture(output_bytes, lambda: self.end(Ending.OUTPUT))
        self.stderr = Capture(output_bytes, lambda: self.end(Ending.OUTPUT))
        self._told = b""
        self._is_to_end = False
        self._has_ended = False
        self._first: int | None = None
        """A handle of the first process within, which no later process of the same number can be
        taken for.
        """

    async def finish(
        self, process: asyncio.subprocess.Process, status: int, stdin: bytes, wall_seconds: float
    ) -> None:
        """Until nothing of the program is left. `status`: where bubblewrap writes what it knows, to
        be read without waiting.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(wall_seconds, self.end, Ending.WALL_TIME)
        loop.add_reader(status, self._read_status, status)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(feed(process.stdin, stdin))
                tasks.create_task(self.stdout.read(process.stdout))
                tasks.create_task(self.stderr.read(process.stderr))
                tasks.create_task(process.wait())
        finally:
            alarm.cancel()
            self.end(Ending.EXITED)
            await process.wait()
            loop.remove_reader(status)
            self._has_ended = True
            self._read_status(status)
            if self._first is not None:
                await ended(self._first)
                os.close(self._first)
                self._first = None

    def end(self, why: Ending) -> None:
        """Kill all of it, as soon as there is anything. The first reason counts."""
        if self.ending is Ending.EXITED:
            self.ending = why
        self._is_to_end = True
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def _read_status(self, status: int) -> None:
        """Take in whole lines; bubblewrap may be in the middle of one."""
        with contextlib.suppress(BlockingIOError):
            self._told += os.read(status, BLOCK_BYTES)
        *lines, self._told = self._told.split(b"\n")
        for entry in map(json.loads, lines):
            # Once bubblewrap has ended, the number may be another process's.
            if "child-pid" in entry and not self._has_ended:
                with contextlib.suppress(ProcessLookupError):
                    self._first = os.pidfd_open(entry["child-pid"])
            self.exit_code = entry.get("exit-code", self.exit_code)
        if self._is_to_end:
            self.end(self.ending)


async def ended(process: int) -> None:
    """Until a process, by its handle, is gone; the first of a namespace goes after all others."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(process, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process)


async def feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Give a program its input, as far as it wants it."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.close()
        await stream.wait_closed()
