"""`planish play`: be the policy yourself. An environment of a recipe shows its prompts in the
terminal, and a person (or standard input) answers. Then the rewards are shown. Nothing is trained.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.text import Text

from planish.commands.recipe_modules import import_recipe, read_recipe_options
from planish.completers import StopCondition, TokensWithLogprobs
from planish.errors import UserError
from planish.logtree.html import visible
from planish.processes.arguments import argument_adder
from planish.recipes import rl_options, training_run
from planish.reports.rollout_records import new_tokens
from planish.reports.rollout_tokens import decode_keys
from planish.rl.rollout.play import Answer, FirstEnvOnly, TextPolicy
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.types import EnvGroupBuilder, RLDataset, Trajectory, TrajectoryGroup
from planish.runlog.model_renderer import model_renderer
from planish.tokenizer import ModelTokenizer
from planish.training.rl_config import Config
from planish.types import ModelInput

HELP = '''\
Answer with a line. A line of """ begins an answer of several lines, and another one ends it.
/cut TEXT is an answer that is cut off by its token limit; // begins an answer with a slash.'''
_BLOCK_QUOTES = '"""'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish play`."""
    add = argument_adder(parser)
    add(
        "RECIPE",
        "name of a recipe (math_rl), your own recipe as a module or .py file, or a script "
        "that starts an RL run",
    )
    add("name=value", "options of the recipe, as in training", dest="options", nargs="*")
    add("--number N", "index of the problem, counted from 0", default=0)
    add("--test", "take the problem from the test set", action="store_true")
    add(
        "--group",
        "answer in every environment of the group, because some rewards compare the answers",
        action="store_true",
    )


def run(arguments: argparse.Namespace) -> None:
    """Run one episode of a recipe's environment."""
    if arguments.number < 0:
        raise UserError(f"number={arguments.number}: give a whole number of at least 0")
    console = Console(highlight=False)
    module: ModuleType | None = None

    def play(config: Config) -> Path:
        if module is None and arguments.options:
            raise UserError(
                f"{arguments.options[0]}: {arguments.recipe} has no class `Options`; change its "
                "config"
            )
        if type(config) is not Config:
            raise UserError("this recipe has no environments to play")
        training_run.run_coroutine(_run_episode(config, arguments, console))
        raise _EpisodeEnd

    with suppress(_EpisodeEnd), rl_options.instead_of_training(play):
        module = _import_playable(arguments.recipe)
        module.main(read_recipe_options(module, arguments.options))


class _EpisodeEnd(BaseException):
    """Ends a script after the episode, because the rest of it would look for a finished run."""


def _import_playable(recipe: str) -> ModuleType:
    """Return the module of a recipe.

    A script that trains runs its episode while it is loaded, and then raises _EpisodeEnd.
    """
    module = import_recipe(recipe)
    options = getattr(module, "Options", None)
    if not isinstance(options, type) or not issubclass(options, rl_options.RLOptions):
        if recipe.endswith(".py"):
            runpy.run_path(recipe, run_name="__main__")
        raise UserError(
            f"RECIPE {recipe} has no environments to play: it needs a class `Options` on top of "
            "planish.recipes.rl_options.RLOptions and a function `main(options)` that ends in "
            "`rl_options.run`, or it is a script that calls planish.training.train_rl.main"
        )
    return module


async def _run_episode(config: Config, arguments: argparse.Namespace, console: Console) -> None:
    train, test = await config.dataset_builder()
    dataset = test if arguments.test else train
    if dataset is None:
        raise UserError("--test: this recipe has no test set; leave --test out")
    builder = _group_builder(dataset, arguments.number)
    if not arguments.group and not builder.plays_together:
        builder = FirstEnvOnly(builder)
    tokenizer = model_renderer(config.model_name, config.renderer_name).tokenizer
    console.print(Text(HELP, style="dim"))
    policy = PersonAtTerminal(tokenizer, config.max_tokens, console)
    group = await do_group_rollout(builder, policy, termination=config.termination, seed=0)
    assert group is not None, "only a strategy that drops failed groups returns None"
    _print(console, group)


def _group_builder(dataset: RLDataset, number: int) -> EnvGroupBuilder:
    """Return the group with this number, counted across batches."""
    remaining = number
    for index in range(len(dataset)):
        batch = dataset.get_batch(index)
        if remaining < len(batch):
            return batch[remaining]
        remaining -= len(batch)
    raise UserError(f"number={number}: the dataset has {number - remaining} problems, from 0 on")


class PersonAtTerminal(TextPolicy):
    """A policy that prints the new part of each prompt and reads the answer from standard input."""

    def __init__(
        self, tokenizer: ModelTokenizer, max_tokens: int, console: Console, name: str = ""
    ) -> None:
        super().__init__(tokenizer, max_tokens)
        self._console = console
        self._name = name
        self._num_environments = 0
        self._previous_tokens: list[int] = []

    def seeded(self, seed: int) -> PersonAtTerminal:
        """Return the same person as the policy of the group's next environment.

        The rollout runner calls this once for each environment.
        """
        self._num_environments += 1
        name = f"environment {self._num_environments}, " if self._num_environments > 1 else ""
        assert self.max_tokens is not None
        return PersonAtTerminal(self.tokenizer, self.max_tokens, self._console, name)

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        completion = await super().__call__(model_input, stop, max_tokens=max_tokens)
        self._previous_tokens = [*model_input.to_keys(), *completion.tokens]
        return completion

    def answer(self, model_input: ModelInput) -> Answer:
        """Print the new part of the prompt and read an answer."""
        added_tokens, _ = new_tokens(self._previous_tokens, model_input)
        text = visible(decode_keys(added_tokens, self.tokenizer.decode))
        self._console.rule(Text(f"{self._name}{model_input.length} tokens", style="dim"))
        self._console.print(Text(text), soft_wrap=True)
        return read_answer(self._console)


def read_answer(console: Console) -> Answer:
    """Read an answer of one line, or of several lines between lines of three quotes.

    Raise UserError if the input ends.
    """
    line = _read_line(console, "> ")
    was_cut_off = line == "/cut" or line.startswith("/cut ")
    if was_cut_off:
        line = line.removeprefix("/cut").removeprefix(" ")
    elif line.startswith("//"):
        line = line[1:]
    if line != _BLOCK_QUOTES:
        return Answer(line, was_cut_off)
    lines: list[str] = []
    while (line := _read_line(console, ". ")) != _BLOCK_QUOTES:
        lines.append(line)
    return Answer("\n".join(lines), was_cut_off)


def _read_line(console: Console, prompt: str) -> str:
    try:
        line = input(prompt)
    except EOFError:
        console.print()
        raise UserError(
            "the input ended before the episode did; give an answer for each turn"
        ) from None
    if not sys.stdin.isatty():
        console.print(Text(line, style="green"), soft_wrap=True)
    return line


def _print(console: Console, group: TrajectoryGroup) -> None:
    totals = group.get_total_rewards()
    for index, trajectory in enumerate(group.trajectories_G):
        name = f" of environment {index + 1}" if len(totals) > 1 else ""
        console.rule(Text(f"outcome{name}", style="bold"))
        for line in _outcome_lines(
            trajectory, group.final_rewards_G[index], group.metrics_G[index]
        ):
            console.print(Text(line), soft_wrap=True)
        console.print(Text(f"total reward {totals[index]:.4g}", style="bold"))
    if group.num_abstained:
        console.print(Text(f"left out because their grader abstained: {group.num_abstained}"))


def _outcome_lines(trajectory: Trajectory, group_reward: float, metrics: Any) -> Sequence[str]:
    lines = []
    for number, turn in enumerate(trajectory.transitions, start=1):
        lines.append(f"turn {number}: {len(turn.ac.tokens)} tokens, reward {turn.reward:.4g}")
        lines += [f"  {name} {value:.4g}" for name, value in turn.metrics.items() if value]
        lines += [f"  {name}: {visible(str(value))}" for name, value in turn.logs.items()]
    lines.append(f"ended: {trajectory.stop_reason or 'completed'}")
    lines.append(f"group reward {group_reward:.4g}")
    lines += [f"  {name} {value:.4g}" for name, value in metrics.items()]
    return lines
