"""The two kinds of preference models: their training data, their loss, and the model that judges.

chat             both answers in one conversation, which the model answers with a label
                 (planish/preference/chat_preferences.py)
bradley_terry    a score for each answer (planish/preference/bradley_terry.py)
"""

from typing import Literal, TypeAlias

from planish.errors import UserError
from planish.preference.bradley_terry import QUESTION, BradleyTerryForm, score_choice
from planish.preference.chat_preferences import ChatForm, label_choice
from planish.renderers import Renderer

Kind = Literal["chat", "bradley_terry"]
Form: TypeAlias = ChatForm | BradleyTerryForm
"""A kind of preference model in one chat format."""


def form_of(kind: str, renderer: Renderer, question: str = QUESTION) -> Form:
    """Return the form of a kind, "chat" or "bradley_terry". Raises UserError for any other.

    Only bradley_terry uses `question`.
    """
    if kind == "chat":
        return ChatForm(label_choice(renderer))
    if kind == "bradley_terry":
        return BradleyTerryForm(score_choice(renderer), question)
    raise UserError(f"kind={kind}: give chat or bradley_terry")
