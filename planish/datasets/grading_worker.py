"""The comparison of answers. `grading.Grader` runs this in a process that it kills if it hangs.

A request has "answer" and "expected"; the reply says whether they are "equal".
"""

import logging
from collections.abc import Callable

# Only killing the process ends a power tower such as 9^{9^{9}}. The library's own alarm cannot
# interrupt it.
PARSE_OPTIONS = {"parsing_timeout": None, "raise_on_error": True}


def start() -> Callable[[dict[str, str]], dict[str, bool]]:
    """Import math-verify and return the function that handles a request."""
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def compare(request: dict[str, str]) -> dict[str, bool]:
        expected, answer = (
            parse(f"${request[name]}$", **PARSE_OPTIONS) for name in ("expected", "answer")
        )
        return {"equal": bool(verify(expected, answer, timeout_seconds=None, raise_on_error=True))}

    return compare
