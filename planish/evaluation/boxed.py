r"""Mathematical questions with the answer in \boxed{}: GSM8K, and rows in the format of MATH-500.

The prompts and the grader are the same as in the recipes' evaluations. A prompt has a worked
example, then the question with instructions for the box. So scores of a training run and of
`planish eval` are comparable.
"""

from collections.abc import Mapping
from typing import Any

from planish.datasets.grading import extract_boxed
from planish.datasets.gsm8k import QUESTION_SUFFIX, read_problem, worked_example
from planish.datasets.math_problems import BOX_SUFFIX, math_answer, text_field
from planish.datasets.process_grader import process_grader
from planish.errors import UnjudgedAnswerError, UserError
from planish.evaluation.types import Question, Verdict


def gsm8k_question(row: Mapping[str, Any], where: str, number: int) -> Question:
    """Return the question of a GSM8K row. Raise UserError, which names the row by `where`, for
    other formats.
    """
    problem = read_problem(row, where)
    return _question(number, problem.question, problem.answer, QUESTION_SUFFIX)


def math_question(row: Mapping[str, Any], where: str, number: int) -> Question:
    """Return the question of a MATH row. Raise UserError, which names the row by `where`, if it has
    no answer.
    """
    answer = math_answer(row, where)
    if not answer:
        raise UserError(
            rf'{where}: no answer; give it as "answer", or as the last \boxed{{}} of "solution", '
            rf"or remove the row"
        )
    return _question(number, text_field(row, "problem", where), answer, BOX_SUFFIX)


async def grade_boxed(question: Question, text: str) -> Verdict:
    """Grade the last box of `text`; the verdict has an error if its content cannot be compared."""
    try:
        grade = await process_grader().grade(text, question.reference)
    except UnjudgedAnswerError as error:
        return Verdict(False, extract_boxed(text), str(error))
    return Verdict(grade.correct, grade.boxed)


def _question(number: int, text: str, answer: str, suffix: str) -> Question:
    message: Any = {"role": "user", "content": text + suffix}
    return Question(number, (*worked_example(suffix), message), answer)  # type: ignore[arg-type]
