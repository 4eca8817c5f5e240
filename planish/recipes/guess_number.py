"""Guess a number: an episode of several turns that a program answers.

    python -m planish.recipes.guess_number                                  the embedded model, 0 to
        15, four guesses
    python -m planish.recipes.guess_number largest=100 max_guesses=8        a longer search

The policy guesses, is told "Too low." or "Too high.", and guesses again. With `hints` it is also
told what is left, which a small model does not work out for itself. Halving what is left finds 15
of 16 numbers in four guesses; any guess from what is left, six in ten.

    reward = found - waste_cost * (guesses that cannot be right after what was said, or are no number in the range)

The cost tells the policy which turn was bad long before it finds many numbers. An answer that does
not end costs as much as if every guess were wasted. A group plays for one number, so its rewards
are comparable. The test is every number once (at most `TEST_GAMES`, evenly spread): none is held
out, since a policy that never meets a number learns not to say it.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.recipes import training_run
from planish.recipes.generated_dataset import BATCHES
from planish.recipes.rl_options import RLOptions, run
from planish.renderers import Message, get_text_content
from planish.rl.environments.datasets import ProblemDataset
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.types import Env, EnvGroupBuilder, Metrics, RLDatasetBuilder, Trajectory
from planish.runlog.model_renderer import model_renderer

TEST_GAMES = 64
SHOWN_GAMES = 3
PRESETS: dict[str, dict[str, Any]] = {
    "long": {"largest": 100, "max_guesses": 8, "max_steps": 200},
}


@dataclass(frozen=True)
class Range:
    """The numbers that are left."""

    low: int
    high: int

    def __contains__(self, number: int) -> bool:
        return self.low <= number <= self.high

    def without(self, guess: int, secret: int) -> "Range":
        """What is left after a wrong guess."""
        if guess < secret:
            return Range(max(self.low, guess + 1), self.high)
        return Range(self.low, min(self.high, guess - 1))

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2


@chz.chz
class Rules:
    largest: int = chz.field(default=15, doc="numbers are 0 to this one")
    max_guesses: int = 4
    waste_cost: float = chz.field(
        default=0.25, doc="of a guess that cannot be right, or is no number"
    )
    hints: bool = chz.field(default=True, doc="say which numbers are left")

    @property
    def question(self) -> str:
        return f"Guess my number, 0 to {self.largest}."

    def told(self, reply: str, left: Range) -> str:
        return f"{reply}: {left.low} to {left.high}." if self.hints else f"{reply}."


@dataclass
class GuessNumberEnv(MessageEnv):
    """One search for `secret`."""

    rules: Rules
    secret: int
    messages: list[Message] = field(default_factory=list)
    guesses: int = 0
    found: bool = False

    def __post_init__(self) -> None:
        self.left = Range(0, self.rules.largest)

    async def initial_observation(self) -> list[Message]:
        self.messages = list(first_messages(self.rules))
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        self.guesses += 1
        guess = read_guess(get_text_content(message))
        is_waste = guess is None or guess not in self.left
        self.found = guess == self.secret
        self.messages = [*self.messages, message, {"role": "user", "content": self.reply(guess)}]
        return MessageStepResult(
            reward=float(self.found) - self.rules.waste_cost * is_waste,
            episode_done=self.found or self.guesses == self.rules.max_guesses,
            next_messages=self.messages,
            metrics={"wasted": float(is_waste)},
            logs={"secret": self.secret, "guess": "unreadable" if guess is None else guess},
        )

    def reply(self, guess: int | None) -> str:
        """What the policy is told; notes what follows from it."""
        if guess == self.secret:
            return "Right."
        if guess is None or not 0 <= guess <= self.rules.largest:
            return self.rules.told(f"Write a number from 0 to {self.rules.largest}", self.left)
        self.left = self.left.without(guess, self.secret)
        return self.rules.told("Too low" if guess < self.secret else "Too high", self.left)


def read_guess(text: str) -> int | None:
    """The number in a text that holds exactly one."""
    numbers = re.findall(r"[0-9]+", text)
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) <= 9 else None


def well_played(rules: Rules, secret: int) -> list[tuple[str, int]]:
    """What a player who halves what is left is told, and guesses; the last guess is `secret`."""
    game, said = GuessNumberEnv(rules, secret), rules.question
    turns: list[tuple[str, int]] = []
    while not turns or turns[-1][1] != secret:
        turns.append((said, game.left.middle))
        said = game.reply(game.left.middle)
    return turns


def shown_secrets(rules: Rules) -> list[int]:
    """Numbers that halving finds with the last guess, spread over the range."""
    length = {number: len(well_played(rules, number)) for number in range(rules.largest + 1)}
    most = min(rules.max_guesses, max(length.values()))
    late = [number for number, guesses in length.items() if guesses == most]
    return [late[(2 * shown + 1) * len(late) // (2 * SHOWN_GAMES)] for shown in range(SHOWN_GAMES)]


@cache
def first_messages(rules: Rules) -> tuple[Message, ...]:
    """The question, after a few games that end well: an untrained small model would not know what
    to write.
    """
    messages: list[Message] = [{"role": "system", "content": "Guess the number."}]
    before = ""
    for secret in shown_secrets(rules):
        for said, guess in well_played(rules, secret):
            messages.append({"role": "user", "content": before + said})
            messages.append({"role": "assistant", "content": str(guess)})
            before = ""
        before = "Right. "
    return (*messages, {"role": "user", "content": before + rules.question})


@dataclass(frozen=True)
class GuessNumberGroup(EnvGroupBuilder):
    """`size` players who look for the same number."""

    model_name: str
    renderer_name: str | None
    rules: Rules
    secret: int
    size: int

    async def make_envs(self) -> Sequence[Env]:
        renderer = model_renderer(self.model_name, self.renderer_name)
        cost = -self.rules.waste_cost * self.rules.max_guesses
        return [
            EnvFromMessageEnv(
                renderer,
                GuessNumberEnv(self.rules, self.secret),
                failed_parse_reward=cost,
                context_overflow_reward=cost,
            )
            for _ in range(self.size)
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Metrics of whole games, also of those that an answer without an end broke off."""
        return [(0.0, {"found": float(game.found)}) for game in map(game_of, env_group)]


def game_of(env: Env) -> GuessNumberEnv:
    assert isinstance(env, EnvFromMessageEnv)
    assert isinstance(env.message_env, GuessNumberEnv)
    return env.message_env


@chz.chz
class GuessNumberDatasetBuilder(RLDatasetBuilder):
    model_name: str
    renderer_name: str | None = None
    rules: Rules = Rules()
    batch_size: int = chz.field(default=16, doc="numbers a step")
    group_size: int = chz.field(default=8, doc="players for each number")
    seed: int = 0

    async def __call__(self) -> tuple[ProblemDataset[int], ProblemDataset[int]]:
        numbers = range(self.rules.largest + 1)
        epochs = -(-BATCHES * self.batch_size // len(numbers))
        train = ProblemDataset(
            numbers, self._group, self.batch_size, num_epochs=epochs, shuffle_seed=self.seed
        )
        tested = numbers[:: -(-len(numbers) // TEST_GAMES)]
        return train, ProblemDataset(tested, self._test, len(tested))

    def _group(self, secret: int) -> GuessNumberGroup:
        return GuessNumberGroup(
            self.model_name, self.renderer_name, self.rules, secret, self.group_size
        )

    def _test(self, secret: int) -> GuessNumberGroup:
        return GuessNumberGroup(self.model_name, self.renderer_name, self.rules, secret, 1)


@chz.chz
class Options(RLOptions):
    log_path: str = "/tmp/planish-examples/guess_number"
    largest: int = chz.field(default=15, doc="numbers are 0 to this one")
    max_guesses: int = 4
    waste_cost: float = chz.field(
        default=0.25, doc="of a guess that cannot be right, or is no number"
    )
    hints: bool = chz.field(default=True, doc="say which numbers are left")
    batch_size: int = chz.field(default=16, doc="numbers a step")
    group_size: int = chz.field(default=8, doc="players for each number")
    learning_rate: float = 3e-4
    max_tokens: int = chz.field(default=8, doc="longest answer")
    max_steps: int | None = 30
    eval_every: int = chz.field(default=10, doc="steps between tests; 0 = never")


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train; returns the run directory."""
    training_run.require(
        options,
        largest=(1 <= options.largest <= 9999, "a whole number from 1 to 9999"),
        max_guesses=(options.max_guesses >= 1, "a whole number of at least 1"),
        waste_cost=(options.waste_cost >= 0, "0 or more"),
        batch_size=(options.batch_size >= 1, "a whole number of at least 1"),
        group_size=(options.group_size >= 2, "at least 2: players are compared within their group"),
    )
    builder = GuessNumberDatasetBuilder(
        model_name=options.model_name,
        renderer_name=options.renderer_name,
        rules=Rules(
            largest=options.largest,
            max_guesses=options.max_guesses,
            waste_cost=options.waste_cost,
            hints=options.hints,
        ),
        batch_size=options.batch_size,
        group_size=options.group_size,
        seed=options.seed,
    )
    return run(options, builder, recipe_name="guess_number", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
