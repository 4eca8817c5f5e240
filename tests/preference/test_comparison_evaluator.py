"""Win rates agree with values computed by hand, in both orders and in one, against texts and
against a policy.
"""

import asyncio
import math
from types import SimpleNamespace

import chz
import numpy as np
import pytest
from metric_tables import definition_of

from planish import ServiceClient
from planish.errors import UserError
from planish.preference.comparison_evaluator import (
    AnswerSampler,
    ComparisonEvaluator,
    ComparisonEvaluatorBuilder,
    FixedReference,
    PolicyReference,
    judge_wins,
)
from planish.preference.preference_models import PreferenceModelBuilder
from planish.preference.prompts import PromptBuilder, Prompts
from planish.preference.types import Comparison
from planish.runlog.evaluators import validate_metrics
from planish.runlog.statistics import Mean
from planish.testing import tiny_model
from planish.types import SampledSequence, SampleResponse

PROMPTS = [[{"role": "user", "content": f"Say {n}."}] for n in range(4)]


def said(text):
    return [{"role": "assistant", "content": text}]


def text_of(completion):
    return completion[0]["content"]


async def longer(comparison):
    a, b = len(text_of(comparison.completion_A)), len(text_of(comparison.completion_B))
    return float((b > a) - (b < a))


async def always_b(comparison):
    return 1.0


class Policy:
    """A policy that repeats the requested text the requested number of times. Odd numbers are
    truncated.
    """

    def __init__(self, renderer, times):
        self.renderer = renderer
        self.times = times
        self.seeds = []

    async def get_tokenizer_async(self):
        return self.renderer.tokenizer

    async def sample_async(self, prompt, num_samples, sampling_params):
        self.seeds.append(sampling_params.seed)
        number = self.renderer.tokenizer.decode(prompt.to_ints()).split("Say ")[1][0]
        end = "" if int(number) % 2 else "<|im_end|>"
        ids = self.renderer.tokenizer.encode(number * self.times + end)
        return SampleResponse(
            [SampledSequence("stop", "0", np.array(ids), np.full(len(ids), -1.0, np.float32))]
        )


def evaluator(renderer, reference, judges=None, **options):
    answer_sampler = AnswerSampler(renderer, max_tokens=8, temperature=0.5, seed=3)
    return ComparisonEvaluator(
        PROMPTS, reference, judges or {"longer": longer}, answer_sampler, **options
    )


@pytest.mark.parametrize(
    ("judge", "both_ways", "wins"),
    [
        (longer, True, [1, 0, 0.5]),
        (longer, False, [1, 0, 0.5]),
        (always_b, True, [0.5, 0.5, 0.5]),
        (always_b, False, [1, 1, 1]),
    ],
)
def test_win_rates_equal_a_hand_computation(judge, both_ways, wins):
    texts = [("a", "ab"), ("ab", "a"), ("a", "b")]
    comparisons = [Comparison(PROMPTS[0], said(a), said(b)) for a, b in texts]
    assert asyncio.run(judge_wins(judge, comparisons, both_ways=both_ways)) == wins


def test_both_orders_have_equal_weight():
    """r(A, B) = 0.6 and r(B, A) = 0.2, so the win is (0.6 - 0.2 + 2) / 4."""

    async def partial(comparison):
        return 0.6 if text_of(comparison.completion_A) == "a" else 0.2

    wins = asyncio.run(judge_wins(partial, [Comparison(PROMPTS[0], said("a"), said("b"))]))
    assert wins == pytest.approx([0.6])


def test_each_order_is_judged_once():
    asked = []

    async def counting(comparison):
        asked.append(text_of(comparison.completion_A))
        return 0

    comparisons = [Comparison(PROMPTS[0], said("a"), said("b"))]
    asyncio.run(judge_wins(counting, comparisons, both_ways=False))
    assert asked == ["a"]
    asyncio.run(judge_wins(counting, comparisons))
    assert sorted(asked) == ["a", "a", "b"]


def test_the_standard_error_is_that_of_a_mean():
    rate = Mean.from_values([1, 0, 0.5, 1])
    assert rate.value == 0.625
    assert rate.stderr == pytest.approx(math.sqrt(((0.375**2) * 2 + 0.625**2 + 0.125**2) / 3 / 4))
    assert Mean.from_values([1.0]).stderr is None


def test_answers_are_compared_with_fixed_texts(renderer):
    """The policy writes n twice, two characters; the reference has 1, 2, 3 and 1."""
    reference = FixedReference([said(text) for text in ("x", "xx", "xxx", "x")])
    found = asyncio.run(evaluator(renderer, reference)(Policy(renderer, 2)))  # pyright: ignore[reportArgumentType]
    assert found == {
        "test/win_rate/longer": (1 + 0.5 + 0 + 1) / 4,
        "test/win_rate_stderr/longer": pytest.approx(
            math.sqrt((0.375**2 * 2 + 0.125**2 + 0.625**2) / 3 / 4)
        ),
        "test/format": 0.5,
        "test/ac_tokens_per_turn": 2.5,
    }
    for name in found:
        definition = definition_of(name)
        assert definition is not None
        assert definition.pattern.startswith("<evaluator>/")


def test_several_judges_see_the_same_answers(renderer):
    results = asyncio.run(
        evaluator(
            renderer,
            FixedReference([said("x")] * 4),
            {"longer": longer, "b": always_b},
            both_ways=False,
            name="held_out",
        ).compare(Policy(renderer, 2))  # pyright: ignore[reportArgumentType]
    )
    assert results.wins == {"longer": [1] * 4, "b": [1] * 4}
    assert [text_of(comparison.completion_B) for comparison in results.comparisons] == [
        "00",
        "11",
        "22",
        "33",
    ]
    assert set(results.metrics("held_out")) == {
        *(
            f"held_out/win_rate{part}/{judge}"
            for part in ("", "_stderr")
            for judge in ("longer", "b")
        ),
        "held_out/format",
        "held_out/ac_tokens_per_turn",
    }


def test_answers_are_compared_with_a_policy_sampled_once(renderer):
    reference, made = Policy(renderer, 1), []

    async def create(**named):
        made.append(named)
        return reference

    service = SimpleNamespace(create_sampling_client_async=create)
    ours = evaluator(renderer, PolicyReference(service, "a base"))  # pyright: ignore[reportArgumentType]
    policy = Policy(renderer, 2)
    first = asyncio.run(ours(policy))  # pyright: ignore[reportArgumentType]
    assert first == asyncio.run(ours(policy))  # pyright: ignore[reportArgumentType]
    assert first["test/win_rate/longer"] == 1
    assert made == [{"base_model": "a base"}]
    assert len(reference.seeds) == 4
    assert policy.seeds[:4] == policy.seeds[4:]
    assert len({*reference.seeds, *policy.seeds}) == 8, "the two draw apart from each other"


def test_a_checkpoint_can_be_the_reference(renderer):
    made = []

    async def create(**named):
        made.append(named)
        return Policy(renderer, 1)

    service = SimpleNamespace(create_sampling_client_async=create)
    asyncio.run(
        evaluator(renderer, PolicyReference(service, "a base", "planish://run/weights/7"))(  # pyright: ignore[reportArgumentType]
            Policy(renderer, 1)  # pyright: ignore[reportArgumentType]
        )
    )
    assert made == [{"model_path": "planish://run/weights/7"}]


def test_a_reference_with_another_vocabulary_is_rejected(renderer, tmp_path):
    """The reference gets the tokens of the policy's prompts."""
    base = tiny_model(tmp_path / "base")
    file = base / "tokenizer.json"
    file.write_text(file.read_text().replace("<think>", "<muse>"))
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as client:
        ours = evaluator(renderer, PolicyReference(client, str(base)))
        with pytest.raises(
            UserError, match=r"reference .*base has another vocabulary .*'<(think|muse)>'"
        ):
            asyncio.run(ours(Policy(renderer, 1)))  # pyright: ignore[reportArgumentType]


def test_invalid_comparison_options_are_rejected(renderer):
    with pytest.raises(UserError, match="4 prompts and 1 reference"):
        asyncio.run(evaluator(renderer, FixedReference([said("x")]))(Policy(renderer, 1)))  # pyright: ignore[reportArgumentType]
    answer_sampler = AnswerSampler(renderer, 8)
    with pytest.raises(UserError, match="no prompts"):
        ComparisonEvaluator([], FixedReference([]), {"longer": longer}, answer_sampler)
    with pytest.raises(UserError, match="no judge"):
        ComparisonEvaluator(PROMPTS, FixedReference([]), {}, answer_sampler)


@chz.chz
class Longer(PreferenceModelBuilder):
    def __call__(self, service_client=None):
        return longer


@chz.chz
class FourPrompts(PromptBuilder):
    def __call__(self):
        return Prompts([], PROMPTS)


def test_a_policy_compared_with_itself_wins_half(models, tmp_path):
    """With random weights, half of the comparisons are won, within the error. The same seeds give
    the same answer.
    """
    with ServiceClient(data_dir=tmp_path) as service:
        build = ComparisonEvaluatorBuilder(
            prompt_builder=FourPrompts(),
            judge_builders={"longer": Longer()},
            policy_model_name=models[0],
            max_tokens=6,
            service_client=service,
        )
        client = service.create_sampling_client(base_model=models[0])
        first, again = (asyncio.run(build()(client)) for _ in range(2))
    assert first == again == validate_metrics(first, "the evaluator")
    assert 0 <= first["test/win_rate/longer"] <= 1
    assert first["test/ac_tokens_per_turn"] <= 6
