"""The shared grader of this process, with an async interface for environments.

All environments of a process share one grading process, and the event loop keeps running while it
works. Environments do not hold a grader; they call `process_grader`. So a group builder that is
sent to another process uses the grader of that process.
"""

import asyncio
import atexit
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from planish.datasets.grading import Grade, Grader


class SharedGrader:
    """A `Grader` and the single thread that calls it."""

    def __init__(self, timeout_seconds: float = 5.0) -> None:
        self._grader = Grader(timeout_seconds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planish-grading")

    async def grade(self, response: str, expected: str) -> Grade:
        """Run `Grader.grade` in the thread. Raises GradingError if the answer cannot be graded."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._grader.grade, response, expected
        )

    def close(self) -> None:
        """Stop the thread and the grading process."""
        self._thread.shutdown(cancel_futures=True)
        self._grader.close()


@cache
def process_grader() -> SharedGrader:
    """Return the grader of this process, which is closed at exit."""
    grader = SharedGrader()
    atexit.register(grader.close)
    return grader
