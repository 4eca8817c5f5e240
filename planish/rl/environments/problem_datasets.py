"""The base class of builders of problem datasets. A group consists of attempts at one problem."""

import logging
import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import chz

from planish.errors import UserError
from planish.renderers import Renderer
from planish.rl.environments.datasets import (
    DEFAULT_NUM_BATCHES,
    GeneratedDataset,
    ProblemDataset,
    evaluation_dataset,
)
from planish.rl.environments.difficulty import DifficultyOptions, select_by_difficulty
from planish.rl.environments.problem_env import ProblemGroupBuilder
from planish.rl.environments.prompt_selection import (
    Selection,
    initial_prompt,
    length_bound,
    select_problems,
    unknown_prompts_error,
)
from planish.rl.types import Env, Metrics, RLDatasetBuilder
from planish.runlog.model_renderer import model_renderer
from planish.types import ModelInput

P = TypeVar("P")

MAX_CONSECUTIVE_REPLACEMENTS = 1000
"""The search for a generated problem with a short prompt ends after this many problems in a row."""

logger = logging.getLogger(__name__)


@chz.chz
class ProblemDatasetBuilder(DifficultyOptions, RLDatasetBuilder):
    """Options of a dataset whose groups are attempts at one problem each.

    A subclass makes the environment of a problem in `make_env`. Its `__call__` returns two
    datasets: the training set, made by `shuffled` or `generated`, and the test set, made by
    `evaluation`. Groups contain the builder and their problem, so both must be picklable if
    rollouts run in worker processes.
    """

    model_name: str
    renderer_name: str | None = None
    batch_size: int = chz.field(default=16, doc="problems per step")
    group_size: int = chz.field(default=8, doc="attempts per problem")
    seed: int = chz.field(default=0, doc="seed of the problems and of their order")
    max_prompt_tokens: int | None = chz.field(
        default=None,
        doc="maximum tokens in a prompt; problems with longer prompts are left out and counted; "
        "none = no limit",
    )

    @abstractmethod
    def make_env(self, problem: Any) -> Env:
        """Return the environment of one attempt at `problem`."""

    def tag(self) -> str:
        """Return the tag under which metrics of the groups are reported; "" = none."""
        return ""

    def episode_metrics(self, env: Env) -> Metrics:
        """Return the metrics of a finished environment. It is also called after cut-off answers."""
        return {}

    @property
    def renderer(self) -> Renderer:
        """The renderer that the options name. It is not stored in the builder, because a renderer
        cannot be pickled.
        """
        return model_renderer(self.model_name, self.renderer_name)

    def group(self, problem: Any, size: int) -> ProblemGroupBuilder:
        """Return a group of `size` attempts at `problem`."""
        make_env = partial(self.make_env, problem)
        return ProblemGroupBuilder(make_env, size, self.tag(), self.episode_metrics)

    def shuffled(
        self, problems: Sequence[P], num_epochs: int = 1, *, places: Sequence[str] | None = None
    ) -> ProblemDataset[P]:
        """Return the training set of `problems`, in a new order each epoch. Their prompts are
        checked first (`selected`).
        """
        selection = self.selected(problems, "train", places)
        return ProblemDataset(
            selection.problems,
            partial(self.group, size=self.group_size),
            self.batch_size,
            num_epochs=num_epochs,
            shuffle_seed=self.seed,
            lengths=selection.lengths,
        )

    def generated(
        self, sample_problem: Callable[[random.Random], Any], batches: int = DEFAULT_NUM_BATCHES
    ) -> GeneratedDataset:
        """Return the training set of problems that `sample_problem` makes, given a generator.
        Problems whose prompts have more than `max_prompt_tokens` tokens are replaced by others.
        `batches` is the length of an epoch. Raises UserError if `difficulty_from` is given.
        """
        self.check_success_rates()
        if self.difficulty_from is not None:
            raise UserError(
                f"difficulty_from={self.difficulty_from}: these problems are generated without end "
                "and have no earlier results; leave it out"
            )
        num_replaced = 0

        def sample_group(rng: random.Random) -> ProblemGroupBuilder:
            nonlocal num_replaced
            problem = sample_problem(rng)
            for _ in range(MAX_CONSECUTIVE_REPLACEMENTS):
                if not self._is_too_long(problem):
                    return self.group(problem, self.group_size)
                problem = sample_problem(rng)
                num_replaced += 1
                if num_replaced.bit_count() == 1:  # at 1, 2, 4, 8, ..., not for each problem
                    logger.warning(
                        "%d generated problems so far are replaced by others, because their "
                        "prompts have more than max_prompt_tokens=%d tokens",
                        num_replaced,
                        self.max_prompt_tokens,
                    )
            raise UserError(
                f"max_prompt_tokens={self.max_prompt_tokens}: {MAX_CONSECUTIVE_REPLACEMENTS} "
                "generated problems in a row have longer prompts; give a larger number"
            )

        return GeneratedDataset(sample_group, self.batch_size, self.seed, batches)

    def evaluation(
        self, problems: Sequence[P], *, places: Sequence[str] | None = None
    ) -> ProblemDataset[P] | None:
        """Return the test set, with one attempt at each problem; None without problems. Their
        prompts are checked first (`selected`).
        """
        selection = self.selected(problems, "test", places)
        return evaluation_dataset(
            selection.problems, partial(self.group, size=1), selection.lengths
        )

    def selected(
        self, problems: Sequence[P], split: str, places: Sequence[str] | None = None
    ) -> Selection[P]:
        """Return the problems whose prompts have at most `max_prompt_tokens` tokens and, for the
        split "train", whose earlier success rates are in the range of `difficulty_from`. Warnings
        count the others. `places` are the names of the problems in messages, such as file and
        line; None = their attribute `location` or, without one, their number.

        Raises UserError for a prompt that cannot be rendered, and if no problem is left.
        """
        self.check_success_rates()
        indices: Sequence[int] = range(len(problems))
        if split == "train" and self.difficulty_from is not None:
            indices = select_by_difficulty(problems, self._prompt, self)

        def place_of(position: int) -> str:
            index = indices[position]
            if places is not None:
                return places[index]
            default_place = f"{split} problem {index + 1} ({problems[index]!r:.100})"
            return getattr(problems[index], "location", "") or default_place

        return select_problems(
            [problems[index] for index in indices],
            self._prompt,
            place_of,
            split=split,
            max_prompt_tokens=self.max_prompt_tokens,
        )

    def _prompt(self, problem: Any) -> ModelInput | None:
        """Return the first prompt of a problem; None if its environment waits for something."""
        return initial_prompt(self.make_env(problem))

    def _is_too_long(self, problem: Any) -> bool:
        """Return whether the prompt of a generated problem has more than `max_prompt_tokens`
        tokens.
        """
        if self.max_prompt_tokens is None:
            return False
        bound = length_bound(self._prompt, problem)
        if bound is not None and bound <= self.max_prompt_tokens:
            return False
        prompt = self._prompt(problem)
        if prompt is None:
            raise unknown_prompts_error(self.max_prompt_tokens)
        return prompt.length > self.max_prompt_tokens
