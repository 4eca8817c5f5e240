"""Guess a number: an episode of several turns with a program that replies.

    python -m planish.recipes.guess_number                              the embedded model: numbers
                                                                        from 0 to 15, four guesses
    python -m planish.recipes.guess_number largest=100 max_guesses=8    a longer search

The policy guesses a number, the program replies "Too low." or "Too high.", and the policy guesses
again. With `hints` the reply also names the remaining range, which a small model does not work out
itself. Binary search finds 15 of 16 numbers in four guesses; random guesses from the remaining
range find six in ten.

    reward = found - waste_cost * wasted guesses

A guess is wasted if the earlier replies rule it out, or if it is not a number in the range. Its
cost is the reward of that turn. So the policy learns which turns are bad, even while it rarely
finds a number. An answer that is cut off costs as much as if every guess were wasted. All rollouts
of a group search for the same number, so their rewards can be compared. The test has every number
once (at most `NUM_TEST_GAMES`, evenly spread). The test numbers also occur in training: otherwise
the policy would learn never to guess them.
"""

import math
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.recipes import training_run
from planish.recipes.rl_options import RLOptions, run
from planish.renderers import Message, get_text_content
from planish.rl.environments.datasets import DEFAULT_NUM_BATCHES
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.types import Env, Metrics, RLDataset
from planish.training.option_rules import GROUP_SIZE, NOT_NEGATIVE, at_least, between, check_fields

NUM_TEST_GAMES = 64
EXAMPLE_GAMES = 3
PRESETS: dict[str, dict[str, Any]] = {
    "long": {"largest": 100, "max_guesses": 8, "max_steps": 200},
}


@dataclass(frozen=True)
class Range:
    """The numbers that can still be right: `low` to `high`, both included."""

    low: int
    high: int

    def __contains__(self, number: int) -> bool:
        return self.low <= number <= self.high

    def without(self, guess: int, secret: int) -> "Range":
        """Return the remaining range after a wrong guess."""
        if guess < secret:
            return Range(max(self.low, guess + 1), self.high)
        return Range(self.low, min(self.high, guess - 1))

    @property
    def middle(self) -> int:
        """The middle of the range, rounded down."""
        return (self.low + self.high) // 2


@chz.chz
class Rules:
    """The rules of a game."""

    largest: int = chz.field(
        default=15, doc="largest number to guess; the smallest is 0", metadata=between(1, 9999)
    )
    max_guesses: int = chz.field(default=4, metadata=at_least(1))
    waste_cost: float = chz.field(
        default=0.25,
        doc="penalty of a guess that contradicts the earlier replies or is no number",
        metadata=NOT_NEGATIVE,
    )
    hints: bool = chz.field(default=True, doc="tell the player which numbers are still possible")

    @property
    def question(self) -> str:
        """The first message of a game."""
        return f"Guess my number, 0 to {self.largest}."

    def with_hint(self, reply: str, left: Range) -> str:
        """Return a reply, with the remaining range if there are hints."""
        return f"{reply}: {left.low} to {left.high}." if self.hints else f"{reply}."


@dataclass
class GuessNumberEnv(MessageEnv):
    """One game: the policy searches for `secret`."""

    rules: Rules
    secret: int
    messages: list[Message] = field(default_factory=list)
    guesses: int = 0
    found: bool = False

    def __post_init__(self) -> None:
        self.left = Range(0, self.rules.largest)

    async def initial_observation(self) -> list[Message]:
        """Return the example games and the question."""
        self.messages = list(few_shot_messages(self.rules))
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Reply to a guess. The game ends with the right number or the last guess."""
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
        """Return the reply to a guess, and narrow the remaining range."""
        if guess == self.secret:
            return "Right."
        if guess is None or not 0 <= guess <= self.rules.largest:
            return self.rules.with_hint(f"Write a number from 0 to {self.rules.largest}", self.left)
        self.left = self.left.without(guess, self.secret)
        return self.rules.with_hint("Too low" if guess < self.secret else "Too high", self.left)


def read_guess(text: str) -> int | None:
    """Return the number in a text; None if the text has no number or several."""
    numbers = re.findall(r"[0-9]+", text)
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) <= 9 else None


def binary_search(rules: Rules, secret: int) -> list[tuple[str, int]]:
    """Return the turns of a binary search as (question or reply, guess). The last guess is
    `secret`.
    """
    game, text = GuessNumberEnv(rules, secret), rules.question
    turns: list[tuple[str, int]] = []
    while not turns or turns[-1][1] != secret:
        turns.append((text, game.left.middle))
        text = game.reply(game.left.middle)
    return turns


def example_secrets(rules: Rules) -> list[int]:
    """Return the secret numbers of the example games, spread over the range. Binary search needs
    equally many guesses for each: the most that any secret needs, or `max_guesses` if that is less.
    """
    num_guesses_by_secret = {
        number: len(binary_search(rules, number)) for number in range(rules.largest + 1)
    }
    max_guesses = min(rules.max_guesses, max(num_guesses_by_secret.values()))
    slowest_secrets = [
        number for number, guesses in num_guesses_by_secret.items() if guesses == max_guesses
    ]
    return [
        slowest_secrets[(2 * index + 1) * len(slowest_secrets) // (2 * EXAMPLE_GAMES)]
        for index in range(EXAMPLE_GAMES)
    ]


@cache
def few_shot_messages(rules: Rules) -> tuple[Message, ...]:
    """Return the question after a few example games. Without them an untrained small model does not
    know what to write.
    """
    messages: list[Message] = [{"role": "system", "content": "Guess the number."}]
    before = ""
    for secret in example_secrets(rules):
        for text, guess in binary_search(rules, secret):
            messages.append({"role": "user", "content": before + text})
            messages.append({"role": "assistant", "content": str(guess)})
            before = ""
        before = "Right. "
    return (*messages, {"role": "user", "content": before + rules.question})


@chz.chz
class GuessNumberDatasetBuilder(ProblemDatasetBuilder):
    """Groups for all numbers, in a new order each epoch."""

    rules: Rules = Rules()

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset)."""
        numbers = range(self.rules.largest + 1)
        train = self.shuffled(
            numbers, num_epochs=math.ceil(DEFAULT_NUM_BATCHES * self.batch_size / len(numbers))
        )
        return train, self.evaluation(numbers[:: math.ceil(len(numbers) / NUM_TEST_GAMES)])

    def make_env(self, problem: int) -> EnvFromMessageEnv:
        """Return the environment of one game with a secret number."""
        reward = -self.rules.waste_cost * self.rules.max_guesses
        game = GuessNumberEnv(self.rules, problem)
        return EnvFromMessageEnv(
            self.renderer, game, failed_parse_reward=reward, context_overflow_reward=reward
        )

    def episode_metrics(self, env: Env) -> Metrics:
        """Return whether the number was found in a game."""
        assert isinstance(env, EnvFromMessageEnv)
        assert isinstance(env.message_env, GuessNumberEnv)
        return {"found": float(env.message_env.found)}


@chz.chz
class Options(Rules, RLOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/guess_number"
    batch_size: int = chz.field(default=16, doc="numbers to guess per step", metadata=at_least(1))
    group_size: int = chz.field(default=8, doc="episodes per number", metadata=GROUP_SIZE)
    learning_rate: float = 3e-4
    max_tokens: int = 8
    max_steps: int | None = 30
    eval_every: int = 10


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check_fields(options)
    builder = training_run.build(
        GuessNumberDatasetBuilder, options, rules=training_run.build(Rules, options)
    )
    return run(options, builder, recipe_name="guess_number", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
