"""Convert rows of published chat data to conversations. These columns are known:

messages               a list of {"role", "content"}: no_robots, tulu3, smoltalk and most others
conversations          a list of {"from", "value"}, as ShareGPT has it
prompt, completion     texts, or lists of messages, as TRL has it
"""

from collections.abc import Mapping, Sequence
from typing import Any

from planish.errors import UserError

Row = Mapping[str, Any]
Conversation = list[dict[str, Any]]

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
MESSAGE_LIST = "a list of messages with at least one in it"
ROW_FORMS = '"messages", "conversations", or "prompt" and "completion"'


def conversation_of(row: Row, where: str) -> Conversation:
    """Return the messages of a row. Raise UserError, which names `where`, for a row of another
    form.
    """
    if "messages" in row:
        return _messages(row["messages"], f'{where}, "messages"')
    if "conversations" in row:
        return [
            _from_sharegpt(message, where)
            for message in _messages(row["conversations"], f'{where}, "conversations"')
        ]
    if "prompt" in row and "completion" in row:
        return [
            *messages_of(row["prompt"], "user", f'{where}, "prompt"'),
            *messages_of(row["completion"], "assistant", f'{where}, "completion"'),
        ]
    raise UserError(f"{where}: the row has {sorted(row)}; give rows with {ROW_FORMS}")


def _is_conversation(row: Row) -> bool:
    """Return whether the row has one of the forms above."""
    return "messages" in row or "conversations" in row or ("prompt" in row and "completion" in row)


def is_worked_solution(row: Row) -> bool:
    """Return whether the row is a question with its answer. A row that also has the columns of a
    conversation counts as a conversation.
    """
    return "question" in row and "answer" in row and not _is_conversation(row)


def _messages(value: Any, where: str, expected: str = MESSAGE_LIST) -> Conversation:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not value:
        raise UserError(f"{where}: give {expected}")
    for message in value:
        if not isinstance(message, Mapping):
            raise UserError(f"{where}: holds a {type(message).__name__}; each message is an object")
    # In a table, every row has every key; a key that a message lacks is null.
    return [
        {key: field for key, field in message.items() if field is not None or key == "content"}
        for message in value
    ]


def messages_of(value: Any, role: str, where: str) -> Conversation:
    """Return a text as one message of `role`, and a list of messages as it is. Raise UserError,
    which names `where`, for anything else.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(value, where, f"a text, or {MESSAGE_LIST}")


def _from_sharegpt(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = SHAREGPT_ROLES.get(message.get("from", ""))
    if role is None or not isinstance(message.get("value"), str):
        raise UserError(
            f'{where}, "conversations": a part has {dict(message)!r:.200}; give "from" (one of '
            f"{', '.join(SHAREGPT_ROLES)}) and "
            '"value"'
        )
    if role == "assistant" and message.get("weight") not in (None, 1):
        raise UserError(
            f'{where}, "conversations": a part has "weight": {message["weight"]!r}, which planish '
            'does not support; give "messages" with '
            '"trainable" true or false on each, and train_on_what=customized, or remove the weight'
        )
    return {"role": role, "content": message["value"]}
