"""Answers that are compared with each other: rewards computed by hand, errors of the judge, and
groups that lost a member.
"""

import asyncio
import pickle
import re
from dataclasses import dataclass, field
from typing import Any

import chz
import numpy as np
import pytest

from planish import ServiceClient, logtree
from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.errors import NonFiniteError, UserError
from planish.files import read_rows
from planish.preference.bradley_terry import QUESTION
from planish.preference.comparison_evaluator import ComparisonEvaluatorBuilder
from planish.preference.datasets import ComparisonBuilderFromJsonl
from planish.preference.matchups import TournamentPattern
from planish.preference.model_files import TrainedPreferenceModelBuilder
from planish.preference.preference_envs import (
    PairwisePreferenceGroupBuilder,
    PairwisePreferenceRLDatasetBuilder,
)
from planish.preference.preference_models import PreferenceModelBuilder
from planish.preference.prompts import PromptsFromRows, PromptsOfComparisons
from planish.renderers import get_text_content
from planish.rl.environments.datasets import EpochCycledRLDataset, RebatchedRLDataset
from planish.rl.limits import TerminationRewardPolicy
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.rollout.strategy import FailFast, MinViableGroup, RetryOnFailure
from planish.runlog.model_renderer import model_renderer
from planish.testing import tiny_model
from planish.training.rl_config import Config
from planish.training.train_rl import main

PROMPT = [{"role": "user", "content": "Say something."}]


@dataclass
class Says(TokenCompleter):
    """Trajectory g answers texts[g]. An answer that ends with "..." is truncated, and "!" fails."""

    model: str
    texts: list[str]
    seeds: list[int] = field(default_factory=list)

    def seeded(self, seed):
        self.seeds.append(seed)
        return Says(self.model, [self.texts[(len(self.seeds) - 1) % len(self.texts)]])

    async def __call__(self, model_input, stop, *, max_tokens=None):
        [text] = self.texts
        if text == "!":
            raise ConnectionError("the policy is away")
        is_cut = text.endswith("...")
        ids = model_renderer(self.model).tokenizer.encode(text if is_cut else f"{text}<|im_end|>")
        return TokensWithLogprobs(ids, [-1.0] * len(ids), "length" if is_cut else "stop")


async def longer(comparison):
    a, b = (
        get_text_content(side[0]) for side in (comparison.completion_A, comparison.completion_B)
    )
    return float(np.sign(len(b) - len(a)))


@dataclass
class Moody:
    """A model that fails a number of times, and then prefers the longer answer."""

    failures: int
    error: Exception = field(default_factory=lambda: ConnectionError("the judge is away"))
    asked: int = 0

    async def __call__(self, comparison):
        self.asked += 1
        if self.failures:
            self.failures -= 1
            raise self.error
        return await longer(comparison)


def group(model, judge=longer, size=4, **options):
    return PairwisePreferenceGroupBuilder(PROMPT, model, None, judge, size, **options)


def play(model, builder, texts, *, strategy=None, **options) -> Any:
    return asyncio.run(do_group_rollout(builder, Says(model, texts), strategy, seed=1, **options))


@pytest.mark.parametrize("pattern", TournamentPattern)
def test_preference_rewards_equal_a_hand_computation(models, pattern):
    """Lengths 1 to 4: each answer beats the shorter ones. The third is truncated."""
    rollout = play(
        models[0], group(models[0], tournament_pattern=pattern), ["a", "ab", "...", "abcd"]
    )
    assert rollout.get_total_rewards() == pytest.approx([-1, -1 / 3, 1 / 3 - 1, 1])
    assert [metrics["format"] for metrics in rollout.metrics_G] == [1, 1, 0, 1]
    assert [metrics["win_minus_loss"] for metrics in rollout.metrics_G] == pytest.approx(
        [-1, -1 / 3, 1 / 3, 1]
    )
    assert [trajectory.stop_reason for trajectory in rollout.trajectories_G][2:] == [
        "max_tokens",
        "completed",
    ]


def test_ties_give_no_reward_and_chunks_do_not_meet(models):
    rollout = play(
        models[0], group(models[0], size=6, matchup_group_size=3), ["a", "b", "c", "a", "ab", "ab"]
    )
    assert rollout.get_total_rewards() == pytest.approx([0, 0, 0, -1, 0.5, 0.5])


def test_the_judge_sees_prompt_and_text(models):
    seen = []

    async def watching(comparison):
        seen.append(comparison)
        return 0

    play(models[0], group(models[0], watching, 2), ["first", "second"])
    assert [comparison.prompt_conversation for comparison in seen] == [PROMPT, PROMPT]
    assert seen[0].completion_A == [{"role": "assistant", "content": "first"}]
    assert seen[0].completion_B == [{"role": "assistant", "content": "second"}]
    assert seen[1] == seen[0].swap()


def test_matchups_are_judged_concurrently(models):
    waiting, most = 0, 0

    async def slow(comparison):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0)
        waiting -= 1
        return 0

    play(models[0], group(models[0], slow), ["a", "b", "c", "d"])
    assert most == 12


def test_a_judge_error_fails_the_group(models):
    with pytest.raises(ConnectionError, match="the judge is away") as caught:
        play(models[0], group(models[0], Moody(1)), list("abcd"), strategy=FailFast())
    assert (
        "in compute_group_rewards of PairwisePreferenceGroupBuilder" in caught.value.__notes__[-1]
    )


def test_a_judge_error_is_retried(models):
    rollout = play(models[0], group(models[0], Moody(2), 2), ["a", "ab"], strategy=RetryOnFailure())
    assert rollout.get_total_rewards() == [-1, 1]
    assert {error.error_message for error in rollout.rollout_errors} == {"the judge is away"}


def test_a_group_with_a_failing_judge_is_dropped(models):
    strategy = MinViableGroup(max_retries=1)
    assert play(models[0], group(models[0], Moody(99)), list("abcd"), strategy=strategy) is None


@pytest.mark.parametrize(
    ("given", "error"),
    [(2, UserError), (float("nan"), NonFiniteError), ("A", UserError), (None, UserError)],
)
def test_an_invalid_preference_is_rejected_naming_the_judge(models, given, error):
    async def odd(comparison):
        return given

    with pytest.raises(error, match=r"odd returned .*return a number from -1"):
        play(models[0], group(models[0], odd), list("abcd"), strategy=RetryOnFailure())


def test_an_incomplete_group_is_judged(models):
    strategy = MinViableGroup(min_successful=1, max_retries=0)
    three = play(models[0], group(models[0]), ["a", "!", "ab", "abc"], strategy=strategy)
    assert three.get_total_rewards() == [-1, 0, 1]
    alone = play(models[0], group(models[0]), ["!", "!", "abc...", "!"], strategy=strategy)
    assert (alone.get_total_rewards(), alone.metrics_G) == (
        [-1],
        [{"win_minus_loss": 0.0, "format": 0.0}],
    )


def test_a_limit_clamps_the_total_reward(models):
    policy = TerminationRewardPolicy(zero_reward_on_limit=True)
    rollout = play(models[0], group(models[0], size=2), ["abc...", "a"], termination=policy)
    assert rollout.get_total_rewards() == [0, -1], "longest, but cut off: 1 - 1"


def test_matchups_are_in_the_report(models):
    with logtree.capture("Group 0") as tree:
        play(models[0], group(models[0], size=2), ["a", "ab"])
    text = str(list(tree.walk()))
    assert "Matchups" in text
    assert re.search(r"-1\.0000", text)


@pytest.mark.parametrize(
    ("options", "name"), [({"size": 1}, "num_envs=1"), ({"matchup_group_size": 1}, "group_size=1")]
)
def test_a_group_of_one_is_rejected(models, options, name):
    with pytest.raises(UserError, match=name):
        group(models[0], **options)


@chz.chz
class LongerBuilder(PreferenceModelBuilder):
    def __call__(self, service_client=None):
        assert service_client == "a service"
        return longer


def built(models, pairs, **options) -> Any:
    usual: dict[str, Any] = {
        "prompt_builder": PromptsOfComparisons(
            comparison_builder=ComparisonBuilderFromJsonl(
                train_path=str(pairs), test_path=str(pairs)
            )
        ),
        "preference_model_builder": LongerBuilder(),
        "policy_model_name": models[0],
        "batch_size": 4,
        "service_client": "a service",
    }
    return asyncio.run(PairwisePreferenceRLDatasetBuilder(**{**usual, **options})())


def test_a_dataset_of_prompts_is_built(models, pairs):
    train, test = built(models, pairs)
    assert test is None
    assert [len(train.get_batch(index)) for index in range(len(train))] == [4, 4, 4, 1]
    builder = train.get_batch(0)[0]
    assert (builder.num_envs, builder.matchup_group_size) == (4, 4)
    assert builder.tournament_pattern is TournamentPattern.ALL_PAIRS_BOTH_WAYS
    assert builder.logging_tags() == ["pair_pref"]
    assert pickle.loads(pickle.dumps(builder)) == builder
    asked = [b.convo_prefix[0]["content"] for index in range(4) for b in train.get_batch(index)]
    assert sorted(asked) == sorted(f"Say {n}." for n in range(13))
    assert asked != [f"Say {n}." for n in range(13)]


def test_long_prompts_are_dropped(models, pairs, caplog):
    shortest = (
        model_renderer(models[0])
        .build_generation_prompt([{"role": "user", "content": "Say 1."}])
        .length
    )
    train, _ = built(models, pairs, max_prompt_tokens=shortest, batch_size=16)
    assert len(train.get_batch(0)) == 10
    assert train.longest_prompt().num_tokens == shortest
    assert "3 of 13 train problems are left out" in caplog.text
    with pytest.raises(UserError, match="the prompts of all 13 train problems are longer"):
        built(models, pairs, max_prompt_tokens=2)


@pytest.mark.parametrize(
    ("name", "value"), [("group_size", 1), ("matchup_group_size", 0), ("batch_size", 0)]
)
def test_an_invalid_environment_option_is_rejected(models, pairs, name, value):
    with pytest.raises(UserError, match="at least"):
        built(models, pairs, **{name: value})


SHORT = 64


@pytest.fixture
def short_judge(tmp_path):
    """A model with a context window of SHORT tokens, and a service for it."""
    model = str(tiny_model(tmp_path / "short", max_context=SHORT))
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as client:
        yield model, client


def judge_tokens(kind, model, prompt, answers):
    """The tokens of a request to a judge, whose tokenizer has one token per byte."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    if kind == "chat":
        labels = [{"role": "system", "content": f"==== {name} ===="} for name in LABELED]
        first, second = ([{"role": "assistant", "content": text}] for text in answers)
        messages += [labels[0], *first, labels[1], *second, labels[2]]
    else:
        messages.append({"role": "assistant", "content": answers[0]})
        messages.append({"role": "user", "content": QUESTION})
    return model_renderer(model).build_generation_prompt(messages).length + 2


LABELED = ("Completion A", "Completion B", "Preference")


@pytest.mark.parametrize("kind", ["chat", "bradley_terry"])
def test_a_judge_that_cannot_read_the_longest_answers_is_named(models, tmp_path, kind):
    """Answers of as many tokens as fit are accepted, and of one more are not."""
    prompts = ["Hi.", "Hello." * 3]
    window = judge_tokens(kind, models[0], prompts[1], ("a" * 8, "a" * 8))
    judge = str(tiny_model(tmp_path / "judge", max_context=window))
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts))
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as client:
        train, _ = asyncio.run(
            PairwisePreferenceRLDatasetBuilder(
                prompt_builder=PromptsFromRows(dataset=str(path)),
                preference_model_builder=TrainedPreferenceModelBuilder(kind=kind, model_name=judge),
                policy_model_name=models[0],
                batch_size=2,
                service_client=client,
            )()
        )
        train.require_answers_fit(8)
        with pytest.raises(UserError) as caught:
            EpochCycledRLDataset(RebatchedRLDataset(train, 1), 2).require_answers_fit(9)
    count = "two answers" if kind == "chat" else "an answer"
    assert str(caught.value).startswith(
        f"{path}, line 2: the preference model {judge} reads this prompt with {count} of "
        f"max_tokens=9 tokens. It needs {window + (2 if kind == 'chat' else 1)} tokens, and its "
        f"context window has {window}; give a smaller max_tokens"
    )


def test_a_checkpoint_is_read_with_its_own_base_model_and_format(models, tmp_path):
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as client:
        training_client = client.create_lora_training_client(
            base_model=models[0], rank=2, user_metadata={"renderer_name": "role_colon"}
        )
        path = training_client.save_state("x").result().path
        builder = TrainedPreferenceModelBuilder(kind="chat", model_name=models[0], model_path=path)
        model: Any = builder(client)
        assert model.choice.renderer.name == "role_colon"
        other = str(tiny_model(tmp_path / "other", seed=1))
        with pytest.raises(UserError, match=f"model_name: .* was trained on .*, not on {other}"):
            chz.replace(builder, model_name=other)(client)


def test_a_run_with_such_a_judge_ends_before_the_first_step(models, short_judge, tmp_path):
    judge, client = short_judge
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi."}\n')
    config = Config(
        dataset_builder=PairwisePreferenceRLDatasetBuilder(
            prompt_builder=PromptsFromRows(dataset=str(path)),
            preference_model_builder=TrainedPreferenceModelBuilder(
                kind="bradley_terry", model_name=judge
            ),
            policy_model_name=models[0],
            batch_size=1,
            service_client=client,
        ),
        model_name=models[0],
        learning_rate=1e-3,
        lora_rank=2,
        max_tokens=60,
        log_path=str(tmp_path / "run"),
    )
    with pytest.raises(UserError, match=f"line 1: the preference model {judge} .* {SHORT}; give"):
        asyncio.run(main(config, client))
    assert read_rows(tmp_path / "run" / "metrics.jsonl") == []


def test_an_evaluation_with_such_a_judge_ends_before_an_answer(models, short_judge, tmp_path):
    judge, client = short_judge
    path = tmp_path / "prompts"
    path.mkdir()
    for split in ("train", "test"):
        (path / f"{split}.jsonl").write_text('{"prompt": "Hi."}\n')
    builder = ComparisonEvaluatorBuilder(
        prompt_builder=PromptsFromRows(dataset=str(path)),
        judge_builders={"model": TrainedPreferenceModelBuilder(kind="chat", model_name=judge)},
        policy_model_name=models[0],
        max_tokens=60,
        service_client=client,
    )
    with pytest.raises(UserError, match="test.jsonl, line 1: the preference model .* two answers"):
        builder()
