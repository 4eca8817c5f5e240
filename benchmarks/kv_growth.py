"""How many samples run at once if `max_tokens` is far above the lengths of the samples, and how long
they take: `python benchmarks/kv_growth.py`.

The same samples are served in two ways, alternately. In the first, each sample reserves keys and
values for `max_tokens` when it starts. In the second, it reserves what it is expected to need, and
grows (planish/engine/sampling/reservations.py). Both must give the same tokens and logprobs. The
model is the default one, SmolLM2-135M-Instruct. The default sizes are 64 samples of 2,048 tokens
with max_tokens=8,000 in 4 GiB, the default on a CPU.

    python benchmarks/kv_growth.py --samples 32 --tokens 256 --max-tokens 2048 --kv-gib 0.5
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch

from planish.engine.sampling import reservations
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.settings import choose_dtype
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.kernels.choose import choose_backend
from planish.model.loading import load_decoder
from planish.model.sources.resolve import resolve_model
from planish.service import Sample
from planish.types import ModelInput, SampleResponse, SamplingParams

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPT_TOKENS = 100


@dataclass(frozen=True)
class Outcome:
    """How one way of reserving memory served all samples."""

    reserves: str
    samples_at_once: int
    """The largest number of samples that ran at the same time."""
    preemptions: int
    steps: int
    seconds: float
    tokens_per_second: float


def served(decoder: BaseDecoder, reserves: str, options: argparse.Namespace) -> tuple[Outcome, Any]:
    """Serve all samples. Return the outcome, and the tokens and logprobs of all samples."""
    settings = SamplerSettings(kv_cache_bytes=int(options.kv_gib * (1 << 30)))
    sampler = Sampler(decoder, settings, str)
    vocab = decoder.config.vocab_size
    futures: list[Future[SampleResponse]] = []
    for number in range(options.samples):
        prompt = ModelInput.from_ints([(17 * number + i) % vocab for i in range(PROMPT_TOKENS)])
        params = SamplingParams(max_tokens=options.max_tokens, seed=number, stop=[])
        operation = Sample("s", prompt, 1, params)
        sampler.validate(operation)
        futures.append(Future())
        sampler.submit(operation, None, "base", futures[-1])
    at_once = steps = 0
    start = time.perf_counter()
    while sampler.busy:
        sampler.step()
        steps += 1
        at_once = max(at_once, len(sampler._scheduler.running))
        for sample in sampler._scheduler.running:
            # In place of a stop token, which comes at a random length.
            if len(sample.tokens) == options.tokens - 1:
                sample.request.max_tokens = options.tokens
    seconds = time.perf_counter() - start
    sequences = [s for future in futures for s in future.result().sequences]
    num_tokens = sum(len(sequence.tokens) for sequence in sequences)
    outcome = Outcome(
        reserves, at_once, sampler.num_preemptions, steps, seconds, num_tokens / seconds
    )
    return outcome, [(sequence.tokens, sequence.logprobs) for sequence in sequences]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=8000)
    parser.add_argument("--kv-gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    directory = resolve_model(MODEL)
    config, dtype = ModelConfig.from_directory(directory), choose_dtype("auto", device)
    decoder = load_decoder(directory, choose_backend(config, dtype, device, deterministic=False))
    outcomes: list[Outcome] = []
    bits: list[Any] = []
    for _ in range(options.rounds):
        for reserves in ("max_tokens", "expected tokens"):
            # Samples expect at least their headroom.
            headroom = 1 << 30 if reserves == "max_tokens" else reservations._MIN_HEADROOM_TOKENS
            with mock.patch.object(reservations, "_MIN_HEADROOM_TOKENS", headroom):
                outcome, found = served(decoder, reserves, options)
            print(json.dumps(asdict(outcome)), flush=True)
            outcomes.append(outcome)
            bits.append(found)
    assert all(found == bits[0] for found in bits), "the ways differ"
    print("the same tokens and logprobs in all runs")


if __name__ == "__main__":
    main()
