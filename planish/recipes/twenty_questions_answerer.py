"""The answerer of twenty questions: a model that knows the word and answers Yes or No.

Any reply of the model becomes "Yes.", "No." or "I cannot say.", so a player cannot talk the model
into giving the word away.
"""

import re
from dataclasses import dataclass
from typing import Self

from planish.completers import MessageCompleter
from planish.renderers import Message, get_text_content

ANSWER_TOKENS = 4
EXAMPLE_ANSWERS = (
    ("table", "Is it alive?", "No"),
    ("table", "Is it furniture?", "Yes"),
    ("bird", "Is it an animal?", "Yes"),
    ("bird", "Is it bigger than a house?", "No"),
    ("soup", "Is it food?", "Yes"),
    ("knife", "Can it fly?", "No"),
)


@dataclass(frozen=True)
class Answerer:
    """A model that knows the word."""

    completer: MessageCompleter

    async def answer(self, secret: str, question: str) -> str:
        """Return "Yes.", "No." or "I cannot say."."""
        messages: list[Message] = [{"role": "system", "content": "Answer with Yes or No."}]
        for word, asked, answer in EXAMPLE_ANSWERS:
            messages.append(question_about(word, asked))
            messages.append({"role": "assistant", "content": answer})
        reply = await self.completer([*messages, question_about(secret, question)])
        first = re.match(r"\W*(yes|no)\b", get_text_content(reply), re.IGNORECASE)
        return f"{first.group(1).capitalize()}." if first else "I cannot say."

    def __deepcopy__(self, memo: object) -> Self:
        """Return the object itself. A run copies its options when it writes config.json, and a
        connection to an engine cannot be copied.
        """
        return self


def question_about(secret: str, question: str) -> Message:
    """Return the question as a message that also names the secret word."""
    text = f"The secret word is {secret}.\nQuestion: {question}\nIs the answer Yes or No?"
    return {"role": "user", "content": text}
