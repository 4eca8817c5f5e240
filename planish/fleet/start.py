"""Starts engines outside of the caller's process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from planish.engine.checkpoints.store import data_directory
from planish.engine.settings import EngineSettings, choose_device
from planish.errors import UserError
from planish.fleet.fleet import Fleet
from planish.fleet.link import EngineOptions
from planish.fleet.process import ProcessLink
from planish.fleet.ray_link import (
    RayLink,
    Resources,
    cluster_devices,
    import_ray,
    join_cluster,
    leave_cluster,
    num_machines,
    start_cluster,
)
from planish.fleet.remote_engine import RemoteEngine
from planish.model.kernels.device import Device
from planish.model.sources import checked_mapping
from planish.processes.threads import usable_cpus


def start_process(
    models: Mapping[str, str] | None, data_dir: str | Path | None, settings: Mapping[str, Any]
) -> RemoteEngine:
    """Start an engine in a process of its own. `settings` are the fields of EngineSettings."""
    return RemoteEngine(ProcessLink(checked_options(models, data_dir, settings)))


def start_fleet(
    models: Mapping[str, str] | None,
    data_dir: str | Path | None,
    settings: Mapping[str, Any],
    replicas: int | None,
    ray: str | None,
) -> Fleet:
    """Start a fleet on Ray: on this machine, or on the cluster at the address `ray`.

    `replicas` is the number of replicas, by default one for each GPU of the cluster, or without
    GPUs one for each machine. Raise UserError, before any replica starts, if there are not enough
    devices.
    """
    if replicas is not None and (
        isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1
    ):
        raise UserError(f"replicas={replicas!r}: give a whole number of at least 1")
    device = settings.get("device", "auto")
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"device={device!r} is one GPU, and each replica has its own; give 'auto', 'cpu' or "
            "'cuda'"
        )
    options = checked_options(models, data_dir, settings)
    import_ray()
    is_own_cluster = False
    if ray is not None:
        is_own_cluster = join_cluster(ray)
        gpus, cpus = cluster_devices("GPU"), cluster_devices("CPU")
        default = gpus if gpus and device != "cpu" else num_machines()
    else:
        is_gpu = Device(choose_device(device)).is_gpu
        gpus, cpus = torch.cuda.device_count() if is_gpu else 0, usable_cpus()
        default = 1
    count = default if replicas is None else replicas
    uses_gpus = bool(gpus) and device != "cpu"
    if device == "cuda" and not gpus:
        raise UserError("device='cuda': the cluster has no GPU; give 'auto' or 'cpu'")
    num_devices, kind = (gpus, "GPUs") if uses_gpus else (cpus, "CPUs")
    if count > num_devices:
        where = "this machine has" if ray is None else "the cluster has"
        raise UserError(
            f"replicas={count}: each replica needs a device of its own, and {where} {num_devices} "
            f"{kind}; give at most {num_devices}"
        )
    if ray is None:
        is_own_cluster = start_cluster(cpus, gpus)
    per_replica = max(1, cpus // max(count, default))
    resources = Resources(1 if uses_gpus else 0, 1 if uses_gpus else per_replica)
    return Fleet(
        lambda: RayLink(options, resources),
        count,
        put=import_ray().put,
        on_close=leave_cluster if is_own_cluster else lambda: None,
    )


def checked_options(
    models: Mapping[str, str] | None, data_dir: str | Path | None, settings: Mapping[str, Any]
) -> EngineOptions:
    """Return the options of an engine. Raise UserError before any process starts, if an option is
    invalid.
    """
    EngineSettings(**settings)
    return EngineOptions(checked_mapping(models) or None, str(data_directory(data_dir)), settings)
