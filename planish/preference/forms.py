"""A common interface to the two kinds of preference models: their training data, their loss, and
the model that judges.

    chat             both answers in one conversation, which the model answers with a label
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
    """A kind of preference model in one chat format."""

    @property
    def depends_on_order(self) -> bool:
        """Whether the order of the answers can influence the model.

        If so, a fair evaluation asks about both orders.
        """
        ...

    @property
    def training_loss(self) -> LabelCrossEntropy | BradleyTerry:
        """The loss to minimise."""
        ...

    def check(self, labeled: LabeledComparison) -> None:
        """Raise ValueError for a comparison that the format cannot express. Nothing is
        tokenized.
        """
        ...

    def data_of(self, labeled: LabeledComparison, max_length: int | None) -> Batch:
        """Return the datums of a comparison.

        The batch is empty, with left_out = 1, if the comparison is longer than `max_length` tokens.
        """
        ...

    def model(self, sampling_client: SamplingClient, temperature: float = 1.0) -> LogOddsModel:
        """Return the preference model that runs on `sampling_client`."""
        ...


@dataclass(frozen=True)
class ChatForm:
    """The form of preference models that read both answers and write a label."""

    choice: Choice
    depends_on_order = True
    training_loss = LabelCrossEntropy()

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
    """The form of preference models that score each answer; `question` asks about the answer."""

    choice: Choice
    question: str = QUESTION
    depends_on_order = False
    training_loss = BradleyTerry()

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
    """Return the form of a kind, "chat" or "bradley_terry"; UserError for any other.

    Only bradley_terry uses `question`.
    """
    if kind == "chat":
        return ChatForm(label_choice(renderer))
    if kind == "bradley_terry":
        return BradleyTerryForm(score_choice(renderer), question)
    raise UserError(f"kind={kind}: give chat or bradley_terry")
