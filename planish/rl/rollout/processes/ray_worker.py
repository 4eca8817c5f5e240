"""Rollout workers on a Ray cluster. Needs planish[ray].

A Ray actor starts the worker as a process of its machine, and passes the bytes between that process
and the training process. So a worker on a cluster runs the same program as a worker on this machine,
ends in the same ways, and Ray does the transport.
"""

# pyright: reportMissingImports=false

import asyncio
import importlib.metadata
import logging
import socket
import threading
from contextlib import suppress
from typing import Any, Self

from planish.processes.interruption import run_uncancelled
from planish.processes.ray_cluster import (
    end_actor,
    free_devices,
    import_ray,
    join_cluster,
    wait_for_devices,
)
from planish.rl.rollout.processes.peer import BUFFER_BYTES
from planish.rl.rollout.processes.process import NoRoomError
from planish.rl.rollout.processes.ray_actor import RolloutActor

logger = logging.getLogger(__name__)

_NO_CPU = (
    "rollout_processes=ray: no CPU of the Ray cluster is free, and each rollout process occupies "
    "one; add a machine to the cluster, give fewer replicas, or give rollout_processes=N for N "
    "processes of this machine"
)
_SLOW_START_SECONDS = 60.0
_SLOW_START = (
    f"a rollout process has not started for {_SLOW_START_SECONDS:.0f} s: it waits for a free CPU in "
    "the cluster (see `ray status`), or its machine reads Python packages slowly"
)
_GROUPS = {"write": "write", "pid": "read", "read": "read", "wait": "wait"}
"""The threads of the actor that run its methods. Calls of one thread run in order."""


class RayWorker:
    """A worker on the cluster of this process. See `Worker`."""

    start_remedy = (
        "its machine needs the packages of the run. Ray writes its output to the directory "
        "session_latest/logs of that machine"
    )

    def __init__(self, end: socket.socket) -> None:
        """Start an actor, and pass bytes between it and `end`. Raise NoRoomError if the cluster
        has no place for it, because Ray would let it wait.
        """
        self._ray = import_ray()
        self._end = end
        self._pid: int | None = None
        if wait_for_devices("CPU", 1) < 1:
            end.close()
            raise NoRoomError(_NO_CPU)
        actor_class = self._ray.remote(
            num_cpus=1, max_restarts=0, concurrency_groups=dict.fromkeys(_GROUPS.values(), 1)
        )(RolloutActor)
        self._actor = actor_class.remote(importlib.metadata.version("planish"))
        threading.Thread(target=self._relay, daemon=True).start()

    @classmethod
    async def start(cls, end: socket.socket) -> Self:
        """Start an actor. See `StartWorker`."""
        return await run_uncancelled(asyncio.to_thread(cls, end))

    @property
    def pid(self) -> int | None:
        """Process id of the worker on its machine; None until it has started."""
        return self._pid

    def wait(self) -> str:
        """Wait until the process has ended. Return how it ended, in words."""
        try:
            return self._call("wait")
        except _ActorEndedError as error:
            return f"its Ray actor has ended: {error}"

    def kill(self) -> None:
        """End the actor, with which the process ends."""
        end_actor(self._actor)

    def close(self) -> None:
        """End the actor of a process that has ended."""
        self.kill()

    def _relay(self) -> None:
        """Pass bytes between the training process and the actor, until both directions have ended."""
        sender = threading.Thread(target=self._send, daemon=True)
        sender.start()
        warning = threading.Timer(_SLOW_START_SECONDS, logger.warning, [_SLOW_START])
        warning.daemon = True
        warning.start()
        with suppress(_ActorEndedError, OSError):
            self._pid = self._call("pid")
            warning.cancel()
            while data := self._call("read"):
                self._end.sendall(data)
        warning.cancel()
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)
        sender.join()
        self._end.close()

    def _send(self) -> None:
        """Pass the bytes of the training process on to the actor."""
        with suppress(_ActorEndedError, OSError):
            while data := self._end.recv(BUFFER_BYTES):
                self._call("write", data)
            self._call("write", b"")

    def _call(self, name: str, *args: Any) -> Any:
        """Call a method of the actor, and return its result. Raise _ActorEndedError if it ends."""
        exceptions = self._ray.exceptions
        try:
            method = getattr(self._actor, name).options(concurrency_group=_GROUPS[name])
            return self._ray.get(method.remote(*args))
        # Ray raises SystemExit in threads that wait when the cluster ends.
        except (exceptions.RayError, SystemExit) as error:
            lines = str(error).strip().splitlines()
            reason = lines[-1].strip() if lines else type(error).__name__
            raise _ActorEndedError(reason[:300]) from None


class _ActorEndedError(Exception):
    """The actor or the connection to the cluster has ended."""


def open_cluster(address: str | None) -> int:
    """Connect this process to the cluster at `address`, by default that of RAY_ADDRESS or of this
    machine, unless it uses a cluster already. Return how many workers have room. Raise UserError if
    no cluster answers, or if it has no room.
    """
    join_cluster(address or "auto")
    free = free_devices("CPU")
    if free < 1:
        raise NoRoomError(_NO_CPU)
    return free


def dump(value: Any) -> bytes:
    """Pickle an object for the workers. Classes of the main script are included."""
    return import_ray().cloudpickle.dumps(value)
