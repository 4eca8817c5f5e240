"""How many replicas a fleet has, and what each of them occupies."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planish.engine.settings import choose_device
from planish.errors import UserError
from planish.fleet.fleet import Fleet
from planish.fleet.link import EngineOptions
from planish.fleet.ray_link import RayLink, Resources, put
from planish.fleet.served import ServedFleet
from planish.model.device import Device
from planish.processes.ray_cluster import (
    HeadWatch,
    free_by_machine,
    free_devices,
    has_gpus,
    import_ray,
    join_cluster,
    leave_cluster,
    num_machines,
    start_cluster,
    wait_for_devices,
)
from planish.processes.threads import usable_cpus


@dataclass(frozen=True)
class FleetPlan:
    """A checked number of replicas, on devices that are there."""

    num_replicas: int
    resources: Resources
    num_cpus: int
    num_gpus: int
    is_own_cluster: bool
    """Whether the cluster ends with the fleet."""
    has_cluster: bool
    """Whether this process is connected to a cluster already."""
    drained: frozenset[int] = frozenset()
    """The numbers of the replicas that are not started."""

    def start(self, options: EngineOptions) -> Fleet:
        """Start the replicas."""
        return Fleet(self._link_starter(options), self.num_replicas, **self._arguments())

    def start_served(self, options: EngineOptions, stall_seconds: float) -> ServedFleet:
        """Start the replicas of a server. See `Fleet` for `stall_seconds`."""
        return ServedFleet(
            self._link_starter(options),
            self.num_replicas,
            options,
            stall_seconds=stall_seconds,
            drained=self.drained,
            **self._arguments(),
        )

    def _link_starter(self, options: EngineOptions) -> Callable[[], RayLink]:
        return lambda: RayLink(options, self.resources)

    def _arguments(self) -> dict[str, Any]:
        """Start a cluster, unless there is one, and return the arguments of `Fleet` for it."""
        owns_cluster = self.is_own_cluster
        if not self.has_cluster:
            owns_cluster = start_cluster(self.num_cpus, self.num_gpus)
        return {
            "put": put,
            "cluster_fault": HeadWatch().fault,
            "check_free": self.check_free,
            "on_close": leave_cluster if owns_cluster else lambda: None,
        }

    def check_free(self) -> None:
        """Raise UserError if no machine of the cluster has room for one more replica."""
        is_gpu = self.resources.num_gpus > 0
        kind, needed = ("GPU", 1) if is_gpu else ("CPU", self.resources.num_cpus)
        free = max(free_by_machine(kind), default=0)
        if free < needed:
            raise UserError(
                f"each replica occupies {needed} {kind}s, and {free} are free on the machine with "
                "the most; add a machine to the cluster, or drain another replica"
            )


def check_replicas(device: str, replicas: int | None, tensor_parallel: int | None = None) -> None:
    """Raise UserError for an invalid number of replicas, for a device that they would share, or for
    replicas of several devices each.
    """
    if tensor_parallel is not None and tensor_parallel > 1:
        raise UserError(
            f"tensor_parallel={tensor_parallel}: a replica has one device; leave out either "
            "tensor_parallel, or replicas and ray"
        )
    if replicas is not None and (
        isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1
    ):
        raise UserError(f"replicas={replicas!r}: give a whole number of at least 1")
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"device={device!r} is one GPU, and each replica has its own; give 'auto', 'cpu' or "
            "'cuda'"
        )


def plan_fleet(
    device: str, replicas: int | None, ray: str | None, drained: Collection[int] = ()
) -> FleetPlan:
    """Return the plan of a fleet on this machine, or on the cluster at the address `ray`.

    `replicas` is the number of replicas, by default one for each GPU of the cluster, or without
    GPUs one for each machine. Those with the numbers in `drained` are not started. Raise UserError
    if there are not enough devices.
    """
    check_replicas(device, replicas)
    import_ray()
    is_own_cluster = False
    if ray is not None:
        is_own_cluster = join_cluster(ray)
        uses_gpus = has_gpus() and device != "cpu"
        gpus, cpus = free_devices("GPU"), free_devices("CPU")
        default = max(1, gpus) if uses_gpus else num_machines()
    else:
        uses_gpus = Device(choose_device(device)).is_gpu
        gpus, cpus = torch.cuda.device_count() if uses_gpus else 0, usable_cpus()
        default = 1
    count = default if replicas is None else replicas
    if device == "cuda" and not uses_gpus:
        raise UserError("device='cuda': the cluster has no GPU; give 'auto' or 'cpu'")
    absent = frozenset(drained) & frozenset(range(count))
    if len(absent) == count:
        raise UserError(f"replicas={count}: all of them were drained; give a larger number")
    if ray is not None:
        free = wait_for_devices("GPU" if uses_gpus else "CPU", count - len(absent))
        gpus, cpus = (free, cpus) if uses_gpus else (gpus, free)
    num_devices, kind = (gpus, "GPUs") if uses_gpus else (cpus, "CPUs")
    if count - len(absent) > num_devices:
        where = "this machine has" if ray is None else "free in the cluster are"
        raise UserError(
            f"replicas={count}: each replica needs a device of its own, and {where} {num_devices} "
            f"{kind}; give at most {num_devices}"
        )
    if uses_gpus and ray is not None:
        _check_cpus(count - len(absent))
    per_replica = 1
    if not uses_gpus:
        free_cpus = [cpus] if ray is None else free_by_machine("CPU")
        per_replica = _cpus_per_replica(free_cpus, count - len(absent), max(count, default))
    resources = Resources(1 if uses_gpus else 0, per_replica)
    return FleetPlan(count, resources, cpus, gpus, is_own_cluster, ray is not None, absent)


def _cpus_per_replica(free: Sequence[int], needed: int, share: int) -> int:
    """Return how many CPUs each replica gets, given the free CPUs of each machine: a part of all
    CPUs, 1 / `share`, or fewer if `needed` replicas would not fit on the machines.
    """
    size = max(1, sum(free) // share)
    while size > 1 and sum(cpus // size for cpus in free) < needed:
        size -= 1
    return size


def _check_cpus(needed: int) -> None:
    """Raise UserError if replicas on the GPUs of a cluster would wait for CPUs forever."""
    room = sum(map(min, free_by_machine("GPU"), free_by_machine("CPU")))
    if room < needed:
        raise UserError(
            f"replicas={needed}: each replica needs a CPU beside its GPU, and the free CPUs and "
            f"GPUs of the machines suffice for {room}; give fewer replicas, start Ray on the "
            "machines with a larger --num-cpus, or end other programs of the cluster"
        )
