"""Synthetic data for RLHF: answers to sums, short or wordy, right or wrong, and a rule that
compares them.

    A right result beats a wrong or missing one. If both are right or both are wrong, the answer
    with fewer words wins.

There are three kinds of data. Demonstrations are right and often wordy. Comparisons are labelled by
the rule, and either answer may be wrong. Prompts are the questions alone. Test sums do not occur in
the training data, in either order of the numbers. Since the rule is known, it can evaluate a policy
that was trained with a learned preference model.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import chz

from planish import ServiceClient
from planish.errors import UserError
from planish.preference.datasets import ComparisonBuilder
from planish.preference.preference_models import PreferenceModelBuilder
from planish.preference.prompts import PromptBuilder, Prompts
from planish.preference.types import Comparison, Label, LabeledComparison, Messages
from planish.recipes.arithmetic_expressions import last_number
from planish.recipes.sum_comparisons import CLOSINGS, OPENINGS
from planish.recipes.sums import Sum, all_sums
from planish.renderers import get_text_content
from planish.supervised.datasets import RowDataset
from planish.supervised.rendering import conversation_converter
from planish.supervised.types import ChatDatasetBuilder, SupervisedDataset

QUESTION = re.compile(r"What is (\d+) \+ (\d+)\?")
EXTRA_PHRASE_PROBABILITY = 0.6
"""Probability of an opening, and of a closing."""
RIGHT_PROBABILITY = 0.9
"""Probability of the right result in an answer of a comparison."""
MAX_RESULT_ERROR = 3
"""Largest distance of a wrong result from the right one."""


@dataclass(frozen=True)
class Quality:
    """The properties of an answer that the rule compares."""

    is_right: bool
    num_words: int

    @property
    def rank(self) -> tuple[bool, int]:
        """Sort key; larger is better."""
        return self.is_right, -self.num_words


async def rule_preference(comparison: Comparison) -> float:
    """Return the preference of the rule: 1 if B is better, -1 if A is better, 0 for a tie."""
    a, b = (
        quality(comparison.prompt_conversation, side)
        for side in (comparison.completion_A, comparison.completion_B)
    )
    return float((b.rank > a.rank) - (b.rank < a.rank))


def quality(prompt: Messages, completion: Messages) -> Quality:
    """Return the quality of an answer. Raises UserError if the prompt is not one of these sums."""
    match = QUESTION.fullmatch(text_of(prompt[-1:]))
    if match is None:
        raise UserError(
            f"{text_of(prompt[-1:])!r:.100} is not a question of the generated sums, and the rule "
            "covers only these"
        )
    text = text_of(completion)
    return Quality(last_number(text) == int(match[1]) + int(match[2]), len(text.split()))


def text_of(messages: Messages) -> str:
    """Return the texts of messages as one text."""
    return " ".join(get_text_content(message) for message in messages)  # type: ignore[arg-type]


@chz.chz
class RuleBuilder(PreferenceModelBuilder):
    """Builder of the rule, in place of a preference model."""

    def __call__(self, service_client: ServiceClient | None = None) -> Any:
        """Return the rule. It does not use `service_client`."""
        return rule_preference


@chz.chz
class WordySums:
    """The sums, and how many of them are held out."""

    largest: int = chz.field(default=12, doc="largest operand")
    test_size: int = chz.field(
        default=48,
        doc="number of held-out sums, plus one if a + b and b + a would otherwise be split",
    )
    seed: int = 0

    @chz.validate
    def _leaves_some(self) -> None:
        count = (self.largest + 1) ** 2
        if not 0 <= self.test_size <= count // 2:
            raise UserError(
                f"test_size={self.test_size}: there are {count} sums up to largest={self.largest}, "
                f"half of which are trained on; give at most {count // 2}, or a larger largest"
            )

    def split(self) -> tuple[list[Sum], list[Sum]]:
        """Return (training sums, held-out sums), each in a random order."""
        rng = random.Random(f"wordy sums:{self.seed}")
        sums = all_sums(self.largest)
        rng.shuffle(sums)
        test: list[Sum] = []
        train: list[Sum] = []
        for problem in sums:
            part = test if len(test) < self.test_size else train
            part += problem.orders
        rng.shuffle(train)
        return train, test


def random_answer(problem: Sum, result: int, rng: random.Random) -> Messages:
    """Return an answer with the given result. An opening and a closing are added at random."""
    equation = f"{problem.terms} = {result}."
    opening = [rng.choice(OPENINGS)] if rng.random() < EXTRA_PHRASE_PROBABILITY else []
    closing = [rng.choice(CLOSINGS)] if rng.random() < EXTRA_PHRASE_PROBABILITY else []
    return [{"role": "assistant", "content": " ".join([*opening, equation, *closing])}]


def result_of(problem: Sum, rng: random.Random) -> int:
    """Return the right result or, with probability 1 - RIGHT_PROBABILITY, a close one."""
    if rng.random() < RIGHT_PROBABILITY:
        return problem.answer
    errors = [
        error
        for error in range(-MAX_RESULT_ERROR, MAX_RESULT_ERROR + 1)
        if error and problem.answer + error >= 0
    ]
    return problem.answer + rng.choice(errors)


def random_comparison(problem: Sum, rng: random.Random) -> LabeledComparison:
    """Return a comparison of two random answers that are not equally good."""
    prompt = [problem.prompt]
    while True:
        a, b = (random_answer(problem, result_of(problem, rng), rng) for _ in "AB")
        rank_a, rank_b = quality(prompt, a).rank, quality(prompt, b).rank
        if rank_a != rank_b:
            label: Label = "A" if rank_a > rank_b else "B"
            return LabeledComparison(Comparison(prompt, a, b), label)


@chz.chz
class WordySumChats(ChatDatasetBuilder):
    """Demonstrations: `each` right answers to every sum."""

    sums: WordySums = WordySums()
    each: int = 4

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Return (training dataset, test dataset). Without test sums, the latter is None."""
        config = self.common_config
        render = conversation_converter(self.common_config, self.renderer)
        rng = random.Random(f"demonstrations:{self.sums.seed}")
        train, test = self.sums.split()
        train_conversations = [
            conversation for _ in range(self.each) for conversation in demonstrations(train, rng)
        ]
        test_conversations = demonstrations(test, rng)
        return RowDataset.from_splits(
            train_conversations, test_conversations, config.batch_size, render, self.sums.seed
        )


def demonstrations(sums: Sequence[Sum], rng: random.Random) -> list[Messages]:
    """Return a conversation with a right answer to each sum."""
    return [[problem.prompt, *random_answer(problem, problem.answer, rng)] for problem in sums]


@chz.chz
class WordySumComparisons(ComparisonBuilder):
    """Comparisons: `each` for every training sum, and one for every held-out sum."""

    sums: WordySums = WordySums()
    each: int = 4

    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        """Return (training comparisons, test comparisons)."""
        rng = random.Random(f"comparisons:{self.sums.seed}")
        train, test = self.sums.split()
        return [random_comparison(problem, rng) for _ in range(self.each) for problem in train], [
            random_comparison(problem, rng) for problem in test
        ]


@chz.chz
class WordySumPrompts(PromptBuilder):
    """The questions alone."""

    sums: WordySums = WordySums()

    def __call__(self) -> Prompts:
        """Return the prompts for training and test."""
        train, test = self.sums.split()
        return Prompts(
            [[problem.prompt] for problem in train], [[problem.prompt] for problem in test]
        )
