"""Two answers to one prompt, and a label that says which is preferred. Names are those of the
public cookbooks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from planish.errors import UserError
from planish.supervised.conversations import messages_of

Messages = Sequence[Mapping[str, Any]]
Label = Literal["A", "B", "Tie"]


@dataclass(frozen=True)
class Comparison:
    """A prompt and two answers to it, each as messages."""

    prompt_conversation: Messages
    completion_A: Messages
    completion_B: Messages

    def swap(self) -> Self:
        """Return the comparison with A and B exchanged."""
        return replace(self, completion_A=self.completion_B, completion_B=self.completion_A)


@dataclass(frozen=True)
class LabeledComparison:
    """A comparison and its label."""

    comparison: Comparison
    label: Label
    """The preferred answer."""

    def swap(self) -> Self:
        """Return the comparison with answers and label exchanged."""
        swapped: dict[Label, Label] = {"A": "B", "B": "A", "Tie": "Tie"}
        return replace(self, comparison=self.comparison.swap(), label=swapped[self.label])

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
    """Return the comparison of two texts that answer `question`; `chosen` is A and is preferred."""
    prompt = [{"role": "user", "content": question}]
    answers = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    return LabeledComparison(Comparison(prompt, *answers), "A")


def read_comparison(row: Mapping[str, Any], where: str) -> LabeledComparison:
    """Read a row of comparison data.

    A row is either {"comparison": {"prompt_conversation", "completion_A", "completion_B"}, "label"}
    or {"prompt", "chosen", "rejected"}, each a text or a list of messages. Without "prompt", chosen
    and rejected are whole conversations that differ only in the last message. Raises UserError,
    which names the row by `where`, for other formats.
    """
    if "comparison" in row:
        return _read_labeled(row, where)
    if "chosen" not in row or "rejected" not in row:
        raise UserError(
            f'{where}: the row has {sorted(row)}; give "prompt", "chosen" and "rejected", or '
            '"comparison" and "label"'
        )
    chosen = messages_of(row["chosen"], "assistant", f'{where}, "chosen"')
    rejected = messages_of(row["rejected"], "assistant", f'{where}, "rejected"')
    prompt = row.get("prompt")
    if _includes_prompt(chosen) and _includes_prompt(rejected):
        if chosen[:-1] != rejected[:-1]:
            raise UserError(
                f"{where}: chosen and rejected differ before their last message; give answers to "
                "one prompt"
            )
        comparison = Comparison(chosen[:-1], chosen[-1:], rejected[-1:])
    elif prompt is None:
        raise UserError(
            f'{where}: there is no "prompt", and chosen and rejected are not conversations; give '
            "the prompt"
        )
    else:
        comparison = Comparison(messages_of(prompt, "user", f'{where}, "prompt"'), chosen, rejected)
    return LabeledComparison(comparison, "A")


def _read_labeled(row: Mapping[str, Any], where: str) -> LabeledComparison:
    comparison_row, label = row["comparison"], row.get("label")
    if label not in ("A", "B", "Tie"):
        raise UserError(f'{where}: label is {label!r}; give "A", "B" or "Tie"')
    names = ("prompt_conversation", "completion_A", "completion_B")
    if not isinstance(comparison_row, Mapping) or any(name not in comparison_row for name in names):
        raise UserError(f'{where}, "comparison": give {", ".join(names)}')
    roles = ("user", "assistant", "assistant")
    prompt, first, second = (
        messages_of(comparison_row[name], role, f'{where}, "{name}"')
        for name, role in zip(names, roles, strict=True)
    )
    return LabeledComparison(Comparison(prompt, first, second), label)


def _includes_prompt(messages: Messages) -> bool:
    """Return whether the messages include their prompt, as in datasets that repeat it in each
    answer.
    """
    return len(messages) > 1 and messages[0].get("role") != "assistant"
