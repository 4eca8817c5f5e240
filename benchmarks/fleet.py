"""What a fleet of replicas costs and gains: throughput, memory, publishing, and what limits more
replicas than this machine has.

    python benchmarks/fleet.py            writes results/fleet.json; needs planish[ray]

The fleets run one after another, so that their memory does not add up: with one CPU for each
replica, then one replica with two CPUs. Iterations (W3) of each fleet alternate with those of an
engine in this process, which computes with one thread; the first ones do not count. The simulation
takes the measured costs of one iteration and gives each of n replicas the work of one iteration. It
asks which part of a step grows with n: the head's process, which submits requests and receives
results; the object store, which sends each version to each replica; and the home, which adds
gradients and steps.
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
from planish.model.sources.resolve import DEFAULT_MODEL
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
class HomeCosts:
    """The costs of the home replica in one iteration, in seconds unless said otherwise."""

    export_seconds: float
    """The home packs and names its weights."""
    version_bytes: int
    gradient_bytes: int
    home_seconds: float
    """The optimizer step, and the addition of one gradient."""


@dataclass(frozen=True)
class StepCosts(HomeCosts):
    """The costs of one iteration, in seconds unless said otherwise."""

    compute_seconds: float
    """Sampling and gradients of one replica."""
    head_seconds: float
    """Processor time of the head's process for the work of one replica."""
    samples: int
    """The samples of one replica."""


@dataclass(frozen=True)
class SimulatedStep:
    """An iteration of n replicas, and the seconds of each part."""

    replicas: int
    seconds: float
    samples_per_second: float
    parts: Mapping[str, float]
    bottleneck: str
    """The longest part beside the computing replicas."""
    efficiency: float
    """The throughput relative to n times that of one replica without overhead."""


def simulate(costs: StepCosts, replicas: int) -> SimulatedStep:
    """Return the iteration of `replicas`. The parts run one after another."""
    transfer_seconds = costs.version_bytes / NETWORK_BYTES_PER_SECOND
    parts = {
        "replicas": costs.compute_seconds,
        "head": costs.head_seconds * replicas,
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
        replicas * costs.samples / seconds,
        parts,
        max(others, key=lambda name: others[name]),
        costs.compute_seconds / seconds,
    )


def main(options: Options) -> None:
    report = header(options)
    shape = (SMALL_WORKLOADS if options.small else WORKLOADS)["W3"].shape
    # Ray gives each replica as many threads as CPUs, unless this variable says otherwise.
    os.environ.pop("OMP_NUM_THREADS", None)
    start_cluster(num_cpus=max(2, *options.replicas), num_gpus=0, object_store_bytes=1 << 30)
    torch.set_num_threads(1)  # for the engine in this process
    summaries: dict[str, dict[str, Any]] = {}
    home_costs: HomeCosts | None = None
    with (
        tempfile.TemporaryDirectory() as directory,
        planish.ServiceClient(data_dir=directory) as engine,
    ):
        engine_client = training_client(engine, options.model)
        measure(engine_client, shape, 0)
        for name, (replicas, cpus) in systems(options.replicas).items():
            fleet = start_fleet(options.model, directory, replicas, cpus)
            with planish.ServiceClient(data_dir=directory, service=fleet) as service:
                client = training_client(service, options.model)
                measure(client, shape, 0)
                pairs = [
                    (measure(engine_client, shape, number), measure(client, shape, number))
                    for number in range(1, options.rounds + 1)
                ]
                summaries[name] = summary(pairs, fleet) | {"idle_share": idle_share()}
                print(json.dumps({name: summaries[name]}), flush=True)
                home_costs = home_costs or measure_home(fleet, client)
                del client
            fleet.close()
    leave_cluster()
    assert home_costs is not None
    costs = step_costs(home_costs, summaries, options.replicas, shape.prompts * shape.samples)
    report["systems"] = summaries
    report["costs"] = asdict(costs)
    report["simulation"] = [asdict(simulate(costs, count)) for count in SIMULATED]
    write_atomically(options.directory / "fleet.json", json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("systems", "simulation")}, indent=1))


def fleet_name(replicas: int) -> str:
    return f"{replicas} replicas, 1 CPU each"


def systems(replicas: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return the number of replicas of each fleet, and the CPUs of each replica."""
    return {**{fleet_name(count): (count, 1) for count in replicas}, "1 replica, 2 CPUs": (1, 2)}


def start_fleet(model: str, directory: str, replicas: int, cpus: int) -> Fleet:
    engine_options = EngineOptions(None, directory, {})
    return Fleet(
        lambda: RayLink(engine_options, Resources(0, cpus)), replicas, put=import_ray().put
    )


def training_client(service: planish.ServiceClient, model: str) -> planish.TrainingClient:
    return service.create_lora_training_client(model, rank=32, train_unembed=False)


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


def summary(
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]], fleet: Fleet
) -> dict[str, Any]:
    """Return the medians over the rounds of a fleet, its throughput relative to the engine's in the
    same rounds, and the memory of the replicas in bytes.
    """
    rows = [row for _, row in pairs]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    memory = [replica.link.request("ping").resident_bytes for replica in fleet.replicas.replicas]
    ratios = [engine["seconds"] / row["seconds"] for engine, row in pairs]
    return {**medians, "ratio": statistics.median(ratios), "replica_bytes": memory, "pairs": pairs}


def measure_home(fleet: Fleet, client: planish.TrainingClient) -> HomeCosts:
    """Return the costs of the home replica of the fleet's model."""
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
    return HomeCosts(
        export_seconds,
        version.content.nbytes,
        4 * version.vector().numel(),
        time.perf_counter() - step_start,
    )


def idle_share(seconds: float = 5.0) -> float:
    """Return the processor time of this process per second while the fleet waits for work: threads
    of Ray, which run whatever the fleet does.
    """
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) / seconds


def step_costs(
    home: HomeCosts,
    summaries: Mapping[str, Mapping[str, Any]],
    replicas: Sequence[int],
    samples: int,
) -> StepCosts:
    """Return the costs of a replica in one step. The head's work for a replica is that for the
    smallest fleet, plus what each further replica of the largest one added to the same step.
    """
    first, last = (summaries[fleet_name(replicas[index])] for index in (0, -1))
    head_first, head_last = (
        max(0.0, fleet["head_seconds"] - fleet["idle_share"] * fleet["seconds"])
        for fleet in (first, last)
    )
    growth = max(0.0, head_last - head_first) / max(1, replicas[-1] - replicas[0])
    return StepCosts(
        compute_seconds=first["seconds"] - head_first,
        head_seconds=head_first + growth,
        samples=samples,
        **asdict(home),
    )


if __name__ == "__main__":
    main(chz.entrypoint(Options))
