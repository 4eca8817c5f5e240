"""Renderers with the cookbook's arguments, and its helpers for message content."""

from collections.abc import Mapping, Sequence
from typing import Any

from planish.errors import UnsupportedError, UserError
from planish.renderers import Renderer, get_renderer as planish_renderer
from planish.renderers.vision import VisionRenderer
from planish.tinker.refused import refused_type
from planish.tokenizer import ModelTokenizer

AudioPart = refused_type("AudioPart", "planish reads text and images only")
TmlV0Renderer = refused_type("TmlV0Renderer", "planish does not support the models of this format")


class _PlayerRoleRenderer(Renderer):
    """A renderer that treats the role `player` as `assistant`, because environments of the cookbook
    give the policy this role.
    """

    def build_generation_prompt(self, messages: Any, *arguments: Any, **options: Any) -> Any:
        return super().build_generation_prompt(
            _with_assistant_role(messages), *arguments, **options
        )

    def build_supervised_example(self, messages: Any, *arguments: Any, **options: Any) -> Any:
        return super().build_supervised_example(
            _with_assistant_role(messages), *arguments, **options
        )


def _with_assistant_role(messages: Any) -> Any:
    if not isinstance(messages, Sequence):
        return messages
    return [
        {**message, "role": "assistant"}
        if isinstance(message, Mapping) and message.get("role") == "player"
        else message
        for message in messages
    ]


def get_renderer(
    name: str,
    tokenizer: ModelTokenizer,
    image_processor: Any = None,
    *,
    model_name: str | None = None,
    strip_thinking_from_history: bool | None = None,
) -> Renderer:
    """Return the renderer `name`. The names are the keys of `planish.renderers.FORMATS`."""
    if image_processor is not None:
        raise UnsupportedError(
            "image_processor: renderers use the one in the directory of the tokenizer; leave it out"
        )
    made = planish_renderer(
        name, tokenizer, strip_thinking_from_history=strip_thinking_from_history
    )
    if isinstance(made, VisionRenderer):
        return made
    return _PlayerRoleRenderer(made.name, tokenizer, made.format)


def ensure_text(content: Any) -> str:
    """Return the text of a message's content: a string, or one text part. Raises UserError for
    anything else.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and len(content) == 1 and content[0].get("type") == "text":
        return content[0]["text"]
    raise UserError(f"content is {content!r}; give a text")


def format_content_as_string(content: Any, separator: str = "\n") -> str:
    """Return the content as text for people: thinking parts in <think> tags."""
    if isinstance(content, str):
        return content
    return separator.join(
        f"<think>{part['thinking']}</think>" if part["type"] == "thinking" else part["text"]
        for part in content
    )
