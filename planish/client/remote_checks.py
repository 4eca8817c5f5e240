"""Checks of operations before they are sent: wrong types and missing ids. The server checks the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planish.errors import UnsupportedError, UserError
from planish.service import (
    CreateModel,
    CreateSampler,
    ForwardBackward,
    ForwardBackwardLater,
    LoadWeights,
    Operation,
    OptimStep,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
    option_value,
)
from planish.types import (
    AdamParams,
    CheckpointPath,
    LoraConfig,
    ModelInput,
    SamplingParams,
    check_data,
)


def check(operation: Operation[Any]) -> None:
    """Raise ValueError, which names the argument, if `operation` cannot be sent as a request."""
    match operation:
        case CreateModel():
            _check_kind("lora", operation.lora, LoraConfig)
            _check_metadata(operation.user_metadata)
            _check_path(operation.from_path)
            _check_base_model(operation.base_model)
            if operation.from_path is None and operation.base_model is None:
                raise UserError("base_model is missing; name one, or give from_path")
        case CreateSampler():
            _check_path(operation.model_path)
            _check_base_model(operation.base_model)
            if operation.model_path is None and operation.base_model is None:
                raise UserError("give base_model or model_path")
        case ForwardBackward():
            check_data(operation.data)
            _check_loss(operation.loss_fn, operation.loss_fn_config)
        case ForwardBackwardLater():
            _check_loss(operation.loss_fn, operation.loss_fn_config)
        case OptimStep():
            if not isinstance(operation.adam_params, AdamParams):
                kind = type(operation.adam_params).__name__
                raise UserError(f"adam_params is a {kind}; give AdamParams(learning_rate=...)")
        case SaveWeights() | SaveWeightsForSampler():
            _check_kind("name", operation.name, str)
            _check_metadata(operation.user_metadata)
        case LoadWeights():
            CheckpointPath.parse(operation.path)
        case Sample():
            for name, kind in (("prompt", ModelInput), ("sampling_params", SamplingParams)):
                _check_kind(name, getattr(operation, name), kind)
            if operation.on_token is not None:
                raise UnsupportedError(
                    "on_token: a server returns complete samples; use its /v1 endpoints to stream tokens"
                )


def _check_kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise UserError(f"{name} is a {type(value).__name__}; give {kind.__name__}")


def _check_path(path: str | None) -> None:
    if path is not None:
        CheckpointPath.parse(path)


def _check_base_model(name: str | None) -> None:
    if name is not None:
        _check_kind("base_model", name, str)
        if not name:
            raise UserError("base_model is empty; give a name from get_server_capabilities()")


def _check_loss(loss_fn: Any, config: Any) -> None:
    _check_kind("loss_fn", loss_fn, str)
    if not isinstance(config, Mapping):
        raise UserError(
            f"loss_fn_config is a {type(config).__name__}; give a dictionary of numbers, or None"
        )
    for key, value in config.items():
        if not isinstance(key, str):
            raise UserError(f"loss_fn_config[{key!r}]={value!r}: option names must be strings")
        option_value(key, value)


def _check_metadata(user_metadata: Any) -> None:
    if not isinstance(user_metadata, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in user_metadata.items()
    ):
        raise UserError(f"user_metadata={user_metadata!r}: give a dictionary of strings to strings")
