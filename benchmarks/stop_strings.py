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

from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.sampling.stopping import Detokenizer, StopCondition, StopMatcher
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.choose import choose_backend
from planish.model.loading import load_decoder
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
    rng = random.Random(3)
    size = MAX_STOP_BYTES
    return ["".join(rng.choices("ab", k=size)) for _ in range(MAX_STOP_STRINGS)]


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


def strings_without_ends(strings: Strings, rng: random.Random) -> list[int]:
    """Return a text of parts of the strings, each of which ends where the string would not."""
    text = b""
    while len(text) < LENGTH:
        string = rng.choice(strings)
        text += string[: rng.randrange(len(string))].encode()
    return list(text[:LENGTH])


TEXTS: dict[str, Callable[[Strings, random.Random], list[int]]] = {
    "letters": lambda _, rng: [ord(rng.choice(LETTERS)) for _ in range(LENGTH)],
    "one letter": lambda _, rng: [ord("a")] * LENGTH,
    "two letters": lambda _, rng: [ord(rng.choice("ab")) for _ in range(LENGTH)],
    "characters of two bytes": lambda _, rng: list("é".encode()) * (LENGTH // 2),
    "random bytes": lambda _, rng: [rng.randrange(256) for _ in range(LENGTH)],
    "beginnings of the strings": strings_without_ends,
}


def matching_seconds(condition: StopCondition, texts: list[list[int]]) -> float:
    """Return the CPU seconds per step of one sample of each text. Where a sample ends, another one
    begins with the rest of the text.
    """
    matchers, starts = [StopMatcher(condition) for _ in texts], [0] * len(texts)
    cpu_seconds = 0.0
    for end in range(1, LENGTH + 1):
        unread_texts = [text[start:end] for start, text in zip(starts, texts, strict=True)]
        start_time = time.thread_time()
        is_met = [
            matcher.text_end(tokens) is not None
            for matcher, tokens in zip(matchers, unread_texts, strict=True)
        ]
        if end > LENGTH - TOKENS:
            cpu_seconds += time.thread_time() - start_time
        for i in range(len(texts)):
            if is_met[i]:
                matchers[i], starts[i] = StopMatcher(condition), end
    return cpu_seconds / TOKENS


def step_seconds(directory: Path, decode: Callable[[Sequence[int]], str]) -> float:
    """Return the CPU seconds of a decoding step without stop strings."""
    backend = choose_backend(
        ModelConfig.from_directory(directory), torch.float32, torch.device("cpu"), False
    )
    decoder = load_decoder(directory, backend)
    sampler = Sampler(decoder, SamplerSettings(), decode)
    future: Future[SampleResponse] = Future()
    params = SamplingParams(max_tokens=TOKENS, seed=1, stop=[])
    operation = Sample("s", ModelInput.from_ints([1, 2, 3]), SAMPLES, params)
    sampler.submit(operation, None, "base", future)
    start_time = time.process_time()
    while sampler.busy:
        sampler.step()
    future.result()
    return (time.process_time() - start_time) / TOKENS


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

        seconds_per_step = step_seconds(Path(directory), decode)

        def token_text(token: int) -> str:
            return str(tokenizer.convert_ids_to_tokens(token))

        texts = Detokenizer(decode, token_text)
    print(f"a step of {SAMPLES} samples of the tiny model: {seconds_per_step * 1e3:.2f} ms")
    largest_share = 0.0
    for case, strings in CASES.items():
        for name, make in TEXTS.items():
            rng = random.Random(1)
            sampled_texts = [make(strings, rng) for _ in range(SAMPLES)]
            added_seconds = matching_seconds(
                StopCondition.from_params(SamplingParams(stop=strings), (), texts), sampled_texts
            )
            largest_share = max(largest_share, added_seconds / seconds_per_step)
            print(
                f"{case}; text of {name}: {added_seconds * 1e3:.2f} ms, "
                f"{added_seconds / seconds_per_step:.0%} of a step"
            )
    print(f"the worst: {largest_share:.0%} of a step")


if __name__ == "__main__":
    main()
