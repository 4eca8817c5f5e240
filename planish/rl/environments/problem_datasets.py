"""The base class of builders of problem datasets. A group consists of attempts at one problem."""

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import chz

from planish.renderers import Renderer
from planish.rl.environments.datasets import (
    DEFAULT_NUM_BATCHES,
    GeneratedDataset,
    ProblemDataset,
    evaluation_dataset,
)
from planish.rl.environments.problem_env import ProblemGroupBuilder
from planish.rl.types import Env, Metrics, RLDatasetBuilder
from planish.runlog.model_renderer import model_renderer


@chz.chz
class ProblemDatasetBuilder(RLDatasetBuilder):
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

    def shuffled(self, problems: Sequence[Any], num_epochs: int = 1) -> ProblemDataset[Any]:
        """Return the training set of `problems`, in a new order each epoch."""
        return ProblemDataset(
            problems,
            partial(self.group, size=self.group_size),
            self.batch_size,
            num_epochs=num_epochs,
            shuffle_seed=self.seed,
        )

    def generated(
        self, sample_problem: Callable[[random.Random], Any], batches: int = DEFAULT_NUM_BATCHES
    ) -> GeneratedDataset:
        """Return the training set of problems that `sample_problem` makes, given a generator."""

        def sample_group(rng: random.Random) -> ProblemGroupBuilder:
            return self.group(sample_problem(rng), self.group_size)

        return GeneratedDataset(sample_group, self.batch_size, self.seed, batches)

    def evaluation(self, problems: Sequence[Any]) -> ProblemDataset[Any] | None:
        """Return the test set, with one attempt at each problem; None without problems."""
        return evaluation_dataset(problems, partial(self.group, size=1))
