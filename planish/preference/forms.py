"""The two kinds of preference models behind one face: how a comparison becomes data, what is
minimised, and what judges.

chat             both answers in one conversation, the label is its answer
                 (planish/preference/chat_preferences.py)
bradley_terry    a score for each answer (planish/preference/bradley_terry.py)
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from planish import SamplingClient
from planish.errors import UserError
from planish.preference.bradley_terry import (
    QUESTION,
    BradleyTerry,
    BradleyTerryPreferenceModel,
    comparison_to_score_data,
    score_choice,
    score_conversation,
)
from planish.preference.chat_preferences import (
    ChatPreferenceModel,
    LabelCrossEntropy,
    comparison_conversation,
    comparison_to_datum,
    label_choice,
)
from planish.preference.choices import Choice
from planish.preference.preference_models import LogOddsModel
from planish.preference.types import LabeledComparison
from planish.renderers import Renderer
from planish.supervised.types import Batch

Kind = Literal["chat", "bradley_terry"]


class Form(Protocol):
    @property
    def minds_order(self) -> bool:
        """Whether the places of the answers may have a say, so that a fair test asks both orders."""
        ...

    @property
    def learned(self) -> LabelCrossEntropy | BradleyTerry:
        """What is minimised."""
        ...

    def check(self, labeled: LabeledComparison) -> None:
        """ValueError for a comparison that the format cannot write; no tokens are made."""
        ...

    def data_of(self, labeled: LabeledComparison, max_length: int | None) -> Batch:
        """What is learned of a comparison; nothing, and left_out = 1, of one that is too long."""
        ...

    def model(self, sampling_client: SamplingClient, temperature: float = 1.0) -> LogOddsModel: ...


@dataclass(frozen=True)
class ChatForm:
    choice: Choice
    minds_order = True
    learned = LabelCrossEntropy()

    def check(self, labeled: LabeledComparison) -> None:
        self.choice.check(comparison_conversation(labeled.comparison))

    def data_of(self, labeled: LabeledComparison, max_length: int | None) -> Batch:
        return comparison_to_datum(labeled, self.choice, max_length)

    def model(
        self, sampling_client: SamplingClient, temperature: float = 1.0
    ) -> ChatPreferenceModel:
        return ChatPreferenceModel(sampling_client, self.choice, temperature)


@dataclass(frozen=True)
class BradleyTerryForm:
    choice: Choice
    question: str = QUESTION
    minds_order = False
    learned = BradleyTerry()

    def check(self, labeled: LabeledComparison) -> None:
        comparison = labeled.comparison
        for answer in (comparison.completion_A, comparison.completion_B):
            self.choice.check(
                score_conversation(comparison.prompt_conversation, answer, self.question)
            )

    def data_of(self, labeled: LabeledComparison, max_length: int | None) -> Batch:
        return comparison_to_score_data(labeled, self.choice, self.question, max_length)

    def model(
        self, sampling_client: SamplingClient, temperature: float = 1.0
    ) -> BradleyTerryPreferenceModel:
        return BradleyTerryPreferenceModel(sampling_client, self.choice, self.question, temperature)


def form_of(kind: str, renderer: Renderer, question: str = QUESTION) -> Form:
    """UserError for another kind. `question` is asked of bradley_terry alone."""
    if kind == "chat":
        return ChatForm(label_choice(renderer))
    if kind == "bradley_terry":
        return BradleyTerryForm(score_choice(renderer), question)
    raise UserError(f"kind={kind}: give chat or bradley_terry")
