"""The reader of what graders return: verdicts, rewards, and rewards with metrics.

Graders are written by users, and Python would read many mistakes as a grade: a tuple (False, "why")
is true, and a forgotten return is false. Every environment reads grades with these functions, which
raise an error that names the grader.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any, TypeAlias

from planish.errors import NonFiniteError, UserError
from planish.rl.types import Metrics
from planish.runlog.evaluators import validate_metrics

Reward: TypeAlias = float | Mapping[str, float] | tuple[float, Mapping[str, float]]
"""What a reward function returns: a number; named numbers, whose sum is the reward; or a number and
metrics.
"""


TOTAL_NAMES = frozenset({"reward", "score", "total", "total_reward", "final", "overall"})
"""The names under which graders of other libraries return the whole reward, beside metrics."""


def read_verdict(value: Any, grader: str) -> bool:
    """Return whether an answer is right. Raises UserError, which names `grader`, for any value but
    True, False, 0 and 1.
    """
    remedy = "return True or False (for scores there is RewardEnv)"
    return read_bool(value, f"{grader} returned ", remedy=remedy)


def read_bool(
    value: Any, source: str, where: str = "", *, remedy: str = "return True or False"
) -> bool:
    """Return True, False, 0 or 1 as a bool, also if it is a scalar of another library. Raises
    UserError for any other value. `source` comes before the value in the message, `where` after it.
    """
    number = _scalar(value)
    if not isinstance(number, int | float) or number not in (0, 1):
        raise UserError(f"{source}{_shown(value)}{where}; {remedy}{_hint(value)}")
    return bool(number)


def read_reward(value: Any, grader: str, where: str = "") -> float:
    """Return a reward as a float. Raises UserError if it is not a number, and NonFiniteError if it
    is not finite. `grader` and `where` name its source in the message.
    """
    number = _scalar(value)
    if not isinstance(number, Real | Decimal):
        raise UserError(
            f"{grader} returned reward={_shown(value)}{where}; return a number{_hint(value)}"
        )
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise NonFiniteError(f"{grader} returned reward={reward}{where}; return a finite number")
    return reward


def read_graded(value: Reward, grader: str) -> tuple[float, Metrics]:
    """Return (reward, metrics) of what a reward function returned (`Reward`). Each of several named
    numbers is also a metric. Raises UserError or NonFiniteError, which name `grader`.
    """
    if isinstance(value, tuple):
        if len(value) != 2:
            raise UserError(
                f"{grader} returned {_shown(value)}; return a number, or a pair of a number and "
                "metrics"
            )
        return read_reward(value[0], grader), validate_metrics(value[1], grader)
    if isinstance(value, Mapping):
        if not value:
            raise UserError(f"{grader} returned no number; return at least one")
        totals = sorted(TOTAL_NAMES.intersection(value))
        if totals and len(value) > 1:
            raise UserError(
                f"{grader} returned {_shown(value)}, whose sum would be the reward; return a pair of "
                f"the reward and the other numbers, or give the part {totals[0]!r} another name"
            )
        parts = {str(name): read_reward(part, f"{grader}, {name}") for name, part in value.items()}
        return read_reward(sum(parts.values()), grader), dict(parts)
    return read_reward(value, grader), {}


def function_name(function: Any) -> str:
    """Return the name of a function, a partial or a callable object, for error messages."""
    function = getattr(function, "func", function)
    return getattr(function, "__qualname__", type(function).__qualname__)


def _scalar(value: Any) -> Any:
    """Return a scalar of NumPy, torch or another library as a Python value."""
    is_scalar = hasattr(value, "item") and getattr(value, "shape", None) == ()
    return value.item() if is_scalar else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _hint(value: Any) -> str:
    return " (a function without a return statement returns None)" if value is None else ""
