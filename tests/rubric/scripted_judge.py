"""A judge whose replies are a function of its prompt."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.completers import MessageCompleter
from planish.renderers import Message


@dataclass
class ScriptedJudge(MessageCompleter):
    """A judge whose replies come from `says`, called with the text of the last message."""

    says: Callable[[str], str]
    asked: list[Sequence[Message]] = field(default_factory=list)

    async def __call__(self, messages: Sequence[Message]) -> Message:
        self.asked.append(messages)
        await asyncio.sleep(0)
        text: Any = messages[-1]["content"]
        return {"role": "assistant", "content": self.says(text)}
