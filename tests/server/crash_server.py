"""A server in a process of its own, on a socket, which can be killed and restarted.

Each start forks a process that has imported everything, so it takes a fraction of a second. The
server is the whole application on a tiny model, with settings that make everything happen within
seconds.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import uvicorn
from disk_shim import Shim, configure, kill_between_calls, preloaded
from server_client import make_core

from planish.engine.checkpoints import store as checkpoints
from planish.engine.engine import Engine
from planish.server.durable import crash_guard, crash_points, store
from planish.server.http.app import create_app
from planish.server.settings import HttpSettings, ServerSettings
from planish.service import ForwardBackward, Operation, Sample

P = ParamSpec("P")
R = TypeVar("R")

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["crash_preload"])

POISON = [13, 7, 13, 7, 13]
_POISON_SECONDS = 0.05
_POLL_SECONDS = 20.0


@dataclass(frozen=True)
class Start:
    """How a server process starts."""

    model_dir: Path
    data_dir: Path
    settings: ServerSettings
    port: int
    keys: Mapping[str, str] | None = None
    crash_at: str | None = None
    """NAME:COUNT of a crash point."""
    crash_after: float | None = None
    """Seconds of CPU time, so that the server gets as far on a busy machine as on an idle one."""
    shim: tuple[Path, Path, Path] | None = None
    """The directory, the log and the control file of a `Shim`."""
    log: Path | None = None
    """Where the process writes its log and errors; by default to stderr."""
    memory_error_at: int | None = None
    """At the nth change of the database or of a checkpoint, memory runs out."""
    has_poison: bool = False
    """Whether a request that begins with POISON kills the server shortly after the engine got it.
    """

    @property
    def timer_mark(self) -> Path:
        """A file that is written when the time is up."""
        return self.data_dir / "killed at random"


class CrashServer:
    """One server process."""

    def __init__(self, start: Start) -> None:
        self._process: Any = FORKS.Process(target=_serve, args=(start,), daemon=True)
        with _modules_on_path(), preloaded():  # the first start starts the fork server
            self._process.start()

    async def died(self) -> int | None:
        """Wait for the end of the process, and return its exit status."""
        await asyncio.to_thread(self._process.join)
        return self._process.exitcode

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill_between_calls(self, shim: Shim) -> None:
        """Kill the process while no file call is unrecorded."""
        if self._process.is_alive():
            kill_between_calls(self.pid, shim)

    def kill(self, sig: int = signal.SIGKILL) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, sig)


@contextmanager
def _modules_on_path() -> Iterator[None]:
    """Let the fork server find the modules of this directory."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *([before] if before else [])]
    )
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def _serve(start: Start) -> None:
    import torch

    torch.set_num_threads(1)
    if start.log is not None:
        os.dup2(os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    logging.basicConfig(level=logging.WARNING)
    if start.shim is not None:
        configure(*start.shim)
    if start.crash_at is not None:
        crash_points.arm_crash_point(start.crash_at)
    if start.crash_after is not None:
        limit = time.process_time() + start.crash_after
        threading.Thread(target=_die_at, args=(limit, start.timer_mark), daemon=True).start()
    store._MIN_FILE_BYTES = 500  # so that there are bodies in files
    if start.memory_error_at is not None:
        _run_out_of_memory(start.memory_error_at)
    if start.has_poison:
        _be_poisoned()
    else:  # or one of so many kills in a row might be taken for the doing of a request
        crash_guard._MAX_SOLE_CRASHES = 20
    server = make_core(start.model_dir, start.data_dir, start.settings)
    app = create_app(server, HttpSettings(_POLL_SECONDS, tenants_by_key=start.keys))
    config = uvicorn.Config(
        app, host="127.0.0.1", port=start.port, lifespan="on", log_level="error", access_log=False
    )
    uvicorn.Server(config).run()


def _be_poisoned() -> None:
    """End the process as a request that exhausts the memory would, which no test can do."""
    submit = Engine.submit
    has_begun = False

    def submit_poisoned(self: Engine, operation: Operation[R]) -> Future[R]:
        nonlocal has_begun
        match operation:
            case Sample(prompt=prompt):
                inputs = [prompt]
            case ForwardBackward(data=data):
                inputs = [datum.model_input for datum in data]
            case _:
                inputs = []
        if any(list(each.to_ints()[: len(POISON)]) == POISON for each in inputs):
            threading.Timer(_POISON_SECONDS, os.kill, (os.getpid(), signal.SIGKILL)).start()
            has_begun = True
        return Future() if has_begun else submit(self, operation)

    Engine.submit = submit_poisoned


def _run_out_of_memory(number: int) -> None:
    """Raise MemoryError once, in the `number`th call that writes."""
    calls = itertools.count(1)

    def failing(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if next(calls) == number:
                raise MemoryError
            return method(*args, **kwargs)

        return call

    store.Transaction.execute = failing(store.Transaction.execute)
    store.Transaction.store_body = failing(store.Transaction.store_body)
    checkpoints._write = failing(checkpoints._write)
    checkpoints.CheckpointStore._link = failing(checkpoints.CheckpointStore._link)


def _die_at(limit: float, mark: Path) -> None:
    while time.process_time() < limit:
        time.sleep(0.002)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
