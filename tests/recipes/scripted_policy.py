"""A policy whose answers are a function of its prompt's text."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.rl.data_processing import trajectory_to_data
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.types import EnvGroupBuilder, RLDatasetBuilder, Trajectory, TrajectoryGroup
from planish.runlog.model_renderer import model_renderer


@dataclass
class ScriptedPolicy(TokenCompleter):
    """A policy whose answers come from `answer`, called with the text of the last user message. An
    answer that ends with "..." is truncated.
    """

    model_name: str
    answer: Callable[[str], str]
    asked: list[str] = field(default_factory=list)

    async def __call__(
        self, model_input: Any, stop: Any, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        renderer = model_renderer(self.model_name)
        text = renderer.tokenizer.decode(model_input.to_ints())
        self.asked.append(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)[-1])
        await asyncio.sleep(0)
        said = self.answer(self.asked[-1])
        is_cut = said.endswith("...")
        tokens = renderer.tokenizer.encode(
            said if is_cut else f"{said}<|im_end|>", add_special_tokens=False
        )
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "length" if is_cut else "stop")


def made(builder: RLDatasetBuilder) -> Any:
    """Return the builder's datasets for training and for evaluation."""
    return asyncio.run(builder())


def play(builder: EnvGroupBuilder, policy: TokenCompleter, **options: Any) -> TrajectoryGroup:
    group = asyncio.run(do_group_rollout(builder, policy, **options))
    assert group is not None
    return group


def is_one_sequence(trajectory: Trajectory) -> bool:
    """Return whether an episode of several turns is one training sequence that contains all sampled
    tokens.
    """
    sequences = trajectory_to_data(trajectory, 1.0)
    sampled = sum(len(turn.ac.tokens) for turn in trajectory.transitions)
    return len(sequences) == 1 and sequences[0].mask_N.sum() == sampled


def contents(groups: Any) -> list[Any]:
    """Return what the groups of a batch contain, in a form that can be compared."""
    return [(group.env_thunk.args, group.num_envs) for group in groups]


def problems(groups: Any) -> list[Any]:
    """Return the problem of each group."""
    return [problem for group in groups for problem in group.env_thunk.args]
