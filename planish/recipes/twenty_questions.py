"""Twenty questions: one model asks, another one answers.

    python -m planish.recipes.twenty_questions                     the embedded model, six words to
                                                                   choose from
    python -m planish.recipes.twenty_questions preset=classic      any word, twenty questions

The policy asks questions, which the answerer answers with Yes or No, and guesses the word by
writing "Guess: cat". The answerer is a model that knows the word and is not trained: by default the
base model of the run, with greedy sampling. Its replies are reduced to "Yes.", "No." and "I cannot
say.", so it cannot give the word away. A guess is checked by comparing words.

    reward = found - waste_cost * wasted messages

A message is wasted if it is neither a question nor a guess, repeats a guess, or guesses a word that
is not among the choices. An answer that is cut off costs as much as if every message were wasted.
With `choices=n`, each game lists n words, and every reply lists the remaining ones. The words of
the test are held out. A small answerer is often wrong: docs/recipes/twenty_questions.md says how
often.
"""

import random
import re
import string
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.completers import TinkerMessageCompleter
from planish.recipes import training_run
from planish.recipes.rl_options import RLOptions, run
from planish.recipes.twenty_questions_answerer import ANSWER_TOKENS, Answerer
from planish.recipes.twenty_questions_words import held_out_words, training_words
from planish.renderers import Message, get_text_content
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.types import Env, Metrics, RLDataset
from planish.runlog.model_renderer import learn_renderer
from planish.training.option_rules import (
    GROUP_SIZE,
    NOT_NEGATIVE,
    at_least,
    check_fields,
    require,
    rule,
)
from planish.training.run_loop import open_client

PRESETS: dict[str, dict[str, Any]] = {
    "classic": {"choices": 0, "max_questions": 20, "max_tokens": 64, "temperature": 1.0},
}
MAX_CHOICES = 40
GUESS = re.compile(r"\s*guess\s*:\s*(?:an?\s|the\s)?", re.IGNORECASE)
GUESS_END = string.whitespace + ".!?"


@chz.chz
class Rules:
    """The rules of a game."""

    max_questions: int = chz.field(
        default=4,
        doc="maximum number of the player's messages, guesses included",
        metadata=at_least(1),
    )
    waste_cost: float = chz.field(
        default=0.1, doc="penalty of a message that cannot help", metadata=NOT_NEGATIVE
    )


@dataclass(frozen=True)
class Riddle:
    """The secret word of a game."""

    secret: str
    choices: tuple[str, ...] = ()
    """The words that the player may choose from; empty = any word."""

    def words_left(self, guessed: Set[str]) -> str:
        """Return the list of remaining words, which every reply ends with; "" without choices."""
        words = [word for word in self.choices if word not in guessed]
        return f" Words: {', '.join(words)}." if words else ""


INSTRUCTION = "Find the secret word. Ask a question, or guess a word."
EXAMPLE_GAMES = (
    (
        Riddle("wolf", ("rose", "duck", "coat", "wolf", "drum", "bus")),
        (("Is it alive?", "Yes."), ("Guess: rose", "No."), ("Guess: wolf", "")),
    ),
    (
        Riddle("bean", ("apron", "lion", "cart", "oven", "bean", "fern")),
        (("Guess: oven", "No."), ("Can you eat it?", "Yes."), ("Guess: bean", "")),
    ),
)


@dataclass
class TwentyQuestionsEnv(MessageEnv):
    """One game."""

    rules: Rules
    riddle: Riddle
    answerer: Answerer
    messages: list[Message] = field(default_factory=list)
    guesses: set[str] = field(default_factory=set)
    said: int = 0
    found: bool = False

    async def initial_observation(self) -> list[Message]:
        """Return the example games and the opening message."""
        self.messages = few_shot_messages(self.riddle)
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Reply to a question or a guess. The right guess or the last message ends the game."""
        self.said += 1
        text = get_text_content(message)
        guess = read_guess(text)
        is_waste = self._is_waste(text, guess)
        self.guesses |= {guess} if guess is not None else set()
        self.found = guess == self.riddle.secret
        is_over = self.found or self.said == self.rules.max_questions
        reply = (
            "" if is_over else await self._reply(text, guess) + self.riddle.words_left(self.guesses)
        )
        self.messages = [*self.messages, message, {"role": "user", "content": reply}]
        return MessageStepResult(
            reward=float(self.found) - self.rules.waste_cost * is_waste,
            episode_done=is_over,
            next_messages=self.messages,
            metrics={"wasted": float(is_waste), "guess": float(guess is not None)},
            logs={"secret": self.riddle.secret, "reply": reply},
        )

    def _is_waste(self, text: str, guess: str | None) -> bool:
        if guess is None:
            return not text.strip().endswith("?")
        return guess in self.guesses or (
            bool(self.riddle.choices) and guess not in self.riddle.choices
        )

    async def _reply(self, text: str, guess: str | None) -> str:
        if guess is not None:
            return "No."
        return await self.answerer.answer(self.riddle.secret, text)


def read_guess(text: str) -> str | None:
    """Return the word that a message guesses; None if it is not a guess."""
    guess = GUESS.match(text)
    return text[guess.end() :].rstrip(GUESS_END).lower() if guess else None


def few_shot_messages(riddle: Riddle) -> list[Message]:
    """Return the opening message after two example games. Without them an untrained small model
    does not know what to write.
    """
    messages: list[Message] = [{"role": "system", "content": INSTRUCTION}]
    opening = "I am thinking of a word."
    for example, turns in EXAMPLE_GAMES:
        guessed_words: set[str] = set()
        last_reply = opening
        for text, reply in turns:
            messages.append(
                {
                    "role": "user",
                    "content": last_reply
                    + (example.words_left(guessed_words) if riddle.choices else ""),
                }
            )
            messages.append({"role": "assistant", "content": text})
            guessed_words |= {read_guess(text) or ""}
            last_reply = reply
        opening = "Right! I am thinking of another word."
    return [*messages, {"role": "user", "content": opening + riddle.words_left(set())}]


@chz.chz
class TwentyQuestionsDatasetBuilder(ProblemDatasetBuilder):
    """Groups for random words; a quarter of the words is held out for the test."""

    answerer: Answerer
    answerer_model: str | None = chz.field(
        default=None, doc="name of the answerer's model, for config.json"
    )
    rules: Rules = Rules()
    choices: int = chz.field(default=6, doc="number of candidate words that a game lists; 0 = none")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset)."""
        words, held_out = training_words(), held_out_words()

        def sample_riddle(rng: random.Random) -> Riddle:
            return riddle_of(rng.choice(words), words, self.choices, rng)

        tests = [riddle_of(word, held_out, self.choices, random.Random(word)) for word in held_out]
        return self.generated(sample_riddle), self.evaluation(tests)

    def make_env(self, problem: Riddle) -> EnvFromMessageEnv:
        """Return the environment of one game."""
        reward = -self.rules.waste_cost * self.rules.max_questions
        game = TwentyQuestionsEnv(self.rules, problem, self.answerer)
        return EnvFromMessageEnv(
            self.renderer, game, failed_parse_reward=reward, context_overflow_reward=reward
        )

    def episode_metrics(self, env: Env) -> Metrics:
        """Return whether the word was found in a game."""
        assert isinstance(env, EnvFromMessageEnv)
        assert isinstance(env.message_env, TwentyQuestionsEnv)
        return {"found": float(env.message_env.found)}


def riddle_of(secret: str, words: Sequence[str], choices: int, rng: random.Random) -> Riddle:
    """Return a riddle with `choices` random words in random order, among them the secret one."""
    if choices == 0:
        return Riddle(secret)
    listed = [secret, *rng.sample([word for word in words if word != secret], choices - 1)]
    return Riddle(secret, tuple(rng.sample(listed, choices)))


@chz.chz
class Options(Rules, RLOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/twenty_questions"
    choices: int = chz.field(
        default=6,
        doc="number of candidate words that a game lists; 0 = none",
        metadata=rule(
            lambda value: value == 0 or 2 <= value <= MAX_CHOICES, f"0, or 2 to {MAX_CHOICES}"
        ),
    )
    answerer_model: str | None = chz.field(
        default=None, doc="base model of the answerer; none = model_name"
    )
    answerer_renderer_name: str | None = chz.field(
        default=None, doc="chat format of the answerer; none = the model's own"
    )
    batch_size: int = chz.field(default=16, doc="secret words per step", metadata=at_least(1))
    group_size: int = chz.field(default=8, doc="episodes per secret word", metadata=GROUP_SIZE)
    learning_rate: float = 2e-4
    max_tokens: int = chz.field(default=12, doc="maximum number of tokens in a message")
    temperature: float = chz.field(
        default=0.7, doc="sampling temperature; the loss uses the same temperature"
    )
    max_steps: int | None = 30
    eval_every: int = 10


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check_fields(options)
    require(
        options,
        rollout_processes=(options.rollout_processes == 0, "0: the answerer runs in this process"),
    )
    models = [options.answerer_model]
    with open_client(options, service_client, models) as client:
        return train(options, client)


def train(options: Options, service_client: ServiceClient) -> Path:
    """Train with an answerer on the same engine or server."""
    model = options.answerer_model or options.model_name
    renderer_name = options.answerer_renderer_name
    if renderer_name is None and options.answerer_model is None:
        renderer_name = options.renderer_name
    sampling_client = service_client.create_sampling_client(base_model=model)
    renderer = learn_renderer(service_client, model, renderer_name)
    completer = TinkerMessageCompleter(
        sampling_client, renderer, max_tokens=ANSWER_TOKENS, temperature=0.0
    )
    builder = training_run.build(
        TwentyQuestionsDatasetBuilder,
        options,
        answerer=Answerer(completer),
        answerer_model=model,
        rules=training_run.build(Rules, options),
    )
    return run(options, builder, recipe_name="twenty_questions", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
