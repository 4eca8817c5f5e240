# pyright: reportMissingImports=false
"""A link to an engine in a Ray actor. Needs planish[ray]."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from planish.fleet.host import RequestHandler
from planish.fleet.link import EngineOptions, Event, ReplicaLostError
from planish.processes.ray_cluster import end_actor, import_ray

_NUM_CALLS = 32
"""The number of calls of one replica that can run at once."""
_CHECK_SECONDS = 1.0
"""How often a waiting call checks whether its replica was given up."""
_SLOW_START_SECONDS = 60.0
_SLOW_START = (
    f"a replica has not started for {_SLOW_START_SECONDS:.0f} s: it waits for a free device in the "
    "cluster (see `ray status`), or its machine reads Python packages slowly"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resources:
    """What each replica occupies."""

    num_gpus: int
    num_cpus: int


@dataclass(frozen=True)
class Machine:
    """Where a replica runs. Versions and device must be the same for all replicas of a fleet."""

    versions: tuple[tuple[str, str], ...]
    """The versions of the packages that compute: name and version."""
    device: str
    """The kind of device: the name of the GPU, or the instruction sets of the CPU."""
    host: str
    pid: int


class ReplicaActor:
    """The Ray actor of a replica. Results are (value, error), because Ray wraps exceptions."""

    def __init__(self) -> None:
        self._handler = RequestHandler()

    def machine(self) -> Machine:
        """Return where this replica runs."""
        return this_machine()

    def request(self, name: str, *args: Any) -> tuple[Any, BaseException | None]:
        """Call a method of the host."""
        return self._handler.answer(name, *args)

    def poll(self) -> list[Event]:
        """Wait for the next events."""
        return self._handler.host.poll()


class RayLink:
    """A Ray actor with an engine, and the calls of the actor."""

    def __init__(self, options: EngineOptions, resources: Resources) -> None:
        """Start the actor, and an engine in it. Raise UserError for an invalid option."""
        ray = import_ray()
        self._ray = ray
        actor_class = ray.remote(
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            max_restarts=0,
            max_concurrency=_NUM_CALLS,
            concurrency_groups={"poll": 1},
        )(ReplicaActor)
        self._actor = actor_class.remote()
        self._was_killed = threading.Event()
        self.machine: Machine | None = None
        warning = threading.Timer(_SLOW_START_SECONDS, _log.warning, [_SLOW_START])
        warning.daemon = True
        warning.start()
        try:
            self.machine = self._call(self._actor.machine)
            self.request("start", options)
        except BaseException:
            self.kill()
            raise
        finally:
            warning.cancel()

    def request(self, name: str, *args: Any) -> Any:
        """Call a method of the host. See `Link`. An argument may be the result of `ray.put`."""
        value, error = self._call(self._actor.request, name, *args)
        if error is not None:
            raise error
        return value

    def poll(self) -> Sequence[Event]:
        """Wait for the next events. See `Link`."""
        return self._call(self._actor.poll.options(concurrency_group="poll"))

    def end(self) -> None:
        """End the process. `RemoteEngine.close` has closed the engine before."""
        if not self._was_killed.is_set():
            self._was_killed.set()
            end_actor(self._actor)

    def kill(self) -> None:
        """Kill the process, and give up all calls that wait for it."""
        self.end()
        # Ray asks the process to end, which a stopped process does not do.
        if self.machine is not None and self.machine.host == socket.gethostname():
            with suppress(ProcessLookupError):
                os.kill(self.machine.pid, signal.SIGKILL)

    def _call(self, method: Any, *args: Any) -> Any:
        """Call a method of the actor, and return its result."""
        exceptions = self._ray.exceptions
        # In a program that has imported Ray before planish, the call would start another cluster.
        if not self._ray.is_initialized():
            raise ReplicaLostError("the connection to the Ray cluster has ended")
        try:
            reference = method.remote(*args)
            while not self._was_killed.is_set():
                with suppress(exceptions.GetTimeoutError):
                    return self._ray.get(reference, timeout=_CHECK_SECONDS)
        # Ray raises SystemExit in threads that wait when the cluster ends.
        except (exceptions.RayError, SystemExit) as error:
            lines = str(error).strip().splitlines()
            reason = lines[-1].strip() if lines else type(error).__name__
            raise ReplicaLostError(f"the replica's process has ended ({reason[:200]})") from None
        raise ReplicaLostError("the replica was ended")


def this_machine() -> Machine:
    """Return the versions and the device of this process."""
    versions = tuple(
        (name, importlib.metadata.version(name)) for name in ("planish", "torch", "numpy")
    )
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
    else:
        device = f"a CPU with {torch.backends.cpu.get_cpu_capability()}"
        if torch.cpu._is_amx_tile_supported():
            device += " and AMX"
    return Machine(versions, device, socket.gethostname(), os.getpid())
