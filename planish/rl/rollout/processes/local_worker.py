"""Rollout workers in processes of this machine."""

import atexit
import multiprocessing
import signal
import socket
from typing import Self

from planish.processes.interruption import blocked_interrupts
from planish.rl.rollout.processes import worker


class LocalWorker:
    """A spawned process that rolls out groups. See `Worker`."""

    start_remedy = (
        "its output says why. Each rollout process imports the script that uses it, so its work "
        "must begin under `if __name__ == '__main__':`"
    )

    def __init__(self, end: socket.socket) -> None:
        """Start a process that serves `end`, and close `end` here."""
        self._process = multiprocessing.get_context("spawn").Process(
            target=worker.main, args=(end,)
        )
        with blocked_interrupts(), end:
            self._process.start()
        # The worker is not a daemon, because daemons cannot start processes of their own. So kill
        # it before the interpreter waits for it at exit.
        atexit.register(self.kill)

    @classmethod
    async def start(cls, end: socket.socket) -> Self:
        """Start a process. See `StartWorker`."""
        return cls(end)

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    def wait(self) -> str:
        """Wait until the process has ended. Return how it ended, in words."""
        self._process.join()
        return describe_exit(self._process.exitcode)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def close(self) -> None:
        """Free what belongs to the process, which has ended."""
        atexit.unregister(self.kill)
        self._process.close()


def describe_exit(exit_code: int | None) -> str:
    """Return an exit code in words, with the name of the signal if one ended the process."""
    if exit_code == 1:
        return (
            "exit code 1; its output says why, also if an environment blocked it for longer than "
            "per_rollout_timeout"
        )
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"{name}, perhaps for lack of memory" if name == "SIGKILL" else name
