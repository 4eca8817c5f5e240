"""Datasets of programming problems: generated functions (planish/recipes/code_functions.py), or
rows of a collection.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import chz

from planish.datasets.layouts import PROBLEM_REFUSALS, check_refused
from planish.datasets.rows import has_split, hold_out, load_rows
from planish.datasets.unused_columns import UnusedColumns
from planish.errors import UserError
from planish.recipes.code_env import (
    CodeEnv,
    Rules,
    code_block,
    episode_metrics,
    instruction,
    process_sandbox,
)
from planish.recipes.code_functions import FunctionProblem, sample_function
from planish.recipes.code_problems import (
    CodeProblem,
    read_problem,
    unused_fields,
    with_parsed_tests,
)
from planish.renderers import Message
from planish.rl.environments.message_env import EnvFromMessageEnv
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.types import Env, Metrics, RLDataset

NUM_WORKED_EXAMPLES = 3
NUM_TEST_FUNCTIONS = 64
MAX_CONSECUTIVE_DUPLICATES = 300
"""The search for new test functions ends after this many known functions in a row."""


@chz.chz
class AttemptsBuilder(ProblemDatasetBuilder):
    """Options of a dataset whose groups are attempts at a programming problem."""

    rules: Rules = Rules()
    batch_size: int = 8

    def prefix(self) -> Sequence[Message]:
        """Return the messages before a problem, such as worked examples."""
        return ()

    def make_env(self, problem: CodeProblem) -> EnvFromMessageEnv:
        """Return the environment of one attempt."""
        sandbox = process_sandbox(self.rules.limits)
        return EnvFromMessageEnv(
            self.renderer,
            CodeEnv(self.rules, problem, sandbox, self.prefix()),
            failed_parse_reward=-self.rules.format_coef,
            context_overflow_reward=-self.rules.format_coef,
        )

    def tag(self) -> str:
        """Return "code"."""
        return "code"

    def episode_metrics(self, env: Env) -> Metrics:
        """Return the metrics of a finished episode."""
        return episode_metrics(env)


@chz.chz
class FunctionDatasetBuilder(AttemptsBuilder):
    """An unlimited number of generated functions. Test functions are never trained on."""

    steps: int = chz.field(default=1, doc="operations per function")
    eval_problems: int | None = chz.field(
        default=None, doc=f"number of test problems; none = {NUM_TEST_FUNCTIONS}"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). Without test functions, the latter is None."""
        shown = {function.problem.question for function in example_functions(self.steps)}
        tests = self._held_out(shown)
        excluded = shown | {problem.question for problem in tests}

        def sample_problem(rng: random.Random) -> CodeProblem:
            problem = sample_function(rng, self.steps).problem
            while problem.question in excluded:
                problem = sample_function(rng, self.steps).problem
            return problem

        return self.generated(sample_problem), self.evaluation(tests)

    def prefix(self) -> Sequence[Message]:
        """Return worked examples, the same for every problem."""
        return [
            message for shown in example_functions(self.steps) for message in worked_example(shown)
        ]

    def tag(self) -> str:
        """Return "functions"."""
        return "functions"

    def _held_out(self, shown: set[str]) -> list[CodeProblem]:
        """Return the test problems. They are the same for every seed, so that runs can be compared.
        Raises UserError if less than a quarter of all functions would be left to train on.
        """
        rng = random.Random("test")
        count = NUM_TEST_FUNCTIONS if self.eval_problems is None else self.eval_problems
        found: dict[str, CodeProblem] = {}
        num_duplicates = 0
        while len(found) < count + count // 3 and num_duplicates < MAX_CONSECUTIVE_DUPLICATES:
            problem = sample_function(rng, self.steps).problem
            is_new = problem.question not in shown and problem.question not in found
            num_duplicates = 0 if is_new else num_duplicates + 1
            if is_new:
                found[problem.question] = problem
        if len(found) < count + count // 3:
            raise UserError(
                f"eval_problems={count}: there are about {len(found)} functions of "
                f"steps={self.steps}, a quarter of which must "
                f"be left to train on; give at most {len(found) * 3 // 4}, or more steps"
            )
        return list(found.values())[:count]


@cache
def example_functions(steps: int) -> list[FunctionProblem]:
    """Return worked examples on a number, a text and a list. They are the same in every prompt."""
    rng = random.Random("shown")
    shown: dict[str, FunctionProblem] = {}
    while len(shown) < NUM_WORKED_EXAMPLES:
        function = sample_function(rng, steps)
        shown.setdefault(function.solution.split(":")[0], function)
    return list(shown.values())


def worked_example(function: FunctionProblem) -> list[Message]:
    """Return a worked example as a question and its answer."""
    return [
        {"role": "user", "content": instruction(function.problem)},
        {"role": "assistant", "content": code_block(function.solution)},
    ]


@chz.chz
class CodeDatasetBuilder(AttemptsBuilder):
    """The rows of a file, a directory or a dataset of the hub."""

    dataset: str
    train_split: str = "train"
    test_split: str | None = chz.field(
        default=None,
        doc="test split of the dataset; none = a directory's test file, else problems held out of "
        "training",
    )
    eval_problems: int | None = chz.field(
        default=None, doc="number of test problems; none = the whole test split, if there is one"
    )
    shown_tests: int = chz.field(
        default=2, doc="number of public tests of a problem whose row does not name them"
    )
    max_tests: int | None = chz.field(
        default=None, doc="maximum number of tests per problem, the first ones; none = all"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). Without test problems, the latter is None."""
        train, tests = self._splits()
        return self.shuffled(train), self.evaluation(tests)

    def _splits(self) -> tuple[Sequence[CodeProblem], Sequence[CodeProblem]]:
        train = self._problems(self.train_split)
        test_split = self.test_split or ("test" if has_test_file(self.dataset) else None)
        if self.eval_problems != 0 and test_split is not None:
            return train, self._problems(test_split)[: self.eval_problems]
        if not self.eval_problems:
            return train, []
        source = f"dataset={self.dataset} has no test split"
        train_indices, test_indices = hold_out(len(train), self.eval_problems, self.seed, source)
        return [train[i] for i in train_indices], [train[i] for i in test_indices]

    def _problems(self, split: str) -> list[CodeProblem]:
        where = f"dataset={self.dataset}, {split}"
        rows = load_rows(self.dataset, split)
        unused = UnusedColumns(f"{self.dataset}, {split}")
        problems_or_none = []
        for row in rows:
            check_refused(row, PROBLEM_REFUSALS, row.location)
            columns = with_parsed_tests(row)
            problems_or_none.append(
                read_problem(columns, row.location, self.shown_tests, self.max_tests)
            )
            unused.add(unused_fields(columns), (), row.location)
        unused.warn()
        problems = [
            replace(problem, location=row.location)
            for row, problem in zip(rows, problems_or_none, strict=True)
            if problem is not None
        ]
        if not problems:
            raise UserError(
                f"{where}: none of its {len(rows)} rows has tests that can be run; see "
                "docs/recipes/code_rl.md"
            )
        if len(problems) < len(rows):
            print(
                f"{where}: {len(rows) - len(problems)} of {len(rows)} rows have no tests that can "
                "be run and are left out"
            )
        return problems


def has_test_file(dataset: str) -> bool:
    """Return whether `dataset` is a local directory with a test file."""
    return Path(dataset).expanduser().is_dir() and has_split(dataset, "test")
