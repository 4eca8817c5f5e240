"""Rules at the fields of options."""

import importlib
import pkgutil
from typing import Literal

import chz
import pytest

from planish import recipes
from planish.errors import UserError
from planish.training.option_rules import (
    NOT_NEGATIVE,
    POSITIVE,
    at_least,
    between,
    check_fields,
    one_of,
    rule_of,
    zero_for,
)


@chz.chz
class Sizes:
    batch_size: int = chz.field(default=16, metadata=at_least(1))
    rate: float = chz.field(default=0.1, metadata=POSITIVE)
    decay: float = chz.field(default=0.0, metadata=NOT_NEGATIVE)
    every: int = chz.field(default=0, metadata=zero_for("never"))
    digits: int = chz.field(default=2, metadata=between(2, 12))
    max_steps: int | None = chz.field(default=None, metadata=at_least(1))
    schedule: str = chz.field(default="linear", metadata=one_of(("linear", "constant")))
    loss: str = chz.field(default="ppo", metadata=one_of(("ppo", "gspo", "dro")))
    mode: Literal["max", "min"] = "max"
    layout: Literal["flat", "folders"] | None = None
    free: int = -1


@chz.chz
class Larger(Sizes):
    batch_size: int = 64
    digits: int = chz.field(default=0, metadata=between(0, 1))


def test_the_defaults_are_valid():
    check_fields(Sizes())
    check_fields(Larger())


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("batch_size", 0, "a whole number of at least 1"),
        ("rate", 0.0, "a number above 0"),
        ("rate", float("inf"), "a number above 0"),
        ("rate", float("nan"), "a number above 0"),
        ("decay", -0.1, "0 or more"),
        ("every", -1, "a whole number, 0 for never"),
        ("digits", 13, "a whole number from 2 to 12"),
        ("max_steps", 0, "a whole number of at least 1"),
        ("loss", "dpo", "one of ppo, gspo, dro"),
        ("schedule", "steps", "linear or constant"),
        ("mode", "best", "max or min"),
        ("layout", "tree", "flat or folders"),
    ],
)
def test_a_value_that_breaks_the_rule_is_named_with_the_remedy(name, value, remedy):
    with pytest.raises(UserError) as caught:
        check_fields(Sizes(**{name: value}))
    assert str(caught.value) == f"{name}={value}: give {remedy}"


def test_a_subclass_keeps_the_rule_of_a_field_or_gives_another_one():
    with pytest.raises(UserError, match="batch_size=0: give a whole number of at least 1"):
        check_fields(Larger(batch_size=0))
    with pytest.raises(UserError, match="digits=2: give a whole number from 0 to 1"):
        check_fields(Larger(digits=2))


FREE_NUMBERS = {"seed", "unfinished_reward", "max_seconds"}
"""Numbers of which every value is valid."""
CHECKED_ELSEWHERE = {
    "min_success_rate",  # a range, by DifficultyOptions.check_success_rates
    "max_success_rate",
    "cpu_seconds",  # by planish.sandbox.Limits
    "wall_seconds",
    "memory_mb",
    "judge_timeout",  # by ChatEndpoint
    "judge_retries",
    "judge_concurrency",
    "max_trajectory_tokens",  # compared with max_tokens by the recipe
    "overlong_buffer",  # compared with max_tokens by rl_config.check
}


def options_of_recipes():
    for info in pkgutil.iter_modules(recipes.__path__):
        module = importlib.import_module(f"{recipes.__name__}.{info.name}")
        for name, value in vars(module).items():
            if name in ("Options", "Config") and chz.is_chz(value):
                yield pytest.param(value, id=info.name)


@pytest.mark.parametrize("options", list(options_of_recipes()))
def test_every_number_of_a_recipe_has_a_rule(options):
    numbers = {
        name
        for name, field in chz.chz_fields(options).items()
        if field.final_type in (int, float, int | None, float | None)
    }
    without_rule = {name for name in numbers if rule_of(options, name) is None}
    assert without_rule <= FREE_NUMBERS | CHECKED_ELSEWHERE
