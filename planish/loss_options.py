"""The options of the losses, for those who give them and for the engine. The formulas:
planish/engine/losses.py.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from planish.errors import UserError

LOSS_OPTIONS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.1},
}
"""Besides temperature, which all of them have."""


def complete_config(name: str, given: Mapping[str, float] | None) -> dict[str, float]:
    """`given` checked and filled with the loss's defaults; UserError names the key at fault."""
    config: dict[str, float] = {"temperature": 1.0, **LOSS_OPTIONS[name]}
    for key, value in (given or {}).items():
        if key not in config:
            raise UserError(
                f"loss_fn_config[{key!r}] is unknown for {name!r}; it takes {', '.join(config)}"
            )
        config[key] = option_value(key, value)
    if config["temperature"] <= 0:
        raise UserError(
            f"loss_fn_config['temperature']={config['temperature']:g}: give a number above 0"
        )
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 1.0)
    if not 0 <= low <= 1 <= high:
        raise UserError(
            f"loss_fn_config: clip_low_threshold={low:g} and clip_high_threshold={high:g} bound the ratio itself, which is "
            "1 on-policy, and not its distance from 1; give 0 <= low <= 1 <= high, such as 0.8 and 1.2"
        )
    if config.get("beta", 0.0) < 0:
        raise UserError(f"loss_fn_config['beta']={config['beta']:g}: give 0 or more")
    return config


def option_value(key: str, value: Any) -> float:
    """`value` as a float; UserError unless it is a finite number."""
    number = value.item() if isinstance(value, np.generic) else value
    is_number = isinstance(number, (int, float)) and not isinstance(value, bool)
    if not is_number or not -sys.float_info.max <= number <= sys.float_info.max:
        raise UserError(f"loss_fn_config[{key!r}]={value!r}: give a finite number")
    return float(number)
