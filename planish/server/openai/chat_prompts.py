"""Builds the prompt of a chat: reads the messages as clients write them, and puts tool results into
the order of their calls.

Most chat formats write tool results without ids, so the model pairs results and calls by their
order. OpenAI's API pairs them by `tool_call_id`, and clients may send results in any order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planish.datasets.image_parts import chunk_of_data_url
from planish.errors import UserError
from planish.images import MAX_IMAGES, ImageChunk
from planish.renderers import Renderer
from planish.renderers.messages import RENDERERS_WITH_TOOLS
from planish.renderers.vision import VisionRenderer
from planish.server.http.openai_errors import WrongParameterError
from planish.server.openai.models import ServedModel
from planish.server.openai.protocol import check_text
from planish.server.openai.requests import ChatRequest, TokenizeRequest, Tool
from planish.types import ModelInput
from planish.wire.json_pieces import JsonValue
from planish.wire.pacing import pause_if_due

# Clients copy earlier answers into the conversation, including these fields. planish ignores the
# first group if they are empty or null. The others describe an answer and are not part of it.
_ANSWER_FIELDS = ("refusal", "audio", "function_call")
_DESCRIPTIVE_FIELDS = ("id", "annotations", "provider_specific_fields")
_DESCRIPTIVE_FIELDS_OF_PARTS = ("id", "index", "annotations", "cache_control")
_DESCRIPTIVE_FIELDS_OF_CALLS = ("index", "provider_specific_fields")
_RENDERER_FIELDS = {
    "tools": "give the tools in the parameter tools of the request",
    "weight": "it has a meaning in training only; remove it",
    "trainable": "it has a meaning in training only; remove it",
}
"""Fields of messages that only planish's renderers know, with the remedy."""
_FAULTS_OF_TOOLS = ("tools", "a tool's schema")
"""The beginnings of the messages with which a renderer rejects a tool."""


def build_prompt(
    model: ServedModel,
    renderer: Renderer,
    options: ChatRequest | TokenizeRequest,
    tools: Sequence[Tool],
) -> ModelInput:
    """Return the prompt for the messages of a request. If there are `tools`, the system message of
    the prompt describes them. Raise WrongParameterError, which names the field, if the renderer
    cannot express a message or tool.
    """
    request_messages = _read_images(model, renderer, options.messages or [])
    functions = [tool.function.model_dump(exclude={"strict"}, exclude_none=True) for tool in tools]
    for name, value in (("messages", request_messages), ("tools", functions)):
        check_text(name, value, model.tokenization.max_characters)
    if functions and not renderer.format.capabilities.tools:
        raise WrongParameterError(
            "tools",
            f"renderer {renderer.name} of {model.name} has no form for tools; leave tools out, or "
            f"use a model with renderer {RENDERERS_WITH_TOOLS}",
        )
    messages = [normalize_message(one, index) for index, one in enumerate(request_messages)]
    order = _order_of_results(messages)
    messages = [messages[index] for index in order]
    try:
        if functions:
            [prefix] = renderer.create_conversation_prefix_with_tools(functions)
            if messages and messages[0].get("role") == "system":
                messages[0] = _with_tools(messages[0], prefix["tools"])
            else:
                messages.insert(0, prefix)
                order.insert(0, -1)
        if options.continue_final_message:
            return renderer.build_continued_prompt(messages)
        return renderer.build_generation_prompt(messages)
    except ValueError as error:
        text = str(error)
        name = "tools" if functions and text.startswith(_FAULTS_OF_TOOLS) else "messages"
        # The prompt may have one message more than the request, and tool results in another order.
        places = ["tools" if index < 0 else f"messages[{index}]" for index in order]
        text = with_message_names(
            text, lambda index: places[index] if index < len(places) else f"messages[{index}]"
        )
        raise WrongParameterError(name, text) from None


def _read_images(
    model: ServedModel, renderer: Renderer, messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the messages of a request, in which image chunks replace the data URLs of images.

    Another endpoint may have read its images already, as {"type": "image", "image": ImageChunk}.
    """
    num_images = 0
    read: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        content: JsonValue = message.get("content")
        parts: list[Any] = content if isinstance(content, list) else []
        if not any(_is_image(part) for part in parts):
            read.append(message)
            continue
        new_parts: list[Any] = []
        for number, part in enumerate(parts):
            if not _is_image(part):
                new_parts.append(part)
                continue
            place = f"messages[{index}].content[{number}]"
            num_images += 1
            if not isinstance(renderer, VisionRenderer):
                raise WrongParameterError(
                    "messages", f"{place} is an image, and {model.name} reads only text; remove it"
                )
            if num_images > MAX_IMAGES:
                raise WrongParameterError("messages", f"messages has over {MAX_IMAGES} images")
            if not isinstance(part.get("image"), ImageChunk):
                part = image_part(_image_address(part, place), place)
            new_parts.append(part)
        read.append({**message, "content": new_parts})
    return read


def image_part(url: str, place: str) -> dict[str, Any]:
    """Return the part of a message with the image of a data URL. Raise WrongParameterError, whose
    text begins with `place`, for any other address and for invalid data.
    """
    try:
        return {"type": "image", "image": chunk_of_data_url(url, place)}
    except UserError as error:
        raise WrongParameterError("messages", str(error)) from None


def _is_image(part: JsonValue) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "image")


def _image_address(part: Mapping[str, Any], place: str) -> str:
    """Return the URL of a part with an image. Raise WrongParameterError for another form."""
    image: JsonValue = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else None
    allowed = {"type", "image_url", *_DESCRIPTIVE_FIELDS_OF_PARTS}
    if part.get("type") != "image_url" or not isinstance(url, str) or part.keys() - allowed:
        raise WrongParameterError(
            "messages",
            f'{place} is an image of another form; give {{"type": "image_url", "image_url": '
            '{"url": "data:image/png;base64,..."}}',
        )
    assert isinstance(image, Mapping)
    if image.get("detail") not in (None, "auto") or image.keys() - {"url", "detail"}:
        raise WrongParameterError(
            "messages",
            f"{place}.image_url has options that are not supported; give its url only, and resize "
            "the image to the detail that the model should see",
        )
    return url


def with_message_names(text: str, name: Callable[[int], str]) -> str:
    """Return the text of an error in which `name(i)` replaces each `messages[i]`."""
    return _MESSAGE_INDEX.sub(lambda found: name(int(found[1])), text)


_MESSAGE_INDEX = re.compile(r"messages\[(\d+)\]")


def _with_tools(system: dict[str, Any], tools: Sequence[Any]) -> dict[str, Any]:
    """Return the system message of a request with the tools that it offers."""
    if system.get("content") is None:
        raise ValueError("messages[0] has no content; give a string (an empty one is allowed)")
    return {**system, "tools": tools}


def _order_of_results(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of the messages, with tool results in the order of the calls that they
    answer. Raise WrongParameterError if the ids of results and calls contradict each other.
    Results are left where they are if a call or a result has no id.
    """
    order = list(range(len(messages)))
    for index, message in enumerate(messages):
        ids = _call_ids(message)
        if not ids:
            continue
        end = index + 1
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        results = [messages[number].get("tool_call_id") for number in range(index + 1, end)]
        if all(isinstance(result, str) for result in results):
            order[index + 1 : end] = _sorted_results(index, ids, results)
    return order


def _call_ids(message: Mapping[str, Any]) -> list[str]:
    """Return the ids of a message's calls; an empty list unless each call has an id of its own."""
    calls: JsonValue = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list):
        return []
    objects: list[JsonValue] = calls
    ids = [call.get("id") if isinstance(call, Mapping) else None for call in objects]
    texts = [one for one in ids if isinstance(one, str) and one]
    return texts if len(set(texts)) == len(ids) else []


def _sorted_results(caller: int, ids: Sequence[str], results: Sequence[Any]) -> list[int]:
    """Return the indices of the messages with `results`, which follow message `caller`, in the
    order of `ids`.
    """
    first = caller + 1
    for number, result in enumerate(results):
        place = f"messages[{first + number}].tool_call_id={result[:80]!r}"
        if result not in ids:
            raise WrongParameterError(
                "messages",
                f"{place} answers no call of messages[{caller}], whose calls are "
                f"{', '.join(ids)[:200]}; give the id of a call",
            )
        if result in results[:number]:
            raise WrongParameterError(
                "messages", f"{place} answers a call that has a result already; remove one of them"
            )
    answered = ids[: len(results)]
    missing = next((one for one in answered if one not in results), None)
    if missing is not None:
        raise WrongParameterError(
            "messages",
            f"the call {missing[:80]!r} of messages[{caller}] has no result, but a later call has; "
            "add a message of role tool with this tool_call_id",
        )
    return [first + results.index(one) for one in answered]


def normalize_message(original: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return message `index` of a request in the form that renderers read."""
    pause_if_due()
    for key, remedy in _RENDERER_FIELDS.items():
        if original.get(key) is not None:
            raise WrongParameterError(
                "messages", f"messages[{index}] has the key {key!r}: {remedy}"
            )
    message = {
        key: value
        for key, value in original.items()
        if not (key in _ANSWER_FIELDS and not value)
        and key not in _DESCRIPTIVE_FIELDS
        and value is not None
    }
    for name, descriptive in (
        ("content", _DESCRIPTIVE_FIELDS_OF_PARTS),
        ("tool_calls", _DESCRIPTIVE_FIELDS_OF_CALLS),
    ):
        if isinstance(message.get(name), list):
            message[name] = [_without(element, descriptive) for element in message[name]]
    if message.get("refusal") and not message.get("content"):
        # A refusal is what the assistant said, in a field of its own.
        message["content"] = message.pop("refusal")
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("role") != "tool":
        # This name identifies a participant of the chat. No chat format here writes such a name.
        message.pop("name", None)
    # vLLM and its clients also use the name `reasoning` for reasoning_content.
    reasoning_texts = [message.pop(name, None) for name in ("reasoning_content", "reasoning")]
    reasoning = reasoning_texts[0] or reasoning_texts[1]
    if reasoning:
        message["content"] = [
            {"type": "thinking", "thinking": reasoning},
            *_content_parts(message.get("content", "")),
        ]
    return message


def _without(element: JsonValue, fields: Sequence[str]) -> JsonValue:
    if not isinstance(element, Mapping):
        return element
    return {key: value for key, value in element.items() if key not in fields}


def _content_parts(content: JsonValue) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
