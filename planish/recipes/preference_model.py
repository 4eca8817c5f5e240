"""Train a preference model on pairs of answers: it predicts which of two answers is better, with a
probability.

    python -m planish.recipes.preference_model                                     generated pairs:
        courteous answers are preferred
    python -m planish.recipes.preference_model pairs=solutions                     GSM8K: the
        question's own solution is preferred
    python -m planish.recipes.preference_model dataset=pairs.jsonl test_size=50    your own
        comparisons
    python -m planish.recipes.preference_model kind=bradley_terry                  a score for each
        answer instead

`PreferenceModelBuilderFromRun(path=...)` loads the trained model from the run directory. The kinds
of models and data are in planish/preference, the generated pairs in
planish/recipes/sum_comparisons.py and exchanged_answers.py.
"""

import sys
from pathlib import Path
from typing import Any, Literal

import chz

from planish import ServiceClient
from planish.datasets.split_names import SplitNames
from planish.errors import UserError
from planish.preference import model_training
from planish.preference.bradley_terry import QUESTION
from planish.preference.datasets import ComparisonBuilder, ComparisonBuilderFromRows
from planish.preference.forms import Kind
from planish.preference.model_datasets import PreferenceDatasetBuilder
from planish.recipes import training_run
from planish.recipes.exchanged_answers import ExchangedSolutionsBuilder
from planish.recipes.sum_comparisons import SumComparisons
from planish.training.option_rules import at_least, check_fields, zero_for
from planish.training.run_options import RecipeOptions

PairsKind = Literal["courtesy", "sums", "solutions"]
DEFAULT_LARGEST, DEFAULT_QUESTION_DATASET = 20, "openai/gsm8k"
PRESETS: dict[str, dict[str, Any]] = {
    "seed": {"batch_size": 64, "learning_rate": 3e-4, "lora_rank": 64, "max_length": 8192},
}


@chz.chz
class PreferenceModelOptions:
    """The kind of the preference model, and the sizes of its training."""

    kind: Kind = chz.field(
        default="chat",
        doc="chat = a judge that reads both answers, bradley_terry = one score per answer",
    )
    calibration_size: int = chz.field(
        default=64,
        doc="number of pairs held out of training for calibration; 0 = no calibration",
        metadata=zero_for("no calibration"),
    )
    batch_size: int = chz.field(default=16, doc="comparisons per step", metadata=at_least(1))
    max_length: int = chz.field(
        default=1024,
        doc="maximum tokens in a conversation; longer comparisons are skipped and counted",
        metadata=at_least(2),
    )


@chz.chz
class ComparisonOptions(SplitNames):
    """Where the comparisons come from, and how many are for the test."""

    dataset: str | None = chz.field(
        default=None, doc="hub name, local directory or file of comparisons; none = pairs"
    )
    pairs: PairsKind | None = chz.field(
        default=None,
        doc="kind of generated pairs: courtesy, sums or solutions; none = courtesy",
    )
    largest: int | None = chz.field(
        default=None,
        doc=f"pairs=courtesy and pairs=sums: largest operand; none = {DEFAULT_LARGEST}",
        metadata=at_least(1),
    )
    questions: str | None = chz.field(
        default=None,
        doc="pairs=solutions: number of questions with worked solutions; "
        f"none = {DEFAULT_QUESTION_DATASET}",
    )
    test_size: int | None = chz.field(
        default=64,
        doc="number of test pairs; none = the whole test split of dataset, 0 = no evaluation",
        metadata=zero_for("no evaluation"),
    )


@chz.chz
class Options(ComparisonOptions, PreferenceModelOptions, RecipeOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/preference_model"
    seed: int = chz.field(
        default=0, doc="seed of the initial weights, the order of the data and the held-out rows"
    )

    question: str | None = chz.field(
        default=None,
        doc=f"bradley_terry: question that is asked about an answer; none = {QUESTION}",
    )
    learning_rate: float = 3e-4


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and calibrate the model, and return the run directory."""
    config = model_config(options)
    model_training.check(config)
    return training_run.run_main(model_training.main, config, service_client)


def model_config(options: Options) -> model_training.Config:
    """Return the config of `planish.preference.model_training`."""
    check_fields(options)
    if options.kind != "bradley_terry":
        training_run.reject_unused(
            options, ("question",), "is for kind=bradley_terry; leave it out"
        )
    builder = training_run.build_with_defaults(
        PreferenceDatasetBuilder,
        options,
        common_config=training_run.chat_config(options),
        comparison_builder=comparisons(options),
        shuffle_seed=options.seed,
    )
    return training_run.build(
        model_training.Config, options, dataset_builder=builder, recipe_name="preference_model"
    )


def comparisons(options: Options) -> ComparisonBuilder:
    """Return the builder of the pairs. Raises UserError for an option that would be ignored."""
    if options.dataset is not None:
        generated_options = ("pairs", "largest", "questions")
        training_run.reject_unused(
            options, generated_options, "is for generated pairs, and dataset is given; leave it out"
        )
        return training_run.build(ComparisonBuilderFromRows, options, shuffle_seed=options.seed)
    training_run.reject_unused(options, *training_run.SPLITS_OF_DATASET)
    if options.test_size is None:
        raise UserError("test_size=none: only a dataset has a test split of its own; give a number")
    split = {"test_size": options.test_size, "seed": options.seed}
    if options.pairs == "solutions":
        training_run.reject_unused(
            options, ("largest",), "is for pairs=courtesy and pairs=sums; leave it out"
        )
        return ExchangedSolutionsBuilder(
            questions=options.questions or DEFAULT_QUESTION_DATASET, **split
        )
    training_run.reject_unused(options, ("questions",), "is for pairs=solutions; leave it out")
    largest = DEFAULT_LARGEST if options.largest is None else options.largest
    return SumComparisons(kind=options.pairs or "courtesy", largest=largest, **split)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
