# pyright: reportMissingImports=false
"""A link to an engine in a Ray actor, and the start of a Ray cluster. Needs planish[ray]."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from planish.errors import UserError
from planish.fleet.host import RequestHandler
from planish.fleet.link import EngineOptions, Event, ReplicaLostError
from planish.processes.stall_watch import StallWatch

_NUM_CALLS = 32
"""The number of calls of one replica that can run at once."""
_CONNECT_SECONDS = 5.0
_START_ATTEMPTS = 4
_CHECK_SECONDS = 1.0
"""How often a waiting call checks whether its replica was given up."""
_FREE_SECONDS = 20.0
_SLOW_START_SECONDS = 60.0
HEAD_SECONDS = 20.0
"""If the head of the cluster does not answer for so long, the fleet ends. It must be less than the
60 s after which Ray ends this process without an exception (gcs_rpc_server_reconnect_timeout_s).
"""
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
            if self._ray.is_initialized():
                self._ray.kill(self._actor, no_restart=True)

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


class HeadWatch:
    """Notices that the head of the cluster has ended."""

    def __init__(self, address: str | None = None, seconds: float = HEAD_SECONDS) -> None:
        """Watch the head at `address`, by default that of the cluster of this process."""
        self.address = address or import_ray().get_runtime_context().gcs_address
        self._watch = StallWatch(seconds)
        self._num_answers = 0

    def fault(self) -> str | None:
        """Return why the cluster is lost, or None. Call this every second."""
        host, _, port = self.address.rpartition(":")
        reason = ""
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
            self._num_answers += 1
        except OSError as error:
            reason = str(error)
        if not self._watch.is_stalled(self._num_answers):
            return None
        return f"the head of the Ray cluster, {self.address}, has ended or cannot be reached ({reason})"


def import_ray() -> Any:
    """Return the module `ray`. Raise UserError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default, Ray gives its workers a low priority. Replicas do most of a program's work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # By default, Ray starts a worker for each CPU of the machine. Each replica needs one.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Otherwise a call after the end of the cluster would start another one.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "several replicas need Ray, which is not installed: pip install 'planish[ray]'"
        ) from error
    return ray


def join_cluster(address: str) -> bool:
    """Connect this process to a running cluster: "auto" for the one of this machine, or HOST:PORT.
    Return False if this process already uses a cluster.

    Raise UserError if no cluster answers.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    remedy = (
        "start one with `ray start --head`, or leave ray out and give replicas=N, which starts a "
        "cluster on this machine"
    )
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not host or not port.isdecimal():
            raise UserError(f"ray={address!r}: give 'auto' or HOST:PORT of a cluster's head")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise UserError(
                f"ray={address!r}: no Ray cluster answers ({error}); {remedy}"
            ) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"ray={address!r}: no Ray cluster answers ({error}); {remedy}") from error
    return True


def start_cluster(num_cpus: int, num_gpus: int, object_store_bytes: int | None = None) -> bool:
    """Start a cluster of this machine alone, and return True. Return False if this process already
    uses a cluster.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    # The processes of the cluster inherit the environment, and find the same packages.
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        for attempt in range(_START_ATTEMPTS):
            try:
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    object_store_memory=object_store_bytes,
                )
                break
            except Exception as error:
                # On a busy machine, the 30 s that Ray waits for its own processes are too short.
                ray.shutdown()
                if "timed out during startup" not in str(error) or attempt == _START_ATTEMPTS - 1:
                    raise
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return True


def leave_cluster() -> None:
    """Disconnect from the cluster. A cluster that this process has started ends."""
    import_ray().shutdown()


def has_gpus() -> bool:
    """Return whether the cluster has GPUs."""
    return import_ray().cluster_resources().get("GPU", 0) >= 1


def free_devices(kind: str) -> int:
    """Return the number of free devices of the cluster: of "GPU" or "CPU". Ray would let a replica
    wait for a device that another program occupies.
    """
    return int(import_ray().available_resources().get(kind, 0))


def wait_for_devices(kind: str, needed: int) -> int:
    """Return `free_devices`. If the cluster has the needed devices and they are occupied, first wait
    for them: Ray needs some seconds to free those of a program that was killed.
    """
    deadline = time.monotonic() + _FREE_SECONDS
    while True:
        free = free_devices(kind)
        total = int(import_ray().cluster_resources().get(kind, 0))
        if not free < needed <= total or time.monotonic() > deadline:
            return free
        time.sleep(0.2)


def num_machines() -> int:
    """Return the number of machines in the cluster."""
    return sum(bool(node["Alive"]) for node in import_ray().nodes())


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
