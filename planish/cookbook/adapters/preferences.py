"""The cookbook's builders of comparisons. Subclasses define how rows are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import chz
import datasets

from planish.errors import UnsupportedError, UserError
from planish.preference import preference_envs
from planish.preference.chat_preferences import ChatPreferenceModel, label_choice
from planish.preference.datasets import ComparisonBuilder
from planish.preference.matchups import TournamentPattern
from planish.preference.model_datasets import PreferenceDatasetBuilder
from planish.preference.preference_models import PreferenceModel, PreferenceModelBuilder
from planish.preference.prompts import PromptsOfComparisons
from planish.preference.types import Comparison, LabeledComparison
from planish.rl.types import RLDataset, RLDatasetBuilder
from planish.runlog.checkpoint_info import require_base_model
from planish.runlog.model_renderer import model_renderer
from planish.tinker import ServiceClient

Comparisons = list[LabeledComparison]


@chz.chz
class ComparisonDatasetBuilder(ComparisonBuilder):
    """Builds comparisons from rows. Subclasses implement `get_train_and_test_datasets` and
    `example_to_labeled_comparison`.
    """

    swap: bool = False

    def get_train_and_test_datasets(self) -> tuple[Any, Any]:
        """Return the training rows, and the test rows or None."""
        raise NotImplementedError

    def example_to_labeled_comparison(self, example: dict[str, Any]) -> LabeledComparison | None:
        """Return a row as a comparison; None leaves it out."""
        raise NotImplementedError

    def get_labeled_comparisons(self) -> tuple[Comparisons, Comparisons | None]:
        """Return the comparisons for training, and those for tests or None."""
        train, test = self.get_train_and_test_datasets()
        return self._read(train), None if test is None else self._read(test)

    def __call__(self) -> tuple[Comparisons, Comparisons]:
        train, test = self.get_labeled_comparisons()
        both = [side for one in train for side in (one, one.swap())] if self.swap else train
        return both, test or []

    def _read(self, rows: Any) -> Comparisons:
        found = (self.example_to_labeled_comparison(dict(row)) for row in rows)
        return [comparison for comparison in found if comparison is not None]


@chz.chz
class ChatDatasetBuilderFromComparisons(PreferenceDatasetBuilder):
    """Training batches for a chat preference model."""

    kind: Any = "chat"
    swap: bool = False


@chz.chz
class PairwisePreferenceRLDatasetBuilder(RLDatasetBuilder):
    """RL on the prompts of comparisons: a preference model compares the answers to each prompt."""

    comparison_builder: ComparisonBuilder
    batch_size: int
    policy_renderer_name: str
    policy_model_name: str
    tournament_pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS
    group_size: int
    content_preprocessor: Callable[[str], str] | None = None
    preference_model_builder: Callable[[], PreferenceModel]

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        if self.content_preprocessor is not None:
            raise UnsupportedError("content_preprocessor: change the text in the preference model")
        return await preference_envs.PairwisePreferenceRLDatasetBuilder(
            # The public cookbook has one group for each comparison.
            prompt_builder=PromptsOfComparisons(
                comparison_builder=self.comparison_builder, keep_repeated=True
            ),
            preference_model_builder=_ClientIgnoringBuilder(self.preference_model_builder),
            policy_model_name=self.policy_model_name,
            policy_renderer_name=self.policy_renderer_name,
            batch_size=self.batch_size,
            group_size=self.group_size,
            tournament_pattern=self.tournament_pattern,
            matchup_group_size=min(4, self.group_size),
        )()


@dataclass(frozen=True)
class _ClientIgnoringBuilder(PreferenceModelBuilder):
    """Calls a builder that takes no service client."""

    builder: Callable[[], PreferenceModel]

    def __call__(self, service_client: Any = None) -> PreferenceModel:
        return self.builder()


@chz.chz
class PreferenceModelBuilderFromChatRenderer(PreferenceModelBuilder):
    """A chat preference model from a checkpoint. Its preference is an expectation over the labels
    instead of one sampled label.
    """

    renderer_name: str
    model_name: str
    rm_weights_path: str
    base_url: str | None = None

    def __call__(self, service_client: Any = None) -> PreferenceModel:
        client = service_client or ServiceClient(base_url=self.base_url)
        renderer = model_renderer(self.model_name, self.renderer_name)
        sampler = client.create_sampling_client(model_path=self.rm_weights_path)
        require_base_model(sampler, self.model_name, self.rm_weights_path, "model_name")
        return ChatPreferenceModel(sampler, label_choice(renderer))


def _parse_transcript(text: str) -> list[dict[str, str]]:
    """Return the messages of a transcript with "Human:" and "Assistant:" turns."""
    messages: list[dict[str, str]] = []
    for part in text.split("\n\nHuman: ")[1:]:
        said, *answers = part.split("\n\nAssistant: ")
        messages.append({"role": "user", "content": said.strip()})
        messages += [{"role": "assistant", "content": answer.strip()} for answer in answers]
    return messages


@chz.chz
class HHHComparisonBuilder(ComparisonDatasetBuilder):
    """Anthropic/hh-rlhf: pairs of transcripts that differ in their last answer."""

    test_size: int = 1024

    def get_train_and_test_datasets(self) -> tuple[Any, Any]:
        found: Any = datasets.load_dataset("Anthropic/hh-rlhf")
        test = found["test"].shuffle(seed=0)
        return found["train"].shuffle(seed=0), test.select(range(min(self.test_size, len(test))))

    def example_to_labeled_comparison(self, example: dict[str, Any]) -> LabeledComparison | None:
        chosen, rejected = (_parse_transcript(example[name]) for name in ("chosen", "rejected"))
        if len(chosen) != len(rejected) or len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
            return None
        if chosen[-1]["role"] != "assistant" or chosen[-1] == rejected[-1]:
            return None
        return LabeledComparison(Comparison(chosen[:-1], chosen[-1:], rejected[-1:]), "A")


@chz.chz
class HelpSteer3ComparisonBuilder(ComparisonDatasetBuilder):
    """nvidia/HelpSteer3, preference: answers with an overall preference below or above 0."""

    def get_train_and_test_datasets(self) -> tuple[Any, Any]:
        found: Any = datasets.load_dataset("nvidia/HelpSteer3", "preference")
        return found["train"].shuffle(seed=0), found["validation"].shuffle(seed=0)

    def example_to_labeled_comparison(self, example: dict[str, Any]) -> LabeledComparison | None:
        overall = example["overall_preference"]
        if overall == 0:
            return None
        answers = [
            [{"role": "assistant", "content": example[name]}] for name in ("response1", "response2")
        ]
        comparison = Comparison(_role_and_content(example["context"]), *answers)
        return LabeledComparison(comparison, "A" if overall < 0 else "B")


@chz.chz
class UltraFeedbackComparisonBuilder(ComparisonDatasetBuilder):
    """argilla/ultrafeedback-binarized-preferences: an instruction with two answers."""

    test_size: int = 1024

    def get_train_and_test_datasets(self) -> tuple[Any, Any]:
        found: Any = datasets.load_dataset("argilla/ultrafeedback-binarized-preferences")
        rows = found["train"].shuffle(seed=0)
        if len(rows) <= self.test_size:
            raise UserError(f"test_size={self.test_size}: there are {len(rows)} rows; give fewer")
        held_out = rows.select(range(self.test_size))
        return rows.select(range(self.test_size, len(rows))), held_out

    def example_to_labeled_comparison(self, example: dict[str, Any]) -> LabeledComparison | None:
        answers = [
            [{"role": "assistant", "content": example[name]}]
            for name in ("chosen_response", "rejected_response")
        ]
        prompt = [{"role": "user", "content": example["instruction"]}]
        return LabeledComparison(Comparison(prompt, *answers), "A")


def _role_and_content(messages: Any) -> list[Mapping[str, Any]]:
    return [{"role": each["role"], "content": each["content"]} for each in messages]
