"""A machine whose power, disk, processor and clock fail on demand, with a server on it.

`Machine` runs a crash server under the shim, and restarts it when it ends. `FaultClient` is a
client that repeats what was rejected with the same number, and what failed with a new one.
"""

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from crash_history import CrashClient, CrashModel, cancel_and_wait
from crash_server import CrashServer, Start
from disk_shim import Shim
from power_loss import LOSSES, Disk
from server_client import BASE, RANK
from server_process import free_port
from wire_client import WireClient

from planish.server.durable.store import DATABASE
from planish.server.results import Done, Failed
from planish.server.settings import ServerSettings
from planish.service import CreateModel, Operation, SaveWeights
from planish.types import LoraConfig

R = TypeVar("R")

TRIES = 8
SECONDS = 400.0
"""The time for one script."""
ENDS = {*range(1, 100), 127}
"""Statuses with which a server may end by itself, with an error in its log. A signal is not among
them. The dynamic linker ends a process with 127 if it gets no memory for a thread's variables.
"""
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}
"""How libraries end a process that gets no memory: safetensors aborts it, and orjson crashes if it
gets none for its first buffer of 1 KiB.
"""


class Machine:
    """A data directory, and the server that uses it."""

    def __init__(
        self,
        model_dir: Path,
        directory: Path,
        settings: ServerSettings,
        keys: dict[str, str],
        seed: int,
    ) -> None:
        """`seed` chooses what power losses leave."""
        self.data_dir = directory / "data"
        self.data_dir.mkdir(parents=True)
        self.shim = Shim(directory / "shim", self.data_dir)
        self.log = directory / "server.log"
        self.stops = 0
        """How often the server ended by itself."""
        self.power_losses = 0
        self.may_crash = False
        """Whether libraries may end the server, because memory runs out."""
        self.heals_at_end = True
        """Whether faults stop when the server ends by itself."""
        self._start = Start(model_dir, self.data_dir, settings, free_port(), keys, log=self.log)
        self._disk = Disk(self.data_dir)
        self._rng = random.Random(seed)
        self._server: CrashServer | None = None
        self._is_ended = False
        self._is_killed = self._loses_power = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._start.port}"

    def kill(self, with_power_loss: bool = False) -> None:
        """Kill the server, which starts again; with a power loss, the disk forgets meanwhile."""
        if self._server is not None and not self._is_killed:
            self._is_killed, self._loses_power = True, with_power_loss
            self.note("the server is killed")
            self._server.kill_between_calls(self.shim)

    async def pause(self, seconds: float) -> None:
        """Stop the server's process for a while."""
        if self._server is not None:
            with suppress(ProcessLookupError):
                self._server.kill(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                self._server.kill(signal.SIGCONT)

    def lose_power(self) -> None:
        """Let the disk forget what was not synced. No server may run."""
        self.power_losses += 1
        loss = self._rng.choice(LOSSES)
        self.note(f"power loss: {loss}")
        self._disk.lose_power(loss, self._rng)

    async def run(self, work: Coroutine[Any, Any, R], memory_error_at: int | None = None) -> R:
        """Serve until `work` is done, and kill the server then. Raises AssertionError if the server
        ends in a way that it must not.
        """
        self._is_ended = False
        serving = asyncio.create_task(self._serve(memory_error_at))
        working = asyncio.create_task(work)
        try:
            async with asyncio.timeout(SECONDS):
                await asyncio.wait([serving, working], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            return working.result()
        finally:
            self._is_ended = True
            await cancel_and_wait(working)
            if self._server is not None:
                self._server.kill_between_calls(self.shim)
            await asyncio.wait([serving])

    async def _serve(self, memory_error_at: int | None) -> None:
        while not self._is_ended:
            self.shim.begin_log()
            self._is_killed = self._loses_power = False
            self._server = CrashServer(
                replace(self._start, shim=self.shim.files, memory_error_at=memory_error_at)
            )
            status = await self._server.died()
            self.note(f"the server ended with status {status}")
            memory_error_at = None
            self._disk.replay(self.shim.log)
            self._disk.check()
            if self._is_killed or self._is_ended:
                if self._loses_power:
                    self.lose_power()
            else:
                self.stops += 1
                log = self.log.read_text()
                may_end = status in ENDS or (self.may_crash and status in CRASHES)
                assert may_end, f"the server ended with status {status}"
                is_told = "rror" in log or "ABORT" in log or status in CRASHES
                assert is_told, "the server ended without a word"
                assert is_intact(self.data_dir), "the database is damaged"
                if self.heals_at_end:
                    self.shim.heal()

    def note(self, event: str) -> None:
        """Append a line about the machine to the server's log."""
        with open(self.log, "a") as file:
            file.write(f"MACHINE at {time.monotonic():.3f} s: {event}\n")

    def log_end(self, characters: int = 3000) -> str:
        """Return the end of the server's log."""
        with open(self.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - characters))
            return file.read().decode(errors="replace")


def is_intact(data_dir: Path) -> bool:
    """Return whether the database can be read in a copy. The server's log cannot tell, because
    SQLite reports a read that failed with EIO as damage.
    """
    with tempfile.TemporaryDirectory() as copy:
        for path in data_dir.glob(f"{DATABASE}*"):
            if not path.name.endswith("-shm"):
                shutil.copy(path, copy)
        try:
            with closing(sqlite3.connect(Path(copy) / DATABASE)) as connection:
                return connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        except sqlite3.DatabaseError:
            return False


class FaultClient:
    """A client that sends what failed again, with a new number."""

    def __init__(self, wire: WireClient, offset: int = 0) -> None:
        """The client's models have seeds from `offset`."""
        self.client = CrashClient(wire)
        self.failures = 0
        self.messages: set[str] = set()
        """What the failed requests said."""
        self._offset = offset
        self._models = 0

    @property
    def facts(self) -> dict[str, Any]:
        return self.client.history.facts

    async def until_done(self, what: str, attempt: Callable[[], Awaitable[R | Failed]]) -> R:
        """Repeat an attempt until it does not fail."""
        error = ""
        for number in range(TRIES):
            result = await attempt()
            if not isinstance(result, Failed):
                return result
            error = result.message
            self.failures += 1
            assert error, f"{what} failed without a message"
            self.messages.add(error)
            await asyncio.sleep(0.02 * 2**number)
        raise AssertionError(f"{what} failed {TRIES} times, at last: {error}")

    async def create(self, number: int, **options: Any) -> CrashModel:
        """Create the model with this number in the script, under the next free id."""

        async def attempt() -> CrashModel | Failed:
            model_id = f"{self.client.session}:train:{self._models}"
            self._models += 1
            lora = LoraConfig(RANK, self._offset + number)
            operation = CreateModel(model_id, **{"base_model": BASE, "lora": lora, **options})
            answer = await self.client.answer(await self.client.call("create_model", operation))
            if isinstance(answer, Failed):
                return answer
            return CrashModel(self.client, model_id, number)

        return await self.until_done(f"creation {number}", attempt)

    async def done(self, model: CrashModel, make: Callable[[], Operation[Any]]) -> bytes:
        """Send an operation until it is done, and return its result."""

        async def attempt() -> Done | Failed:
            return await model.do(make())

        answer = await self.until_done(repr(make())[:200], attempt)
        assert isinstance(answer, Done)
        return answer.content

    async def save(self, model: CrashModel, name: str, **options: Any) -> str:
        answer = await self.done(model, lambda: SaveWeights(model.model_id, name, **options))
        return orjson.loads(answer)["path"]
