"""Sums for distillation without data: prompts that a teacher answers, and a test of the student.

The test sums are those of planish/recipes/sums.py; no prompt asks for them.
"""

import random
from functools import partial

from planish.datasets.messages import Message
from planish.recipes.sums import (
    EXAMPLE_SUMS,
    Sum,
    SumEnv,
    held_out_sums,
    random_sum,
    worked_examples,
)
from planish.rl.environments.datasets import ProblemDataset
from planish.rl.environments.problem_env import ProblemGroupBuilder
from planish.rl.rollout.evaluation import RLTestSetEvaluator
from planish.runlog.model_renderer import model_renderer

MAX_TOKENS = 16
"""Maximum tokens of an answer in the test."""


def generated_sum_prompts(
    count: int, max_operand: int, seed: int, *, shows_examples: bool
) -> list[list[Message]]:
    """Return `count` random questions. With `shows_examples`, worked examples come before each."""
    held_out = {test.pair for test in held_out_sums(max_operand, None)} | {
        example.pair for example in EXAMPLE_SUMS
    }
    rng = random.Random(f"prompts:{seed}")
    prefix = [dict(message) for message in worked_examples()] if shows_examples else []
    problems = (random_sum(rng, max_operand, held_out) for _ in range(count))
    return [[*prefix, {"role": "user", "content": problem.question}] for problem in problems]


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
