"""Rollouts of one episode: turns, stop reasons, and limits that the runner enforces."""

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_fakes import PROMPT, Draws, Plain
from virtual_time import run_in_virtual_time

from planish import logtree
from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.errors import NonFiniteError, UserError
from planish.rl.data_processing import trajectory_to_data
from planish.rl.limits import RolloutLimits
from planish.rl.rollout.rollouts import do_single_rollout
from planish.rl.types import Env, InitialObservationOverflow, StepResult, StopReason
from planish.types import ModelInput


def play(env, policy=None, **options):
    return asyncio.run(do_single_rollout(policy or Draws(), env, **options))


def reason_of(trajectory) -> str:
    """Return the stop reason in the last turn's metrics; assert that no other turn has one."""
    *others, last = trajectory.transitions
    assert not any(name.startswith("stop/") for turn in others for name in turn.metrics)
    shares = {
        name.removeprefix("stop/"): value
        for name, value in last.metrics.items()
        if name.startswith("stop/")
    }
    assert set(shares) == set(StopReason)
    [reason] = [name for name, value in shares.items() if value == 1.0]
    assert sum(shares.values()) == 1.0
    return reason


def test_turns_record_observations_actions_and_rewards():
    env = Plain(turns=3)
    trajectory = play(env, policy := Draws())
    turns = trajectory.transitions
    assert [turn.ac.tokens for turn in turns] == env.actions
    assert len(policy.calls) == 3
    assert turns[0].ob == PROMPT
    for before, after in pairwise(turns):
        assert after.ob.to_ints() == [*before.ob.to_ints(), *before.ac.tokens, 10]
    assert [turn.episode_done for turn in turns] == [False, False, True]
    assert [turn.reward for turn in turns] == [action[-1] - 48 for action in env.actions]
    assert turns[1].metrics == {"digit": turns[1].reward}
    assert turns[0].ac.prompt_cache_hit_tokens == 1
    assert trajectory.final_ob == env.prompt
    assert reason_of(trajectory) == trajectory.stop_reason == "completed"


@pytest.mark.parametrize("given", [StopReason.MAX_TURNS, "tool_stopped"])
def test_the_environment_can_give_the_stop_reason(given):
    env = Answering(stop_reason=given)
    assert play(env).stop_reason == reason_of(play(env)) == given


def test_train_on_action_false_masks_the_turn():
    trajectory = play(Answering(train_on_action=False))
    assert [turn.train_on_action for turn in trajectory.transitions] == [False]
    assert [sequence.mask_N.sum() for sequence in trajectory_to_data(trajectory, 1.0)] == [0.0]


class Answering(Env):
    """An environment of one turn whose StepResult has the given fields."""

    def __init__(self, **fields):
        self.fields = {
            "reward": 1.0,
            "episode_done": True,
            "next_observation": PROMPT,
            "next_stop_condition": [10],
        } | fields

    async def initial_observation(self):
        return PROMPT, [10]

    async def step(self, action, *, extra=None):
        return StepResult(**self.fields)


class WithoutExtra(Plain):
    async def step(self, action):  # type: ignore[override]
        return await super().step(action, extra={"stop_reason": "stop"})


class WithAnything(Plain):
    async def step(self, action, **given):  # type: ignore[override]
        self.given = given
        return await super().step(action)


def test_extra_is_passed_only_to_environments_that_accept_it():
    assert len(play(WithoutExtra()).transitions) == 2
    play(env := WithAnything())
    assert env.given == {"extra": {"stop_reason": "stop"}}


class TooLong(Env):
    async def initial_observation(self):
        return InitialObservationOverflow(-0.5, {"max_tokens_reached": 1.0}, {"why": "long"})

    async def step(self, action, *, extra=None):
        raise AssertionError


def test_an_overlong_first_prompt_gives_a_turn_without_tokens():
    policy = Draws()
    trajectory = play(TooLong(), policy)
    assert policy.calls == []
    [turn] = trajectory.transitions
    assert (turn.ob.length, turn.ac.tokens, turn.episode_done, turn.reward) == (0, [], True, -0.5)
    assert turn.metrics["max_tokens_reached"] == 1.0
    assert turn.logs == {"why": "long"}
    assert trajectory.step_rewards == -0.5
    assert reason_of(trajectory) == trajectory.stop_reason == "context_overflow"
    assert trajectory_to_data(trajectory, 1.0) == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"reward": float("nan")}, "Answering.step returned reward=nan in turn 1"),
        ({"reward": float("inf")}, "return a finite number"),
        ({"reward": None}, "Answering.step returned reward=None in turn 1; return a number"),
        ({"stop_reason": "bored"}, "stop_reason='bored'; return completed, "),
        (
            {"metrics": {"answer": "42"}},
            "Answering.step, in turn 1, returned the metric answer='42'; return a number",
        ),
        ({"metrics": None}, "returned None as metrics"),
        (
            {"episode_done": None},
            "Answering.step returned episode_done=None in turn 1; return True or False",
        ),
        ({"episode_done": "False"}, "episode_done='False'"),
        (
            {"episode_done": False, "next_observation": [1, 2]},
            "next_observation, in turn 1, that is a list; give a ModelInput",
        ),
    ],
)
def test_an_invalid_step_result_is_rejected(answer, message):
    with pytest.raises(UserError, match=message) as caught:
        play(Answering(**answer))
    assert isinstance(caught.value, NonFiniteError) == isinstance(answer.get("reward"), float)


def test_a_step_result_of_another_type_is_rejected():
    class Foreign(Answering):
        async def step(self, action, *, extra=None) -> Any:
            return SimpleNamespace(reward=0.0)

    with pytest.raises(
        UserError,
        match="returned a types.SimpleNamespace in turn 1; return a planish.rl.types.StepResult",
    ):
        play(Foreign())


def test_an_initial_observation_of_another_type_is_rejected():
    class Messages(Answering):
        async def initial_observation(self) -> Any:
            return [{"role": "user", "content": "Hi"}]

    with pytest.raises(
        UserError, match=r"Messages.initial_observation returned a list.*EnvFromMessageEnv"
    ):
        play(Messages())


def test_a_prompt_of_another_type_is_rejected():
    class Numbers(Answering):
        async def initial_observation(self) -> Any:
            return [1, 2], [10]

    with pytest.raises(
        UserError,
        match=r"Numbers.initial_observation returned a prompt that is a list; give a ModelInput",
    ):
        play(Numbers())


def test_on_turn_is_called_before_the_environment_steps():
    env, told = Plain(turns=2), []
    play(env, on_turn=lambda answer: told.append((answer.tokens, len(env.actions))))
    assert told == [(env.actions[0], 0), (env.actions[1], 1)]


def test_environment_logs_nest_in_the_open_section():
    async def run() -> Any:
        with logtree.capture("all") as tree, logtree.scope_header("around"):
            await do_single_rollout(Draws(), Plain(turns=2))
            logtree.log_text("behind")
        return tree

    [_, body] = asyncio.run(run()).children
    [around] = body.children
    [_, inner] = around.children
    titles = [part.children[0].children[0] for part in inner.children[:2]]
    assert titles == ["Turn 1", "Turn 2"]
    assert inner.children[2].children == ["behind"]


@dataclass
class Limited(Plain):
    rollout_limits: RolloutLimits | None = None
    asked: list[str] = field(default_factory=list)

    async def stopped_by_limit(self, reason):
        self.asked.append(reason)
        return 0.25, {"graded": 1.0}


@dataclass
class Slow(TokenCompleter):
    """A policy that is slow from call number `since` on."""

    since: int = 0
    calls: int = 0
    cancelled: int = 0

    async def __call__(self, model_input, stop, *, max_tokens=None):
        self.calls += 1
        if self.calls > self.since:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return TokensWithLogprobs([49], [-1.0])


def test_max_tokens_of_each_answer_is_the_remaining_budget():
    limits = RolloutLimits(max_sampled_tokens=8, max_trajectory_tokens=18)
    trajectory = play(Limited(turns=3, rollout_limits=limits), Draws(length=5))
    # The prompts have 3, 9 and 13 tokens. The last leaves nothing of the budget of 8, but a call
    # needs at least one token.
    assert [len(turn.ac.tokens) for turn in trajectory.transitions] == [5, 3, 1]


def test_without_limits_the_policy_gets_no_max_tokens():
    class Old(TokenCompleter):
        async def __call__(self, model_input, stop):  # type: ignore[override]
            return TokensWithLogprobs([49], [-1.0])

    assert len(play(Plain(), Old()).transitions) == 2
    assert len(play(Limited(rollout_limits=RolloutLimits(max_turns=9)), Old()).transitions) == 2


def test_the_time_limit_cancels_a_running_policy_call():
    env = Limited(turns=9, rollout_limits=RolloutLimits(rollout_timeout_seconds=0.3))
    trajectory = run_in_virtual_time(do_single_rollout(policy := Slow(since=2), env))
    assert policy.cancelled == 1
    assert [len(turn.ac.tokens) for turn in trajectory.transitions] == [1, 1, 0]
    assert env.asked == ["rollout_timeout"]
    last = trajectory.transitions[-1]
    assert (last.reward, last.metrics["graded"], last.ob, last.episode_done) == (
        0.25,
        1.0,
        env.prompt,
        True,
    )
    assert reason_of(trajectory) == trajectory.stop_reason == "rollout_timeout"
    [sequence] = trajectory_to_data(trajectory, 1.0)
    assert sequence.mask_N.sum() == 2


def test_rewards_of_an_end_without_an_action_are_validated():
    class Full(Plain):
        async def initial_observation(self) -> Any:
            return InitialObservationOverflow(float("nan"))

    class Ungraded(Limited):
        async def stopped_by_limit(self, reason):
            return float("nan"), {}

    with pytest.raises(
        NonFiniteError,
        match=r"Full\.initial_observation returned reward=nan; return a finite number",
    ):
        play(Full())
    with pytest.raises(NonFiniteError, match=r"Ungraded\.stopped_by_limit returned reward=nan"):
        play(Ungraded(rollout_limits=RolloutLimits(rollout_timeout_seconds=1e-9)))


def test_a_policy_that_exceeds_its_timeout_fails():
    env = Limited(
        turns=9,
        rollout_limits=RolloutLimits(
            sampling_turn_timeout_seconds=0.02, rollout_timeout_seconds=60
        ),
    )
    with pytest.raises(TimeoutError, match="sampling_turn_timeout_seconds=0.02"):
        run_in_virtual_time(do_single_rollout(Slow(since=1), env))
    assert env.asked == []


def test_a_timeout_error_of_the_policy_is_raised_unchanged():
    class Broken(TokenCompleter):
        async def __call__(self, model_input, stop, *, max_tokens=None):
            raise TimeoutError("the connection")

    with pytest.raises(TimeoutError, match="the connection"):
        play(Limited(rollout_limits=RolloutLimits(rollout_timeout_seconds=60)), Broken())


def test_numpy_rewards_and_metrics_become_plain_numbers():
    import numpy as np

    trajectory = play(
        Answering(reward=np.float32(0.5), metrics={"correct": np.float32(0.5), "tries": 2})
    )
    [turn] = trajectory.transitions
    assert type(turn.reward) is type(turn.metrics["correct"]) is float
    assert (turn.metrics["correct"], turn.metrics["tries"]) == (0.5, 2)


def test_an_empty_prompt_is_accepted():
    class Free(Answering):
        async def initial_observation(self):
            return ModelInput.empty(), [10]

    assert play(Free()).transitions[0].ob.length == 0
