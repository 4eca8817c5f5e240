"""A peer of a benchmark as a process: it loads once, then does one piece of work for each line it
is told.

Peers need their own environments, so this file and those beside it import nothing of planish except
`ours.py`. A line on standard input is "WORK ROUND"; the answer is one JSON object on the standard
output that the process began with. What libraries print goes to standard error.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Run = Callable[[dict[str, Any]], dict[str, Any]]
"""Does the work of one round (see `works.py`); answers facts by which peers' results can be
compared.

Its time is what is measured; a fact "seconds" takes the place of that, where a peer must make
something first that is there already when it runs for long.
"""


@dataclass(frozen=True)
class Peer:
    works: Mapping[str, Run]
    versions: Mapping[str, str]


class Wire:
    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)


def serve(load: Callable[[str], Peer]) -> None:
    """`python peer.py MODEL WORKS`: load(MODEL) gives the peer; WORKS is the file of `works.py`."""
    model, works = sys.argv[1:]
    wire = Wire()
    peer = load(model)
    with open(works) as file:
        rounds = json.load(file)
    wire.say({"versions": dict(peer.versions), "peak_gib": peak_gib()})
    for line in sys.stdin:
        name, number = line.split()
        start, used = time.perf_counter(), time.process_time()
        facts = peer.works[name](rounds[name][int(number)])
        seconds = time.perf_counter() - start
        wire.say(
            {
                "seconds": seconds,
                "cpu_seconds": time.process_time() - used,
                "peak_gib": peak_gib(),
                **facts,
            }
        )


def quickest_dtype() -> Any:
    """bf16, but float32 on a CPU on which torch takes several times as long for products of bf16."""
    import torch

    has_bfloat16 = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def peak_gib() -> float:
    """Largest resident memory of this process so far; of a process that computes on a GPU, the most
    of its memory that torch held.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / (1 << 30)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
