"""What a fleet of replicas costs and gains: throughput, memory, publishing, and what limits more
replicas than this machine has.

    python benchmarks/fleet.py                 writes results/fleet.json; needs planish[ray]
    python benchmarks/fleet.py head_only=true  measures the head's process again, and simulates

The fleets run one after another, so that their memory does not add up: with one CPU for each
replica, then one replica with two CPUs. Iterations (W3) of each fleet alternate with those of an
engine in this process, which computes with one thread; the first ones do not count. The simulation
takes the measured costs of one iteration and gives each of n replicas the work of one iteration. It
asks which part of a step grows with n: the head's process, which submits requests and receives
results; the object store, which sends each version to each replica; and the home, which adds
gradients and steps.

The head does the same work for models of all sizes, apart from the size of the gradients. So its
processor time is measured with a tiny model, whose iterations are short beside the idle time of
Ray's threads, with one replica and with several.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
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
from planish.testing import tiny_model

SIMULATED = (8, 64, 512)
NETWORK_BYTES_PER_SECOND = 1.25e9
"""A network of 10 Gbit/s, over which the simulation sends versions and gradients."""


@chz.chz
class Options:
    model: str = DEFAULT_MODEL
    replicas: tuple[int, ...] = (1, 2)
    rounds: int = 3
    small: bool = False
    head_replicas: tuple[int, int] = (2, 6)
    """The replicas of the two fleets in which the head's process is measured."""
    head_only: bool = False
    """Take all other measurements from the last report."""
    directory: Path = RESULTS


@dataclass(frozen=True)
class IterationCosts:
    """The costs of one iteration outside of the head's process, in seconds unless said otherwise."""

    export_seconds: float
    """The home packs and names its weights."""
    version_bytes: int
    gradient_bytes: int
    home_seconds: float
    """The optimizer step, and the addition of one gradient."""
    compute_seconds: float
    """Sampling and gradients of one replica."""
    samples: int
    """The samples of one replica."""


@dataclass(frozen=True)
class HeadCosts:
    """The processor time of the head's process for each replica."""

    head_seconds: float
    """Seconds for the work of one replica in one iteration."""
    head_idle_share: float
    """Seconds per second for the signs of life of one replica."""


@dataclass(frozen=True)
class StepCosts(HeadCosts, IterationCosts):
    """All costs of one iteration."""


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
    idle_share = min(0.99, costs.head_idle_share * replicas)
    parts = {
        "replicas": costs.compute_seconds,
        "head": costs.head_seconds * replicas / (1 - idle_share),
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
    report, path = header(options), options.directory / "fleet.json"
    shape = (SMALL_WORKLOADS if options.small else WORKLOADS)["W3"].shape
    # Ray gives each replica as many threads as CPUs, unless this variable says otherwise.
    os.environ.pop("OMP_NUM_THREADS", None)
    if options.head_only:
        report = json.loads(path.read_text()) | {"head": report}
        names = {field.name for field in fields(IterationCosts)}
        iteration = IterationCosts(**{name: report["costs"][name] for name in names})
    else:
        report["systems"], iteration = measure_systems(options, shape)
    costs = StepCosts(**asdict(iteration), **asdict(measure_head(options, shape, iteration)))
    report["costs"] = asdict(costs)
    report["simulation"] = [asdict(simulate(costs, count)) for count in SIMULATED]
    write_atomically(path, json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("systems", "costs", "simulation")}, indent=1))


def measure_systems(
    options: Options, shape: Shape
) -> tuple[dict[str, dict[str, Any]], IterationCosts]:
    """Measure the fleets of `options.model` beside an engine of this process."""
    start_cluster(num_cpus=max(2, *options.replicas), num_gpus=0, object_store_bytes=1 << 30)
    torch.set_num_threads(1)  # for the engine in this process
    summaries: dict[str, dict[str, Any]] = {}
    home_costs: dict[str, Any] = {}
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
                summaries[name] = summary(pairs, fleet)
                print(json.dumps({name: summaries[name]}), flush=True)
                home_costs = home_costs or measure_home(fleet, client)
                del client
            fleet.close()
    leave_cluster()
    compute_seconds = summaries[fleet_name(options.replicas[0])]["seconds"]
    samples = shape.prompts * shape.samples
    return summaries, IterationCosts(compute_seconds=compute_seconds, samples=samples, **home_costs)


def measure_head(options: Options, shape: Shape, iteration: IterationCosts) -> HeadCosts:
    """Return the costs of the head's process for one replica more."""
    work, idle = [], []
    with tempfile.TemporaryDirectory() as directory:
        model = str(tiny_model(Path(directory) / "tiny"))
        for replicas in options.head_replicas:
            many = replace(shape, prompts=shape.prompts * replicas)
            start_cluster(num_cpus=replicas, num_gpus=0, object_store_bytes=1 << 30)
            fleet = start_fleet(model, directory, replicas, 1)
            with planish.ServiceClient(data_dir=directory, service=fleet) as service:
                client = training_client(service, model)
                measure(client, many, 0)
                idle.append(idle_share())
                rows = [measure(client, many, number) for number in range(1, options.rounds + 1)]
                del client
            fleet.close()
            leave_cluster()
            own = [row["head_seconds"] - idle[-1] * row["seconds"] for row in rows]
            work.append(statistics.median(own))
        wide = str(tiny_model(Path(directory) / "wide", hidden_size=512, layers=16))
        gradient_seconds = measure_gradient(wide, directory, options.rounds)
    few, several = options.head_replicas
    return HeadCosts(
        head_seconds=(work[1] - work[0]) / (several - few)
        + iteration.gradient_bytes * gradient_seconds,
        head_idle_share=(idle[1] - idle[0]) / (several - few),
    )


def measure_gradient(model: str, directory: str, rounds: int) -> float:
    """Return the head's processor time for each byte of a gradient that passes through it."""
    start_cluster(num_cpus=2, num_gpus=0, object_store_bytes=1 << 30)
    fleet = start_fleet(model, directory, 2, 1, {"micro_batch_tokens": 8})
    prompt = planish.ModelInput.from_ints
    data = [planish.Datum(prompt([first] * 8), {"target_tokens": [first] * 8}) for first in (3, 4)]
    seconds: dict[str, list[float]] = {"forward": [], "forward_backward": []}
    with planish.ServiceClient(data_dir=directory, service=fleet) as service:
        client = service.create_lora_training_client(model, rank=128, train_unembed=False)
        num_bytes = measure_home(fleet, client)["gradient_bytes"]
        for _ in range(1 + rounds):
            for name, values in seconds.items():
                start = time.process_time()
                getattr(client, name)(data, "cross_entropy").result()
                values.append(time.process_time() - start)
        del client
    fleet.close()
    leave_cluster()
    forward, backward = (statistics.median(values[1:]) for values in seconds.values())
    return max(0.0, backward - forward) / (2 * num_bytes)  # the home's part passes too


def fleet_name(replicas: int) -> str:
    return f"{replicas} replicas, 1 CPU each"


def systems(replicas: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return the number of replicas of each fleet, and the CPUs of each replica."""
    return {**{fleet_name(count): (count, 1) for count in replicas}, "1 replica, 2 CPUs": (1, 2)}


def start_fleet(
    model: str, directory: str, replicas: int, cpus: int, settings: Mapping[str, Any] | None = None
) -> Fleet:
    engine_options = EngineOptions(None, directory, settings or {})
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


def measure_home(fleet: Fleet, client: planish.TrainingClient) -> dict[str, Any]:
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
    return {
        "export_seconds": export_seconds,
        "version_bytes": version.content.nbytes,
        "gradient_bytes": 4 * version.vector().numel(),
        "home_seconds": time.perf_counter() - step_start,
    }


def idle_share(seconds: float = 5.0) -> float:
    """Return the processor time of this process per second while the fleet waits for work: threads
    of Ray, which run whatever the fleet does.
    """
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) / seconds


if __name__ == "__main__":
    main(chz.entrypoint(Options))
