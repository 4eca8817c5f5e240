"""What the clients ask the embedded model for. It is so small that only a constraint makes its
answers valid.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from planish.model.sources.resolve import DEFAULT_MODEL

MODEL = DEFAULT_MODEL
QUESTION: Any = [{"role": "user", "content": "Which colour has the sea?"}]
TOKENS = 80


class Colour(BaseModel):
    """An answer of bounded length, because its schema allows no other properties."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["red", "green", "blue"]
    level: int = Field(ge=0, le=9)


class Anything(BaseModel):
    """An answer that any JSON object is."""

    colour: Any = None


def mix(colour: Literal["red", "blue"]) -> str:
    """Mix a colour with yellow.

    Args:
        colour: the colour
    """
    return {"red": "orange", "blue": "green"}[colour]


MIX: Any = {
    "type": "function",
    "function": {
        "name": "mix",
        "description": "Mix a colour with yellow.",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
