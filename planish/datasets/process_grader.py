"""The grader of this process, for environments, which await.

All environments of a process share one grading process, whatever their number, and the event loop
goes on while it works. An environment carries no grader but asks here for it, so a builder of
groups that is sent to another process finds the one of that process.
"""

import asyncio
import atexit
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from planish.datasets.grading import Grade, Grader


class SharedGrader:
    """A `Grader` and the one thread that talks to it."""

    def __init__(self, timeout_seconds: float = 5.0) -> None:
        self._grader = Grader(timeout_seconds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planish-grading")

    async def grade(self, response: str, expected: str) -> Grade:
        """`Grader.grade`: GradingError, which environments count as unjudged, if nobody can say."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._grader.grade, response, expected
        )

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._grader.close()


@cache
def process_grader() -> SharedGrader:
    """One for the whole process, closed when it ends."""
    grader = SharedGrader()
    atexit.register(grader.close)
    return grader
