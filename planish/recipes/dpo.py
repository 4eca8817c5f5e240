"""Direct preference optimization on pairs of answers.

    python -m planish.recipes.dpo                                     generated pairs: short answers
                                                                      preferred to wordy ones
    python -m planish.recipes.dpo pairs=result                        generated pairs: right sums
                                                                      preferred to wrong ones
    python -m planish.recipes.dpo dataset=pairs.jsonl test_size=50    rows with "prompt", "chosen"
                                                                      and "rejected"
    python -m planish.recipes.dpo loss=simpo                          without a reference

Each step takes `batch_size` pairs and makes the chosen answers likelier than the rejected ones,
relative to the reference model. By default, the reference is the policy that the run begins with.
The losses are in planish/preference/losses.py, the generated pairs in
planish/recipes/sum_comparisons.py.
"""

import sys
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.datasets.split_names import SplitNames
from planish.preference import dpo
from planish.preference.datasets import (
    ComparisonBuilder,
    ComparisonBuilderFromRows,
    DPODatasetBuilderFromComparisons,
)
from planish.recipes import training_run
from planish.recipes.sum_comparisons import SumComparisons, SumPairs
from planish.training.option_rules import at_least, check_fields, one_of, zero_for
from planish.training.run_options import RecipeOptions

KINDS: tuple[SumPairs, ...] = ("style", "result")
DEFAULT_PAIRS, DEFAULT_LARGEST, DEFAULT_TEST_SIZE = "style", 30, 64
PRESETS: dict[str, dict[str, Any]] = {
    "seed": {"batch_size": 256, "learning_rate": 1e-5, "max_length": 8192},
}


@chz.chz
class Options(dpo.PairLossOptions, SplitNames, RecipeOptions):
    """Options of the recipe."""

    dataset: str | None = chz.field(
        default=None, doc="hub name, local directory or file; none = generated pairs"
    )
    test_size: int | None = chz.field(
        default=DEFAULT_TEST_SIZE,
        doc="number of test pairs; none = the whole test split, 0 = no evaluation",
        metadata=zero_for("no evaluation"),
    )
    pairs: SumPairs | None = chz.field(
        default=None,
        doc=f"kind of generated pairs: {' or '.join(KINDS)}; none = {DEFAULT_PAIRS}",
        metadata=one_of(KINDS),
    )
    largest: int | None = chz.field(
        default=None,
        doc=f"generated pairs: largest operand; none = {DEFAULT_LARGEST}",
        metadata=at_least(1),
    )
    log_path: str = "/tmp/planish-examples/dpo"
    batch_size: int = chz.field(default=16, doc="pairs per step", metadata=at_least(1))
    max_length: int = chz.field(
        default=1024,
        doc="maximum tokens in a prompt with its answer; longer ones are truncated and counted",
        metadata=at_least(2),
    )
    learning_rate: float = 1e-5
    eval_every: int = 10


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    config = dpo_config(options)
    dpo.check(config)
    return training_run.run_main(dpo.main, config, service_client)


def dpo_config(options: Options) -> dpo.Config:
    """Return the config of `planish.preference.dpo`."""
    check_fields(options)
    builder = DPODatasetBuilderFromComparisons(
        common_config=training_run.chat_config(options),
        comparison_builder=comparisons(options),
        shuffle_seed=options.seed,
    )
    return training_run.build(dpo.Config, options, dataset_builder=builder, recipe_name="dpo")


def comparisons(options: Options) -> ComparisonBuilder:
    """Return the builder of the pairs. Raises UserError for an option that would be ignored."""
    if options.dataset is not None:
        training_run.reject_unused(
            options,
            ("pairs", "largest"),
            "is for generated pairs, and dataset is given; leave it out",
        )
        return training_run.build(ComparisonBuilderFromRows, options, shuffle_seed=options.seed)
    training_run.reject_unused(options, *training_run.SPLITS_OF_DATASET)
    return SumComparisons(
        kind=options.pairs or DEFAULT_PAIRS,
        largest=DEFAULT_LARGEST if options.largest is None else options.largest,
        test_size=DEFAULT_TEST_SIZE if options.test_size is None else options.test_size,
        seed=options.seed,
    )


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
