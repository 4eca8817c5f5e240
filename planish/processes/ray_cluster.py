# pyright: reportMissingImports=false
"""The Ray cluster of this process: start, connection, free devices. Needs planish[ray]."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from planish.errors import UserError
from planish.processes.stall_watch import StallWatch

_CONNECT_SECONDS = 5.0
_START_ATTEMPTS = 4
_FREE_SECONDS = 20.0
HEAD_SECONDS = 20.0
"""If the head of the cluster does not answer for so long, the fleet ends. It must be less than the
60 s after which Ray ends this process without an exception (gcs_rpc_server_reconnect_timeout_s).
"""


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
            "replicas, ray and rollout_processes=ray need Ray, which is not installed: pip install "
            "'planish[ray]'"
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


def end_actor(actor: Any) -> None:
    """End an actor. Do nothing if this process has left the actor's cluster, even if it uses another
    one now: the garbage collector may end an actor late.
    """
    ray = import_ray()
    if ray.is_initialized():
        with suppress(ray.exceptions.ActorHandleNotFoundError):
            ray.kill(actor, no_restart=True)


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


def free_by_machine(kind: str) -> list[int]:
    """Return the number of free devices of each machine of the cluster: of "GPU" or "CPU"."""
    # Ray has no public function for this.
    machines = import_ray()._private.state.available_resources_per_node()
    return [int(free.get(kind, 0)) for _, free in sorted(machines.items())]


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
