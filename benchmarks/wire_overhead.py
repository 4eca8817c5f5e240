"""What it costs that the engine is a server: the same GRPO iterations over HTTP and in this process, in turn.

    python benchmarks/wire_overhead.py                            5 rounds of 8 problems x 8 answers of 64 tokens
    python benchmarks/wire_overhead.py steps=9 problems=4 new_tokens=128

A round is one iteration on each side (a sampler of the newest weights, samples, forward_backward, optim_step), with the same prompts, seeds and
adapter, and the other side first in every second round. The server journals as it always does. That both did the same work is checked by
their logprobs. One JSON object is printed; `ratio` is the median over the rounds of HTTP by in process, 1.05 being 5% of overhead.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import chz
import torch
from grpo_step import Work, step
from served import served

import planish


@chz.chz
class Rounds(Work):
    problems: int = 8
    group: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 64
    steps: int = 5


def main(work: Rounds) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="planish-") as directory,
        served(Path(directory)) as url,
        planish.ServiceClient(base_url=url) as remote,
        planish.ServiceClient() as local,
    ):
        sides = {"in_process": local, "http": remote}
        clients = {
            name: side.create_lora_training_client(base_model=work.model, rank=work.rank, seed=0)
            for name, side in sides.items()
        }
        played(clients, work, 0)  # the first iteration warms caches and allocators up
        rounds = [played(clients, work, number) for number in range(1, work.steps + 1)]
    ratios = {
        part: [row["http"][part] / row["in_process"][part] for row in rounds]
        for part in ("seconds_per_step", "seconds_sampling", "seconds_training")
    }
    report = {
        "work": chz.asdict(work),
        "threads": torch.get_num_threads(),
        "ratio": statistics.median(ratios["seconds_per_step"]),
        "ratios": {part: [round(value, 4) for value in values] for part, values in ratios.items()},
        "seconds_per_step": {
            name: statistics.median(row[name]["seconds_per_step"] for row in rounds) for name in clients
        },
    }
    print(json.dumps(report, indent=2))


def played(clients: dict[str, Any], work: Rounds, number: int) -> dict[str, dict[str, float]]:
    """One iteration on each side."""
    names = list(clients)[:: 1 if number % 2 else -1]
    rows = {name: step(clients[name], work, number) for name in names}
    assert rows["http"]["kl_sample_train_v2"] == rows["in_process"]["kl_sample_train_v2"], "the work was not the same"
    return rows


if __name__ == "__main__":
    main(chz.entrypoint(Rounds))
