# pyright: reportMissingImports=false
"""A link to an engine in a Ray actor. Needs planish[ray]."""

import importlib.metadata
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from planish.errors import PlanishError, StorageError
from planish.fleet.host import RequestHandler
from planish.fleet.link import EngineOptions, Event, ReplicaLostError
from planish.processes.ray_cluster import end_actor, import_ray

R = TypeVar("R")

_GROUPS = {"ping": "ping", "cancel": "send"}
"""The concurrency groups of methods that do not wait for the others. A request to cancel runs after
what was sent before.
"""
_NUM_CALLS = 32
"""The number of calls of one replica that can run at once."""
_CHECK_SECONDS = 3.0
"""How often a waiting call checks whether its replica was given up."""
_SLOW_START_SECONDS = 60.0
_MAX_START_SECONDS = 900.0
_SLOW_START = (
    "a replica has not started for {:.0f} s: it waits for a free device in the cluster (see "
    "`ray status`), or its machine reads Python packages slowly"
)
_NUM_REASON_CHARACTERS = 300

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

    def __init__(
        self,
        options: EngineOptions,
        resources: Resources,
        max_start_seconds: float = _MAX_START_SECONDS,
    ) -> None:
        """Start the actor, and an engine in it. Raise UserError for an invalid option, and
        ReplicaLostError if the process does not answer for `max_start_seconds`.
        """
        ray = import_ray()
        self._ray = ray
        actor_class = ray.remote(
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            # Replicas on CPUs use as many machines as possible.
            scheduling_strategy="DEFAULT" if resources.num_gpus else "SPREAD",
            max_restarts=0,
            max_concurrency=_NUM_CALLS,
            # A sign of life must not wait until other calls are done.
            concurrency_groups={"poll": 1, "ping": 1, "send": 1},
        )(ReplicaActor)
        self._actor = actor_class.remote()
        self._send = self._actor.request.options(concurrency_group="send", num_returns=0)
        self._was_killed = threading.Event()
        self.machine: Machine | None = None
        warning = threading.Timer(
            _SLOW_START_SECONDS, _log.warning, [_SLOW_START.format(_SLOW_START_SECONDS)]
        )
        is_late = threading.Event()
        limit = threading.Timer(max_start_seconds, lambda: (is_late.set(), self.kill()))
        for timer in (warning, limit):
            timer.daemon = True
            timer.start()
        try:
            self.machine = self._call(self._actor.machine)
            self.request("start", options)
        except BaseException:
            self.kill()
            if is_late.is_set():
                raise ReplicaLostError(_SLOW_START.format(max_start_seconds)) from None
            raise
        finally:
            warning.cancel()
            limit.cancel()

    def request(self, name: str, *args: Any) -> Any:
        """Call a method of the host. See `Link`. An argument may be the result of `ray.put`."""
        method = self._actor.request
        if name in _GROUPS:
            method = method.options(concurrency_group=_GROUPS[name])
        value, error = self._call(method, name, *args)
        if error is not None:
            raise error
        return value

    def send(self, name: str, *args: Any) -> None:
        """Call a method of the host without waiting. See `Link`. Ray tells nobody of an argument
        that the replica cannot read. After the end of the connection, `poll` reports the loss.
        """
        if self._ray.is_initialized():
            _store(lambda: self._send.remote(name, *args))

    def poll(self) -> Sequence[Event]:
        """Wait for the next events. See `Link`."""
        try:
            return self._call(self._actor.poll.options(concurrency_group="poll"))
        except TransferError as error:  # the events are lost, and with them results of operations
            raise self._lost(error) from None

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
            reference = _store(lambda: method.remote(*args))
            while not self._was_killed.is_set():
                with suppress(exceptions.GetTimeoutError):
                    return self._ray.get(reference, timeout=_CHECK_SECONDS)
        # Ray raises SystemExit in threads that wait when the cluster ends.
        except (exceptions.ActorDiedError, SystemExit) as error:
            raise ReplicaLostError(describe_end(error)) from None
        except exceptions.RayTaskError as error:
            reason = str(error).strip().splitlines()[-1]
            raise TransferError(f"data of a replica cannot be transferred: {reason}") from None
        except exceptions.RayError as error:
            raise self._lost(error) from None
        raise ReplicaLostError("the replica was ended")

    def _lost(self, error: Exception) -> ReplicaLostError:
        """End the process, because a call has no answer. Otherwise it would occupy its device while
        another one takes its place.
        """
        self.kill()
        return ReplicaLostError(describe_end(error))


class TransferError(PlanishError):
    """A replica cannot read an argument of a call, or cannot return its result."""


def put(value: Any) -> Any:
    """Put an object into the object store, and return the reference. Raise StorageError if the
    store is full.
    """
    return _store(lambda: import_ray().put(value))


def _store(action: Callable[[], R]) -> R:
    """Return the result of an action that puts objects into the object store."""
    exceptions = import_ray().exceptions
    try:
        return action()
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
        raise StorageError(
            f"Ray's object store on {socket.gethostname()} is full, and so is the disk to which it "
            "moves objects; free space in Ray's directory (by default /tmp/ray), or start Ray with "
            f"a larger --object-store-memory ({str(error).splitlines()[0]})"
        ) from None


def describe_end(error: BaseException) -> str:
    """Return how a replica's process has ended. Ray's message has a header, the reason, and advice
    about Ray.
    """
    lines = [line for line in str(error).splitlines()[1:] if line.strip() and line[0] != "\t"]
    reason = " ".join(lines) or str(error) or type(error).__name__
    # Ray names the OOM killer as a possible cause of every end that it does not know.
    if "OOM kill reason" in reason:
        return (
            "the replica's process was ended by Ray, because the memory of its machine is nearly "
            "full; start fewer replicas on each machine, or lower kv_cache_bytes and "
            f"micro_batch_tokens ({reason[:_NUM_REASON_CHARACTERS]})"
        )
    return f"the replica's process has ended ({reason[:_NUM_REASON_CHARACTERS]})"


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
