"""The types of an evaluation: questions, tasks, sampling options and answers."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from planish.errors import UserError
from planish.renderers import Message


@dataclass(frozen=True)
class Question:
    """One question of a task."""

    number: int
    """The position in the data, from 1. It identifies the question in files and determines its
    seeds.
    """
    messages: tuple[Message, ...]
    reference: str
    """The correct answer; for multiple choice, its letter."""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The grade of one answer."""

    correct: bool
    extracted: str | None
    """The final answer that was found in the text; None if there is none."""
    error: str | None = None
    """Why the answer could not be graded, in which case it counts as wrong; None if it could."""


@dataclass(frozen=True)
class SampledTask:
    """Questions whose answers are sampled and graded."""

    name: str
    source: str
    """The file, directory or hub name that the questions come from."""
    digest: str
    """SHA-256 of all questions of the source, to check that two evaluations ask the same."""
    questions: Sequence[Question]
    grade: Callable[[Question, str], Verdict | Awaitable[Verdict]]
    """Grades an answer. A plain function runs in a thread, so it must be thread-safe."""
    """Grades the text of the model's message."""


@dataclass(frozen=True)
class ChoiceTask:
    """Questions whose choices are compared by their logprobs; nothing is sampled."""

    name: str
    source: str
    digest: str
    questions: Sequence[Question]


Task = SampledTask | ChoiceTask


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled."""

    samples: int = 1
    """The number of answers to each question. They share one prefill of the prompt."""
    max_tokens: int = 512
    temperature: float = 0.0
    """The sampling temperature; 0 is greedy."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "max_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: give a whole number of at least 1")
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature={self.temperature}: give a number of at least 0; 0 is greedy"
            )
        if self.samples > 1 and self.temperature == 0:
            raise UserError(
                f"samples={self.samples} at temperature=0 would be {self.samples} times the same "
                "answer; give a temperature, such as 1"
            )


@dataclass(frozen=True)
class SampledAnswer:
    """One row of samples.jsonl for a SampledTask."""

    question: int
    sample: int
    """The number of the answer among those to its question, from 0."""
    prompt_id: str
    """Identifies the tokens of the prompt (`planish.rl.types.prompt_id`)."""
    prompt: str
    answer: str
    """The decoded tokens of the answer, including control tokens."""
    tokens: list[int]
    stop_reason: Literal["stop", "length"] | None
    """Why sampling ended; None if the prompt left no room for an answer."""
    reward: float
    """1 if the answer is correct, else 0."""
    extracted: str | None
    reference: str
    error: str | None = None


@dataclass(frozen=True)
class ScoredChoice:
    """One choice of a question with its logprob."""

    letter: str
    text: str
    logprob: float
    """The sum over the tokens of the assistant's message, including its end-of-message token, in
    nats.
    """
    num_tokens: int

    @property
    def mean_logprob(self) -> float:
        """The logprob per token."""
        return self.logprob / self.num_tokens


@dataclass(frozen=True)
class ChosenAnswer:
    """One row of samples.jsonl for a ChoiceTask."""

    question: int
    prompt: str
    choices: list[ScoredChoice]
    answer: str | None
    """The letter of the choice with the largest logprob, the first one in a tie.

    None if the choices do not fit into the context window.
    """
    answer_length_normalized: str | None
    """The letter of the choice with the largest logprob per token."""
    reward: float
    reward_length_normalized: float
    reference: str
    error: str | None = None
