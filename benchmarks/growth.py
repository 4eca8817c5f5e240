"""How time and memory grow with the number of groups and with the context length.

    python benchmarks/growth.py                 writes results/growth.json and results/contexts.json
    python benchmarks/growth.py parts=contexts  one of them

* groups: W1 and W2 with 1, 4, 16 and 64 prompts of 8 samples, each in its own process, so that its
  memory can be measured.
* contexts: seconds of a decode step of 8 sequences of 256 to 4,096 tokens without a common prefix.
  Many and few new tokens are sampled from cached prompts; the difference is the time of the steps
  in between. Attention needs 4 x context x heads x head_dim FLOPs per row and layer, and reads
  every key and value once.

tenants.py measures several tenants.
"""

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import chz
from compare import HERE, OWN_ENVIRONMENT, header, interpreter, measure_interleaved
from iteration import rollouts, step_seconds
from peer_process import PeerProcess
from report import RESULTS, contexts_table, growth_table
from workloads import Shape, Workload, make_prompts, write_rounds

import planish
from planish.files import write_atomically
from planish.model.architecture.config import ModelConfig
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model

GROUPS = (1, 4, 16, 64)
CONTEXTS = (256, 512, 1024, 2048, 4096)
SEQUENCES = 8
FEW_TOKENS, MANY_TOKENS = 8, 40
KEY_BYTES = 2
"""Bytes of one number of a key or value in bf16."""


@chz.chz
class Options:
    model: str = DEFAULT_MODEL
    parts: str = "groups,contexts"
    rounds: int = 3
    small: bool = False
    """A quick check with small workloads; their times mean nothing."""
    directory: Path = RESULTS


def main(options: Options) -> None:
    makers = {
        "groups": (measure_groups, "growth", growth_table),
        "contexts": (measure_contexts, "contexts", contexts_table),
    }
    for name in options.parts.split(","):
        measure, file, table = makers[name]
        report = header(options)
        with tempfile.TemporaryDirectory(prefix="planish-benchmark-") as scratch:
            report |= measure(options, Path(scratch))
        write_atomically(options.directory / f"{file}.json", json.dumps(report, indent=1) + "\n")
        print(table(report))


def measure_groups(options: Options, scratch: Path) -> dict[str, Any]:
    """Measure all sizes, each in its own process, alternating."""
    new_tokens, sizes = (8, GROUPS[:2]) if options.small else (64, GROUPS)
    workloads: dict[str, list[dict[str, Any]]] = {}
    for name in ("W1", "W2"):
        peer_processes = []
        for groups in sizes:
            path = scratch / f"{name}-{groups}-groups.json"
            warm_up, shape = (
                Shape(count, 8, new_tokens) for count in (max(1, groups // 4), groups)
            )
            write_rounds(
                options.model, path, {name: Workload(warm_up, shape, name == "W2")}, options.rounds
            )
            peer_processes.append(
                PeerProcess(
                    f"{groups} groups",
                    [interpreter(OWN_ENVIRONMENT), HERE / "peers" / "ours.py"],
                    path,
                )
            )
        measured = measure_interleaved(
            peer_processes, name, options.rounds, resolve_model(options.model), scratch
        )
        workloads[name] = [
            {**one.row(), "groups": groups, "tokens": groups * 8 * new_tokens}
            for groups, one in zip(sizes, measured, strict=True)
        ]
    return {"works": workloads}


def measure_contexts(options: Options, scratch: Path) -> dict[str, Any]:
    config = ModelConfig.from_directory(resolve_model(options.model))
    contexts = CONTEXTS[:2] if options.small else CONTEXTS
    with planish.ServiceClient() as service_client:
        client = service_client.create_sampling_client(base_model=options.model)
        steps = [seconds_with_context(client, context, options.rounds) for context in contexts]
    points = []
    for context, step in zip(contexts, steps, strict=True):
        attended = (
            SEQUENCES
            * config.num_layers
            * (context + (FEW_TOKENS + MANY_TOKENS) / 2)
            * config.head_dim
        )
        points.append(
            {
                "context": context,
                "step_seconds": round(step, 6),
                "attention_flops": 4 * attended * config.num_heads,
                "attention_bytes": 2 * KEY_BYTES * attended * config.num_kv_heads,
            }
        )
    return {"contexts": points}


def seconds_with_context(client: planish.SamplingClient, context: int, rounds: int) -> float:
    shape = Shape(SEQUENCES, 1, MANY_TOKENS, prompt_tokens=context, shared_tokens=0)
    prompts = make_prompts(client.get_tokenizer(), random.Random(context), shape)

    def sample(new_tokens: int) -> None:
        rollouts(client, {"prompts": prompts, "samples": 1, "new_tokens": new_tokens, "seed": 0})

    return statistics.median(step_seconds(sample, FEW_TOKENS, MANY_TOKENS, rounds))


if __name__ == "__main__":
    main(chz.entrypoint(Options))
