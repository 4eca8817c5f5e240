"""Rollout limits, the parse-error policy, and the reward after a limit."""

import pickle
from itertools import product

import chz
import pytest

from planish.errors import UserError
from planish.rl.limits import (
    ParseErrorPolicy,
    RolloutConfig,
    RolloutLimits,
    TerminationRewardPolicy,
    agentic,
    simple,
)
from planish.rl.types import StopReason


def reached(
    limits: RolloutLimits, turns: int = 0, tokens: int = 0, sampled: int = 0, seconds: float = 0.0
):
    return limits.reached(
        turns=turns, trajectory_tokens=tokens, sampled_tokens=sampled, seconds=seconds
    )


def test_without_limits_no_episode_is_ended():
    assert reached(RolloutLimits(), 10**6, 10**6, 10**6, 10**6) is None
    assert RolloutLimits().max_answer_tokens(10**6, 10**6) is None
    assert not RolloutLimits().ends_every_episode
    assert not RolloutLimits().can_truncate_answers


def test_each_limit_has_its_stop_reason():
    limits = RolloutLimits(
        max_turns=3, max_trajectory_tokens=100, max_sampled_tokens=20, rollout_timeout_seconds=5.0
    )
    assert reached(limits, 2, 99, 19, 4.9) is None
    assert reached(limits, turns=3) is StopReason.MAX_TURNS
    assert reached(limits, tokens=100) is StopReason.MAX_TOKENS
    assert reached(limits, sampled=20) is StopReason.MAX_SAMPLED_TOKENS
    assert reached(limits, seconds=5.0) is StopReason.ROLLOUT_TIMEOUT
    assert reached(limits, 3, 100, 20, 5.0) is StopReason.MAX_TURNS


def test_max_tokens_is_limited_to_the_remaining_budget():
    limits = RolloutLimits(max_trajectory_tokens=100, max_sampled_tokens=20, max_turn_tokens=15)
    assert limits.max_answer_tokens(10, 0) == 15
    assert limits.max_answer_tokens(10, 12) == 8
    assert limits.max_answer_tokens(97, 12) == 3
    # An episode without a token of budget has ended. A call of the policy needs at least one.
    assert limits.max_answer_tokens(100, 20) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: RolloutLimits(max_turns=0),
        lambda: RolloutLimits(max_sampled_tokens=1.5),  # type: ignore[arg-type]
        lambda: RolloutLimits(max_tool_calls=True),
        lambda: RolloutLimits(rollout_timeout_seconds=0),
        lambda: RolloutLimits(rollout_timeout_seconds=float("nan")),
        lambda: ParseErrorPolicy(max_consecutive=-1),
        lambda: ParseErrorPolicy(penalty_per_error=-0.1),
        lambda: ParseErrorPolicy(terminal_reward=float("inf")),
        lambda: ParseErrorPolicy(retry_message_template="Again!"),
        lambda: TerminationRewardPolicy(limit_stop_reasons=("tired",)),
        lambda: RolloutConfig(tool_execution="both"),  # type: ignore[arg-type]
    ],
)
def test_invalid_limits_are_rejected_by_name(make):
    with pytest.raises(
        UserError,
        match=r"max_turns|max_sampled|max_tool|timeout|consecutive|penalty|terminal|template|reasons|execution",
    ):
        make()


def test_a_retry_message_accepts_any_text():
    policy = ParseErrorPolicy(retry_message_template='Write {"name": ...}. {details}')
    assert policy.retry_message("{0} {x}") == 'Write {"name": ...}. {0} {x}'


def test_a_limit_clamps_the_reward_from_above():
    policy = TerminationRewardPolicy(zero_reward_on_limit=True)
    for reason, reward in product(StopReason, (-0.7, 0.0, 0.9)):
        is_free = reason in (
            StopReason.COMPLETED, StopReason.TOOL_STOPPED, StopReason.CONTEXT_OVERFLOW, StopReason.PARSE_ERROR,
        )  # fmt: skip
        assert policy.clamp(reward, reason) == (reward if is_free else min(reward, 0.0))
        assert TerminationRewardPolicy().clamp(reward, reason) == reward
    assert policy.clamp(0.9, None) == 0.9


def test_grading_is_skipped_only_if_it_cannot_change_the_reward():
    assert agentic().termination.skips_grading("rollout_timeout")  # type: ignore[union-attr]
    assert not agentic().termination.skips_grading("max_turns")  # type: ignore[union-attr]
    assert not TerminationRewardPolicy(skip_grading_on_timeout=True).skips_grading(
        "rollout_timeout"
    )
    elsewhere = TerminationRewardPolicy(
        skip_grading_on_timeout=True, zero_reward_on_limit=True, limit_stop_reasons=("max_turns",)
    )
    assert not elsewhere.skips_grading("rollout_timeout")


def test_limit_presets_have_their_documented_values():
    assert simple() == RolloutConfig()
    config = agentic()
    assert config.limits == RolloutLimits(
        max_turns=10, max_trajectory_tokens=65536, max_tool_calls=30
    )
    assert config.parse_errors == ParseErrorPolicy(max_consecutive=2)
    assert config.termination == TerminationRewardPolicy(
        zero_reward_on_limit=True, skip_grading_on_timeout=True, grader_timeout_seconds=900
    )
    assert config.tool_execution == "sequential"
    assert pickle.loads(pickle.dumps(config)) == config
    assert chz.asdict(config)["limits"]["max_turns"] == 10
