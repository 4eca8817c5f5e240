"""Rubrics: the criteria by which an answer is graded, and how the judge's score is read.

A row of rubric data is a conversation and its criteria:

    {"messages": [...], "rubric_items": [{"rubric_str": "Is the answer polite?", "weight": 2}, ...]}

Files of the public cookbook, which say "convo" instead of "messages", work unchanged. An item may
have the fields of `Criterion`. Any other field is rejected, because a misspelt weight would
otherwise be ignored silently.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from planish.datasets.layouts import (
    TEXT_REFUSALS,
    Layout,
    check_refused,
    find_layout,
    with_common_columns,
)
from planish.datasets.messages import read_message_list
from planish.datasets.row_images import has_images, image_place
from planish.errors import UserError
from planish.renderers import Message
from planish.rl.field_checks import is_finite

SCORE_TAG = r"<score>\s*(.*?)\s*</score>"
QUOTE = "> "
ROLES = ("system", "user", "assistant", "tool")
RUBRICS: Mapping[Layout, None] = {
    Layout(("messages", "rubric_items")): None,
    Layout(("convo", "rubric_items")): None,
}
"""The layouts of rows with rubrics."""


@dataclass(frozen=True)
class Example:
    """An answer to the same conversation, and the reply that the judge should give to it."""

    answer: str
    reply: str


@dataclass(frozen=True)
class Criterion:
    """One criterion of a rubric. The fields are those of an item of "rubric_items"."""

    rubric_str: str
    """The requirement on the answer, as the judge reads it."""
    name: str = ""
    """Name in the metrics: rubric/NAME. Criteria without a name are called 1, 2, ..."""
    weight: float = 1.0
    score_range: tuple[float, float] = (0.0, 1.0)
    """(worst, best) score that the judge can give; [1, 0] for something that an answer should not
    do.
    """
    word_scores: Mapping[str, float] | None = None
    """Words that the judge writes instead of a number, with their scores: {"Yes": 1, "No": 0}."""
    extraction_regex: str = SCORE_TAG
    """Finds the score in the judge's reply: group 1, or the whole match. If there are several
    matches, the last one counts.
    """
    grader_output_format_instruction: str = ""
    """Tells the judge how to write its score; "" = made from the fields above."""
    examples: tuple[Example, ...] = ()
    """Shown to the judge first, as earlier turns. A small judge imitates their form."""
    truth_regex: str | None = None
    """For a criterion that a program can check: an answer in which this is found meets the
    criterion. It is not part of the reward; it measures the judge.
    """

    @property
    def instruction(self) -> str:
        """Return the last line of the prompt, which says how the judge writes its score."""
        if self.grader_output_format_instruction:
            return self.grader_output_format_instruction
        if self.word_scores is not None:
            return f"Write {' or '.join(self.word_scores)} between <score> and </score>."
        low, high = sorted(self.score_range)
        return f"Write your score, a number from {low:g} to {high:g}, between <score> and </score>."

    def read_score(self, reply: str) -> float | None:
        """Return the judge's score, from 0 for the worst to 1 for the best. None if the reply has
        no score, or one outside the range. Lines that the judge quotes do not count.
        """
        judge_text = "\n".join(
            line for line in reply.splitlines() if not line.startswith(QUOTE.rstrip())
        )
        matches = list(re.finditer(self.extraction_regex, judge_text, re.DOTALL))
        if not matches:
            return None
        score = self._number(
            (matches[-1].group(1) if matches[-1].re.groups else matches[-1].group()) or ""
        )
        if score is None:
            return None
        normalized = self.normalize(score)
        return normalized if 0 <= normalized <= 1 else None

    def normalize(self, score: float) -> float:
        """Return a score as a share of the range: 0 for the worst score and 1 for the best."""
        worst, best = self.score_range
        return (score - worst) / (best - worst)

    def _number(self, text: str) -> float | None:
        if self.word_scores is not None:
            score_by_word = {word.casefold(): score for word, score in self.word_scores.items()}
            return score_by_word.get(text.strip().rstrip(".").casefold())
        try:
            return float(text)
        except ValueError:
            return None

    def is_met(self, answer: str) -> bool | None:
        """Return whether `truth_regex` is found in the answer; None if there is no
        `truth_regex`.
        """
        return None if self.truth_regex is None else re.search(self.truth_regex, answer) is not None


@dataclass(frozen=True)
class RubricRow:
    """A conversation that the policy continues, and the criteria for its answer."""

    messages: tuple[Message, ...]
    criteria: tuple[Criterion, ...]
    location: str = field(default="", compare=False, repr=False)
    """The place of its row, such as file and line, for messages; "" if it is not from a row."""

    def __post_init__(self) -> None:
        """Raise UserError if a message has an image, which the judge would not see."""
        if has_images(self.messages):
            place = image_place(self.messages, "messages")
            raise UserError(
                f"{self.location or 'RubricRow'}: {place} is an image, and the judge reads only text; "
                "leave the row out"
            )


@dataclass(frozen=True)
class RubricRows:
    """The rows to train on, and those to evaluate on."""

    train: Sequence[RubricRow]
    test: Sequence[RubricRow] = ()


def read_rubric_row(row: Mapping[str, Any], where: str) -> RubricRow:
    """Return the row as a RubricRow. Raises UserError, which begins with `where`, if it is
    invalid.
    """
    layout = find_layout(row, RUBRICS, where)
    check_refused(row, TEXT_REFUSALS, where)
    messages = _messages(row, layout.columns[0], where)
    items = row["rubric_items"]
    if not isinstance(items, Sequence) or isinstance(items, str) or not items:
        raise UserError(f'{where}, "rubric_items": give a list with at least one criterion')
    criteria = [
        _criterion(item, number, f"{where}, rubric item {number}")
        for number, item in enumerate(items, 1)
    ]
    names = [criterion.name for criterion in criteria]
    if len(set(names)) < len(names):
        raise UserError(
            f"{where}: several rubric items have the same name ({', '.join(names)}); give each a "
            "name of its own"
        )
    return RubricRow(tuple(messages), tuple(criteria), where)


def _messages(row: Mapping[str, Any], column: str, where: str) -> list[Message]:
    given = read_message_list(row[column], f'{where}, "{column}"')
    for number, message in enumerate(given, 1):
        if message.get("role") not in ROLES:
            raise UserError(
                f'{where}, "{column}": message {number} has no role of {", ".join(ROLES)}; give one'
            )
        if not isinstance(message.get("content"), str):
            raise UserError(
                f'{where}, "{column}": the content of message {number} is not a text; give a text'
            )
    if given[-1]["role"] == "assistant":
        raise UserError(
            f'{where}, "{column}": the last message is an answer; leave it out, because the policy '
            "writes it"
        )
    return cast(list[Message], with_common_columns(given, row, where))


def _criterion(item: Any, number: int, where: str) -> Criterion:
    known = {field.name for field in fields(Criterion)}
    if (
        not isinstance(item, Mapping)
        or not isinstance(item.get("rubric_str"), str)
        or not item["rubric_str"].strip()
    ):
        raise UserError(f'{where}: there is no text "rubric_str"; describe what the answer must do')
    given = {name: value for name, value in item.items() if value is not None}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise UserError(
            f"{where} has unknown fields {', '.join(unknown)}; give {', '.join(sorted(known))}"
        )
    given["name"] = str(given.get("name", number))
    if isinstance(given.get("score_range"), Sequence):
        given["score_range"] = tuple(given["score_range"])
    given["examples"] = _examples(given.get("examples", []), where)
    criterion = Criterion(**given)
    _check_criterion(criterion, where)
    return criterion


def _examples(value: Any, where: str) -> tuple[Example, ...]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    examples: list[Any] = list(value) if is_list else [None]
    for example in examples:
        if not isinstance(example, Mapping) or set(example) != {"answer", "reply"}:
            wrong = example if is_list else value
            raise UserError(
                f'{where}: examples={wrong!r}: give a list of {{"answer": ..., "reply": ...}}'
            )
        if not all(isinstance(text, str) for text in example.values()):
            raise UserError(f"{where}: examples={example!r}: answers and replies are texts")
    return tuple(Example(**example) for example in examples)


def _check_criterion(criterion: Criterion, where: str) -> None:
    words = criterion.word_scores
    has_own_form = criterion.extraction_regex != SCORE_TAG
    checks = {
        "name": ("/" not in criterion.name and bool(criterion.name.strip()), "a text without /"),
        "weight": (is_finite(criterion.weight) and criterion.weight > 0, "a number above 0"),
        "score_range": (
            _is_range(criterion.score_range),
            "two different numbers, the worst score and the best",
        ),
        "word_scores": (
            words is None or _are_word_scores(words),
            "at least two words with a number each",
        ),
        "extraction_regex": (
            _is_pattern(criterion.extraction_regex),
            "a regular expression with at most one group",
        ),
        "truth_regex": (
            criterion.truth_regex is None or _is_pattern(criterion.truth_regex),
            "a regular expression",
        ),
        "grader_output_format_instruction": (
            isinstance(criterion.grader_output_format_instruction, str)
            and (bool(criterion.grader_output_format_instruction) or not has_own_form),
            "a text that tells the judge to write what extraction_regex finds",
        ),
    }
    for name, (holds, remedy) in checks.items():
        if not holds:
            raise UserError(f"{where}: {name}={getattr(criterion, name)!r}: give {remedy}")
    for example in criterion.examples:
        if criterion.read_score(example.reply) is None:
            raise UserError(
                f"{where}: the example's reply {example.reply!r} has no readable score; give one"
            )
    if any(not 0 <= criterion.normalize(score) <= 1 for score in (words or {}).values()):
        raise UserError(
            f"{where}: word_scores={words!r} are not all in score_range={criterion.score_range}; "
            "give a range that contains them"
        )


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(map(is_finite, value))
        and value[0] != value[1]
    )


def _are_word_scores(words: Any) -> bool:
    if not isinstance(words, Mapping) or len({str(word).casefold() for word in words}) < 2:
        return False
    return all(isinstance(word, str) and is_finite(score) for word, score in words.items())


def _is_pattern(text: Any) -> bool:
    try:
        return isinstance(text, str) and re.compile(text).groups <= 1
    except re.error:
        return False
