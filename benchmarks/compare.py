"""Compare planish with other systems ("peers") on the same workloads (workloads.py) in one run.

    python benchmarks/compare.py                                      what `make bench` does
    python benchmarks/compare.py name=peers peers=all workloads=all     what `make bench-peers` does
    python benchmarks/compare.py name=try small=True directory=/tmp   a quick check with small
        workloads, whose times mean nothing

Each peer runs in its own process and environment (environments.py) and loads once per workload.
After a smaller warm-up round, rounds alternate: round 1 of every peer, then round 2, and so on. A
waiting process is suspended. `limit` is the time of the unavoidable matmuls alone (limits.py),
measured in the same rounds. There is no result unless all peers did the same work: the same number
of tokens, and losses that agree.

Medians, ratios, machine, versions, commit and load are written to NAME.json in `directory`, and
report.py makes tables of them. Run it on an otherwise idle machine: the share of the cores that
other programs used is recorded for every round, and printed if it is large.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import chz
from environments import python_of
from machine import ROOT, commit, machine
from peer_process import PeerProcess
from report import RESULTS, peers_table
from workloads import SMALL_WORKLOADS, WORKLOADS, write_rounds

import planish
from planish.files import write_atomically
from planish.model.architecture.weight_sizes import SCHEMES
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model

HERE = Path(__file__).parent
OWN_ENVIRONMENT = "planish"
"""The environment that this process runs in."""
PATH_OPTIONS = ("directory", "models")
"""Options with paths, which are not part of the recorded options."""
BUSY_SHARE = 0.05
"""If other programs use a larger share of the cores in a round, it is printed."""
LOSS_TOLERANCE = 0.01
"""Allowed difference of losses, relative to the sum of |advantage| over the tokens. bf16 logprobs
differ by about 0.01 between implementations.
"""


@dataclass(frozen=True)
class PeerSpec:
    environment: str
    script: str
    workloads: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process, which select a variant of the script."""


SAMPLING = ("W1", "W1b", "W1c")
PEERS = {
    "ours": PeerSpec(OWN_ENVIRONMENT, "peers/ours.py", (*SAMPLING, "W1j", "W2", "W3")),
    "limit": PeerSpec(OWN_ENVIRONMENT, "limits.py", (*SAMPLING, "W2", "W3")),
    "generate": PeerSpec("trl", "peers/transformers_generate.py", SAMPLING),
    "generate-repeated": PeerSpec("trl", "peers/transformers_repeated.py", ("W1", "W1c")),
    "vllm": PeerSpec("vllm", "peers/vllm_cpu.py", (*SAMPLING, "W1j")),
    "peft": PeerSpec("trl", "peers/peft_training.py", ("W2",)),
    "peft-compiled": PeerSpec("trl", "peers/peft_training.py", ("W2",), {"PEFT_COMPILE": "1"}),
    "trl": PeerSpec("trl", "peers/trl_grpo.py", ("W3",)),
}
OPTIONAL_PEERS = {
    "llama": PeerSpec("llama", "peers/llama_cpp_alone.py", ("W1b",)),
    **{
        f"ours-{scheme}": PeerSpec(
            OWN_ENVIRONMENT,
            "peers/ours.py",
            (*SAMPLING, "W2", "W3"),
            {"OURS_OPTIONS": json.dumps({"quantize": scheme})},
        )
        for scheme in SCHEMES
    },
    "llama-bf16": PeerSpec("llama", "peers/llama_cpp_alone.py", ("W1b",), {"LLAMA_TYPE": "bf16"}),
    **{
        f"peft-{size}": PeerSpec(
            "trl", "peers/peft_training.py", ("W2",), {"PEFT_MICRO_BATCH": str(size)}
        )
        for size in (4, 8, 16, 32)
    },
}
"""Peers that "all" leaves out: llama.cpp is compiled from source, the sizes of PEFT's micro-batch
are only compared once, and quantized base weights compute with other weights.
"""


@chz.chz
class Options:
    name: str = "bench"
    """Name of the results file."""
    peers: str = "ours,limit,generate,peft"
    """Names separated by commas, or "all"."""
    workloads: str = "W1,W1b,W2"
    rounds: int = 3
    model: str = DEFAULT_MODEL
    directory: Path = RESULTS
    small: bool = False


@dataclass(frozen=True)
class PeerMeasurement:
    """One peer on one workload: the facts of each round after the warm-up."""

    process: PeerProcess
    rounds: list[dict[str, Any]]

    def row(self) -> dict[str, Any]:
        seconds = [result["seconds"] for result in self.rounds]
        return {
            "median_seconds": round(statistics.median(seconds), 4),
            "seconds": [round(value, 4) for value in seconds],
            "load_seconds": round(self.process.load_seconds, 2),
            "peak_gib": round(max(result["peak_gib"] for result in self.rounds), 3),
            "others": round(max(result["others"] for result in self.rounds), 3),
            "versions": dict(self.process.versions),
            "variables": dict(self.process.environment),
        }


def main(options: Options) -> None:
    all_peers = PEERS | OPTIONAL_PEERS
    specs = {name: all_peers[name] for name in parse_names(options.peers, PEERS, all_peers)}
    source = SMALL_WORKLOADS if options.small else WORKLOADS
    workloads = {name: source[name] for name in parse_names(options.workloads, source, source)}
    pythons = {spec.environment: interpreter(spec.environment) for spec in specs.values()}
    model = resolve_model(options.model)
    report = header(options)
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="planish-benchmark-") as scratch:
        path = Path(scratch) / "rounds.json"
        write_rounds(options.model, path, workloads, options.rounds)
        rounds = json.loads(path.read_text())
        for workload in workloads:
            peer_processes = [
                PeerProcess(
                    name, [pythons[spec.environment], HERE / spec.script], path, spec.variables
                )
                for name, spec in specs.items()
                if workload in spec.workloads
            ]
            measurements = measure_interleaved(
                peer_processes, workload, options.rounds, model, Path(scratch)
            )
            check_same_work(workload, rounds[workload], measurements)
            report["works"][workload] = {
                measurement.process.name: measurement.row() for measurement in measurements
            }
            # Write after each workload, because a later peer may run out of memory.
            write_atomically(
                options.directory / f"{options.name}.json", json.dumps(report, indent=1) + "\n"
            )
    print(peers_table(report))


def parse_names(text: str, every: Iterable[str], known: Iterable[str]) -> list[str]:
    names = list(every) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: give some of {', '.join(known)}, or all")
    return names


def interpreter(environment: str) -> Path:
    return Path(sys.executable) if environment == OWN_ENVIRONMENT else python_of(environment)


def header(options: Any) -> dict[str, Any]:
    """Return the fields that every results file begins with."""
    if ROOT not in Path(planish.__file__).parents:
        raise SystemExit(
            f"planish is imported from {planish.__file__}, not from this checkout: set "
            f"PYTHONPATH={ROOT}"
        )
    return {
        "options": {
            name: str(value)
            for name, value in chz.asdict(options).items()
            if name not in PATH_OPTIONS
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "works": {},
    }


def measure_interleaved(
    peer_processes: Sequence[PeerProcess], workload: str, rounds: int, model: Path, scratch: Path
) -> list[PeerMeasurement]:
    """Run all peers on one workload, alternating, in the given order."""
    measurements = [PeerMeasurement(peer_process, []) for peer_process in peer_processes]
    with ExitStack() as stack:
        # If this process is terminated, it must end the peers: all but one are suspended, and would
        # stay suspended.
        stack.callback(
            signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        )
        for number, peer_process in enumerate(peer_processes):
            say(f"{workload}: {peer_process.name} loads")
            stack.callback(peer_process.end)
            peer_process.start(model, scratch / f"{workload}-{number}.log")
        for number in range(rounds + 1):
            for measurement in measurements:
                result = measurement.process.run_round(workload, number)
                kind = f"round {number}" if number else "warm-up"
                busy_note = (
                    f"; others used {result['others']:.0%} of the cores"
                    if result["others"] > BUSY_SHARE
                    else ""
                )
                say(
                    f"{workload}: {measurement.process.name}, {kind}: {result['seconds']:.2f} "
                    f"s{busy_note}"
                )
                if number:
                    measurement.rounds.append(result)
    return measurements


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_same_work(
    workload: str, rounds: Sequence[Mapping[str, Any]], measurements: Sequence[PeerMeasurement]
) -> None:
    """Raise if a peer made another number of tokens than requested, or if the losses differ."""
    for number, round_spec in enumerate(rounds[1:]):
        expected_tokens = (
            len(round_spec["prompts"]) * round_spec["samples"] * round_spec["new_tokens"]
        )
        facts = {one.process.name: one.rounds[number] for one in measurements}
        for name, one in facts.items():
            if one.get("tokens", expected_tokens) != expected_tokens:
                raise SystemExit(
                    f"{workload}, round {number + 1}: {name} made {one['tokens']} tokens, not "
                    f"{expected_tokens}"
                )
        losses = {name: one["loss"] for name, one in facts.items() if "loss" in one}
        if losses:
            weights = [abs(advantage) for group in round_spec["advantages"] for advantage in group]
            allowed = LOSS_TOLERANCE * sum(weights) * round_spec["new_tokens"]
            if max(losses.values()) - min(losses.values()) > allowed:
                raise SystemExit(
                    f"{workload}, round {number + 1}: losses differ by more than {allowed:.3g}: "
                    f"{losses}"
                )


if __name__ == "__main__":
    main(chz.entrypoint(Options))
