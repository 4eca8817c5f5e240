"""Find out what a model's chat template does, by rendering probe conversations with it.

Templates are programs, and different sources can have the same effect. So a default system message
is read from a template's output. The renderer of a local model is the one that writes the same text
as the template for all probes. `transformers` runs the templates in jinja2's sandbox.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from planish.errors import DamagedFileError
from planish.renderers.chat_format import ChatFormat
from planish.renderers.messages import read_messages
from planish.renderers.tool_calls import as_text
from planish.tokenizer import ModelTokenizer

HELLO = {"role": "user", "content": "Hello."}
ANSWER = {"role": "assistant", "content": "Good day."}
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN = {"role": "user", "content": "And now?"}
PROBES: tuple[tuple[Sequence[Mapping[str, str]], bool], ...] = (
    ((HELLO,), True),
    ((SYSTEM, HELLO), True),
    ((HELLO, ANSWER, AGAIN), True),
    ((SYSTEM, HELLO, ANSWER), False),
)
"""Probe conversations, each with the value of add_generation_prompt."""


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    prompt: bool,
    bos_token: str = "",
    **names: Any,
) -> str:
    """Render a chat template. Raises DamagedFileError if it is not a valid template or rejects the
    messages.
    """
    # Imported here, because the import of transformers takes a second.
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        [text], _ = render_jinja_template(
            [[dict(message) for message in messages]],
            chat_template=template,
            add_generation_prompt=prompt,
            bos_token=bos_token,
            **names,
        )
        return text
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"the chat template cannot be rendered ({error}); name the renderer yourself, and for "
            "chatml its default_system"
        ) from error


def chat_template_of(tokenizer: ModelTokenizer) -> str | None:
    """Return a tokenizer's chat template, or None if it has none.

    If the tokenizer has several templates, return the one that is named default.
    """
    return choose_template(getattr(tokenizer, "chat_template", None))


def choose_template(template: Any) -> str | None:
    """Return the template named default if `template` is a list or mapping of several templates.

    Return `template` itself if it is a string, and None for anything else.
    """
    if isinstance(template, list):
        template = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, Mapping)
        }
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def default_system_message(template: str, bos_token: str = "") -> str | None:
    """Return the system message that a ChatML template adds to a conversation without one."""
    text = render_template(template, [HELLO], True, bos_token)
    before, separator, _ = text.partition(f"<|im_start|>user\n{HELLO['content']}<|im_end|>")
    if not separator:
        return None
    _, separator, rest = before.partition("<|im_start|>system\n")
    return rest.partition("<|im_end|>")[0] if separator else None


def writes_like(template: str, chat_format: ChatFormat, bos_token: str = "") -> bool:
    """Return whether the format's text equals the template's on every probe."""
    for messages, prompt in PROBES:
        format_output = format_text(chat_format, messages, prompt)
        template_output = render_template(template, messages, prompt, bos_token)
        # A ChatML template writes a line break after the last message. In planish that line break
        # begins the next header.
        if template_output not in (
            (format_output,) if prompt else (format_output, format_output + "\n")
        ):
            return False
    return True


def writes_reasoning_like(template: str, chat_format: ChatFormat, bos_token: str = "") -> bool:
    """Return whether the format's text of an answer with reasoning equals the template's."""
    if not chat_format.capabilities.thinking:
        return False
    thought = "So be it."
    format_output = format_text(
        chat_format, [HELLO, {**ANSWER, "reasoning_content": thought}], False
    )
    # The template of gpt-oss reads the reasoning from the key `thinking`.
    answer = {**ANSWER, "reasoning_content": thought, "thinking": thought}
    return render_template(template, [HELLO, answer], False, bos_token) in (
        format_output,
        format_output + "\n",
    )


def format_text(
    chat_format: ChatFormat, messages: Sequence[Mapping[str, Any]], prompt: bool
) -> str:
    """Return the text that a format writes for `messages`.

    `prompt`: whether to append the header of the assistant's next message.
    """
    checked = read_messages(messages, chat_format.capabilities, type(chat_format).__name__)
    pieces = list(chat_format.opening())
    for turn in chat_format.turns(checked):
        pieces += [*turn.header, *turn.output]
    return as_text([*pieces, *(chat_format.suffix(checked, "assistant") if prompt else ())])
