"""The smallest example of RL from preferences: the shorter of two answers wins.

    python -m planish.recipes.shorter                                    the embedded model,
                                                                         generated questions
    python -m planish.recipes.shorter dataset=prompts.jsonl              rows with "prompt", or
                                                                         chats

Each question gets `group_size` answers, and a rule replaces the preference model: the answer with
fewer tokens wins. The environment is in planish/preference/preference_envs.py. The rule ignores the
content, so in the end the policy's answers have none.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chz

from planish import ServiceClient
from planish.datasets.split_names import SplitNames
from planish.preference.comparison_evaluator import ComparisonEvaluatorBuilder
from planish.preference.matchups import TournamentPattern
from planish.preference.preference_envs import (
    PairwisePreferenceRLDatasetBuilder,
    TournamentOptions,
)
from planish.preference.preference_models import PreferenceModelBuilder
from planish.preference.prompts import PromptBuilder, Prompts, PromptsFromRows
from planish.preference.types import Comparison, Messages
from planish.recipes import training_run
from planish.recipes.rl_options import RLOptions, run
from planish.renderers import Renderer, get_text_content
from planish.runlog.model_renderer import model_renderer
from planish.training.option_rules import GROUP_SIZE, at_least, check_fields, zero_for
from planish.training.run_loop import open_client

QUESTIONS = (
    "Say one sentence about {}.",
    "What is {}? Answer in one sentence.",
    "In a few words: what do you think of {}?",
    "Name one thing that people like about {}.",
)
TOPIC_NAMES: str = (
    "tea, rain, bread, chess, the moon, bicycles, winter, gardens, trains, the sea, music, maps, "
    "cats, bridges, soup, letters, mountains, clocks, apples, libraries, boats, football, snow, "
    "honey"
)
TOPICS = tuple(TOPIC_NAMES.split(", "))
TEST_TOPICS = 6


@dataclass(frozen=True)
class Shorter:
    """Prefers the answer with fewer tokens; equal lengths are a tie."""

    model_name: str
    renderer_name: str | None = None

    async def __call__(self, comparison: Comparison) -> float:
        """Return 1 if answer B is shorter, -1 if answer A is shorter, 0 for a tie."""
        renderer = model_renderer(self.model_name, self.renderer_name)
        a, b = (
            num_tokens(side, renderer)
            for side in (comparison.completion_A, comparison.completion_B)
        )
        return float((a > b) - (a < b))


def num_tokens(completion: Messages, renderer: Renderer) -> int:
    """Return the number of tokens in the texts of an answer."""
    texts = (get_text_content(message) for message in completion)  # type: ignore[arg-type]
    return sum(len(renderer.tokenizer.encode(text, add_special_tokens=False)) for text in texts)


@chz.chz
class ShorterBuilder(PreferenceModelBuilder):
    """Builder of the rule, in place of a preference model."""

    model_name: str
    renderer_name: str | None = None

    def __call__(self, service_client: ServiceClient | None = None) -> Shorter:
        """Return the rule. It does not use `service_client`."""
        return Shorter(self.model_name, self.renderer_name)


@chz.chz
class GeneratedPrompts(PromptBuilder):
    """Questions about everyday things. The test asks about other things than training."""

    seed: int = 0

    def __call__(self) -> Prompts:
        """Return the prompts for training and test."""
        topics = random.Random(f"topics:{self.seed}").sample(TOPICS, len(TOPICS))
        return Prompts(_questions_on(topics[TEST_TOPICS:]), _questions_on(topics[:TEST_TOPICS]))


def _questions_on(topics: Sequence[str]) -> list[Messages]:
    return [
        [{"role": "user", "content": question.format(topic)}]
        for topic in topics
        for question in QUESTIONS
    ]


@chz.chz
class Options(TournamentOptions, SplitNames, RLOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/shorter"
    dataset: str | None = chz.field(
        default=None, doc="hub name, local directory or file; none = generated questions"
    )
    test_size: int | None = chz.field(
        default=16,
        doc="dataset: number of test prompts; none = the whole test split, 0 = no evaluation",
        metadata=zero_for("no evaluation"),
    )
    batch_size: int = chz.field(default=8, doc="prompts per step", metadata=at_least(1))
    group_size: int = chz.field(default=4, doc="answers per prompt", metadata=GROUP_SIZE)
    tournament_pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS
    learning_rate: float = 2e-4
    max_tokens: int = 64
    max_steps: int | None = 20
    num_epochs: int = chz.field(
        default=10, doc="number of passes through the prompts, limited by max_steps"
    )
    eval_every: int = 10
    eval_temperature: float | None = chz.field(
        default=None,
        doc="sampling temperature in evaluations, which compare with the initial weights; none = "
        "temperature",
    )


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check_fields(options)
    with open_client(options, service_client) as client:
        return train(options, client)


def train(options: Options, service_client: ServiceClient) -> Path:
    """Train and return the run directory. Evaluations compare the policy with the weights that the
    run started from.
    """
    judge = training_run.build(ShorterBuilder, options)
    shared = {
        "prompt_builder": prompt_builder(options),
        "policy_model_name": options.model_name,
        "policy_renderer_name": options.renderer_name,
    }
    builder = training_run.build(
        PairwisePreferenceRLDatasetBuilder, options, preference_model_builder=judge, **shared
    )
    temperature = options.eval_temperature
    test = training_run.build(
        ComparisonEvaluatorBuilder,
        options,
        judge_builders={"shorter": judge},
        reference_checkpoint_path=options.load_checkpoint_path,
        temperature=options.temperature if temperature is None else temperature,
        both_ways=False,  # the rule does not depend on the order of two answers
        service_client=service_client,
        **shared,
    )
    tests = () if options.test_size == 0 else (test,)
    return run(
        options,
        builder,
        recipe_name="shorter",
        service_client=service_client,
        evaluator_builders=tests,
    )


def prompt_builder(options: Options) -> PromptBuilder:
    """Return the builder of the questions."""
    if options.dataset is None:
        training_run.reject_unused(options, *training_run.SPLITS_OF_DATASET)
        return GeneratedPrompts(seed=options.seed)
    return training_run.build(PromptsFromRows, options, shuffle_seed=options.seed)


if __name__ == "__main__":
    training_run.run_command(main, Options, {}, sys.argv[1:])
