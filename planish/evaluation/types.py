"""What is asked, how it is answered, and what is kept of an answer."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from planish.errors import UserError
from planish.renderers import Message


@dataclass(frozen=True)
class Question:
    number: int
    """From 1, in the order of the data; by it a question is known in files, and its draws are
    seeded.
    """
    messages: tuple[Message, ...]
    reference: str
    """The right answer; for multiple choice its letter."""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    correct: bool
    extracted: str | None
    """The final answer that was found in the text; None if there is none."""
    error: str | None = None
    """Why nobody can say whether it is right; it then counts as wrong."""


@dataclass(frozen=True)
class SampledTask:
    """Questions that are answered in the model's own words."""

    name: str
    source: str
    """Where the questions come from."""
    digest: str
    """Of all questions of the source, so that two evaluations can be known to ask the same."""
    questions: Sequence[Question]
    grade: Callable[[Question, str], Awaitable[Verdict]]
    """Given the text of the model's message."""


@dataclass(frozen=True)
class ChoiceTask:
    """Questions that are answered by the choice that the model finds likeliest: nothing is drawn."""

    name: str
    source: str
    digest: str
    questions: Sequence[Question]


Task = SampledTask | ChoiceTask


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""

    samples: int = 1
    """Answers to each question. They share its prompt, which is computed once."""
    max_tokens: int = 512
    temperature: float = 0.0
    """0 = greedy."""
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
                f"samples={self.samples} at temperature=0 would be {self.samples} times the same answer; give a temperature, such as 1"
            )


@dataclass(frozen=True)
class SampledAnswer:
    """A row of samples.jsonl for a SampledTask."""

    question: int
    sample: int
    """From 0, of the question's answers."""
    prompt: str
    answer: str
    """All that the model wrote, marks of its format included."""
    tokens: list[int]
    stop_reason: Literal["stop", "length"] | None
    """None: there was no room for an answer."""
    reward: float
    """1 for right."""
    extracted: str | None
    reference: str
    error: str | None = None


@dataclass(frozen=True)
class ScoredChoice:
    letter: str
    text: str
    logprob: float
    """Sum over the tokens of the message that says this, its end mark included."""
    num_tokens: int

    @property
    def mean_logprob(self) -> float:
        return self.logprob / self.num_tokens


@dataclass(frozen=True)
class ChosenAnswer:
    """A row of samples.jsonl for a ChoiceTask."""

    question: int
    prompt: str
    choices: list[ScoredChoice]
    answer: str | None
    """The letter of the largest sum; the first of equal ones. None: the choices do not fit the
    context.
    """
    answer_length_normalized: str | None
    """The letter of the largest mean over tokens."""
    reward: float
    reward_length_normalized: float
    reference: str
    error: str | None = None
