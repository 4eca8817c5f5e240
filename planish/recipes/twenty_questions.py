"""Twenty questions: one model asks, another one answers.

    python -m planish.recipes.twenty_questions                     the embedded model, six words to
        choose from
    python -m planish.recipes.twenty_questions preset=classic      any word, twenty questions

The policy asks questions, which the answerer answers by Yes or No, and names the word by "Guess:
cat". The answerer is a model that is told the word and is not trained: by default the base model of
the run, greedily. It can say nothing but "Yes.", "No." and "I cannot say.", so it cannot be talked
into giving the word away; whether a guess is right is decided by comparing words.

    reward = found - waste_cost * (messages that are no question, repeat a guess, or guess a word that is not among the choices)

An answer that does not end costs as much as if every message were wasted. With `choices`, each game
lists so many words, and every reply those that are left. Words of the test are held out. A small
answerer is often wrong: docs/recipes/twenty_questions.md says how often.
"""

import random
import re
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.client.local import used_together
from planish.completers import TinkerMessageCompleter
from planish.recipes import training_run
from planish.recipes.generated_dataset import GeneratedDataset
from planish.recipes.rl_options import RLOptions, run
from planish.recipes.twenty_questions_answerer import ANSWER_TOKENS, Answerer
from planish.recipes.twenty_questions_words import held_out_words, training_words
from planish.renderers import Message, get_text_content
from planish.rl.environments.datasets import ProblemDataset
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, RLDatasetBuilder, Trajectory
from planish.runlog.model_renderer import learn_renderer, model_renderer

PRESETS: dict[str, dict[str, Any]] = {
    "classic": {"choices": 0, "max_questions": 20, "max_tokens": 64, "temperature": 1.0},
}
MOST_CHOICES = 40
GUESS = re.compile(r"\s*guess\s*:\s*(?:an?\s|the\s)?(.*?)[\s.!?]*", re.IGNORECASE | re.DOTALL)


@chz.chz
class Rules:
    max_questions: int = chz.field(default=4, doc="messages of the player, guesses included")
    waste_cost: float = chz.field(default=0.1, doc="of a message that cannot help")


@dataclass(frozen=True)
class Riddle:
    secret: str
    choices: tuple[str, ...] = ()
    """What the player is told that it is one of; empty = nothing."""

    def words_left(self, guessed: Set[str]) -> str:
        """What is added to everything that the player is told."""
        words = [word for word in self.choices if word not in guessed]
        return f" Words: {', '.join(words)}." if words else ""


INSTRUCTION = "Find the secret word. Ask a question, or guess a word."
SHOWN_GAMES = (
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
        self.messages = first_messages(self.riddle)
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
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
    """The word that a message names as its guess."""
    guess = GUESS.fullmatch(text)
    return guess.group(1).lower() if guess else None


def first_messages(riddle: Riddle) -> list[Message]:
    """The question, after two games that end well: an untrained small model would not know what to
    write.
    """
    messages: list[Message] = [{"role": "system", "content": INSTRUCTION}]
    opening = "I am thinking of a word."
    for shown, turns in SHOWN_GAMES:
        guessed: set[str] = set()
        said = opening
        for text, reply in turns:
            messages.append(
                {
                    "role": "user",
                    "content": said + (shown.words_left(guessed) if riddle.choices else ""),
                }
            )
            messages.append({"role": "assistant", "content": text})
            guessed |= {read_guess(text) or ""}
            said = reply
        opening = "Right! I am thinking of another word."
    return [*messages, {"role": "user", "content": opening + riddle.words_left(set())}]


@dataclass(frozen=True)
class TwentyQuestionsGroup(EnvGroupBuilder):
    """`size` players with the same riddle."""

    model_name: str
    renderer_name: str | None
    rules: Rules
    riddle: Riddle
    answerer: Answerer
    size: int

    async def make_envs(self) -> Sequence[Env]:
        renderer = model_renderer(self.model_name, self.renderer_name)
        cost = -self.rules.waste_cost * self.rules.max_questions
        return [
            EnvFromMessageEnv(
                renderer,
                TwentyQuestionsEnv(self.rules, self.riddle, self.answerer),
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


def game_of(env: Env) -> TwentyQuestionsEnv:
    assert isinstance(env, EnvFromMessageEnv)
    assert isinstance(env.message_env, TwentyQuestionsEnv)
    return env.message_env


@chz.chz
class TwentyQuestionsDatasetBuilder(RLDatasetBuilder):
    model_name: str
    renderer_name: str | None = None
    answerer: Answerer
    answerer_model: str | None = chz.field(
        default=None, doc="the name of its model, for config.json"
    )
    rules: Rules = Rules()
    choices: int = chz.field(default=6, doc="words that a game lists; 0 = none")
    batch_size: int = chz.field(default=16, doc="riddles a step")
    group_size: int = chz.field(default=8, doc="players for each riddle")
    seed: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        words = training_words()
        train = GeneratedDataset(
            lambda rng: self._group(
                riddle_of(rng.choice(words), words, self.choices, rng), self.group_size
            ),
            self.batch_size,
            self.seed,
        )
        held_out = held_out_words()
        tests = [riddle_of(word, held_out, self.choices, random.Random(word)) for word in held_out]
        return train, ProblemDataset(tests, lambda riddle: self._group(riddle, 1), len(tests))

    def _group(self, riddle: Riddle, size: int) -> TwentyQuestionsGroup:
        return TwentyQuestionsGroup(
            self.model_name, self.renderer_name, self.rules, riddle, self.answerer, size
        )


def riddle_of(secret: str, words: Sequence[str], choices: int, rng: random.Random) -> Riddle:
    """`choices` of the words in any order, the secret one among them."""
    if choices == 0:
        return Riddle(secret)
    listed = [secret, *rng.sample([word for word in words if word != secret], choices - 1)]
    return Riddle(secret, tuple(rng.sample(listed, choices)))


@chz.chz
class Options(RLOptions):
    log_path: str = "/tmp/planish-examples/twenty_questions"
    choices: int = chz.field(default=6, doc="words that a game lists; 0 = none")
    max_questions: int = chz.field(default=4, doc="messages of the player, guesses included")
    waste_cost: float = chz.field(default=0.1, doc="of a message that cannot help")
    answerer_model: str | None = chz.field(
        default=None, doc="base model that answers; none = model_name"
    )
    answerer_renderer_name: str | None = chz.field(
        default=None, doc="its chat format; none = the model's own"
    )
    batch_size: int = chz.field(default=16, doc="riddles a step")
    group_size: int = chz.field(default=8, doc="players for each riddle")
    learning_rate: float = 2e-4
    max_tokens: int = chz.field(default=12, doc="longest message")
    temperature: float = chz.field(
        default=0.7, doc="of sampling; the loss is computed at the same one"
    )
    max_steps: int | None = 30
    eval_every: int = chz.field(default=10, doc="steps between tests; 0 = never")


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train; returns the run directory."""
    training_run.require(
        options,
        choices=(
            options.choices == 0 or 2 <= options.choices <= MOST_CHOICES,
            f"0, or 2 to {MOST_CHOICES}",
        ),
        max_questions=(options.max_questions >= 1, "a whole number of at least 1"),
        waste_cost=(options.waste_cost >= 0, "0 or more"),
        batch_size=(options.batch_size >= 1, "a whole number of at least 1"),
        group_size=(options.group_size >= 2, "at least 2: players are compared within their group"),
        rollout_processes=(options.rollout_processes == 0, "0: the answerer lives in this process"),
    )
    if service_client is not None:
        return train(options, service_client)
    answerer = options.answerer_model
    models = used_together(options.base_url, options.model_name, answerer)
    with ServiceClient(
        base_url=options.base_url, models=models, deterministic=options.deterministic
    ) as own_client:
        return train(options, own_client)


def train(options: Options, service_client: ServiceClient) -> Path:
    model = options.answerer_model or options.model_name
    renderer_name = options.answerer_renderer_name
    if renderer_name is None and options.answerer_model is None:
        renderer_name = options.renderer_name
    sampling_client = service_client.create_sampling_client(base_model=model)
    renderer = learn_renderer(service_client, model, renderer_name)
    completer = TinkerMessageCompleter(
        sampling_client, renderer, max_tokens=ANSWER_TOKENS, temperature=0.0
    )
    builder = TwentyQuestionsDatasetBuilder(
        model_name=options.model_name,
        renderer_name=options.renderer_name,
        answerer=Answerer(completer),
        answerer_model=model,
        rules=Rules(max_questions=options.max_questions, waste_cost=options.waste_cost),
        choices=options.choices,
        batch_size=options.batch_size,
        group_size=options.group_size,
        seed=options.seed,
    )
    return run(options, builder, recipe_name="twenty_questions", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
