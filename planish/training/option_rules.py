"""Rules for the values of options, written at the field:

    batch_size: int = chz.field(default=16, doc="problems per step", metadata=at_least(1))

`check_fields` checks all fields of an object. If a subclass gives a field another default, the rule
stays. A field of a Literal type needs no rule. None breaks no rule, since the type says whether it
is allowed. A rule that compares several fields is a call of `require`.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import chz

from planish.errors import UserError

_RULE = "rule"
Metadata = dict[str, Any]
USUAL_NAMES = {
    "lr": "learning_rate",
    "epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "steps": "max_steps",
    "num_steps": "max_steps",
    "model": "model_name",
    "rank": "lora_rank",
    "r": "lora_rank",
    "num_generations": "group_size",
    "max_new_tokens": "max_tokens",
    "max_completion_length": "max_tokens",
    "output_dir": "log_path",
    "beta": "kl_penalty_coef",
    "loss": "loss_fn",
    "resume_from_checkpoint": "load_checkpoint_path",
}
"""Names that other libraries give to options, and the names of planish."""


@dataclass(frozen=True)
class Rule:
    """Which values are valid, as a function and in words."""

    is_valid: Callable[[Any], bool]
    remedy: str


def rule(is_valid: Callable[[Any], bool], remedy: str) -> Metadata:
    """Return the metadata of a field whose values must satisfy `is_valid`. `remedy` describes the
    valid values, after the word "give".
    """
    return {_RULE: Rule(is_valid, remedy)}


def at_least(minimum: int, remedy: str = "a whole number of at least {}") -> Metadata:
    """Return the rule for numbers of at least `minimum`."""
    return rule(lambda value: value >= minimum, remedy.format(minimum))


def zero_for(meaning: str) -> Metadata:
    """Return the rule for whole numbers where 0 has a meaning of its own, such as "never"."""
    return at_least(0, f"a whole number, 0 for {meaning}")


def between(lowest: int, highest: int) -> Metadata:
    """Return the rule for whole numbers from `lowest` to `highest`."""
    return rule(
        lambda value: lowest <= value <= highest, f"a whole number from {lowest} to {highest}"
    )


def one_of(names: Collection[str]) -> Metadata:
    """Return the rule for a choice of names."""
    words = " or ".join(names) if len(names) == 2 else f"one of {', '.join(names)}"
    return rule(lambda value: value in names, words)


POSITIVE = rule(lambda value: 0 < value < math.inf, "a number above 0")
NOT_NEGATIVE = rule(lambda value: 0 <= value < math.inf, "0 or more")
GROUP_SIZE = at_least(2, "at least {}: answers are compared within their group")
SAMPLING_TEMPERATURE = rule(
    lambda value: 0 < value < math.inf,
    "a number above 0: greedy answers of a group are all the same",
)


def check_fields(options: object) -> None:
    """Raise UserError for the first field of a chz object whose value breaks its rule."""
    for name in chz.chz_fields(type(options)):
        value, found = getattr(options, name), rule_of(type(options), name)
        if value is not None and found is not None and not found.is_valid(value):
            raise UserError(f"{name}={value}: give {found.remedy}")


def rule_of(config_type: type, name: str) -> Rule | None:
    """Return the rule of a field: its own, or that of the field that it overrides."""
    for base in config_type.__mro__:
        if chz.is_chz(base) and (field := chz.chz_fields(base).get(name)) is not None:
            if _RULE in (metadata := field.metadata or {}):
                return metadata[_RULE]
            if choices := _literals(field.final_type):
                return one_of(choices)[_RULE]
    return None


def _literals(field_type: Any) -> tuple[str, ...]:
    """Return the values of a Literal, or of the Literal in a union."""
    if get_origin(field_type) is Literal:
        return get_args(field_type)
    if get_origin(field_type) in (Union, UnionType):
        return tuple(value for part in get_args(field_type) for value in _literals(part))
    return ()


def require(options: Any, **rules: tuple[bool, str]) -> None:
    """Raise UserError for the first invalid option. `rules` are given as `name=(is_valid, valid
    values in words)`.
    """
    for name, (is_valid, remedy) in rules.items():
        if not is_valid:
            raise UserError(f"{name}={getattr(options, name)}: give {remedy}")
