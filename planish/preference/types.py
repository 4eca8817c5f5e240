"""Two answers to one prompt, and a label that says which is preferred. Names are those of the
public cookbooks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from planish.datasets.layouts import Label, comparison_of
from planish.datasets.row_images import has_images, image_place
from planish.errors import UserError

Messages = Sequence[Mapping[str, Any]]
EMPTY_ANSWER: Messages = ({"role": "assistant", "content": ""},)
"""An answer without text, to measure what a comparison has besides its answers."""


@dataclass(frozen=True)
class Comparison:
    """A prompt and two answers to it, each as messages."""

    prompt_conversation: Messages
    completion_A: Messages
    completion_B: Messages

    def __post_init__(self) -> None:
        """Raise UserError if a message has an image: nothing that reads comparisons shows images."""
        for name, messages in vars(self).items():
            if has_images(messages):
                raise UserError(
                    f"{image_place(messages, name)} is an image, and comparisons have text only; "
                    "leave the comparison out"
                )

    def swap(self) -> Self:
        """Return the comparison with A and B exchanged."""
        return replace(self, completion_A=self.completion_B, completion_B=self.completion_A)


@dataclass(frozen=True)
class LabeledComparison:
    """A comparison and its label."""

    comparison: Comparison
    label: Label
    """The preferred answer."""
    location: str = field(default="", compare=False)
    """Where the row is, for error messages; "" if the comparison comes from no file."""

    def swap(self) -> Self:
        """Return the comparison with answers and label exchanged."""
        swapped: dict[Label, Label] = {"A": "B", "B": "A", "Tie": "Tie"}
        return replace(self, comparison=self.comparison.swap(), label=swapped[self.label])

    @property
    def is_identical(self) -> bool:
        """Whether the two answers are equal, so that neither can be preferred."""
        return list(self.comparison.completion_A) == list(self.comparison.completion_B)

    @property
    def ranked(self) -> tuple[Messages, Messages] | None:
        """Return (preferred answer, other answer), or None for a tie."""
        first, second = self.comparison.completion_A, self.comparison.completion_B
        ranks: dict[Label, tuple[Messages, Messages] | None] = {
            "A": (first, second),
            "B": (second, first),
            "Tie": None,
        }
        return ranks[self.label]


def preferred_answer(question: str, chosen: str, rejected: str) -> LabeledComparison:
    """Return the comparison of two texts that answer `question`: `chosen` is A and is preferred,
    and `rejected` is B.
    """
    prompt = [{"role": "user", "content": question}]
    answers = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    return LabeledComparison(Comparison(prompt, *answers), "A")


def read_comparison(row: Mapping[str, Any], where: str) -> LabeledComparison:
    """Read a row of comparison data; docs/reference/data.md lists the layouts. Raises UserError,
    which names the row by `where`, for other layouts.
    """
    pair = comparison_of(row, where)
    return LabeledComparison(Comparison(pair.prompt, pair.first, pair.second), pair.label, where)
