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
planish/recipes/preference_pairs.py.
"""

import sys
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.datasets.split_names import SplitNames
from planish.errors import UserError
from planish.preference import dpo
from planish.preference.datasets import (
    ComparisonBuilder,
    ComparisonBuilderFromRows,
    DPODatasetBuilderFromComparisons,
)
from planish.preference.types import LabeledComparison
from planish.recipes import training_run
from planish.recipes.preference_pairs import KINDS, generated_pairs
from planish.recipes.sums import num_sums
from planish.training.run_options import RecipeOptions

DEFAULT_PAIRS, DEFAULT_LARGEST = "style", 30
PRESETS: dict[str, dict[str, Any]] = {
    "seed": {"batch_size": 256, "learning_rate": 1e-5, "max_length": 8192},
}


@chz.chz
class GeneratedPairsBuilder(ComparisonBuilder):
    """The generated pairs of planish/recipes/preference_pairs.py."""

    largest: int
    test_size: int
    seed: int
    kind: str = "style"

    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        """Return (training pairs, test pairs)."""
        return generated_pairs(self.largest, self.test_size, self.seed, self.kind)


@chz.chz
class Options(dpo.PairLossOptions, SplitNames, RecipeOptions):
    """Options of the recipe."""

    dataset: str | None = chz.field(
        default=None, doc="hub name, local directory or file; none = generated pairs"
    )
    test_size: int | None = chz.field(
        default=64, doc="number of test pairs; none = the whole test split, 0 = no evaluation"
    )
    pairs: str | None = chz.field(
        default=None, doc=f"kind of generated pairs: {' or '.join(KINDS)}; none = {DEFAULT_PAIRS}"
    )
    largest: int | None = chz.field(
        default=None, doc=f"generated pairs: largest operand; none = {DEFAULT_LARGEST}"
    )
    log_path: str = "/tmp/planish-examples/dpo"
    batch_size: int = chz.field(default=16, doc="pairs per step")
    max_length: int = chz.field(
        default=1024,
        doc="maximum tokens in a prompt with its answer; longer ones are truncated and counted",
    )
    learning_rate: float = chz.field(default=1e-5, doc="learning rate before the schedule")
    eval_every: int = 10


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    config = dpo_config(options)
    dpo.check(config)
    return training_run.run_main(dpo.main, config, service_client)


def dpo_config(options: Options) -> dpo.Config:
    """Return the config of `planish.preference.dpo`."""
    training_run.require_at_least(options, batch_size=1, max_length=2, test_size=0, largest=1)
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
    kind = options.pairs or DEFAULT_PAIRS
    if kind not in KINDS:
        raise UserError(f"pairs={kind}: give {' or '.join(KINDS)}")
    largest = DEFAULT_LARGEST if options.largest is None else options.largest
    count = num_sums(largest)
    test_size = options.test_size if options.test_size is not None else 64
    if test_size >= count:
        raise UserError(
            f"test_size={test_size}: there are only {count} generated sums; lower test_size or "
            "raise largest"
        )
    return GeneratedPairsBuilder(largest=largest, test_size=test_size, seed=options.seed, kind=kind)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
