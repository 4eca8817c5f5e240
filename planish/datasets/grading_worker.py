"""How answers of a model are compared, in the process that `grading.Grader` starts and kills when
it hangs.

A question has "answer" and "expected"; its answer says whether they are "equal".
"""

import logging
from collections.abc import Callable

# A power tower such as 9^{9^{9}} has to be ended from outside; the library's own alarm cannot
# interrupt it.
NO_ALARM = {"parsing_timeout": None, "raise_on_error": True}


def start() -> Callable[[dict[str, str]], dict[str, bool]]:
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def compare(question: dict[str, str]) -> dict[str, bool]:
        expected, answer = (
            parse(f"${question[name]}$", **NO_ALARM) for name in ("expected", "answer")
        )
        return {"equal": bool(verify(expected, answer, timeout_seconds=None, raise_on_error=True))}

    return compare
