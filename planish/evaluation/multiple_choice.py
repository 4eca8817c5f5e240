"""Multiple-choice questions: rows of "question", "choices" (two or more texts) and "answer" (a
letter, or an index from 0).

There are two tasks for them:

    multiple_choice            the choices are listed with letters, and the letter is read from
                               the sampled answer
    multiple_choice_logprobs   the choices are not shown, and each is scored as the assistant's
                               message

The letter is never guessed. If a text does not clearly state a letter, it counts as no answer and
is wrong.
"""

import re
from collections.abc import Mapping
from string import ascii_uppercase as LETTERS
from typing import Any

from planish.datasets.grading import extract_boxed
from planish.datasets.math_problems import text_of
from planish.errors import UserError
from planish.evaluation.types import Question, Verdict

ASK_FOR_LETTER = 'Answer with the letter of the right choice. End with "Answer: " and that letter.'
NO_WORD = r"(?![A-Za-z0-9'])(?!(?<=[AI]) [a-z])"
"""Lookaheads after a letter. They reject letters that are an article (A), a pronoun (I) or the
beginning of a word.
"""
STATED = re.compile(r"(?i:\banswer)\W{0,3}?(?:(?i:is\b)|[:=])\W{0,4}(?:boxed\{)?([A-Z])" + NO_WORD)
LISTED = re.compile(r"^[^\S\n]*\(?([A-Z])[).:]", re.MULTILINE)
LEADING = re.compile(r"\s*\(?([A-Z])(?:[).:]|\s*(?:\n|\Z))")
ALONE = re.compile(r"\W*([A-Za-z])\W*")


def lettered_question(row: Mapping[str, Any], where: str, number: int) -> Question:
    """Return a question that lists the choices with letters; UserError for an invalid row."""
    question, choices, reference = _read(row, where)
    listed = "\n".join(
        f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)
    )
    asked: Any = {"role": "user", "content": f"{question}\n\n{listed}\n\n{ASK_FOR_LETTER}"}
    return Question(number, (asked,), reference, choices)


def unlisted_question(row: Mapping[str, Any], where: str, number: int) -> Question:
    """Return a question that does not list its choices; UserError for an invalid row."""
    question, choices, reference = _read(row, where)
    asked: Any = {"role": "user", "content": question}
    return Question(number, (asked,), reference, choices)


async def grade_letter(question: Question, text: str) -> Verdict:
    """Grade the letter in `text`."""
    letter = letter_of(text, len(question.choices))
    return Verdict(letter == question.reference, letter)


def letter_of(text: str, choices: int) -> str | None:
    """Return the letter of the choice that a text names; None if the text does not clearly name one.

    The letter may be boxed, stated as the answer (the last statement counts), at the start, or
    alone.
    """
    boxed = extract_boxed(text)
    stated = STATED.findall(text)
    front, alone = LEADING.match(text), ALONE.fullmatch(text)
    if boxed is not None and (only := ALONE.fullmatch(boxed)):
        found = only[1].upper()
    elif stated:
        found = stated[-1]
    elif front and len(set(LISTED.findall(text))) <= 1:  # otherwise the text repeats the list
        found = front[1]
    else:
        found = alone[1].upper() if alone else ""
    return found if found and found in LETTERS[:choices] else None


def _read(row: Mapping[str, Any], where: str) -> tuple[str, tuple[str, ...], str]:
    question, choices = text_of(row, "question", where), row.get("choices")
    if not question:
        raise UserError(f"{where}: the question is empty; write it, or remove the row")
    if not isinstance(choices, list | tuple) or not 2 <= len(choices) <= len(LETTERS):
        raise UserError(
            f'{where}: needs "choices", a list of 2 to {len(LETTERS)} texts; it has {choices!r}'
        )
    texts = tuple(text_of({"choices": choice}, "choices", where) for choice in choices)
    if not all(texts) or len(set(texts)) < len(texts):
        raise UserError(
            f"{where}: a choice is empty or repeated: {list(texts)}; give distinct texts"
        )
    return question, texts, LETTERS[_index(row.get("answer"), len(texts), where)]


def _index(answer: Any, choices: int, where: str) -> int:
    if (
        isinstance(answer, str)
        and len(letter := answer.strip().upper()) == 1
        and letter in LETTERS[:choices]
    ):
        return LETTERS.index(letter)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < choices:
        return answer
    raise UserError(
        f'{where}: "answer" is {answer!r}; give a letter from A to {LETTERS[choices - 1]}, or an '
        f"index from 0 to {choices - 1}"
    )
