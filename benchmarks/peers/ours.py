"""planish with its public API. `OURS_OPTIONS` is a JSON object with options of ServiceClient."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from serving import Peer, serve

import planish

sys.path.append(str(Path(__file__).parents[1]))
from iteration import count_tokens, rollouts, run_iteration, train_step


def load(model: str) -> Peer:
    service_client = planish.ServiceClient(**json.loads(os.environ.get("OURS_OPTIONS", "{}")))
    sampling_client = service_client.create_sampling_client(base_model=model)
    training_client = service_client.create_lora_training_client(
        base_model=model, rank=32, seed=0, train_unembed=False
    )

    def sample(round_spec: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": count_tokens(rollouts(sampling_client, round_spec))}

    def train(round_spec: dict[str, Any]) -> dict[str, Any]:
        return {"loss": train_step(training_client, round_spec)}

    def iterate(round_spec: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": count_tokens(run_iteration(training_client, round_spec).groups)}

    workloads = {
        "W1": sample,
        "W1b": sample,
        "W1c": sample,
        "W1j": sample,
        "W2": train,
        "W3": iterate,
    }
    return Peer(workloads, {"planish": version("planish"), "torch": torch.__version__})


if __name__ == "__main__":
    serve(load)
