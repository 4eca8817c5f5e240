"""Count the conversations of a dataset whose answers are missing or empty, and name them in a warning.

Such rows are trained as they are. They often come from a generation that failed: an empty answer
teaches a model to answer nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from planish.datasets.messages import PlainText
from planish.renderers import TrainOnWhat

_log = logging.getLogger(__name__)


class AnswerCounts:
    """The rows that end without an answer, and those with an empty answer, by location."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {
            "end without an answer; nothing is learned from their last messages. Add the answers, "
            "or remove these messages": [],
            "have an empty answer, which teaches the model to answer nothing. Add the answers, or "
            "remove the rows": [],
        }

    def add(
        self,
        messages: Sequence[Mapping[str, Any]] | PlainText,
        train_on_what: TrainOnWhat,
        where: str,
    ) -> None:
        """Count a conversation. `where` names its row."""
        if isinstance(messages, PlainText) or "assistant" not in train_on_what.value:
            return
        missing, empty = self._found.values()
        if messages[-1].get("role") != "assistant":
            missing.append(where)
        if any(map(_is_empty_answer, messages)):
            empty.append(where)

    def warn(self, rows: str) -> None:
        """Log the counts that are not 0. `rows` names all rows in the message."""
        for text, locations in self._found.items():
            if locations:
                _log.warning("%d %s, the first in %s, %s", len(locations), rows, locations[0], text)


def _is_empty_answer(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return (
        message.get("role") == "assistant"
        and message.get("weight") != 0
        and not (content.strip() if isinstance(content, str) else content)
        and not any(message.get(key) for key in ("tool_calls", "reasoning_content"))
    )
