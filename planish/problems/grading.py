r"""Whether an answer in \boxed{} equals the known one.

Two plain numbers are compared as numbers. Anything else goes to math-verify, in a process that can be killed: an answer
such as 9^{9^{9^{9}}} keeps a computer algebra system busy for ever, and neither an alarm nor a thread can stop it there.
An answer that cannot be judged (the library fails on it, or takes too long) raises GradingError and is counted; it is for
the caller to say what reward that means, and to show how often it happened.
"""

import json
import re
import select
import subprocess
import sys
import threading
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

from planish.interruption import interrupts_held_back
from planish.rl.problem_env import UnjudgedAnswerError

PLAIN_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)?(\.\d+)?")
BOX = r"\boxed{"
BRACE = re.compile(r"(?<!\\)[{}]")
START_SECONDS = 60.0


class GradingError(UnjudgedAnswerError):
    """An answer could not be judged."""


@dataclass(frozen=True)
class Grade:
    boxed: str | None
    """What is in the last box; None if there is no closed box."""
    correct: bool


def extract_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces close; it may hold braces itself."""
    last: tuple[int, int] | None = None
    is_open: list[int] = []
    """Where what stands in the braces begins, for each that is not closed yet."""
    for match in BRACE.finditer(text):
        if match[0] == "{":
            is_open.append(match.end())
        elif is_open:
            start = is_open.pop()
            if text.endswith(BOX, 0, start) and (last is None or start > last[0]):
                last = start, match.start()
    return None if last is None else text[slice(*last)].strip()


class Grader:
    """Compares answers; holds one process, started at the first answer that is not a plain number."""

    def __init__(self, timeout_seconds: float = 5.0) -> None:
        self.timeout_seconds = timeout_seconds
        self.failures = 0
        """How many answers raised GradingError."""
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, response: str, expected: str) -> Grade:
        """Judge the last box of a response. GradingError if its content cannot be judged."""
        boxed = extract_boxed(response)
        return Grade(boxed, boxed is not None and self.equal(boxed, expected))

    def equal(self, answer: str, expected: str) -> bool:
        given, known = _normal(answer), _normal(expected)
        if given == known:
            return True
        if not given:
            return False
        numbers = _number(given), _number(known)
        if numbers[0] is not None and numbers[1] is not None:
            return numbers[0] == numbers[1]
        with self._lock:
            reply = self._ask({"answer": given, "expected": known})
        if "equal" in reply:
            return bool(reply["equal"])
        self.failures += 1
        raise GradingError(f"the answer {answer[:200]!r} could not be compared with {expected!r}: {reply['error']}")

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _ask(self, question: dict[str, str]) -> dict[str, Any]:
        try:
            worker = self._worker or self._start()
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(question).encode() + b"\n")
            worker.stdin.flush()
            return self._receive(worker, self.timeout_seconds)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self._stop()  # the next question gets a fresh process
            return {"error": str(error) or "the grading process ended"}
        except BaseException:
            self._stop()  # Ctrl-C, say: the next question would be given the reply to this one
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("grading_worker.py")
        with interrupts_held_back():  # Ctrl-C is for this process, and goes to all of a terminal
            # -P: this directory's modules must not stand in front of installed ones.
            self._worker = worker = subprocess.Popen(
                [sys.executable, "-P", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        try:
            reply = self._receive(worker, START_SECONDS)
        except (TimeoutError, EOFError) as error:
            reply = {"error": str(error)}
        if "ready" not in reply:
            self._stop()
            raise RuntimeError(f"the grading process did not start: {reply['error']}; is math-verify installed?")
        return worker

    def _receive(self, worker: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert worker.stdout is not None
        answers = select.poll()  # select itself takes no file numbers above 1023
        answers.register(worker.stdout, select.POLLIN)
        if not answers.poll(1000 * seconds):
            raise TimeoutError(f"no verdict in {seconds:g} s")
        line = worker.stdout.readline()
        if not line:
            raise EOFError("the grading process ended without a verdict")
        return json.loads(line)

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            if pipe is not None:
                pipe.close()


def _normal(answer: str) -> str:
    text = answer.strip().strip("$").strip().removesuffix(".").strip()
    return text.removeprefix("\\$").strip()


def _number(text: str) -> Decimal | None:
    if not PLAIN_NUMBER.fullmatch(text) or not any(character.isdigit() for character in text):
        return None
    if not text.isascii():
        return None
    return Decimal(text.replace(",", ""))
