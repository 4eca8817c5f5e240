"""Which messages of a conversation a supervised example trains on."""

from collections.abc import Sequence
from enum import StrEnum

from planish.renderers.messages import CheckedMessage, last_user_index


class TrainOnWhat(StrEnum):
    """Which messages of a conversation are training targets."""

    LAST_ASSISTANT_MESSAGE = "last_assistant_message"
    LAST_ASSISTANT_TURN = "last_assistant_turn"
    """Every assistant message after the last user message: with tools, one turn has several."""
    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"
    ALL_MESSAGES = "all_messages"
    ALL_TOKENS = "all_tokens"
    """The headers of messages too, but never a beginning-of-sequence token."""
    ALL_USER_AND_SYSTEM_MESSAGES = "all_user_and_system_messages"
    CUSTOMIZED = "customized"
    """The messages with `trainable` True; every message must have the key."""


def read_train_on_what(value: TrainOnWhat | str) -> TrainOnWhat:
    """Return `value` as a TrainOnWhat. Raises ValueError for an unknown name."""
    try:
        return TrainOnWhat(value)
    except ValueError:
        names = ", ".join(TrainOnWhat)
        raise ValueError(f"train_on_what={value!r}: give a TrainOnWhat or one of {names}") from None


def target_flags(messages: Sequence[CheckedMessage], train_on: TrainOnWhat) -> list[bool]:
    """Return one flag per message; a message of weight 0 is no target. Raises ValueError if no
    message would be trained, or if the messages' `trainable` keys do not fit `train_on`.
    """
    _check_trainable(messages, train_on)
    assistant_indices = [
        index for index, message in enumerate(messages) if message.role == "assistant"
    ]
    last_user = last_user_index(messages)
    target_indices: set[int] = set()
    match train_on:
        case TrainOnWhat.LAST_ASSISTANT_MESSAGE:
            target_indices = set(assistant_indices[-1:])
        case TrainOnWhat.LAST_ASSISTANT_TURN:
            target_indices = {index for index in assistant_indices if index > last_user}
        case TrainOnWhat.ALL_ASSISTANT_MESSAGES:
            target_indices = set(assistant_indices)
        case TrainOnWhat.ALL_MESSAGES | TrainOnWhat.ALL_TOKENS:
            target_indices = set(range(len(messages)))
        case TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES:
            roles = ("user", "system")
            target_indices = {
                index for index, message in enumerate(messages) if message.role in roles
            }
        case TrainOnWhat.CUSTOMIZED:
            target_indices = {index for index, message in enumerate(messages) if message.trainable}
    target_indices &= {index for index, message in enumerate(messages) if message.is_learned}
    if not target_indices:
        raise ValueError(
            f"train_on_what={train_on.value}: messages holds nothing to train on; add such a "
            "message, choose another TrainOnWhat, or leave this conversation out"
        )
    return [index in target_indices for index in range(len(messages))]


def _check_trainable(messages: Sequence[CheckedMessage], train_on: TrainOnWhat) -> None:
    for index, message in enumerate(messages):
        if train_on is TrainOnWhat.CUSTOMIZED and message.trainable is None:
            raise ValueError(
                f"messages[{index}] lacks 'trainable', which train_on_what=customized needs; set "
                "True or False"
            )
        if train_on is not TrainOnWhat.CUSTOMIZED and message.trainable is not None:
            raise ValueError(
                f"messages[{index}] has 'trainable', which only train_on_what=customized reads; "
                "remove the key, or choose TrainOnWhat.CUSTOMIZED"
            )
