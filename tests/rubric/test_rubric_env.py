"""The rubric environment in the library's rollouts: rewards, metrics, and a judge that fails."""

import asyncio
import itertools
from typing import Any

import chz
import pytest
from metric_tables import definition_of
from scripted_judge import ScriptedJudge

from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.errors import UserError
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.rollout.strategy import MinViableGroup, RetryOnFailure
from planish.rubric.env import RubricDatasetBuilder, RubricRows
from planish.rubric.grading import Grader, UnreadableVerdictError
from planish.rubric.rubrics import Criterion, RubricRow
from planish.runlog.model_renderer import model_renderer

QUESTION: Any = ({"role": "user", "content": "What is 3 + 4?"},)
RESULT = Criterion("Is it 7?", name="result", weight=3, truth_regex=r"7\Z")
MANNER = Criterion("Is it polite?", name="manner")
ROW = RubricRow(QUESTION, (RESULT, MANNER))


class Says(TokenCompleter):
    def __init__(self, model, *answers):
        self.model = model
        self.answers = itertools.cycle(answers)

    async def __call__(self, model_input, stop, *, max_tokens=None):
        text = next(self.answers)
        is_cut = text.endswith("...")
        tokens = model_renderer(self.model).tokenizer.encode(
            text if is_cut else f"{text}<|im_end|>", add_special_tokens=False
        )
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "length" if is_cut else "stop")


def judge(prompt):
    """Accept every answer with a 7, wrongly also 70."""
    if "Is it polite?" in prompt:
        return "<score>0.5</score>"
    return f"<score>{int('7' in prompt.split('answer:')[1].split('Rubric')[0])}</score>"


def builder_of(model, says, rows=None, **options):
    return RubricDatasetBuilder(
        model_name=model,
        rows=lambda: rows or RubricRows([ROW]),
        grader=Grader(ScriptedJudge(says)),
        judge_name="scripted",
        **options,
    )


def play(model, *answers, says=judge, **options):
    builder = builder_of(model, says).group(ROW, len(answers))
    group = asyncio.run(do_group_rollout(builder, Says(model, *answers), **options))
    assert group is not None
    return group


def test_rewards_are_the_judges_and_metrics_say_how_good_it_is(model):
    group = play(model, "7", "8", "70", "and so on...")
    assert group.get_total_rewards() == pytest.approx([0.875, 0.125, 0.875, -0.1])
    right, wrong, deceived, unfinished = (
        trajectory.transitions[0].metrics for trajectory in group.trajectories_G
    )
    assert right["rubric_score"] == pytest.approx(0.875)
    assert (right["rubric/result"], right["rubric/manner"], right["judge/asked_again"]) == (
        1.0,
        0.5,
        0.0,
    )
    assert (right["judge/truth"], right["judge/agreement"], right["judge/score_if_met"]) == (
        1.0,
        1.0,
        1.0,
    )
    assert (wrong["judge/truth"], wrong["judge/agreement"], wrong["judge/score_if_not_met"]) == (
        0.0,
        1.0,
        0.0,
    )
    assert (deceived["judge/agreement"], deceived["judge/score_if_not_met"]) == (0.0, 1.0)
    assert "judge/score_if_met" not in deceived
    assert "rubric_score" not in unfinished
    names = {name for metrics in (right, wrong) for name in metrics}
    assert [name for name in names if definition_of(f"env/all/{name}") is None] == []


def at_a_loss(prompt):
    """Write no score for an answer with a question mark, also on a retry."""
    return "What?" if "> ?" in prompt or "There is no score" in prompt else "<score>1</score>"


def test_a_judge_that_fails_is_a_failed_rollout(model):
    with pytest.raises(UnreadableVerdictError):
        play(model, "7", "?", says=at_a_loss)
    row = RubricRow(QUESTION, (Criterion("Is it?"),))

    def group(strategy, *answers):
        builder = builder_of(model, at_a_loss).group(row, 2)
        return asyncio.run(do_group_rollout(builder, Says(model, *answers), strategy))

    again = group(RetryOnFailure(max_retries=1), "7", "?", "7")
    assert again is not None
    assert again.get_total_rewards() == [1.0, 1.0]
    assert [error.error_type for error in again.rollout_errors] == ["UnreadableVerdictError"]
    smaller = group(MinViableGroup(min_successful=1, max_retries=0), "7", "?")
    assert smaller is not None
    assert smaller.get_total_rewards() == [1.0]
    assert group(MinViableGroup(min_successful=1, max_retries=0), "?") is None


def test_a_dataset_of_groups(model):
    rows = RubricRows([RubricRow(QUESTION, (Criterion(f"{n}?"),)) for n in range(5)], [ROW])
    builder = builder_of(model, judge, rows, batch_size=2, group_size=3)
    train, test = asyncio.run(builder())
    assert test is not None
    assert (len(train), len(test)) == (3, 1)
    groups: Any = [group for index in range(3) for group in train.get_batch(index)]
    envs = [asyncio.run(group.make_envs()) for group in groups]
    assert sorted(env.message_env.row.criteria[0].rubric_str for env, *_ in envs) == [
        f"{n}?" for n in range(5)
    ]
    assert {len(group) for group in envs} == {3}
    single: Any = test.get_batch(0)[0]
    [env] = asyncio.run(single.make_envs())
    assert (env.message_env.row, single.logging_tags()) == (ROW, ["rubric"])
    with pytest.raises(UserError, match="no row to train on"):
        asyncio.run(chz.replace(builder, rows=lambda: RubricRows([]))())
