"""Transcripts as hh-rlhf has them: "\n\nHuman: ...\n\nAssistant: ..." in one text."""

import re

from planish.errors import UserError

START = "\n\nHuman:"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(text: str) -> bool:
    """Return whether a text is a transcript."""
    return text.startswith(START)


def read_transcript(text: str, where: str) -> list[dict[str, str]]:
    """Return the messages of a transcript, each without blanks at its start and end. Raise
    UserError, which names `where`, if the transcript does not end with an answer.
    """
    _, *parts = _TURN.split(text)
    messages = [
        {"role": _ROLES[speaker], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if messages[-1]["role"] != "assistant":
        raise UserError(f'{where}: the last turn is not "Assistant:"; give an answer at the end')
    return messages
