"""How a sampled message ended.

`bool(termination)` equals `is_clean`. Older interfaces return a success flag at this position, and
their callers write `if not ok:`. Members of an ordinary enum are always true, so such callers would
silently accept every truncated answer.

"Clean" means that the message is complete: the model closed it with the format's stop sequence or,
as base models do, with its end-of-sequence token. `is_stop_sequence` is the stricter test.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from planish.renderers.codec import Codec

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
"""End-of-sequence tokens of instruction tokenizers, which also have an end-of-turn token."""


class Termination(Enum):
    """How a sampled message ended."""

    STOP_SEQUENCE = "stop_sequence"
    EOS = "eos"
    MALFORMED = "malformed"
    """The message was cut off by max_tokens, or tokens follow its end."""

    @property
    def is_clean(self) -> bool:
        """Whether the message is complete."""
        return self is not Termination.MALFORMED

    @property
    def is_stop_sequence(self) -> bool:
        """Whether the message ended with the format's stop sequence."""
        return self is Termination.STOP_SEQUENCE

    def __bool__(self) -> bool:
        return self.is_clean


class ParsedResponse(NamedTuple):
    """The result of `Renderer.parse_response`. It unpacks as `message, termination`."""

    message: dict[str, Any]
    termination: Termination


def eos_ids(codec: Codec) -> set[int]:
    """Return the ids of the tokenizer's end-of-sequence tokens."""
    ids = {codec.control_id(text) for text in END_OF_TEXT}
    ids.add(getattr(codec.tokenizer, "eos_token_id", None))
    return {id_ for id_ in ids if id_ is not None}


def cut_at_stop(
    codec: Codec, tokens: Sequence[int], *stop_ids: int
) -> tuple[list[int], Termination]:
    """Return the tokens before the first stop or end-of-sequence token, and how they ended."""
    ends = eos_ids(codec).union(stop_ids)
    position = next((position for position, token in enumerate(tokens) if token in ends), None)
    if position is None or position + 1 < len(tokens):
        return list(tokens[:position]), Termination.MALFORMED
    ending = Termination.STOP_SEQUENCE if tokens[position] in stop_ids else Termination.EOS
    return list(tokens[:position]), ending
