"""Sums as tasks: RL environments, prompts for a teacher with a test of the student, and rubrics for
a judge.

The last number of a message is its answer.

    reward = correct + 0.1 * (format - 1)

`format`: the message is the equation or the number alone, and ends with a stop sequence.
"""

import random
import re
from functools import partial
from typing import Any

import chz

from planish.recipes.arithmetic_expressions import last_number
from planish.recipes.sums import (
    EXAMPLE_SUMS,
    NUM_TEST_SUMS,
    Sum,
    held_out_sums,
    random_sum,
    split_sums,
    untrained_pairs,
    worked_example,
    worked_examples,
)
from planish.renderers import Renderer
from planish.rl.environments.datasets import ENDLESS_NUM_BATCHES, ProblemDataset
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.environments.problem_env import ProblemEnv, ProblemGroupBuilder
from planish.rl.rollout.evaluation import RLTestSetEvaluator
from planish.rl.types import RLDataset
from planish.rubric.rubrics import Criterion, Example, RubricRow, RubricRows
from planish.runlog.model_renderer import model_renderer

ANSWER_FORMAT = re.compile(r"(\d+ \+ \d+ = )?\d+\.?")
MAX_TOKENS = 16
"""Maximum tokens of an answer in the test of a student."""
VERDICT_SCORES = {"Yes": 1.0, "No": 0.0}
NUM_EXAMPLE_VERDICTS = 5
"""Maximum number of example verdicts in a judge's prompt."""


class SumEnv(ProblemEnv):
    """One sum, after worked examples if `shows_examples`."""

    def __init__(self, renderer: Renderer, problem: Sum, *, shows_examples: bool = True) -> None:
        super().__init__(renderer, convo_prefix=worked_examples() if shows_examples else None)
        self.problem = problem

    def get_question(self) -> str:
        """Return the question."""
        return self.problem.question

    def check_format(self, sample_str: str) -> bool:
        """Return whether the text is the equation or a number alone."""
        return ANSWER_FORMAT.fullmatch(sample_str.strip()) is not None

    def check_answer(self, sample_str: str) -> bool:
        """Return whether the last number of the text is the result."""
        return last_number(sample_str) == self.problem.answer

    def get_reference_answer(self) -> str:
        """Return the result."""
        return str(self.problem.answer)


@chz.chz
class SumDatasetBuilder(ProblemDatasetBuilder):
    """Groups for random sums without end, and held-out sums for the test."""

    max_operand: int = chz.field(default=20, doc="largest operand")
    eval_problems: int | None = chz.field(
        default=None, doc=f"number of test sums; none = {NUM_TEST_SUMS}, or a third of all"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). Without test sums, the latter is None."""
        test_sums = held_out_sums(self.max_operand, self.eval_problems)
        held_out = untrained_pairs(test_sums)

        def sample_problem(rng: random.Random) -> Sum:
            return random_sum(rng, self.max_operand, held_out)

        return self.generated(sample_problem, ENDLESS_NUM_BATCHES), self.evaluation(test_sums)

    def make_env(self, problem: Sum) -> SumEnv:
        """Return the environment of one answer."""
        return SumEnv(self.renderer, problem)

    def tag(self) -> str:
        """Return "arithmetic"."""
        return "arithmetic"


def generated_sum_prompts(
    count: int, max_operand: int, seed: int, *, shows_examples: bool
) -> list[list[dict[str, Any]]]:
    """Return `count` random questions. With `shows_examples`, worked examples come before each. No
    prompt asks for a sum of `sum_test`.
    """
    held_out = untrained_pairs(held_out_sums(max_operand, None))
    rng = random.Random(f"prompts:{seed}")
    prefix = worked_examples() if shows_examples else []
    problems = (random_sum(rng, max_operand, held_out) for _ in range(count))
    return [[dict(message) for message in (*prefix, problem.prompt)] for problem in problems]


def sum_test(
    *, model_name: str, renderer_name: str | None, max_operand: int, shows_examples: bool
) -> RLTestSetEvaluator:
    """Return the evaluator of test/env/all/correct and the other test metrics, with greedy
    answers.
    """

    def attempt(problem: Sum) -> ProblemGroupBuilder:
        make_env = partial(_sum_env, problem, model_name, renderer_name, shows_examples)
        return ProblemGroupBuilder(make_env, 1, "sums")

    tests = held_out_sums(max_operand, None)
    return RLTestSetEvaluator(
        ProblemDataset(tests, attempt, len(tests)), MAX_TOKENS, temperature=0.0
    )


def _sum_env(
    problem: Sum, model_name: str, renderer_name: str | None, shows_examples: bool
) -> SumEnv:
    return SumEnv(model_renderer(model_name, renderer_name), problem, shows_examples=shows_examples)


def generated_rubrics(
    largest: int, test_size: int, seed: int, shown_verdicts: int = NUM_EXAMPLE_VERDICTS
) -> RubricRows:
    """Return rubrics for all sums of two numbers from 0 to `largest`, with the right result in each
    rubric. A program can check such an answer as well, so the metric `judge/agreement` shows how
    good the judge is.
    """
    train, test = split_sums(largest, test_size, random.Random(f"rubrics:{seed}"))
    return RubricRows(
        [rubric_of(problem, shown_verdicts) for problem in train],
        [rubric_of(problem, shown_verdicts) for problem in test],
    )


def rubric_of(problem: Sum, shown_verdicts: int) -> RubricRow:
    """Return the rubric of a sum, with `shown_verdicts` example verdicts."""
    criterion = Criterion(
        f"Does the answer say that the result is {problem.answer}?",
        name="result",
        word_scores=VERDICT_SCORES,
        examples=verdicts(problem)[:shown_verdicts],
        truth_regex=rf"(?<!\d){problem.answer}\D*\Z",
    )
    return RubricRow((*worked_example(EXAMPLE_SUMS[0]), problem.prompt), (criterion,))


def verdicts(problem: Sum) -> tuple[Example, ...]:
    """Return answers to the same sum with their verdicts. Without these examples the embedded model
    writes no verdict at all.
    """
    right = problem.answer
    results = (right, right + 1, right + 10, right, abs(right - 2))
    return tuple(
        Example(
            f"{problem.terms} = {result}" if number % 2 == 0 else f"{result}",
            verdict(result == right),
        )
        for number, result in enumerate(results)
    )


def verdict(is_right: bool) -> str:
    """Return a verdict in the format that the judge must use."""
    return f"<score>{'Yes' if is_right else 'No'}</score>"
