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
from planish.datasets.math_problems import text_field
from planish.errors import UserError
from planish.evaluation.types import Question, Verdict

LETTER_INSTRUCTION = (
    'Answer with the letter of the right choice. End with "Answer: " and that letter.'
)
NOT_A_WORD = r"(?![A-Za-z0-9'])(?!(?<=[AI]) [a-z])"
"""Lookaheads after a letter. They reject letters that are an article (A), a pronoun (I) or the
beginning of a word.
"""
STATED_LETTER = re.compile(
    r"(?i:\banswer)\W{0,3}?(?:(?i:is\b)|[:=])\W{0,4}(?:boxed\{)?([A-Z])" + NOT_A_WORD
)
LISTED_LETTER = re.compile(r"^[^\S\n]*\(?([A-Z])[).:]", re.MULTILINE)
LEADING_LETTER = re.compile(r"\s*\(?([A-Z])(?:[).:]|\s*(?:\n|\Z))")
LONE_LETTER = re.compile(r"\W*([A-Za-z])\W*")


def lettered_question(row: Mapping[str, Any], where: str, number: int) -> Question:
    """Return a question that lists the choices with letters. Raises UserError for an invalid
    row.
    """
    question, choices, reference = _read_fields(row, where)
    choice_list = "\n".join(
        f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)
    )
    message: Any = {
        "role": "user",
        "content": f"{question}\n\n{choice_list}\n\n{LETTER_INSTRUCTION}",
    }
    return Question(number, (message,), reference, choices)


def unlisted_question(row: Mapping[str, Any], where: str, number: int) -> Question:
    """Return a question that does not list its choices. Raises UserError for an invalid row."""
    question, choices, reference = _read_fields(row, where)
    message: Any = {"role": "user", "content": question}
    return Question(number, (message,), reference, choices)


async def grade_letter(question: Question, text: str) -> Verdict:
    """Grade the letter in `text`."""
    letter = letter_of(text, len(question.choices))
    return Verdict(letter == question.reference, letter)


def letter_of(text: str, num_choices: int) -> str | None:
    """Return the letter of the choice that a text names; None if the text does not clearly name
    one.

    The letter may be boxed, stated as the answer (the last statement counts), at the start, or
    alone.
    """
    boxed = extract_boxed(text)
    stated_letters = STATED_LETTER.findall(text)
    leading_match, lone_match = LEADING_LETTER.match(text), LONE_LETTER.fullmatch(text)
    if boxed is not None and (boxed_match := LONE_LETTER.fullmatch(boxed)):
        letter = boxed_match[1].upper()
    elif stated_letters:
        letter = stated_letters[-1]
    elif (
        leading_match and len(set(LISTED_LETTER.findall(text))) <= 1
    ):  # otherwise the text repeats the list
        letter = leading_match[1]
    else:
        letter = lone_match[1].upper() if lone_match else ""
    return letter if letter and letter in LETTERS[:num_choices] else None


def _read_fields(row: Mapping[str, Any], where: str) -> tuple[str, tuple[str, ...], str]:
    question, choices = text_field(row, "question", where), row.get("choices")
    if not question:
        raise UserError(f"{where}: the question is empty; write it, or remove the row")
    if not isinstance(choices, list | tuple) or not 2 <= len(choices) <= len(LETTERS):
        raise UserError(
            f'{where}: needs "choices", a list of 2 to {len(LETTERS)} texts; it has {choices!r}'
        )
    choice_texts = tuple(text_field({"choices": choice}, "choices", where) for choice in choices)
    if not all(choice_texts) or len(set(choice_texts)) < len(choice_texts):
        raise UserError(
            f"{where}: a choice is empty or repeated: {list(choice_texts)}; give distinct texts"
        )
    return (
        question,
        choice_texts,
        LETTERS[_answer_index(row.get("answer"), len(choice_texts), where)],
    )


def _answer_index(answer: Any, num_choices: int, where: str) -> int:
    if (
        isinstance(answer, str)
        and len(letter := answer.strip().upper()) == 1
        and letter in LETTERS[:num_choices]
    ):
        return LETTERS.index(letter)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < num_choices:
        return answer
    raise UserError(
        f'{where}: "answer" is {answer!r}; give a letter from A to {LETTERS[num_choices - 1]}, or '
        f"an index from 0 to {num_choices - 1}"
    )
