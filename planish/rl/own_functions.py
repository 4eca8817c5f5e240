"""An advantage and a loss of the user's own: functions that an option names by their import path.

An import path is `module:name`. The module must be importable where the run starts, also when it
is resumed, and the name may have dots (`my_losses:Clipped.loss`). The numbers of `advantage_config`
or `loss_fn_config` are keyword arguments of the function. What the functions return is checked, and
errors name the option and the path.

Legend: G trajectories of a group, D sequences.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from planish.errors import UserError
from planish.rl.advantages import ADVANTAGES, AdvantageEstimator

if TYPE_CHECKING:
    from planish.client.custom_loss import CustomLoss

Numbers = Mapping[str, float]
"""Keyword arguments of an own function, by name."""
_CONFIG = {"advantage": "advantage_config", "loss_fn": "loss_fn_config"}
"""The option with the numbers of an own function, by the option that names the function."""
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def is_import_path(name: str) -> bool:
    """Return whether the value of an option is an import path, and not a name of planish's."""
    return ":" in name


def import_path(option: str, value: str | Callable[..., Any]) -> str:
    """Return the import path of a function; a string is returned as it is. Raises UserError if a
    resumed run could not import the function: a lambda, a local function, a `functools.partial`, or
    one of a program that is not a file.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, partial):
        raise UserError(
            f"{option}={value!r}: a resumed run could not import a partial; give the function "
            f"itself, and its numbers as {_CONFIG[option]}={{'name': number}}"
        )
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not callable(value) or module is None or name is None:
        raise UserError(
            f"{option}={value!r}: give a name, or a function that is defined in a module"
        )
    if "<" in name:
        what = "a lambda" if name.endswith("<lambda>") else "defined inside a function"
        raise UserError(
            f"{option}: {module}.{name} is {what}, so a resumed run could not import it; give a "
            "function of a module"
        )
    if module == "__main__":
        module = _program_name()
        if module is None:
            raise UserError(
                f"{option}: {name} is defined in a program without a file, so a resumed run could "
                "not import it; write it to a module, such as my_rules.py, and import it from there"
            )
    path = f"{module}:{name}"
    if load_function(option, path) is not value:
        raise UserError(
            f"{option}: {path} is another object than the function that was given, so a resumed "
            "run would use another one; give a function of a module"
        )
    return path


def load_function(option: str, path: str) -> Callable[..., Any]:
    """Import and return the function of an import path. Raises UserError if there is none."""
    module_name, _, name = path.partition(":")
    try:
        found: Any = _imported(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{option}={path}: importing {module_name} failed: {error}") from error
        raise UserError(
            f"{option}={path}: there is no module {error.name}; give module:function, with a module "
            "that can be imported from the directory in which the run starts"
        ) from error
    except Exception as error:
        raise UserError(
            f"{option}={path}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{option}={path}: {module_name} has no {name}; give module:function")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{option}={path} is a {type(found).__name__}; give a function")
    return found


def _imported(module_name: str) -> Any:
    # The program's own module is there already, as __main__. An import would run it once more.
    is_program = module_name == _program_name()
    return sys.modules["__main__"] if is_program else importlib.import_module(module_name)


def _program_name() -> str | None:
    """Return the name by which other programs import this one; None if it is not a file."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # it was started by `python -m`
        return main.__spec__.name
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else None


def check_own_advantage(path: str, numbers: Numbers | None, group_size: int | None) -> None:
    """Raise UserError unless the function of `path` takes the rewards of a group, and the numbers.
    If the size of groups is known, the function is called once, with the rewards 0, 1, 0, 1, ...
    """
    _check_arguments("advantage", path, numbers, "rewards")
    if group_size is None:
        return
    rewards_G = [float(index % 2) for index in range(group_size)]
    try:
        advantage_estimator(path, numbers)(rewards_G)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"advantage={path} failed for the rewards {rewards_G}: {type(error).__name__}: {error}"
        ) from error


def check_own_loss(path: str, numbers: Numbers | None) -> None:
    """Raise UserError unless the function of `path` takes datums, logprobs and the numbers."""
    _check_arguments("loss_fn", path, numbers, "data", "logprobs")


def advantage_estimator(name: str, numbers: Numbers | None = None) -> AdvantageEstimator:
    """Return the estimator of a name in `ADVANTAGES`, or of an import path, which gets the numbers
    as keyword arguments.
    """
    if not is_import_path(name):
        return ADVANTAGES[name]
    return partial(
        _own_advantages, name, partial(load_function("advantage", name), **(numbers or {}))
    )


def own_loss(path: str, numbers: Numbers | None = None) -> CustomLoss:
    """Return the loss of an import path, for `TrainingClient.forward_backward_custom`. The function
    gets the numbers as keyword arguments. The metrics that it returns get the prefix `loss/`.
    """
    function = load_function("loss_fn", path)

    @wraps(function)
    def loss(data: Sequence[Any], logprobs_D: list[Any]) -> Any:
        with _named_errors("loss_fn", path):
            outcome: tuple[Any, Mapping[str, Any]] | None = function(
                data, logprobs_D, **(numbers or {})
            )
        match outcome:
            case (value, Mapping() as metrics):
                return value, {
                    f"loss/{key}": _finite_metric(path, key, metric)
                    for key, metric in metrics.items()
                }
            case _:
                return outcome  # custom_gradient says what is wrong with it

    return loss


def _own_advantages(
    path: str, function: Callable[[list[float]], Any], rewards_G: Sequence[float]
) -> list[float]:
    if not rewards_G:  # the grader abstained from all answers
        return []
    with _named_errors("advantage", path):
        result = function(list(rewards_G))
    values: list[Any] | tuple[Any, ...] | None = _plain(result)
    if not isinstance(values, list | tuple):
        raise UserError(
            f"advantage={path} returned a {type(result).__name__}; return a list of numbers, one "
            "for each reward"
        )
    if len(values) != len(rewards_G):
        raise UserError(
            f"advantage={path} returned {len(values)} advantages for {len(rewards_G)} rewards; "
            "return one for each"
        )
    return [_finite_advantage(path, _plain(value), rewards_G) for value in values]


def _plain(value: Any) -> Any:
    """Return an array, a tensor or a number of numpy as plain Python values."""
    return value.tolist() if hasattr(value, "tolist") else value


def _finite_advantage(path: str, value: Any, rewards_G: Sequence[float]) -> float:
    is_number = isinstance(value, int | float)
    # Advantages are trained on as float32. A comparison with nan is False.
    if not (is_number and abs(value) <= _MAX_FLOAT32):
        raise UserError(
            f"advantage={path} returned {value!r} for one of the rewards {list(rewards_G)}; return "
            "finite numbers"
        )
    return float(value)


def _finite_metric(path: str, key: Any, value: Any) -> float:
    try:
        number = float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not isinstance(key, str) or not math.isfinite(number):
        raise UserError(
            f"loss_fn={path} returned the metric {key!r}: {value!r}; return a dictionary of "
            "finite numbers by name"
        )
    return number


def _check_arguments(option: str, path: str, numbers: Numbers | None, *arguments: str) -> None:
    function, numbers = load_function(option, path), numbers or {}
    call = f"({', '.join([*arguments, *(f'{name}={value}' for name, value in numbers.items())])})"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UserError(f"{option}={path} is async or a generator; give an ordinary function")
    try:
        inspect.signature(function).bind(*arguments, **numbers)
    except TypeError as error:
        raise UserError(
            f"{option}={path} is called with {call}, which it does not take: {error}"
        ) from error
    except ValueError:  # functions of C may have no signature
        return


@contextmanager
def _named_errors(option: str, path: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in {option}={path}")
        raise
