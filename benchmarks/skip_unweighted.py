"""What `skip_unweighted` saves where part of each sequence is a prompt.

    OMP_NUM_THREADS=2 python benchmarks/skip_unweighted.py
    python benchmarks/skip_unweighted.py prompt_tokens=96 answer_tokens=160

Each round computes the cross-entropy gradient of the same datums with the option off and on, in
turns. The script prints one JSON object: for both settings the median seconds of a call, and their
ratio.
"""

import json
import statistics
import time

import chz
import numpy as np

from planish import ServiceClient
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.types import Datum, ModelInput


@chz.chz
class Options:
    model: str = DEFAULT_MODEL
    datums: int = 16
    prompt_tokens: int = 192
    answer_tokens: int = 64
    rounds: int = 3


def main(options: Options) -> None:
    service = ServiceClient()
    client = service.create_lora_training_client(options.model, rank=32)
    data = datums(options)
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for number in range(options.rounds + 1):
        for skip, measured in seconds.items():
            began = time.perf_counter()
            client.forward_backward(data, "cross_entropy", {"skip_unweighted": skip}).result()
            if number:  # the first round warms up
                measured.append(time.perf_counter() - began)
    off, on = (statistics.median(measured) for measured in seconds.values())
    print(json.dumps({"off": off, "on": on, "ratio": on / off}))
    service.close()


def datums(options: Options) -> list[Datum]:
    """Return datums of random tokens without a common prefix; only the answers have weight."""
    rng = np.random.default_rng(0)
    length = options.prompt_tokens + options.answer_tokens
    weights = (np.arange(1, length) >= options.prompt_tokens).astype(np.float32)
    data = []
    for _ in range(options.datums):
        tokens = rng.integers(100, 40_000, length).tolist()
        inputs = {"target_tokens": np.array(tokens[1:]), "weights": weights}
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return data


if __name__ == "__main__":
    chz.nested_entrypoint(main)
