"""The processes of ranks 1 and above, and rank 0's messages to them.

A message is a list of commands: method names of `Follower` or `FollowerCache` with their arguments.
A command that only changes a follower's state is recorded, and goes out with the next command that
computes. So a pass costs one message, and the ranks meet only in its collectives.

The ranks are out of step after any error within a pass. The group is then lost: its processes end,
and every later command raises ShardLostError.
"""

from __future__ import annotations

import itertools
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from planish.model.decoder.tensor_parallel.collectives import Collectives, connect
from planish.model.decoder.tensor_parallel.shards import Shard
from planish.model.kernels.interface.backend import Backend
from planish.model.layers.row_tiling import RowTiling
from planish.processes.interruption import blocked_interrupts

_FOLLOWER_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from planish.model.decoder.tensor_parallel.follower import main; main(int(sys.argv[1]))"
)
"""The child does not import the caller's main module. So a script needs no guard
`if __name__ == "__main__"`.
"""
_EXIT_SECONDS = 10.0
"""How long a process may take to end after its connection is closed."""

Command = tuple[str, tuple[Any, ...]]


class ShardLostError(RuntimeError):
    """A rank has failed, so this process can no longer use the base model."""


@dataclass(frozen=True)
class FollowerOptions:
    """What the process of a rank needs to load its part of a base model."""

    shard: Shard
    directory: Path
    device: torch.device
    dtype: torch.dtype
    tiling: RowTiling | None
    make_backend: Callable[..., Backend]
    """Makes the backend of a rank from its config, dtype, device and row tiling. A picklable
    function, because each rank calls it in its own process.
    """
    num_threads: int
    store_file: Path
    backend: str
    """The backend of the collectives: "gloo" or "nccl"."""


@dataclass(frozen=True)
class FollowerReport:
    """What a follower answers when it has loaded its part of the base model."""

    kernels: str
    weight_bytes: int
    """The bytes of its frozen weights."""
    error: str | None = None


class ShardGroup:
    """The other ranks of one base model, as rank 0 sees them. One thread at a time may use it."""

    def __init__(
        self, options: FollowerOptions, devices: Sequence[torch.device], kernels: str
    ) -> None:
        """Start one process for each of `devices`, the devices of ranks 1 and above.

        `options`: those of every process, except rank and device. `kernels`: the name of rank 0's
        backend, which must be that of all ranks.
        """
        self._pending: deque[Command] = deque()
        self._records = True
        self._kernels = kernels
        self._failure: str | None = None
        self._ids = itertools.count()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._options = options
        self.weight_bytes: list[int] = []
        """The bytes of the frozen weights of ranks 1 and above."""
        self.is_backward_open = False
        """Whether the followers run a backward pass whose gradients are not collected yet."""
        self._directory = tempfile.TemporaryDirectory(prefix="planish-shards-")
        self._store_file = Path(self._directory.name) / "store"
        self.end = weakref.finalize(self, _end, self._processes, self._connections, self._directory)
        try:
            for rank, device in enumerate(devices, 1):
                self._start(rank, device)
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int, device: torch.device) -> None:
        own_end, other_end = socket.socketpair()
        with blocked_interrupts(), other_end:
            # A new session, because a terminal sends Ctrl-C to the whole process group. Rank 0
            # decides when the others end.
            process = subprocess.Popen(
                [sys.executable, "-c", _FOLLOWER_PROGRAM, str(other_end.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
                start_new_session=True,
            )
        self._processes.append(process)
        self._connections.append(Connection(own_end.detach()))
        options = replace(
            self._options,
            shard=Shard(rank, self._options.shard.num_shards),
            device=device,
            store_file=self._store_file,
        )
        self._connections[-1].send_bytes(pickle.dumps(options))

    def connect(self) -> Collectives:
        """Wait until all ranks have loaded their weights, and return rank 0's collectives."""
        for rank, connection in enumerate(self._connections, 1):
            try:
                report = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                raise self._lost(f"{self._how_it_ended(rank)} while it loaded the model") from None
            assert isinstance(report, FollowerReport)
            if report.error is not None:
                raise self._lost(f"rank {rank} could not load the model: {report.error}")
            if report.kernels != self._kernels:
                raise self._lost(
                    f"rank {rank} has {report.kernels}, but rank 0 has {self._kernels}"
                )
            self.weight_bytes.append(report.weight_bytes)
        group = connect(self._options.shard, self._store_file, self._options.backend)
        return Collectives(self._options.shard, group, self._explain)

    @property
    def is_lost(self) -> bool:
        """Whether a rank has failed."""
        return self._failure is not None

    def new_id(self) -> int:
        """Return a number for an object that the followers keep a part of."""
        return next(self._ids)

    def record(self, name: str, *args: Any) -> None:
        """Record a command that only changes the followers' state. Any thread may call this."""
        if self._records:
            self._pending.append((name, args))

    @contextmanager
    def recorded(self, name: str, *args: Any) -> Generator[None]:
        """Record a command, and do not record those that the block would record."""
        self.record(name, *args)
        records, self._records = self._records, False
        try:
            yield
        finally:
            self._records = records

    @contextmanager
    def running(self, name: str, *args: Any) -> Generator[None]:
        """Send a command that computes. The block must do rank 0's part of it.

        The group is lost if the block raises an exception.
        """
        self._send(name, args)
        try:
            yield
        except BaseException as error:
            self.lose(f"rank 0 failed: {type(error).__name__}: {error}")
            raise

    def _send(self, name: str, args: tuple[Any, ...]) -> None:
        if self._failure is not None:
            raise ShardLostError(self._failure)
        commands: list[Command] = []
        while self._pending:
            commands.append(self._pending.popleft())
        message = pickle.dumps([*commands, (name, args)], protocol=5)
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.send_bytes(message)
            except OSError:
                raise self._lost(self._reason(rank)) from None

    def lose(self, reason: str) -> None:
        """End all processes, because the ranks are out of step."""
        if self._failure is None:
            self._failure = f"a rank of tensor parallelism has failed ({reason})"
            for process in self._processes:
                process.kill()

    def _lost(self, reason: str) -> ShardLostError:
        self.lose(reason)
        return ShardLostError(self._failure)

    def _explain(self, error: Exception) -> Exception:
        """Return the error for a failed collective."""
        for rank, (process, connection) in enumerate(
            zip(self._processes, self._connections, strict=True), 1
        ):
            # A process that has failed closes its sockets first, and ends a moment later.
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            if process.returncode is not None or connection.poll():
                return self._lost(self._reason(rank))
        return self._lost(str(error))

    def _reason(self, rank: int) -> str:
        """Return why the process of a rank has ended: its own message if it has sent one."""
        with suppress(EOFError, OSError):
            connection = self._connections[rank - 1]
            if connection.poll():
                return f"rank {rank}: {pickle.loads(connection.recv_bytes())}"
        return self._how_it_ended(rank)

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank - 1]
        try:
            status = process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the process of rank {rank} has closed its connection"
        if status >= 0:
            return f"the process of rank {rank} has ended with exit status {status}"
        how = f"the process of rank {rank} was ended by {signal.Signals(-status).name}"
        if status == -signal.SIGKILL:
            how += ", as the kernel does when the memory is full"
        return how

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 and above."""
        return [process.pid for process in self._processes]


def _end(
    processes: Sequence[subprocess.Popen[bytes]],
    connections: Sequence[Connection],
    directory: tempfile.TemporaryDirectory[str],
) -> None:
    """End the processes. They end by themselves when their connections are closed."""
    for connection in connections:
        connection.close()
    for process in processes:
        try:
            process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    directory.cleanup()
