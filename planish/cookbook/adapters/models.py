"""Tokenizers and attributes of base models, by the names that planish can resolve."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from planish.model.architecture.config import ModelConfig
from planish.model.sources.resolve import resolve_model
from planish.renderers import recommended_renderer_name
from planish.tokenizer import ModelTokenizer, load_tokenizer

Tokenizer = Any
_log = logging.getLogger(__name__)
_REGISTERED: dict[str, Callable[[], Any]] = {}


def register_tokenizer(name: str, factory: Callable[[], Any]) -> None:
    """Let `get_tokenizer(name)` return the result of `factory`."""
    _REGISTERED[name] = factory


def get_tokenizer(model_name: str) -> Any:
    """Return the tokenizer of a base model, from --model, a path, the hub's cache or the hub."""
    return _REGISTERED[model_name]() if model_name in _REGISTERED else _load_cached(model_name)


def encode_without_special_tokens(tokenizer: ModelTokenizer, text: str) -> list[int]:
    """Return the tokens of `text`, without special tokens before or after it."""
    return list(tokenizer.encode(text, add_special_tokens=False))


@cache
def _load_cached(model_name: str) -> Any:
    return load_tokenizer(resolve_model(model_name))


@dataclass(frozen=True)
class ModelAttributes:
    """Facts about a base model."""

    organization: str
    version_str: str
    size_str: str
    is_chat: bool
    recommended_renderers: Sequence[str] = ()
    is_vl: bool = False
    is_audio_in: bool = False


def get_model_attributes(model_name: str) -> ModelAttributes:
    """Read the attributes of a base model from its files."""
    renderer = get_recommended_renderer_name(model_name)
    config = ModelConfig.from_directory(resolve_model(model_name))
    organization = model_name.rpartition("/")[0] or "local"
    return ModelAttributes(organization, config.family, "", renderer != "role_colon", (renderer,))


@cache
def get_recommended_renderer_name(model_name: str) -> str:
    """Return the renderer for the chat format that the model was trained on."""
    try:
        return recommended_renderer_name(model_name)
    except ValueError:  # the name is not known, so look at the files
        return recommended_renderer_name(resolve_model(model_name))


def get_recommended_renderer_names(model_name: str) -> list[str]:
    """Return a list with the recommended renderer name as its only element."""
    return [get_recommended_renderer_name(model_name)]


def warn_if_renderer_not_recommended(model_name: str, renderer_name: str | None) -> None:
    """Log a warning if `renderer_name` is not the recommended one."""
    recommended = get_recommended_renderer_name(model_name)
    if renderer_name not in (None, recommended):
        _log.warning(
            "%s was trained for renderer %s, not %s", model_name, recommended, renderer_name
        )
