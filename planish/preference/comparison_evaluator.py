"""Evaluate a policy by its win rate: how often a judge prefers its answers to held-out prompts to
those of a reference. The reference is a set of fixed texts or another policy.

    win(prompt) = (r(A, B) - r(B, A) + 2) / 4    where A is the reference's answer, B the policy's,
                                                 and r the judge's preference, from -1 to 1
    win(prompt) = (r(A, B) + 1) / 2              with both_ways=False: half as many requests, but
                                                 the judge's position bias remains

A win is 1, a loss is 0, and the win rate is the mean over prompts. A policy compared with itself
scores 0.5 within the standard error, because policy and reference sample with independent seeds.
Seeds depend only on the evaluation's seed and the prompt's number. So all policies of a run are
measured with the same seeds and against the same reference answers.

Several judges may compare the same answers. If a learned judge and a known rule disagree, the
policy exploits flaws of the learned judge.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import chz

from planish import SamplingClient, ServiceClient
from planish.completers import TinkerTokenCompleter, derived_seed
from planish.errors import UserError
from planish.preference.judging import judge_comparisons, require_judge_fits
from planish.preference.preference_envs import Answer, read_answer
from planish.preference.preference_models import PreferenceModel, PreferenceModelBuilder
from planish.preference.prompts import PromptBuilder, fitting_prompts
from planish.preference.types import Comparison, Messages
from planish.processes.interruption import gather_or_cancel
from planish.renderers import Renderer
from planish.runlog.evaluators import SamplingClientEvaluator
from planish.runlog.model_renderer import model_renderer
from planish.runlog.run_directory import model_argument
from planish.runlog.statistics import Mean
from planish.training.scoring_models import vocabulary_difference

POLICY, REFERENCE = 0, 1
"""The `role` of policy and reference in the derivation of sampling seeds."""


@dataclass(frozen=True)
class SampledAnswer(Answer):
    """A policy's answer with its length in tokens."""

    num_tokens: int


@dataclass(frozen=True)
class AnswerSampler:
    """Samples the answers of policies in an evaluation."""

    renderer: Renderer
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0

    async def __call__(
        self, sampling_client: SamplingClient, prompts: Sequence[Messages], role: int
    ) -> list[SampledAnswer]:
        """Sample one answer to each prompt, all concurrently.

        `role` is POLICY or REFERENCE and keeps the seeds of the two apart.
        """
        policy = TinkerTokenCompleter(sampling_client, self.max_tokens, self.temperature)

        async def sample_one(number: int, prompt: Messages) -> SampledAnswer:
            seeded = policy.seeded(derived_seed(self.seed, role, number))
            sampled = await seeded(
                self.renderer.build_generation_prompt(prompt), self.renderer.get_stop_sequences()
            )
            answer = read_answer(self.renderer, sampled.tokens)
            return SampledAnswer(answer.text, answer.is_complete, len(sampled.tokens))

        return await gather_or_cancel(
            sample_one(number, prompt) for number, prompt in enumerate(prompts)
        )


class Reference(ABC):
    """The answers that a policy's answers are compared with."""

    @abstractmethod
    async def completions(
        self, prompts: Sequence[Messages], answer_sampler: AnswerSampler
    ) -> Sequence[Messages]:
        """Return one answer for each prompt, and the same answers on every call."""


@dataclass(frozen=True)
class FixedReference(Reference):
    """Fixed reference answers, in the order of the prompts."""

    answers: Sequence[Messages]

    async def completions(
        self, prompts: Sequence[Messages], answer_sampler: AnswerSampler
    ) -> Sequence[Messages]:
        """Return the answers. Raises UserError if their number is not that of the prompts."""
        if len(self.answers) != len(prompts):
            raise UserError(
                f"there are {len(prompts)} prompts and {len(self.answers)} reference answers; "
                "give one for each"
            )
        return self.answers


@dataclass
class PolicyReference(Reference):
    """Answers of another policy, sampled on first use and kept."""

    service_client: ServiceClient
    base_model: str
    checkpoint_path: str | None = None
    """A checkpoint or a run directory; None for the base model."""
    _sampled: Sequence[Messages] | None = field(default=None, init=False, repr=False)

    async def completions(
        self, prompts: Sequence[Messages], answer_sampler: AnswerSampler
    ) -> Sequence[Messages]:
        """Return the policy's answers, which are sampled at the first call."""
        if self._sampled is None:
            client = await self.service_client.create_sampling_client_async(
                **model_argument(self.base_model, self.checkpoint_path)
            )
            await self._require_vocabulary(client, answer_sampler.renderer)
            answers = await answer_sampler(client, prompts, REFERENCE)
            self._sampled = [answer.completion for answer in answers]
        return self._sampled

    async def _require_vocabulary(self, client: SamplingClient, renderer: Renderer) -> None:
        """Raise UserError unless the client's tokens are those of the policy's renderer, in which
        the reference gets its prompts.
        """
        policy_tokenizer: Any = renderer.tokenizer
        tokenizer = await client.get_tokenizer_async()
        difference = vocabulary_difference(policy_tokenizer.get_vocab(), tokenizer.get_vocab())
        if difference is not None:
            raise UserError(
                f"the reference {self.checkpoint_path or self.base_model} has another vocabulary "
                f"than the policy: {difference}; give a reference with the policy's tokenizer"
            )


async def judge_wins(
    judge: PreferenceModel, comparisons: Sequence[Comparison], *, both_ways: bool = True
) -> list[float]:
    """Return the win of answer B in each comparison: 1 for a win, 0 for a loss, or a fraction. With
    `both_ways`, each comparison is judged in both orders.
    """
    if not both_ways:
        return [(r + 1) / 2 for r in await judge_comparisons(judge, comparisons)]
    ordered_comparisons = [*comparisons, *(comparison.swap() for comparison in comparisons)]
    preferences = await judge_comparisons(judge, ordered_comparisons)
    count = len(comparisons)
    return [
        (r - swapped + 2) / 4
        for r, swapped in zip(preferences[:count], preferences[count:], strict=True)
    ]


@dataclass(frozen=True)
class ComparisonResults:
    """The answers of an evaluation and its win rates."""

    comparisons: Sequence[Comparison]
    """In each comparison, A is the reference's answer and B is the policy's."""
    answers: Sequence[SampledAnswer]
    """The policy's answers, one for each prompt."""
    wins: Mapping[str, Sequence[float]]
    """The result of `judge_wins` by the name of the judge."""

    def metrics(self, name: str) -> dict[str, float]:
        """Return the metrics of `ComparisonEvaluator`, with `name` as their prefix."""
        count = len(self.answers)
        metrics = {
            f"{name}/format": sum(answer.is_complete for answer in self.answers) / count,
            f"{name}/ac_tokens_per_turn": sum(answer.num_tokens for answer in self.answers) / count,
        }
        for judge, wins in self.wins.items():
            rate = Mean.from_values(wins)
            metrics[f"{name}/win_rate/{judge}"] = rate.value
            if rate.stderr is not None:
                metrics[f"{name}/win_rate_stderr/{judge}"] = rate.stderr
        return metrics


@dataclass(eq=False)
class ComparisonEvaluator(SamplingClientEvaluator):
    """An evaluator that compares a policy with a reference.

    Its metrics are NAME/win_rate/JUDGE, NAME/win_rate_stderr/JUDGE, NAME/format (the fraction of
    answers that ended properly) and NAME/ac_tokens_per_turn (mean tokens per answer).
    """

    prompts: Sequence[Messages]
    reference: Reference
    judges: Mapping[str, PreferenceModel]
    answer_sampler: AnswerSampler
    _: KW_ONLY
    both_ways: bool = True
    name: str = "test"

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UserError(
                "there are no prompts to compare answers to; hold some out, or leave the evaluator "
                "out"
            )
        if not self.judges:
            raise UserError("there is no judge; give at least one preference model by name")

    async def __call__(self, sampling_client: SamplingClient) -> Mapping[str, float]:
        return (await self.compare(sampling_client)).metrics(self.name)

    async def compare(self, sampling_client: SamplingClient) -> ComparisonResults:
        """Sample the policy's answers and let every judge compare them with the reference."""
        completions = await self.reference.completions(self.prompts, self.answer_sampler)
        answers = await self.answer_sampler(sampling_client, self.prompts, POLICY)
        comparisons = [
            Comparison(prompt, completion, answer.completion)
            for prompt, completion, answer in zip(self.prompts, completions, answers, strict=True)
        ]
        wins = {
            name: await judge_wins(judge, comparisons, both_ways=self.both_ways)
            for name, judge in self.judges.items()
        }
        return ComparisonResults(comparisons, answers, wins)


@chz.chz
class ComparisonEvaluatorBuilder:
    """The options of a `ComparisonEvaluator` whose reference is a policy.

    Give it to a run as one of its `evaluator_builders`.
    """

    prompt_builder: PromptBuilder = chz.field(
        doc="builder of the dataset whose held-out prompts are answered"
    )
    judge_builders: Mapping[str, PreferenceModelBuilder] = chz.field(
        doc="judges by the name that they have in the metrics"
    )
    policy_model_name: str
    policy_renderer_name: str | None = None
    reference_checkpoint_path: str | None = chz.field(
        default=None, doc="checkpoint of the reference; none = the base model itself"
    )
    max_tokens: int = 256
    temperature: float = 1.0
    both_ways: bool = chz.field(default=True, doc="judge each pair in both orders")
    max_prompt_tokens: int | None = chz.field(
        default=None,
        doc="maximum tokens in a prompt; longer ones are left out and counted; none = no limit",
    )
    max_prompts: int | None = chz.field(
        default=None, doc="maximum number of prompts, the first ones; none = all"
    )
    name: str = "test"
    seed: int = 0
    service_client: Any = chz.field(doc="service client on which the reference and the judges run")

    def __call__(self) -> ComparisonEvaluator:
        renderer = model_renderer(self.policy_model_name, self.policy_renderer_name)
        prompts = fitting_prompts(
            self.prompt_builder().test, renderer, "test", self.max_prompt_tokens
        )
        asked = prompts.problems[: self.max_prompts]
        judges = {name: build(self.service_client) for name, build in self.judge_builders.items()}
        for judge in judges.values():
            require_judge_fits(judge, asked, self.max_tokens)
        return ComparisonEvaluator(
            asked,
            PolicyReference(
                self.service_client, self.policy_model_name, self.reference_checkpoint_path
            ),
            judges,
            AnswerSampler(renderer, self.max_tokens, self.temperature, self.seed),
            both_ways=self.both_ways,
            name=self.name,
        )
