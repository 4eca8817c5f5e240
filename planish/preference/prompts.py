"""Prompts without answers, for training on the policy's own samples. They are read from the rows of
any chat or comparison dataset.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import chz

from planish.datasets.layouts import PROMPTS, prompt_of
from planish.datasets.messages import location_of
from planish.datasets.row_files import Row
from planish.datasets.row_images import has_images, image_place
from planish.datasets.split_names import SplitNames
from planish.errors import UserError
from planish.preference.datasets import ComparisonBuilder
from planish.preference.types import Messages
from planish.renderers import Renderer
from planish.rl.environments.prompt_selection import Selection, select_problems
from planish.supervised.datasets import read_splits, row_splits


@dataclass(frozen=True)
class Prompts:
    """Conversations that end where the assistant's answer begins."""

    train: Sequence[Messages]
    test: Sequence[Messages]
    """Held-out prompts; may be empty."""


class PromptBuilder(ABC):
    """The options of a set of prompts, as plain data."""

    @abstractmethod
    def __call__(self) -> Prompts: ...


@chz.chz
class PromptsOfComparisons(PromptBuilder):
    """The prompts of a comparison dataset."""

    comparison_builder: ComparisonBuilder
    keep_repeated: bool = chz.field(
        default=False, doc="use a prompt once for each of its comparisons, and not only once"
    )

    def __call__(self) -> Prompts:
        train, test = (
            [labeled.comparison.prompt_conversation for labeled in split]
            for split in self.comparison_builder()
        )
        return (
            Prompts(train, test)
            if self.keep_repeated
            else Prompts(_deduplicate(train), _deduplicate(test))
        )


@chz.chz
class PromptsFromRows(SplitNames, PromptBuilder):
    """Prompts from a hub dataset, a directory, or one file; docs/reference/data.md lists the
    layouts of rows.
    """

    dataset: str
    test_size: int | None = chz.field(
        default=None, doc="number of test prompts; none = the whole test split, 0 = no evaluation"
    )
    shuffle_seed: int | None = 0

    def __call__(self) -> Prompts:
        splits = row_splits(
            self.dataset, self.test_size, self.shuffle_seed, self.train_split, self.test_split
        )
        return Prompts(*read_splits(self.dataset, splits, _text_prompt_of, PROMPTS))


def fitting_prompts(
    prompts: Sequence[Messages], renderer: Renderer, split: str, max_tokens: int | None
) -> Selection[Messages]:
    """Return the prompts of at most `max_tokens` tokens (None: all). A warning counts the others.

    Raise UserError for the first prompt that the chat format cannot express, and if no prompt is
    short enough.
    """
    return select_problems(
        prompts,
        renderer.build_generation_prompt,
        lambda index: location_of(prompts[index]) or f"{split} prompt {index + 1}",
        split=split,
        max_prompt_tokens=max_tokens,
    )


def _text_prompt_of(row: Row, where: str) -> Messages:
    """Return the prompt of a row. Raise UserError if it has an image, because the models that judge
    the answers read only text.
    """
    prompt = prompt_of(row, where)
    if has_images(prompt):
        place = image_place(prompt, '"prompt"')
        raise UserError(
            f"{where}: {place} is an image, and these prompts have text only; remove the row"
        )
    return prompt


def _deduplicate(prompts: Sequence[Messages]) -> list[Messages]:
    by_repr: dict[str, Messages] = {}
    for prompt in prompts:
        by_repr.setdefault(repr(prompt), prompt)
    return list(by_repr.values())
