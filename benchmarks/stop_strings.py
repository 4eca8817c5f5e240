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
from planish.engine.sampling.stopping import Detokenizer, StopCondition, StopMatcher
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

SAMPLES, TOKENS, LENGTH = 256, 256, 512
LETTERS = "etaoinshrdlucmfwypvbgkqjxz ,.EAT"
Strings = list[str]


def two_letters() -> Strings:
    source = random.Random(3)
    size = MAX_STOP_BYTES
    return ["".join(source.choices("ab", k=size)) for _ in range(MAX_STOP_STRINGS)]


CASES: dict[str, Strings] = {
    "one short string": ["\n\nUser:"],
    "most strings, ends of all letters": [
        "x" * (MAX_STOP_BYTES - 1) + LETTERS[i % len(LETTERS)] for i in range(MAX_STOP_STRINGS)
    ],
    "most strings, begun by all letters": [
        LETTERS[i % len(LETTERS)] * MAX_STOP_BYTES for i in range(MAX_STOP_STRINGS)
    ],
    "most strings, all but the first byte in the text": [
        f"{i:02}" + "a" * (MAX_STOP_BYTES - 2) for i in range(MAX_STOP_STRINGS)
    ],
    "most strings, of characters of two bytes": [
        f"{i:02}" + "é" * (MAX_STOP_BYTES // 2 - 1) for i in range(MAX_STOP_STRINGS)
    ],
    "most strings, of two letters": two_letters(),
}


def begun(strings: Strings, source: random.Random) -> list[int]:
    """Return a text of parts of the strings, each of which ends where the string would not."""
    text = b""
    while len(text) < LENGTH:
        string = source.choice(strings)
        text += string[: source.randrange(len(string))].encode()
    return list(text[:LENGTH])


TEXTS: dict[str, Callable[[Strings, random.Random], list[int]]] = {
    "letters": lambda _, source: [ord(source.choice(LETTERS)) for _ in range(LENGTH)],
    "one letter": lambda _, source: [ord("a")] * LENGTH,
    "two letters": lambda _, source: [ord(source.choice("ab")) for _ in range(LENGTH)],
    "characters of two bytes": lambda _, source: list("é".encode()) * (LENGTH // 2),
    "random bytes": lambda _, source: [source.randrange(256) for _ in range(LENGTH)],
    "beginnings of the strings": begun,
}


def matching(condition: StopCondition, texts: list[list[int]]) -> float:
    """Return the CPU seconds per step of one sample of each text. Where a sample ends, another one
    begins with the rest of the text.
    """
    matchers, starts = [StopMatcher(condition) for _ in texts], [0] * len(texts)
    spent = 0.0
    for end in range(1, LENGTH + 1):
        ends = [text[start:end] for start, text in zip(starts, texts, strict=True)]
        began = time.thread_time()
        met = [matcher.is_met(tokens) for matcher, tokens in zip(matchers, ends, strict=True)]
        if end > LENGTH - TOKENS:
            spent += time.thread_time() - began
        for i in range(len(texts)):
            if met[i]:
                matchers[i], starts[i] = StopMatcher(condition), end
    return spent / TOKENS


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

        def written(token: int) -> str:
            return str(tokenizer.convert_ids_to_tokens(token))

        texts = Detokenizer(decode, written)
    print(f"a step of {SAMPLES} samples of the tiny model: {step * 1e3:.2f} ms")
    worst = 0.0
    for case, strings in CASES.items():
        for name, make in TEXTS.items():
            source = random.Random(1)
            sampled = [make(strings, source) for _ in range(SAMPLES)]
            added = matching(
                StopCondition.from_params(SamplingParams(stop=strings), (), texts), sampled
            )
            worst = max(worst, added / step)
            print(f"{case}; text of {name}: {added * 1e3:.2f} ms, {added / step:.0%} of a step")
    print(f"the worst: {worst:.0%} of a step")


if __name__ == "__main__":
    main()
