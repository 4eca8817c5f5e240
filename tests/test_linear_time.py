"""Functions that read the text of a model or a program take time proportional to its length."""

import time

import pytest

from planish.datasets.grading import extract_boxed, parse_number
from planish.evaluation.multiple_choice import letter_of
from planish.recipes.arithmetic_expressions import THOUSANDS
from planish.recipes.code_env import CODE_BLOCK
from planish.recipes.reasoning_problems import tagged_answers
from planish.recipes.sum_tasks import ANSWER_FORMAT
from planish.recipes.twenty_questions import read_guess
from planish.recipes.wordy_sums import QUESTION
from planish.renderers.messages import THINK_BLOCK
from planish.renderers.tool_calls import VERBATIM_CALL
from planish.sandbox.program_tests import texts_match

READERS = {
    "printed number": lambda text: texts_match(text, "0.5"),
    "boxed answer": extract_boxed,
    "number": parse_number,
    "letter": lambda text: letter_of("A. " + text, 4),
    "stated letter": lambda text: letter_of(text, 4),
    "tagged answer": tagged_answers,
    "program": CODE_BLOCK.findall,
    "guess": lambda text: read_guess("guess: " + text),
    "sum": ANSWER_FORMAT.fullmatch,
    "question": QUESTION.search,
    "thousands": lambda text: THOUSANDS.sub("", text),
    "thinking": THINK_BLOCK.fullmatch,
    "tool call": VERBATIM_CALL.fullmatch,
}
LONG = 100_000
PIECES = [
    "1", " ", "\n", "<answer>", "<answer> ", "```\n", "```python\n", ". ", "{", "\\boxed{", "answer",
    "answer: ", "1,", "A) ", "\nA", "<think>", '{"name": "f", "arguments": {', "}", "What is 1 + ",
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
def test_reading_a_long_text_of_one_repeated_piece_takes_a_moment(reader):
    for piece in PIECES:
        text = (piece * (LONG // len(piece) + 1))[:LONG]
        for whole in (text, text + "x", text + "\n\0"):
            start = time.thread_time()
            reader(whole)
            # A quadratic reader needs ten seconds and more.
            assert time.thread_time() - start < 3, f"{piece!r} takes too long"


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("<answer> 7 </answer>", ["7"]),
        ("<answer>a</answer> no, <answer>\nb\n</answer>", ["a", "b"]),
        ("<answer><answer>2</answer>", ["<answer>2"]),
        ("<answer>2", []),
        ("</answer><answer>", []),
    ],
)
def test_tagged_answers(text, answers):
    assert tagged_answers(text) == answers
