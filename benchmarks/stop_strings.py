"""How long stop strings take per step: `python benchmarks/stop_strings.py`.

Prints the CPU time that the worst legal stop strings add to a step of 256 samples, and the CPU time
of such a step of the tiny model that the tests use.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from planish.engine.sampling.sampler import Sampler, SamplerSettings
from planish.engine.sampling.stopping import StopCondition
from planish.model.decoder import Decoder
from planish.service import Sample
from planish.testing import tiny_model
from planish.tokenizer import load_tokenizer
from planish.types import (
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

SAMPLES, TOKENS, LENGTH = 256, 256, 1024
LETTERS = "etaoinshrdlucmfwypvbgkqjxz ,.EAT"
CASES = {
    "one short string": ["\n\nUser:"],
    "most strings, ends of all letters": [
        "x" * (MAX_STOP_BYTES - 1) + LETTERS[i % len(LETTERS)] for i in range(MAX_STOP_STRINGS)
    ],
    "most strings, all but the first byte in the text": [
        f"{i:02}" + "a" * (MAX_STOP_BYTES - 2) for i in range(MAX_STOP_STRINGS)
    ],
}
TEXTS = {
    "letters": [ord(random.Random(1).choice(LETTERS)) for _ in range(LENGTH)],
    "one letter": [ord("a")] * LENGTH,
    "random bytes": [random.Random(2).randrange(256) for _ in range(LENGTH)],
}


def matching(strings: list[str], text: list[int], decode: Callable[[Sequence[int]], str]) -> float:
    """Return the CPU seconds per token, of a sample of 768 to 1024 tokens."""
    condition = StopCondition.from_params(SamplingParams(stop=strings), ())
    texts = [text[:end] for end in range(len(text) - TOKENS, len(text))]
    began = time.thread_time()
    for tokens in texts:
        condition.is_met(tokens, decode)
    return (time.thread_time() - began) / len(texts)


def step_seconds(directory: Path, decode: Callable[[Sequence[int]], str]) -> float:
    """Return the CPU seconds of a decoding step without stop strings."""
    decoder = Decoder.load(directory, torch.float32, torch.device("cpu"))
    sampler = Sampler(decoder, SamplerSettings(), decode)
    future: Future[SampleResponse] = Future()
    params = SamplingParams(max_tokens=TOKENS, seed=1, stop=[])
    operation = Sample("s", ModelInput.from_ints([1, 2, 3]), SAMPLES, params)
    sampler.submit(operation, None, "base", future)
    began = time.process_time()
    while sampler.busy:
        sampler.step()
    future.result()
    return (time.process_time() - began) / TOKENS


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = load_tokenizer(tiny_model(directory))

        def decode(tokens: Sequence[int]) -> str:
            text = tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            assert isinstance(text, str)
            return text

        step = step_seconds(Path(directory), decode)
    print(f"a step of {SAMPLES} samples of the tiny model: {step * 1e3:.2f} ms")
    for case, strings in CASES.items():
        for name, text in TEXTS.items():
            added = SAMPLES * matching(strings, text, decode)
            print(f"{case}; text of {name}: {added * 1e3:.2f} ms, {added / step:.0%} of a step")


if __name__ == "__main__":
    main()
