"""Datasets of groups from the data of a verifiers environment."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import chz

from planish.datasets.arrow_rows import ArrowRows
from planish.datasets.row_digests import record_rows
from planish.datasets.rows import hold_out
from planish.errors import UserError
from planish.integrations.verifiers.environments import VerifiersGroup
from planish.integrations.verifiers.library import load_environment
from planish.rl.environments.datasets import ProblemDataset, evaluation_dataset
from planish.rl.types import RLDataset, RLDatasetBuilder
from planish.runlog.model_renderer import model_renderer

Rows = Sequence[Mapping[str, Any]]


@chz.chz
class VerifiersDatasetBuilder(RLDatasetBuilder):
    """Trains on the environment `env_id`: an installed package, or any module with a function
    `load_environment`.
    """

    env_id: str
    model_name: str
    env_args: str = chz.field(default="{}", doc="arguments of load_environment as a JSON object")
    renderer_name: str | None = None
    batch_size: int = chz.field(default=8, doc="rows per step")
    group_size: int = chz.field(default=8, doc="rollouts per row")
    eval_problems: int | None = chz.field(
        default=None,
        doc="number of test rows; none = the environment's eval data, or rows held out of "
        "training if it has none",
    )
    max_prompt_tokens: int | None = chz.field(
        default=None,
        doc="maximum tokens in a prompt with its answer; a longer prompt ends the rollout",
    )
    seed: int = chz.field(default=0, doc="seed of the order of the data")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        train, test = self._splits(load_environment(self.env_id, canonical_env_args(self.env_args)))
        group = partial(self._group, num_envs=self.group_size)
        train_dataset = ProblemDataset(train, group, self.batch_size, shuffle_seed=self.seed)
        return train_dataset, evaluation_dataset(test, partial(self._group, num_envs=1))

    def _splits(self, environment: Any) -> tuple[Rows, Rows]:
        train, test = environment.build_dataset(), environment.build_eval_dataset()
        if train is None:
            raise UserError(
                f"env_id={self.env_id}: the environment has only evaluation data; give an "
                "environment with training data"
            )
        record_rows(f"{self.env_id}, training data", ArrowRows(train))
        if self.eval_problems != 0 and test is not None:
            record_rows(f"{self.env_id}, eval data", ArrowRows(test))
            return train, test.select(range(len(test))[: self.eval_problems])
        if not self.eval_problems:
            return train, []
        source = f"env_id={self.env_id} has no eval data"
        train_positions, test_positions = hold_out(
            len(train), self.eval_problems, self.seed, source, "rows"
        )
        return train.select(train_positions), train.select(test_positions)

    def _group(self, row: Mapping[str, Any], num_envs: int) -> VerifiersGroup:
        return VerifiersGroup(
            load=partial(load_environment, self.env_id, canonical_env_args(self.env_args)),
            make_renderer=partial(model_renderer, self.model_name, self.renderer_name),
            row=row,
            num_envs=num_envs,
            max_prompt_tokens=self.max_prompt_tokens,
            tag=self.env_id.rpartition("/")[2],
        )


def canonical_env_args(text: str) -> str:
    """Return the JSON object with sorted keys, which is the cache key of a loaded environment.
    Raises UserError if `text` is not a JSON object.
    """
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise UserError(
            f'env_args={text}: it is not JSON ({error}); give an object such as \'{{"split": '
            '"train"}\''
        ) from error
    if not isinstance(arguments, dict):
        raise UserError(f"env_args={text}: give a JSON object, the arguments of load_environment")
    return json.dumps(arguments, sort_keys=True)
