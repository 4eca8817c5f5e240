"""The cost of a server: the same GRPO iterations over HTTP and in this process, alternating.

    python benchmarks/wire_overhead.py                            5 rounds of 8 problems x 8 answers
        of 64 tokens
    python benchmarks/wire_overhead.py steps=9 problems=4 new_tokens=128

A round is one iteration on each side (a sampling client for the newest weights, samples,
forward_backward, optim_step) with the same prompts, seeds and adapter. The order alternates. The
server journals as usual. The script checks that both sides did the same work by comparing tokens,
logprobs and losses. It prints one JSON object; `ratio` is the median over rounds of the time over
HTTP divided by the time in process, so 1.05 means 5% of overhead.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import chz
import torch
from iteration import Iteration, run_iteration, with_completions
from served import running_server
from workloads import Shape, make_round

import planish
from planish.model.sources.resolve import DEFAULT_MODEL

PARTS = ("seconds", "sampling_seconds", "training_seconds")


@chz.chz
class Options:
    model: str = DEFAULT_MODEL
    problems: int = 8
    group: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 64
    rank: int = 32
    steps: int = 5


def main(options: Options) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="planish-") as directory,
        running_server(Path(directory)) as url,
        planish.ServiceClient(base_url=url) as remote,
        planish.ServiceClient() as local,
    ):
        sides = {"in_process": local, "http": remote}
        clients = {
            name: side.create_lora_training_client(
                base_model=options.model, rank=options.rank, seed=0
            )
            for name, side in sides.items()
        }
        # The first iteration warms up caches and allocators.
        _, *rounds = [iterations(clients, options, number) for number in range(options.steps + 1)]
    ratios = {
        part: [getattr(row["http"], part) / getattr(row["in_process"], part) for row in rounds]
        for part in PARTS
    }
    report = {
        "work": chz.asdict(options),
        "threads": torch.get_num_threads(),
        "ratio": statistics.median(ratios["seconds"]),
        "ratios": {part: [round(value, 4) for value in values] for part, values in ratios.items()},
        "seconds_per_step": {
            name: statistics.median(row[name].seconds for row in rounds) for name in clients
        },
    }
    print(json.dumps(report, indent=2))


def iterations(
    clients: Mapping[str, planish.TrainingClient], options: Options, number: int
) -> dict[str, Iteration]:
    """Run one iteration on each side. The prompts share their first half."""
    shape = Shape(
        options.problems,
        options.group,
        options.new_tokens,
        options.prompt_tokens,
        options.prompt_tokens // 2,
    )
    given = make_round(clients["in_process"].get_tokenizer(), f"wire {number}", shape, number)
    names = list(clients)[:: 1 if number % 2 else -1]
    rows = {name: run_iteration(clients[name], given) for name in names}
    http, in_process = (
        (with_completions(given, one.groups), one.loss)
        for one in (rows["http"], rows["in_process"])
    )
    assert http == in_process, "the work was not the same"
    return rows


if __name__ == "__main__":
    main(chz.entrypoint(Options))
