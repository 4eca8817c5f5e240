"""What a fleet of replicas costs and gains: throughput, memory, publishing, and what limits more
replicas than this machine has.

    python benchmarks/fleet.py            writes results/fleet.json; needs planish[ray]

Iterations (W3) alternate between the systems, so that a change of the machine's speed affects all:
an engine in this process, fleets with one CPU for each replica, and one replica with two CPUs. The
simulation takes the measured costs of one iteration and asks for n replicas which part of a step
does not shrink with n: the head's process, which submits requests and receives results; the object
store, which sends each version to each replica; and the home, which adds gradients and steps.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import chz
import torch
from compare import header
from iteration import count_tokens, run_iteration
from report import RESULTS
from workloads import SMALL_WORKLOADS, WORKLOADS, Shape, make_round

import planish
from planish.engine.replication import ExportedWeights, ExportWeights
from planish.files import write_atomically
from planish.fleet.fleet import Fleet
from planish.fleet.link import EngineOptions
from planish.fleet.ray_link import RayLink, Resources
from planish.model.sources import DEFAULT_MODEL
from planish.processes.ray_cluster import import_ray, leave_cluster, start_cluster

SIMULATED = (8, 64, 512)
NETWORK_BYTES_PER_SECOND = 1.25e9
"""A network of 10 Gbit/s, over which the simulation sends versions and gradients."""


@chz.chz
class Options:
    model: str = DEFAULT_MODEL
    replicas: tuple[int, ...] = (1, 2)
    rounds: int = 3
    small: bool = False
    directory: Path = RESULTS


@dataclass(frozen=True)
class StepCosts:
    """The costs of one iteration, in seconds unless said otherwise."""

    compute_seconds: float
    """Sampling and gradients of one replica, which n replicas share."""
    head_seconds: float
    """Processor time of the head's process with one replica."""
    head_seconds_per_replica: float
    """What each further replica adds to it."""
    export_seconds: float
    """The home packs and names its weights."""
    version_bytes: int
    gradient_bytes: int
    home_seconds: float
    """The optimizer step, and the addition of one gradient."""


@dataclass(frozen=True)
class SimulatedStep:
    """An iteration of n replicas: the seconds of each part that does not shrink with n."""

    replicas: int
    seconds: float
    parts: Mapping[str, float]
    bottleneck: str
    efficiency: float
    """The throughput relative to n times that of one replica without overhead."""


def simulate(costs: StepCosts, replicas: int) -> SimulatedStep:
    """Return the iteration of `replicas`. Each part is a queue with one server, except compute."""
    transfer_seconds = costs.version_bytes / NETWORK_BYTES_PER_SECOND
    parts = {
        "replicas": costs.compute_seconds / replicas,
        # The number of requests is the same, and each replica adds the results of its part.
        "head": costs.head_seconds + costs.head_seconds_per_replica * (replicas - 1),
        # Ray sends an object along a tree of the nodes that have it.
        "object store": costs.export_seconds + transfer_seconds * (replicas - 1).bit_length(),
        # The gradients of all replicas arrive at the home, which adds them.
        "home": costs.home_seconds
        + (replicas - 1) * costs.gradient_bytes / NETWORK_BYTES_PER_SECOND,
    }
    seconds = sum(parts.values())
    others = {name: value for name, value in parts.items() if name != "replicas"}
    return SimulatedStep(
        replicas,
        seconds,
        parts,
        max(others, key=lambda name: others[name]),
        costs.compute_seconds / replicas / seconds,
    )


def main(options: Options) -> None:
    report = header(options)
    shape = (SMALL_WORKLOADS if options.small else WORKLOADS)["W3"].shape
    # Ray gives each replica as many threads as CPUs, unless this variable says otherwise. The
    # fleets take turns, so the cluster may have more CPUs than the machine.
    os.environ.pop("OMP_NUM_THREADS", None)
    num_cpus = sum(options.replicas) + 2
    start_cluster(num_cpus=num_cpus, num_gpus=0, object_store_bytes=1 << 30)
    torch.set_num_threads(1)  # for the engine in this process
    with tempfile.TemporaryDirectory() as directory:
        fleets = {
            f"{count} replicas, 1 CPU each": start_fleet(options.model, directory, count, 1)
            for count in options.replicas
        }
        fleets["1 replica, 2 CPUs"] = start_fleet(options.model, directory, 1, 2)
        engine = planish.ServiceClient(data_dir=directory)
        clients = {"engine in this process": engine} | {
            name: planish.ServiceClient(service=fleet) for name, fleet in fleets.items()
        }
        systems = {name: measured_client(client, options) for name, client in clients.items()}
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
        for number in range(options.rounds + 1):
            for name, client in systems.items():
                rows[name].append(measure(client, shape, number))
        costs = step_costs(next(iter(fleets.values())), systems, rows, options.replicas)
        report["systems"] = {
            name: summary(measured[1:], fleets.get(name)) for name, measured in rows.items()
        }
        report["costs"] = asdict(costs)
        report["simulation"] = [asdict(simulate(costs, count)) for count in SIMULATED]
        engine.close()
        for fleet in fleets.values():
            fleet.close()
    leave_cluster()
    write_atomically(options.directory / "fleet.json", json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("systems", "simulation")}, indent=1))


def start_fleet(model: str, directory: str, replicas: int, cpus: int) -> Fleet:
    engine_options = EngineOptions(None, directory, {})
    return Fleet(
        lambda: RayLink(engine_options, Resources(0, cpus)), replicas, put=import_ray().put
    )


def measured_client(client: planish.ServiceClient, options: Options) -> planish.TrainingClient:
    return client.create_lora_training_client(options.model, rank=32, train_unembed=False)


def measure(client: planish.TrainingClient, shape: Shape, number: int) -> dict[str, float]:
    """Return the seconds of one iteration, of a publication after it, and the head's own time."""
    round_spec = make_round(client.get_tokenizer(), f"fleet {number}", shape, number)
    head_start = time.process_time()
    iteration = run_iteration(client, round_spec)
    head_seconds = time.process_time() - head_start
    publish_start = time.perf_counter()
    client.save_weights_and_get_sampling_client()
    return {
        "seconds": iteration.seconds,
        "sampling_seconds": iteration.sampling_seconds,
        "training_seconds": iteration.training_seconds,
        "tokens_per_second": count_tokens(iteration.groups) / iteration.seconds,
        "publish_seconds": time.perf_counter() - publish_start,
        "head_seconds": head_seconds,
    }


def summary(rows: list[dict[str, float]], fleet: Fleet | None) -> dict[str, Any]:
    """Return the medians over the rounds, and the memory of the replicas in bytes."""
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    replicas = [] if fleet is None else fleet.replicas.replicas
    memory = [replica.link.request("ping").resident_bytes for replica in replicas]
    return {**medians, "replica_bytes": memory, "rounds": rows}


def step_costs(
    fleet: Fleet,
    systems: Mapping[str, planish.TrainingClient],
    rows: Mapping[str, list[dict[str, float]]],
    replicas: Sequence[int],
) -> StepCosts:
    """Return the costs of a step on the first fleet, which is the smallest one."""
    names = list(systems)[1:-1]  # the fleets with one CPU for each replica
    client = systems[names[0]]
    medians = [summary(rows[name][1:], None) for name in names]
    growth = medians[-1]["head_seconds"] - medians[0]["head_seconds"]
    home = fleet.replicas.replicas[0].engine
    export_start = time.perf_counter()
    version = home.submit(ExportWeights(client.model_id)).result()
    export_seconds = time.perf_counter() - export_start
    assert not isinstance(version, ExportedWeights)
    prompt = planish.ModelInput.from_ints([1, 2, 3])
    data = [planish.Datum(prompt, {"target_tokens": [2, 3, 4]})]
    client.forward_backward(data, "cross_entropy").result()
    step_start = time.perf_counter()
    client.optim_step(planish.AdamParams(learning_rate=0.0)).result()
    return StepCosts(
        compute_seconds=medians[0]["seconds"] - medians[0]["head_seconds"],
        head_seconds=medians[0]["head_seconds"],
        head_seconds_per_replica=max(0.0, growth / max(1, replicas[-1] - replicas[0])),
        export_seconds=export_seconds,
        version_bytes=version.content.nbytes,
        gradient_bytes=4 * version.vector().numel(),
        home_seconds=time.perf_counter() - step_start,
    )


if __name__ == "__main__":
    main(chz.entrypoint(Options))
