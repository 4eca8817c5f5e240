"""Renderers by name."""

from collections.abc import Callable
from typing import Any

from planish.errors import UnsupportedError
from planish.renderers.chat_format import ChatFormat
from planish.renderers.chatml import ChatML, Thinking
from planish.renderers.gemma3 import Gemma3
from planish.renderers.llama3 import Llama3
from planish.renderers.renderer import Renderer
from planish.renderers.role_colon import RoleColon
from planish.renderers.templates import chat_template_of, default_system_message
from planish.tokenizer import ModelTokenizer


def _chatml(tokenizer: ModelTokenizer) -> ChatFormat:
    template = chat_template_of(tokenizer)
    if template is None:
        return ChatML()
    return ChatML(
        default_system=default_system_message(template, getattr(tokenizer, "bos_token", None) or "")
    )


def _role_colon(tokenizer: ModelTokenizer) -> ChatFormat:
    return RoleColon(bos=getattr(tokenizer, "bos_token", None))


FORMATS: dict[str, Callable[[Any], ChatFormat]] = {
    "role_colon": _role_colon,
    "llama3": lambda tokenizer: Llama3(),
    "chatml": _chatml,
    "qwen3": lambda tokenizer: ChatML(thinking=Thinking.STRIP_HISTORY),
    "qwen3_disable_thinking": lambda tokenizer: ChatML(thinking=Thinking.DISABLED),
    "qwen3_instruct": lambda tokenizer: ChatML(),
    "gemma3": lambda tokenizer: Gemma3(),
}
"""A function for each renderer name that makes its format for a tokenizer."""


def get_renderer(
    name: str,
    tokenizer: ModelTokenizer,
    *,
    default_system: str | None = None,
    strip_thinking_from_history: bool | None = None,
) -> Renderer:
    """Return the renderer `name` for a tokenizer of `transformers`.

    `default_system` (chatml only) replaces the default system message of the tokenizer's chat
    template; "" means none. `strip_thinking_from_history=False` (qwen3 only) keeps all reasoning in
    prompts, so that each prompt extends the one before it. ValueError for an unknown name or an
    option of another renderer.
    """
    if name not in FORMATS:
        raise ValueError(f"renderer {name!r} is unknown; choose one of {', '.join(FORMATS)}")
    if default_system is not None and name != "chatml":
        raise ValueError(
            f"default_system is an option of renderer chatml, not of {name}; give a system message instead"
        )
    if strip_thinking_from_history is not None and name != "qwen3":
        raise ValueError(
            f"strip_thinking_from_history is an option of renderer qwen3, not of {name}; remove it"
        )
    if name == "chatml" and default_system is not None:
        return Renderer(name, tokenizer, ChatML(default_system=default_system or None))
    if name == "qwen3" and strip_thinking_from_history is False:
        return Renderer(name, tokenizer, ChatML(thinking=Thinking.KEEP_HISTORY))
    return Renderer(name, tokenizer, FORMATS[name](tokenizer))


_WITHOUT_THINKING = {"qwen3": "qwen3_disable_thinking"}
"""Renderers that think, and those of the same models that do not."""


def with_thinking(name: str, thinks: bool) -> str:
    """Return the renderer of the same models as `name` that thinks, or that answers at once.
    UnsupportedError if the models have no form for thinking.
    """
    if not thinks:
        return _WITHOUT_THINKING.get(name, name)
    thinking = {quiet: one for one, quiet in _WITHOUT_THINKING.items()}.get(name, name)
    if thinking not in _WITHOUT_THINKING:
        raise UnsupportedError(
            f"renderer {name} does not think; leave it out, or use {', '.join(_WITHOUT_THINKING)}"
        )
    return thinking
