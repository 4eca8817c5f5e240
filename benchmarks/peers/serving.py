"""A peer of a benchmark as a process: it loads once and then runs one round for each input line.

Peers run in their own environments, so the files in this folder, except `ours.py`, do not import
planish. A line on standard input is "WORK ROUND"; the answer is one JSON object on the original
standard output. Output of libraries goes to standard error.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

RunRound = Callable[[dict[str, Any]], dict[str, Any]]
"""Runs one round (see `workloads.py`) and returns facts with which the peers' work can be compared.

The time of this call is the measurement. If a peer needs preparation that a long run would need
only once, it returns its own time as the fact "seconds".
"""


@dataclass(frozen=True)
class Peer:
    workloads: Mapping[str, RunRound]
    versions: Mapping[str, str]


class ReplyPipe:
    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)


def serve(load: Callable[[str], Peer]) -> None:
    """Run `python peer.py MODEL WORKS`. load(MODEL) returns the peer; WORKS is the file of
    `workloads.py`.
    """
    model, rounds_file = sys.argv[1:]
    reply_pipe = ReplyPipe()
    peer = load(model)
    with open(rounds_file) as file:
        rounds = json.load(file)
    reply_pipe.send({"versions": dict(peer.versions), "peak_gib": peak_gib()})
    for line in sys.stdin:
        name, number = line.split()
        start, cpu_start = time.perf_counter(), time.process_time()
        facts = peer.workloads[name](rounds[name][int(number)])
        seconds = time.perf_counter() - start
        reply_pipe.send(
            {
                "seconds": seconds,
                "cpu_seconds": time.process_time() - cpu_start,
                "peak_gib": peak_gib(),
                **facts,
            }
        )


def fastest_dtype() -> Any:
    """Return bf16, or float32 on a CPU where torch's bf16 matmuls are several times slower."""
    import torch

    has_bfloat16 = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def peak_gib() -> float:
    """Return the peak resident memory of this process in GiB. If it uses a GPU, return the peak GPU
    memory that torch reserved.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / (1 << 30)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
