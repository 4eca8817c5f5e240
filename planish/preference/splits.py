"""Splits of comparisons for training, calibration and evaluation that share no prompt.

A comparison dataset often holds several answers to one prompt. If rows were held out one by one,
the model would be evaluated on prompts that it has trained on. So training leaves out, and counts,
all comparisons that share a prompt with a held-out one.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from planish.errors import UserError
from planish.preference.types import LabeledComparison


@dataclass(frozen=True)
class PreferenceSplits:
    """The three sets of comparisons."""

    train: Sequence[LabeledComparison]
    calibration: Sequence[LabeledComparison]
    test: Sequence[LabeledComparison]
    num_left_out: int = 0
    """How many training comparisons were dropped because their prompt is held out."""


def split_by_prompt(
    train: Sequence[LabeledComparison],
    test: Sequence[LabeledComparison],
    calibration_size: int,
    seed: int,
) -> PreferenceSplits:
    """Hold `calibration_size` random comparisons out of `train`; `seed` decides which.

    Training comparisons that share a prompt with a held-out one are dropped. Raise UserError if
    none is left.
    """
    test_prompts = {prompt_of(labeled) for labeled in test}
    candidates = [labeled for labeled in train if prompt_of(labeled) not in test_prompts]
    order = random.Random(f"calibration:{seed}").sample(range(len(candidates)), len(candidates))
    calibration = [candidates[index] for index in order if candidates[index].ranked is not None][
        :calibration_size
    ]
    calibration_prompts = {prompt_of(labeled) for labeled in calibration}
    remaining = [labeled for labeled in candidates if prompt_of(labeled) not in calibration_prompts]
    if not remaining:
        raise UserError(
            f"calibration_size={calibration_size}: each of the {len(train)} "
            "comparisons is held out or shares a prompt with one that is; hold fewer out"
        )
    return PreferenceSplits(
        remaining, calibration, test, len(train) - len(calibration) - len(remaining)
    )


def prompt_of(labeled: LabeledComparison) -> str:
    """Return a text that is equal for equal prompts."""
    return json.dumps(
        [dict(message) for message in labeled.comparison.prompt_conversation], sort_keys=True
    )
