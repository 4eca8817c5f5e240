"""Fleets of tiny models for tests, and the training run by which they are compared."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from planish import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient, TrainingClient
from planish.files import read_rows
from planish.fleet.fleet import Fleet
from planish.fleet.link import EngineOptions
from planish.fleet.ray_link import RayLink, Resources
from planish.fleet.replica import Replica
from planish.fleet.served import ServedFleet
from planish.fleet.start import checked_options
from planish.processes.ray_cluster import import_ray

WAIT = 240.0
"""Seconds after which a test gives up on a result. A replica may have to be replaced meanwhile."""
SETTINGS: dict[str, Any] = {"dtype": "float32", "micro_batch_tokens": 32}
"""Small micro-batches, so that a call has a dozen of them."""


def options(model_dir: Path, data_dir: Path) -> EngineOptions:
    """Return the options of the engines of a fleet."""
    return checked_options({"tiny": str(model_dir)}, data_dir, SETTINGS)


def ray_fleet(model_dir: Path, data_dir: Path, num_replicas: int, **arguments: Any) -> Fleet:
    """Return a fleet on the cluster of this process, with one CPU for each replica."""
    engine_options = options(model_dir, data_dir)
    return Fleet(
        lambda: RayLink(engine_options, Resources(num_gpus=0, num_cpus=1)),
        num_replicas,
        put=import_ray().put,
        **arguments,
    )


def served_fleet(model_dir: Path, data_dir: Path, num_replicas: int) -> ServedFleet:
    """Return a fleet for a server, on the cluster of this process."""
    engine_options = replace(options(model_dir, data_dir), adapter_bytes=1 << 30)
    return ServedFleet(
        lambda: RayLink(engine_options, Resources(num_gpus=0, num_cpus=1)),
        num_replicas,
        engine_options,
        put=import_ray().put,
    )


def home_of(fleet: Fleet) -> Replica:
    """Return the replica that has the newest training model."""
    return list(fleet._models.by_id.values())[-1].home


def wait_until_whole(fleet: Fleet) -> None:
    """Wait until all lost replicas are replaced."""
    replicas = fleet.replicas
    with replicas._changed:
        assert replicas._changed.wait_for(
            lambda: not any(replica.is_lost for replica in replicas.replicas), WAIT
        )


def pid_of(replica: Replica) -> int:
    """Return the id of the process of a replica on Ray."""
    assert isinstance(replica.link, RayLink)
    assert replica.link.machine is not None
    return replica.link.machine.pid


def run_grpo(
    client: ServiceClient,
    num_steps: int,
    before_step: Callable[[int], object] = lambda step: None,
    state: str | None = None,
    first_step: int = 0,
    save_every: int = 0,
    on_save: Callable[[int, str], object] = lambda step, path: None,
    model: str = "tiny",
) -> list[Any]:
    """Run GRPO steps of a new model, or from a checkpoint. Return what each of them computed: see
    `continue_grpo`.
    """
    return continue_grpo(
        new_run(client, state, model), num_steps, before_step, first_step, save_every, on_save
    )


def new_run(client: ServiceClient, state: str | None = None, model: str = "tiny") -> TrainingClient:
    """Return the training model of `run_grpo`."""
    if state is None:
        return client.create_lora_training_client(model, rank=4, seed=1)
    return client.create_training_client_from_state_with_optimizer(state)


def continue_grpo(
    training_client: TrainingClient,
    num_steps: int,
    before_step: Callable[[int], object] = lambda step: None,
    first_step: int = 0,
    save_every: int = 0,
    on_save: Callable[[int, str], object] = lambda step, path: None,
) -> list[Any]:
    """Run GRPO steps. Return what each of them computed: tokens, logprobs, losses and gradient norms,
    and a hash of the adapter.
    """
    rows: list[Any] = []
    for step in range(first_step, num_steps):
        before_step(step)
        sampling_client = training_client.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=8, seed=step, stop=[])
        prompts = [ModelInput.from_ints([1, 2, 3 + number]) for number in range(4)]
        futures = [sampling_client.sample(prompt, 4, params) for prompt in prompts]
        groups = [future.result(WAIT).sequences for future in futures]
        data = [
            datum
            for prompt, group in zip(prompts, groups, strict=True)
            for datum in _datums(prompt, group)
        ]
        backward = training_client.forward_backward(data, "importance_sampling")
        update = training_client.optim_step(AdamParams(learning_rate=1e-2))
        rows.append(
            [
                [(sequence.tokens, sequence.logprobs) for group in groups for sequence in group],
                backward.result(WAIT).metrics,
                update.result(WAIT).metrics,
                adapter_hash(training_client),
            ]
        )
        if save_every and (step + 1) % save_every == 0:
            path = training_client.save_state(f"step-{step + 1}", overwrite=True).result(WAIT).path
            on_save(step + 1, path)
    return rows


def reproducible(run_directory: Path) -> list[dict[str, Any]]:
    """Return the rows without times, and without values that depend on prefix caches."""
    changing = ("time/", "tokens_per_second/", "tokens/prefill", "tokens/cumulative/prefill")
    return [
        {k: v for k, v in row.items() if not k.startswith(changing) and "cached" not in k}
        for row in read_rows(run_directory / "metrics.jsonl")
    ]


def training_data(number: int) -> list[Datum]:
    """Return datums without common prefixes, which make several micro-batches."""
    rows = [[(start * 7 + number * 3 + i * 5) % 256 for i in range(10)] for start in range(16)]
    return [Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in rows]


def adapter_hash(training_client: TrainingClient) -> str:
    """Return a hash of the adapter's logprobs at all positions of a fixed text."""
    tokens = list(range(1, 200))
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    output = training_client.forward([datum], "cross_entropy").result(WAIT)
    logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    return hashlib.sha256(logprobs.tobytes()).hexdigest()


def _datums(prompt: ModelInput, group: Any) -> list[Datum]:
    """Return the training data of a group. The reward is the share of even tokens."""
    rewards = [sum(t % 2 == 0 for t in s.tokens) / len(s.tokens) for s in group]
    mean = sum(rewards) / len(rewards)
    data = []
    for sequence, reward in zip(group, rewards, strict=True):
        tokens = [*prompt.to_ints(), *sequence.tokens]
        start = prompt.length - 1
        num_targets = len(tokens) - 1
        advantages = torch.zeros(num_targets)
        advantages[start:] = reward - mean
        logprobs = torch.zeros(num_targets)
        logprobs[start:] = torch.tensor(sequence.logprobs)
        data.append(
            Datum(
                ModelInput.from_ints(tokens[:-1]),
                {"target_tokens": tokens[1:], "advantages": advantages, "logprobs": logprobs},
            )
        )
    return data
