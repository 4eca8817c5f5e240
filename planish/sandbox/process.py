"""One process of bubblewrap from start to end: input given, output held up to a limit, everything killed in time.

It ends by itself, or `end` kills it: when its time is up, when it prints too much, when its caller is cancelled. What is killed
is the first process of the program's namespace, with which the kernel kills all others; bubblewrap outside then ends by itself.
Killed first, it might leave a namespace behind that it has just made, so its telling of the process's number is waited for.
Output is read until its pipes close, which they do when no process of the program is left.
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
    """bubblewrap as it runs."""

    def __init__(self, status: int, output_bytes: int) -> None:
        """`status`: where bubblewrap writes what it knows, to be read without waiting."""
        self.ending = Ending.EXITED
        self.stdout = Capture(output_bytes, lambda: self.end(Ending.OUTPUT))
        self.stderr = Capture(output_bytes, lambda: self.end(Ending.OUTPUT))
        self._status = status
        self._told = b""
        self._is_to_end = False
        self._process: asyncio.subprocess.Process | None = None

    async def finish(self, process: asyncio.subprocess.Process, stdin: bytes, wall_seconds: float) -> None:
        """Until nothing of the program is left."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(wall_seconds, self.end, Ending.WALL_TIME)
        loop.add_reader(self._status, self._read_status)
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
            self._read_status()
            loop.remove_reader(self._status)

    def end(self, why: Ending) -> None:
        """Kill all of it, as soon as there is anything. The first reason counts."""
        if self._process is not None and self._process.returncode is not None:
            return
        if self.ending is Ending.EXITED:
            self.ending = why
        self._is_to_end = True
        self._kill()

    @property
    def exit_code(self) -> int | None:
        """Of the program, as bubblewrap saw it; None if it never came to that."""
        return self._status_entry("exit-code")

    def _read_status(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._told += os.read(self._status, BLOCK_BYTES)
        if self._is_to_end:
            self._kill()

    def _kill(self) -> None:
        first = self._status_entry("child-pid")
        # Once bubblewrap has ended, the number may be another process's.
        if first is not None and self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)

    def _status_entry(self, name: str) -> int | None:
        # Whole lines only: bubblewrap may be in the middle of one.
        lines = self._told.decode().split("\n")[:-1]
        return next((entry[name] for entry in map(json.loads, lines) if name in entry), None)


async def feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Give a program its input, as far as it wants it."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.close()
        await stream.wait_closed()
