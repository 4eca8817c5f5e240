"""The one reader of rows: which columns hold a conversation, a comparison or a prompt.

docs/reference/data.md has the table of the layouts. A row has one layout for each purpose, the
first one whose columns are all there and not null. Columns that the layout does not use are treated
in one of two ways. A column that would change what is trained (REFUSED_COLUMNS) is an error. All
other columns are counted and named in one warning per dataset (planish/datasets/unused_columns.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from planish.datasets.gsm8k import QUESTION_SUFFIX, is_gsm8k, read_problem
from planish.datasets.messages import (
    Conversation,
    Message,
    PlainText,
    read_message_list,
    read_text_or_messages,
    read_tools,
    with_system,
    with_tools,
)
from planish.datasets.raw_transcripts import is_transcript, read_transcript
from planish.datasets.row_images import IMAGE_COLUMNS, has_images, image_place, with_images
from planish.errors import UserError

Columns = Mapping[str, Any]
Label = Literal["A", "B", "Tie"]

SYSTEM_COLUMNS = ("system", "system_prompt")
COMMON_COLUMNS = (*SYSTEM_COLUMNS, "tools", *IMAGE_COLUMNS)
"""Columns that are used with every layout of messages."""
TEXT_ONLY = "remove the row, or the column if its content is not needed"
PROMPT_REFUSALS = {
    **dict.fromkeys(
        ("videos", "video", "audios", "audio"), f"planish reads text and images only; {TEXT_ONLY}"
    ),
    "chat_template_kwargs": "choose the variant of the chat format with renderer_name, and remove "
    "the column",
    "functions": 'give the declarations as "tools", and calls as "tool_calls"',
    "history": 'give the whole conversation as "messages"',
}
"""Columns that change a prompt and are not supported, with the remedy."""
REFUSED_COLUMNS = {
    **PROMPT_REFUSALS,
    "weight": 'every row counts the same; remove the column, or give "weight" 0 or 1 on messages',
    "margin": "the losses on pairs have no margin; remove the column",
}
"""Columns that change a prompt or a loss and are not supported, with the remedy."""
TEXT_REFUSALS = {
    **REFUSED_COLUMNS,
    **dict.fromkeys(
        (*IMAGE_COLUMNS, "rejected_images"), f"rows of this kind have text only; {TEXT_ONLY}"
    ),
}
"""REFUSED_COLUMNS, and the columns of images, for rows whose images nothing would read."""
PROBLEM_REFUSALS = {
    **REFUSED_COLUMNS,
    **dict.fromkeys(
        COMMON_COLUMNS,
        "problems of this kind have a prompt of their own; remove the column, or reward your own "
        "prompts (RewardDatasetBuilder)",
    ),
}
"""REFUSED_COLUMNS, and the columns that problems with a fixed prompt do not use."""


@dataclass(frozen=True)
class Layout:
    """Columns that together hold a conversation, a comparison or a prompt."""

    columns: tuple[str, ...]
    """All of them must be there, and not null."""
    optional: tuple[str, ...] = ()
    takes_common: bool = True
    """Whether a system message, tools and images may be given in columns of their own."""

    @property
    def used(self) -> tuple[str, ...]:
        """All columns that the layout uses."""
        return (*self.columns, *self.optional, *(COMMON_COLUMNS if self.takes_common else ()))


@dataclass(frozen=True)
class Pair:
    """A prompt, two answers to it as messages, and which of them is preferred."""

    prompt: Conversation
    first: list[Message]
    second: list[Message]
    label: Label


def conversation_of(row: Columns, where: str) -> Conversation | PlainText:
    """Return the conversation to train on, or a plain text.

    The messages of a column "prompt" get "weight" 0, so that only the completion is learned. Raise
    UserError, which names the row by `where`, for a row of another layout.
    """
    layout = find_layout(row, CONVERSATIONS, where)
    check_refused(row, REFUSED_COLUMNS, where)
    result = CONVERSATIONS[layout](row, where)
    if isinstance(result, PlainText):
        _reject_common(row, where)
        result.location = where
        return result
    return Conversation(with_common_columns(with_images(result, row, where), row, where), where)


def comparison_of(row: Columns, where: str) -> Pair:
    """Return the comparison of a row. Raise UserError, which names the row by `where`, for a row
    of another layout.
    """
    layout = find_layout(row, COMPARISONS, where)
    check_refused(row, TEXT_REFUSALS, where)
    pair = COMPARISONS[layout](row, where)
    if has_images([*pair.prompt, *pair.first, *pair.second]):
        places = (image_place(row[name], f'"{name}"') for name in layout.columns)
        # A column of JSON text has no places.
        place = next(filter(None, places), "a message")
        raise UserError(
            f"{where}: {place} is an image, and comparisons have text only; remove the row"
        )
    for message in (*pair.first, *pair.second):
        if "trainable" in message or "weight" in message:
            raise UserError(
                f'{where}: an answer has "trainable" or "weight"; whole answers are compared: '
                "remove the key"
            )
    prompt = _unmarked(with_common_columns(list(pair.prompt), row, where))
    return Pair(Conversation(prompt, where), pair.first, pair.second, pair.label)


def prompt_of(row: Columns, where: str) -> Conversation:
    """Return the messages before the answer. Raise UserError, which names the row by `where`, for a
    row of another layout.

    An answer at the end of a whole conversation is removed. Columns that do not belong to the
    prompt are not checked: a reward function may use them.
    """
    layout = find_layout(row, PROMPTS, where)
    check_refused(row, PROMPT_REFUSALS, where)
    messages = with_images(PROMPTS[layout](row, where), row, where)
    messages = with_common_columns(messages, row, where)
    if messages[-1].get("role") not in ("user", "tool"):
        raise UserError(
            f'{where}, "{layout.columns[0]}": there is no question; give a conversation with a user '
            "message before the answer"
        )
    asked = messages[-1].get("content")
    if messages[-1]["role"] == "user" and not (asked.strip() if isinstance(asked, str) else asked):
        raise UserError(
            f'{where}, "{layout.columns[0]}": the question is empty; write it, or remove the row'
        )
    return Conversation(_unmarked(messages), where)


def find_layout(row: Columns, layouts: Mapping[Layout, Any], where: str) -> Layout:
    """Return the first of `layouts` that a row has. Raise UserError if it has none. `where` names
    the row in the message.
    """
    for layout in layouts:
        if all(row.get(name) is not None for name in layout.columns):
            return layout
    forms = ", or ".join(" and ".join(f'"{name}"' for name in each.columns) for each in layouts)
    present = sorted(name for name, value in row.items() if value is not None)
    raise UserError(
        f"{where}: the row has {present}; give rows with {forms} (docs/reference/data.md)"
    )


def check_refused(row: Columns, refusals: Mapping[str, str], where: str) -> None:
    """Raise UserError for a column of `refusals` that says something. Null, an empty value and a
    weight of 1 say nothing. `where` names the row in the message.
    """
    for name, remedy in refusals.items():
        value = row.get(name)
        if value is None or value in ("", [], {}) or (name == "weight" and value == 1):
            continue
        raise UserError(f'{where}: the column "{name}" has {value!r:.200}; {remedy}')


def with_common_columns(messages: list[Message], row: Columns, where: str) -> list[Message]:
    """Return the messages with the row's system message and tools. `where` names the row in
    errors.
    """
    for name in SYSTEM_COLUMNS:
        if row.get(name) is not None:
            messages = with_system(messages, row[name], f'{where}, "{name}"')
    if row.get("tools") is None or row["tools"] == "":
        return messages
    tools_where = f'{where}, "tools"'
    return with_tools(messages, read_tools(row["tools"], tools_where), tools_where)


def _reject_common(row: Columns, where: str) -> None:
    for name in COMMON_COLUMNS:
        if row.get(name) not in (None, "", []):
            raise UserError(
                f'{where}: the column "{name}" does not belong to a plain "text"; remove it, or '
                'give "messages"'
            )


def _unmarked(messages: list[Message]) -> list[Message]:
    """Return messages without the keys that say what is learned."""
    marks = ("trainable", "weight")
    return [
        {key: value for key, value in message.items() if key not in marks} for message in messages
    ]


def _question(messages: list[Message]) -> list[Message]:
    """Return messages as a prompt, of which nothing is learned."""
    return [{**message, "weight": 0} for message in messages]


def _messages(row: Columns, where: str) -> list[Message]:
    return read_message_list(row["messages"], f'{where}, "messages"')


def _conversations(row: Columns, where: str) -> list[Message]:
    return read_message_list(row["conversations"], f'{where}, "conversations"')


def _prompt(row: Columns, where: str) -> list[Message]:
    messages = read_text_or_messages(row["prompt"], "user", f'{where}, "prompt"')
    if messages == [{"role": "user", "content": ""}]:
        raise UserError(f'{where}: the "prompt" is empty; write it, or remove the row')
    return messages


def _completion(row: Columns, where: str) -> list[Message]:
    label = row.get("label")
    if label is False:
        raise UserError(
            f'{where}: the column "label" is false, so the completion is a bad one; remove the '
            "row, or train on pairs of answers (recipe dpo)"
        )
    if label not in (None, True):
        raise UserError(
            f'{where}: the column "label" has {label!r:.200}; it says whether a completion is a '
            "good one: give true, or remove the column"
        )
    answer = read_text_or_messages(row["completion"], "assistant", f'{where}, "completion"')
    prompt = _prompt(row, where)
    _reject_begun_answer(prompt, answer, f'{where}, "prompt"')
    return [*_question(prompt), *answer]


def _reject_begun_answer(prompt: list[Message], answer: list[Message], where: str) -> None:
    """Raise UserError if both the prompt's last message and the answer's first one are the
    assistant's: TRL continues such a message, and a chat format would end it.
    """
    if [prompt[-1].get("role"), answer[0].get("role")] == ["assistant", "assistant"]:
        raise UserError(
            f"{where}: the prompt ends in the beginning of an answer; let it end in a question, and "
            "move the beginning into the answer"
        )


def _instruction(row: Columns, where: str) -> list[Message]:
    instruction = _text(row, "instruction", where)
    context = _text(row, "input", where) if row.get("input") is not None else ""
    return [{"role": "user", "content": f"{instruction}\n{context}" if context else instruction}]


def _instruction_with_output(row: Columns, where: str) -> list[Message]:
    answer = {"role": "assistant", "content": _text(row, "output", where)}
    return [*_instruction(row, where), answer]


def _asked(row: Columns, where: str) -> list[Message]:
    return [{"role": "user", "content": _text(row, "question", where)}]


def _asked_and_answered(row: Columns, where: str) -> list[Message]:
    """Return a question with its answer; a worked solution of GSM8K ends in a box."""
    if is_gsm8k(row):
        problem = read_problem(row, where)
        return [
            {"role": "user", "content": problem.question + QUESTION_SUFFIX},
            {"role": "assistant", "content": problem.solution},
        ]
    return [*_asked(row, where), {"role": "assistant", "content": _text(row, "answer", where)}]


def _plain_text(row: Columns, where: str) -> PlainText:
    text = _text(row, "text", where)
    if not text:
        raise UserError(f'{where}: the "text" is empty; remove the row')
    return PlainText(text)


def _text(row: Columns, name: str, where: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise UserError(f'{where}, "{name}": holds a {type(value).__name__}; give a text')
    return value


def _labeled(row: Columns, where: str) -> Pair:
    """Read a comparison as the public cookbooks write it."""
    names = ("prompt_conversation", "completion_A", "completion_B")
    fields, label = row["comparison"], row["label"]
    if label not in ("A", "B", "Tie"):
        raise UserError(f'{where}: label is {label!r}; give "A", "B" or "Tie"')
    _check_fields(fields, names, (), f'{where}, "comparison"')
    prompt, first, second = (
        read_text_or_messages(fields[name], role, f'{where}, "{name}"')
        for name, role in zip(names, ("user", "assistant", "assistant"), strict=True)
    )
    return Pair(Conversation(prompt), first, second, label)


def _openai_preference(row: Columns, where: str) -> Pair:
    """Read a preference as OpenAI's fine-tuning API takes it."""
    given, where_given = row["input"], f'{where}, "input"'
    _check_fields(given, ("messages",), ("tools", "parallel_tool_calls"), where_given)
    prompt = read_message_list(given["messages"], f'{where_given}, "messages"')
    if given.get("tools"):
        tools_where = f'{where_given}, "tools"'
        prompt = with_tools(prompt, read_tools(given["tools"], tools_where), tools_where)
    preferred, other = (
        read_text_or_messages(row[name], "assistant", f'{where}, "{name}"')
        for name in ("preferred_output", "non_preferred_output")
    )
    return Pair(Conversation(prompt), preferred, other, "A")


def _check_fields(
    value: Any, required: tuple[str, ...], optional: tuple[str, ...], where: str
) -> None:
    if not isinstance(value, Mapping) or any(value.get(name) is None for name in required):
        raise UserError(f"{where}: give {', '.join(required)}")
    unknown = [name for name in value if name not in (*required, *optional)]
    unknown = [name for name in unknown if value[name] is not None]
    if unknown:
        raise UserError(f"{where}: {unknown} is not used; remove it")


def _chosen_and_rejected(
    column: str | None, read_prompt: Callable[[Columns, str], list[Message]]
) -> Callable[[Columns, str], Pair]:
    """Return a reader of "chosen" and "rejected". `column`: the column with the prompt, which
    `read_prompt` reads; None = chosen and rejected begin with the prompt.
    """

    def read(row: Columns, where: str) -> Pair:
        chosen, rejected = (_answer(row, name, where) for name in ("chosen", "rejected"))
        shared = _shared_beginning(chosen, rejected, where)
        chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
        prompt = read_prompt(row, where)
        if not prompt and not shared:
            raise UserError(
                f'{where}: there is no "prompt", and chosen and rejected are not conversations; '
                "give the prompt"
            )
        joined = _joined(prompt, shared, column, where)
        for answer in (chosen, rejected):
            _reject_begun_answer(joined, answer, f'{where}, "{column or "chosen"}"')
        return Pair(Conversation(joined), chosen, rejected, "A")

    return read


def _no_prompt(row: Columns, where: str) -> list[Message]:
    return []


def _answer(row: Columns, name: str, where: str) -> list[Message]:
    value = row[name]
    if isinstance(value, str) and is_transcript(value):
        return read_transcript(value, f'{where}, "{name}"')
    return read_text_or_messages(value, "assistant", f'{where}, "{name}"')


def _shared_beginning(chosen: list[Message], rejected: list[Message], where: str) -> list[Message]:
    """Return the messages before the first answer in which two conversations differ. The last
    message is an answer in any case, also if the two are equal.
    """
    length = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        length += 1
    answers = chosen[length], rejected[length]
    if any(answer.get("role") != "assistant" for answer in answers):
        raise UserError(
            f"{where}: chosen and rejected differ before their last message, in a message that is "
            "no answer; give answers to one prompt"
        )
    return chosen[:length]


def _joined(
    prompt: list[Message], shared: list[Message], column: str | None, where: str
) -> list[Message]:
    """Return the whole prompt of two answers. `prompt` is from the column of that name, and
    `shared` from before the answers. One of the two may be empty, or lack the other's beginning.
    """
    if not shared or prompt[-len(shared) :] == shared:
        return prompt
    is_repeated = prompt == shared[-len(prompt) :] or (len(prompt) == 1 and prompt[0] in shared)
    if not prompt or is_repeated:
        return shared
    raise UserError(
        f'{where}: "{column}" differs from the messages before the answers in chosen and rejected; '
        "keep one of them"
    )


def _without_answer(read: Callable[[Columns, str], list[Message]]) -> Any:
    """Return a reader of the messages before the answer of a whole conversation."""

    def read_prompt(row: Columns, where: str) -> list[Message]:
        messages = read(row, where)
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        if not messages:
            raise UserError(
                f"{where}: there is no question; give rows with a prompt before the answer"
            )
        return messages

    return read_prompt


def _prompt_of_pair(read: Callable[[Columns, str], Pair]) -> Any:
    return lambda row, where: list(read(row, where).prompt)


MESSAGES = Layout(("messages",))
CONVERSATIONS_LAYOUT = Layout(("conversations",))
WORKED_SOLUTION = Layout(("question", "answer"))

CONVERSATIONS: Mapping[Layout, Callable[[Columns, str], Any]] = {
    MESSAGES: _messages,
    CONVERSATIONS_LAYOUT: _conversations,
    Layout(("prompt", "completion"), ("label",)): _completion,
    Layout(("instruction", "output"), ("input",)): _instruction_with_output,
    WORKED_SOLUTION: _asked_and_answered,
    Layout(("text",), takes_common=False): _plain_text,
}
"""The layouts of conversations to train on, and the functions that read them."""

COMPARISONS: Mapping[Layout, Callable[[Columns, str], Pair]] = {
    Layout(("comparison", "label")): _labeled,
    Layout(("input", "preferred_output", "non_preferred_output")): _openai_preference,
    Layout(("chosen", "rejected", "prompt")): _chosen_and_rejected("prompt", _prompt),
    Layout(("chosen", "rejected", "conversations")): _chosen_and_rejected(
        "conversations", _conversations
    ),
    Layout(("chosen", "rejected", "instruction"), ("input",)): _chosen_and_rejected(
        "instruction", _instruction
    ),
    Layout(("chosen", "rejected", "question")): _chosen_and_rejected("question", _asked),
    Layout(("chosen", "rejected")): _chosen_and_rejected(None, _no_prompt),
}
"""The layouts of comparisons, and the functions that read them."""

PROMPTS: Mapping[Layout, Callable[[Columns, str], list[Message]]] = {
    **{layout: _prompt_of_pair(read) for layout, read in COMPARISONS.items()},
    MESSAGES: _without_answer(_messages),
    CONVERSATIONS_LAYOUT: _without_answer(_conversations),
    Layout(("prompt",), ("completion",)): _prompt,
    Layout(("instruction",), ("input", "output")): _instruction,
    Layout(("question",), ("answer",)): _asked,
}
"""The layouts of prompts, and the functions that read them."""
