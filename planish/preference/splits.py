"""Comparisons to train on, to calibrate on and to test on, no two of which have a prompt in common.

A data set of comparisons often holds several answers to one prompt. Rows that are held out one by
one would then be judged by a model that has seen their prompts; so what shares a prompt with
held-out comparisons is left out of training, and counted.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from planish.errors import UserError
from planish.preference.types import LabeledComparison


@dataclass(frozen=True)
class PreferenceSplits:
    train: Sequence[LabeledComparison]
    calibration: Sequence[LabeledComparison]
    test: Sequence[LabeledComparison]
    left_out: int = 0
    """Of those to train on, since their prompt is held out."""


def split_by_prompt(
    train: Sequence[LabeledComparison],
    test: Sequence[LabeledComparison],
    calibration_size: int,
    seed: int,
) -> PreferenceSplits:
    """Hold `calibration_size` comparisons out of `train`, drawn by `seed`; and what shares a prompt
    with held-out ones.
    """
    tested = {prompt_of(labeled) for labeled in test}
    free = [labeled for labeled in train if prompt_of(labeled) not in tested]
    order = random.Random(f"calibration:{seed}").sample(range(len(free)), len(free))
    calibration = [free[index] for index in order if free[index].ranked is not None][
        :calibration_size
    ]
    calibrated = {prompt_of(labeled) for labeled in calibration}
    kept = [labeled for labeled in free if prompt_of(labeled) not in calibrated]
    if not kept:
        raise UserError(
            f"calibration_size={calibration_size}: of {len(train)} comparisons none is left to train on that shares no prompt "
            "with held-out ones; hold fewer out"
        )
    return PreferenceSplits(kept, calibration, test, len(train) - len(calibration) - len(kept))


def prompt_of(labeled: LabeledComparison) -> str:
    """A text that is equal for equal prompts."""
    return json.dumps(
        [dict(message) for message in labeled.comparison.prompt_conversation], sort_keys=True
    )
