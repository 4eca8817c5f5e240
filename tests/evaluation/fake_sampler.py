"""A sampling client whose answers come from a function, and which counts its requests. Like the
engine's, its samples depend only on seed and index.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planish.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

END = "<|im_end|>"


class Killed(BaseException):
    """Simulates a kill of the process."""


@dataclass
class FakeSampler:
    tokenizer: Any
    answer: Callable[[str, random.Random], str] = lambda prompt, luck: "a\\boxed{1}" + END
    """Of the prompt's text and a source of luck; what does not end with END is cut off."""
    logprob: Callable[[str], float] = lambda text: -1.0
    """Of each token of a scored message, given the whole text."""
    die_after: int | None = None
    asked: list[str] = field(default_factory=list)
    requests: list[tuple[int, SamplingParams]] = field(default_factory=list)
    most_at_once: int = 0
    _at_once: int = 0
    model_path: str | None = None

    def get_base_model(self) -> str:
        return "Qwen/Qwen2.5-1.5B-Instruct"

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        text = self.tokenizer.decode(prompt.to_ints())
        await self._take(text)
        self.requests.append((num_samples, sampling_params))
        return SampleResponse(
            [self._sequence(text, sampling_params, index) for index in range(num_samples)]
        )

    async def compute_logprobs_async(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        text = self.tokenizer.decode(prompt.to_ints())
        await self._take(text)
        known = prompt_logprobs_last_n or prompt.length
        return [None] * (prompt.length - known) + [self.logprob(text)] * known

    async def _take(self, text: str) -> None:
        if self.die_after is not None and len(self.asked) >= self.die_after:
            raise Killed
        self.asked.append(text)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0)
        self._at_once -= 1

    def _sequence(self, text: str, params: SamplingParams, index: int) -> SampledSequence:
        answer = self.answer(text, random.Random(f"{params.seed}:{index}"))
        tokens = self.tokenizer.encode(answer, add_special_tokens=False)[: params.max_tokens]
        stop = (
            "stop"
            if answer.endswith(END) and tokens[-1] == self.tokenizer.convert_tokens_to_ids(END)
            else "length"
        )
        return SampledSequence(
            stop, str(index), np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32)
        )
