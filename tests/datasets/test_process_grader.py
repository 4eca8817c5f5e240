"""Grading in async code does not block the event loop, one process serves all callers, and an
answer that cannot be graded raises an error.
"""

import asyncio

import pytest

from planish.datasets.grading import Grade, GradingError
from planish.datasets.process_grader import SharedGrader, process_grader
from planish.errors import UnjudgedAnswerError


@pytest.fixture
def grader():
    grader = SharedGrader(timeout_seconds=120.0)
    yield grader
    grader.close()


async def grades_of(grader, *answers):
    return await asyncio.gather(
        *(grader.grade(rf"\boxed{{{answer}}}", "1/2") for answer in answers)
    )


@pytest.mark.sandbox
def test_many_answers_are_graded_concurrently(grader):
    grades = asyncio.run(grades_of(grader, r"\frac{1}{2}", "0.5", "2/4", "2"))
    assert grades == [
        Grade(r"\frac{1}{2}", True),
        Grade("0.5", True),
        Grade("2/4", True),
        Grade("2", False),
    ]


@pytest.mark.sandbox
@pytest.mark.slow
def test_the_event_loop_runs_while_an_answer_is_graded(grader):
    async def both():
        endless = asyncio.ensure_future(grader.grade(r"\boxed{9^{9^{9^{9}}}}", "5"))
        turns = 0
        while not endless.done():
            await asyncio.sleep(0.01)
            turns += 1
        return endless, turns

    asyncio.run(grader.grade(r"\boxed{x}", "y"))  # the process starts
    grader._grader.timeout_seconds = 2.0
    endless, turns = asyncio.run(both())
    # A blocked loop makes one turn, and an idle machine 200 in the two seconds.
    assert turns > 5
    with pytest.raises(GradingError):
        endless.result()
    assert issubclass(GradingError, UnjudgedAnswerError), "environments count it"


def test_a_process_has_one_grader_for_every_loop():
    assert process_grader() is process_grader()
    for _ in range(2):
        assert asyncio.run(process_grader().grade(r"\boxed{5}", "5.0")).correct
