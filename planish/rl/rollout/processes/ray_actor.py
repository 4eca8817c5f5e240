"""The Ray actor of a rollout worker."""

import importlib.metadata
import socket
from contextlib import suppress

from planish.errors import UserError
from planish.rl.rollout.processes.local_worker import LocalWorker
from planish.rl.rollout.processes.peer import BUFFER_BYTES


class RolloutActor:
    """The Ray actor of a worker: it starts the worker on its machine and passes bytes on."""

    def __init__(self, version: str) -> None:
        """Start the worker. Raise UserError unless this machine has this `version` of planish."""
        own = importlib.metadata.version("planish")
        if own != version:
            raise UserError(
                f"the machine {socket.gethostname()} has planish {own}, and the run has {version}; "
                "install the same version"
            )
        self._end, worker_end = socket.socketpair()
        self._worker = LocalWorker(worker_end)

    def pid(self) -> int | None:
        """Return the process id of the worker."""
        return self._worker.pid

    def write(self, data: bytes) -> None:
        """Pass bytes on to the worker. No bytes mean that no more will come."""
        with suppress(OSError):  # the worker has ended, which `wait` tells
            if data:
                self._end.sendall(data)
            else:
                self._end.shutdown(socket.SHUT_WR)

    def read(self) -> bytes:
        """Wait for bytes of the worker. No bytes mean that no more will come."""
        with suppress(ConnectionError):
            return self._end.recv(BUFFER_BYTES)
        return b""

    def wait(self) -> str:
        """Wait until the worker has ended. Return how it ended, in words."""
        return f"{self._worker.wait()}, on the machine {socket.gethostname()}"
