"""The process in which answers of a model are compared: `grading.Grader` starts it, and kills it when it hangs.

It is a program of its own and imports nothing of planish, so that it starts fast and needs no start method, no guard in the
user's script and no main thread. One JSON object a line comes in ("answer", "expected"), one goes out ("equal" or "error").
"""

import json
import logging
import os
import sys

MEMORY_BYTES = 4 << 30


def main() -> None:
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # libraries that print would break the protocol
    try:
        _limit_memory()
        logging.disable(logging.CRITICAL)
        from math_verify import parse, verify
    except Exception as error:
        _send(out, {"error": f"{type(error).__name__}: {error}"})
        return
    _send(out, {"ready": True})
    # A power tower such as 9^{9^{9}} has to be ended from outside; the library's own alarm cannot interrupt it.
    no_alarm = {"parsing_timeout": None, "raise_on_error": True}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            expected, answer = (parse(f"${request[name]}$", **no_alarm) for name in ("expected", "answer"))
            equal = verify(expected, answer, timeout_seconds=None, raise_on_error=True)
            _send(out, {"equal": bool(equal)})
        except (Exception, RecursionError, MemoryError) as error:
            _send(out, {"error": f"{type(error).__name__}: {error}"})


def _send(out: object, message: dict[str, object]) -> None:
    print(json.dumps(message), file=out, flush=True)  # type: ignore[call-overload]


def _limit_memory() -> None:
    """A huge number becomes a MemoryError here instead of the end of the training process."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if hard < 0 else min(MEMORY_BYTES, hard), hard))


if __name__ == "__main__":
    main()
