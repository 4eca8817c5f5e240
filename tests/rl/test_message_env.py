"""Message environments under a policy that reads and samples tokens."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from byte_chat import END, Counting, ScriptedPolicy, play, play_async, tokens_of
from hypothesis import given, settings, strategies as st
from virtual_time import VirtualTimeLoop, run_in_virtual_time

from planish import logtree
from planish.errors import UserError
from planish.model.sources.embedded import DEFAULT_DIRECTORY_NAME
from planish.model.sources.resolve import models_home
from planish.renderers import Message, get_renderer
from planish.rl.data_processing import trajectory_to_data
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.limits import ParseErrorPolicy, RolloutLimits
from planish.rl.rollout.rollouts import do_single_rollout
from planish.rl.types import InitialObservationOverflow, StopReason
from planish.tokenizer import load_tokenizer

EMBEDDED = models_home() / DEFAULT_DIRECTORY_NAME
UNREADABLE = f"<tool_call>{{broken</tool_call>{END}"
HI = f"Hi{END}"

NO_END = {"max_tokens_reached": 0.0, "context_overflow": 0.0}
"""The metrics of each turn that does not end the episode."""


@pytest.fixture
def renderer(tokenizer):
    return get_renderer("qwen3_instruct", tokenizer)


@pytest.fixture
def make(renderer):
    """Return a function that wraps Counting in an EnvFromMessageEnv, with options for both."""

    def make(counting: MessageEnv | None = None, **options) -> EnvFromMessageEnv:
        return EnvFromMessageEnv(renderer, counting or Counting(), **options)

    return make


def assert_appended(rollout):
    """Assert that each prompt begins with the previous prompt and its sampled tokens."""
    for prompt, action, following in zip(
        rollout.prompts, rollout.actions, rollout.prompts[1:], strict=False
    ):
        assert following[: len(prompt) + len(action)] == prompt + action


# Episodes


def test_an_episode_runs_to_its_end(make, renderer):
    counting = Counting(turns=3)
    rollout = play(make(counting), f"One{END}", f"Two{END}", f"Three{END}")
    assert [step.reward for step in rollout.steps] == [0.5] * 3
    assert [step.episode_done for step in rollout.steps] == [False, False, True]
    assert [step.stop_reason for step in rollout.steps] == [None, None, StopReason.COMPLETED]
    assert rollout.steps[-1].metrics == {"length": 6, **NO_END, "parse_error": 0.0}
    assert rollout.steps[0].next_stop_condition == renderer.get_stop_sequences()
    assert_appended(rollout)
    assert rollout.prompts[-1] == renderer.build_generation_prompt(counting.seen[:-1]).to_ints()
    assert rollout.steps[-1].next_observation.to_ints() == rollout.prompts[-1] + rollout.actions[-1]


def test_a_step_that_returns_none_is_named_in_the_error(make):
    class Forgetful(Counting):
        async def step(self, message) -> Any:
            await super().step(message)

    with pytest.raises(
        UserError, match=r"Forgetful.step returned a NoneType in turn 1; return a MessageStepResult"
    ):
        play(make(Forgetful()), HI)


def test_episode_done_must_be_a_bool(make):
    class Undecided(Counting):
        async def step(self, message):
            return MessageStepResult(1.0, cast(Any, None), [])

    with pytest.raises(
        UserError,
        match=r"Undecided.step returned episode_done=None in turn 1; return True or False",
    ):
        play(make(Undecided()), HI)


def test_the_stop_reason_of_the_environment_is_kept(make):
    @dataclass
    class Stopping(Counting):
        async def step(self, message):
            return MessageStepResult(1.0, True, [], stop_reason=StopReason.TOOL_STOPPED)

    assert play(make(Stopping()), HI).steps[-1].stop_reason is StopReason.TOOL_STOPPED


def test_several_turns_become_one_training_sequence(make, renderer):
    policy = ScriptedPolicy(renderer, [f"One{END}", f"Two{END}", f"Three{END}"])
    trajectory = asyncio.run(do_single_rollout(policy, make(Counting(turns=3))))
    assert trajectory.stop_reason == "completed"
    assert trajectory.step_rewards == 1.5
    [sequence] = trajectory_to_data(trajectory, 1.0)
    assert sequence.mask_N.sum() == len(tokens_of(renderer, f"One{END}Two{END}Three{END}"))


def test_many_episodes_run_concurrently(make):
    async def all_of_them():
        return await asyncio.gather(
            *(play_async(make(Counting(turns=n)), *[f"{n}{END}"] * 9) for n in range(1, 9))
        )

    for turns, rollout in enumerate(asyncio.run(all_of_them()), start=1):
        assert len(rollout.steps) == turns
        assert_appended(rollout)


# Sampled tokens are kept


def test_a_rewritten_history_is_rendered_again(make, renderer):
    @dataclass
    class Forgetful(Counting):
        async def step(self, message):
            result = await super().step(message)
            result.next_messages = [{"role": "user", "content": "Only this."}]
            return result

    rollout = play(make(Forgetful()), HI)
    assert rollout.steps[0].next_observation.to_ints() == prompt_before(renderer, "Only this.")


@pytest.mark.parametrize("edited", [0, 1])
def test_a_history_edited_in_place_is_rendered_again(make, renderer, edited):
    @dataclass
    class Editing(Counting):
        async def step(self, message):
            result = await super().step(message)
            self.seen[edited]["content"] = "[...]"
            return result

    counting = Editing()
    rollout = play(make(counting), HI)
    assert "[...]" in renderer.tokenizer.decode(rollout.prompts[1])
    assert rollout.steps[0].next_observation == renderer.build_generation_prompt(counting.seen)


def test_a_history_without_the_sampled_message_is_rendered_again(make, renderer):
    @dataclass
    class Censoring(Counting):
        async def step(self, message):
            return await super().step(cast(Message, {**message, "content": "[...]"}))

    counting = Censoring()
    rollout = play(make(counting), HI)
    assert rollout.steps[0].next_observation == renderer.build_generation_prompt(counting.seen)


def test_a_format_that_drops_old_reasoning_renders_the_history_again(tokenizer):
    thinking = get_renderer("qwen3", tokenizer)
    counting = Counting()
    rollout = play(EnvFromMessageEnv(thinking, counting), f"<think>\nHm.\n</think>\n\nHi{END}")
    assert rollout.steps[0].next_observation == thinking.build_generation_prompt(counting.seen)
    assert "Hm." not in tokenizer.decode(rollout.prompts[1])


def test_a_stop_string_is_not_repeated_in_the_next_header(tokenizer):
    words = get_renderer("role_colon", tokenizer)
    counting = Counting()
    rollout = play(EnvFromMessageEnv(words, counting), " One\n\nUser:", " Two\n\nUser:")
    assert_appended(rollout)
    assert rollout.prompts[-1] == words.build_generation_prompt(counting.seen).to_ints()


@pytest.mark.skipif(not EMBEDDED.is_dir(), reason="the embedded model is not in the cache")
def test_sampled_tokens_are_not_tokenized_again():
    """A model may sample other tokens for a text than the tokenizer would choose."""
    tokenizer = load_tokenizer(EMBEDDED)
    renderer = get_renderer("chatml", tokenizer)
    end: Any = renderer.get_stop_sequences()[0]
    spelled = [
        token
        for letter in "Certainly, it is."
        for token in tokenizer.encode(letter, add_special_tokens=False)
    ]
    counting = Counting()
    rollout = play(EnvFromMessageEnv(renderer, counting), [*spelled, end], [*spelled, end])
    assert counting.seen[1]["content"] == "Certainly, it is."
    assert_appended(rollout)
    rendered = renderer.build_generation_prompt(counting.seen).to_ints()
    assert rollout.prompts[-1] != rendered
    assert tokenizer.decode(rollout.prompts[-1]) == tokenizer.decode(rendered)


def prompt_before(renderer, text):
    return renderer.build_generation_prompt([{"role": "user", "content": text}]).to_ints()


# Truncated answers


def test_a_truncated_answer_ends_the_episode(make):
    counting = Counting()
    [step] = play(make(counting), "and so on...").steps
    assert (step.reward, step.stop_reason) == (-0.1, StopReason.MAX_TOKENS)
    assert step.metrics == {**NO_END, "max_tokens_reached": 1.0, "parse_error": 0.0}
    assert len(counting.seen) == 1


def test_a_truncated_answer_can_be_kept(make, renderer):
    counting = Counting(keeps_all=True)
    limits = RolloutLimits(max_turns=9)
    rollout = play(
        make(counting, terminate_on_length=False, rollout_limits=limits), "and so on...", HI
    )
    assert [step.reward for step in rollout.steps] == [0.0, 0.5]
    assert_appended(rollout)
    assert rollout.prompts[-1] == renderer.build_generation_prompt(counting.seen).to_ints()


def test_a_truncated_answer_that_cannot_be_extended_ends_the_episode(make):
    env = make(Counting(), terminate_on_length=False, rollout_limits=RolloutLimits(max_turns=9))
    assert play(env, "and so on...").steps[-1].stop_reason is StopReason.MAX_TOKENS


def test_an_answer_without_an_end_mark_ends_the_episode(make):
    counting = Counting()
    [step] = play(make(counting), f"Hi{END} and more").steps
    assert (step.reward, step.stop_reason, step.train_on_action) == (
        -1.0,
        StopReason.PARSE_ERROR,
        True,
    )
    assert step.metrics == {**NO_END, "parse_error": 1.0}
    assert len(counting.seen) == 1


def test_an_answer_without_an_end_mark_can_be_retried(make):
    options = {"terminate_on_parse_error": False, "rollout_limits": RolloutLimits(max_turns=2)}
    rollout = play(make(**options), "Hi", "Hi")
    assert [step.stop_reason for step in rollout.steps] == [None, StopReason.MAX_TURNS]
    assert [step.reward for step in rollout.steps] == [-1.0, -1.0]
    assert rollout.prompts[1] == rollout.prompts[0]
    with pytest.raises(UserError, match="terminate_on_parse_error=False may continue forever"):
        make(terminate_on_parse_error=False)
    with pytest.raises(UserError, match="terminate_on_length=False may continue forever"):
        make(terminate_on_length=False)


def test_an_answer_ended_by_the_stop_condition_of_the_environment_is_complete(make, renderer):
    @dataclass
    class FirstLine(Counting):
        async def step(self, message):
            result = await super().step(message)
            result.next_stop_condition = ["\n"]
            return result

    counting = FirstLine()
    rollout = play(make(counting), HI, "One line\n")
    assert [step.next_stop_condition for step in rollout.steps] == [["\n"], ["\n"]]
    assert counting.seen[-2] == {"role": "assistant", "content": "One line\n"}
    assert_appended(rollout)
    assert rollout.prompts[-1] == renderer.build_generation_prompt(counting.seen).to_ints()


# Parse errors


def test_unparsable_tool_calls_reach_the_environment_by_default(make):
    counting = Counting()
    [step] = play(make(counting), UNREADABLE).steps
    assert step.reward == 0.5
    assert "unparsed_tool_calls" in counting.seen[1]


@pytest.mark.parametrize("keeps_all", [False, True])
def test_unparsable_tool_calls_are_answered_by_the_retry_policy(make, renderer, keeps_all):
    counting = Counting(keeps_all=keeps_all)
    policy = ParseErrorPolicy(
        max_consecutive=2, penalty_per_error=0.2, terminal_reward=-0.7, mask_error_turns=True
    )
    rollout = play(make(counting, parse_error_policy=policy), UNREADABLE, HI, *[UNREADABLE] * 3)
    assert [step.reward for step in rollout.steps] == [-0.2, 0.5, -0.2, -0.2, -0.7]
    assert [step.train_on_action for step in rollout.steps] == [False, True, False, False, False]
    assert [step.metrics["parse_error"] for step in rollout.steps] == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert rollout.steps[-1].stop_reason is StopReason.PARSE_ERROR
    assert_appended(rollout)
    texts = [renderer.tokenizer.decode(prompt) for prompt in rollout.prompts]
    assert [
        text.count("The previous message had a formatting issue.\nError: not JSON")
        for text in texts
    ] == [
        0,
        1,
        1,
        2,
        3,
    ]
    readable = [
        message
        for message in counting.seen
        if message["role"] == "assistant" and "content" in message
    ]
    assert len(readable) == (4 if keeps_all else 1)


def test_an_answer_without_an_end_mark_is_not_retried_as_a_parse_error(make):
    policy = ParseErrorPolicy(max_consecutive=2, terminal_reward=-0.7, mask_error_turns=True)
    [step] = play(make(parse_error_policy=policy), "Hi").steps
    assert (step.reward, step.stop_reason, step.train_on_action) == (
        -0.7,
        StopReason.PARSE_ERROR,
        False,
    )


def test_an_untrained_turn_is_observed_with_mask_zero(make, renderer):
    policy = ParseErrorPolicy(max_consecutive=1, mask_error_turns=True)
    script = ScriptedPolicy(renderer, [UNREADABLE, HI])
    trajectory = asyncio.run(
        do_single_rollout(script, make(Counting(turns=1), parse_error_policy=policy))
    )
    [sequence] = trajectory_to_data(trajectory, 1.0)
    assert sequence.mask_N.sum() == len(tokens_of(renderer, HI))


# Limits


def test_an_episode_ends_when_the_context_is_full(make):
    roomy = len(play(make(), HI).prompts[1])
    rollout = play(make(max_trajectory_tokens=roomy + 9, max_generation_tokens=10), HI)
    assert (rollout.steps[0].reward, rollout.steps[0].stop_reason) == (
        -0.1,
        StopReason.CONTEXT_OVERFLOW,
    )
    assert rollout.steps[0].metrics == {
        "length": 3,
        **NO_END,
        "parse_error": 0.0,
        "context_overflow": 1.0,
    }
    assert (
        not play(make(max_trajectory_tokens=roomy + 10, max_generation_tokens=10), HI)
        .steps[0]
        .episode_done
    )
    # An episode that is done needs no room for another answer.
    done = play(make(Counting(turns=1), max_trajectory_tokens=roomy), HI).steps[0]
    assert (done.reward, done.stop_reason) == (0.5, StopReason.COMPLETED)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (RolloutLimits(max_turns=2), StopReason.MAX_TURNS),
        (RolloutLimits(max_sampled_tokens=6), StopReason.MAX_SAMPLED_TOKENS),
        (RolloutLimits(max_trajectory_tokens=90), StopReason.MAX_TOKENS),
    ],
)
def test_a_limit_ends_the_episode_with_a_last_reward(make, limits, reason):
    steps = play(make(Counting(last_reward=0.25), rollout_limits=limits), HI, HI, HI).steps
    assert [step.reward for step in steps] == [0.5, 0.75]
    assert steps[-1].stop_reason is reason
    assert steps[-1].metrics["asked"] == 1.0


def test_a_prompt_that_fills_the_context_is_not_sampled_from(make):
    for options in (
        {"max_trajectory_tokens": 20},
        {"rollout_limits": RolloutLimits(max_trajectory_tokens=20)},
    ):
        first = asyncio.run(make(**options).initial_observation())
        assert isinstance(first, InitialObservationOverflow)
        assert (first.reward, first.metrics) == (
            -0.1,
            {**NO_END, "parse_error": 0.0, "context_overflow": 1.0},
        )
        assert "leaves no room" in str(first.logs["initial_observation_overflow"])


@dataclass
class Slow(Counting):
    seconds: float = 0.02

    async def step(self, message):
        await asyncio.sleep(self.seconds)
        return await super().step(message)


def test_the_time_limit_is_checked_after_a_turn(make):
    @dataclass
    class Blocking(Counting):
        async def step(self, message):
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop.block(0.02)
            return await super().step(message)

    limits = RolloutLimits(rollout_timeout_seconds=0.05)
    env = make(Blocking(last_reward=0.25), rollout_limits=limits)
    steps = run_in_virtual_time(play_async(env, *[HI] * 9)).steps
    assert steps[-1].stop_reason is StopReason.ROLLOUT_TIMEOUT
    assert [step.reward for step in steps] == [0.5, 0.5, 0.75]


def test_the_time_limit_cancels_sampling(make, renderer):
    @dataclass
    class SlowAtLast(ScriptedPolicy):
        async def __call__(self, model_input, stop, *, max_tokens=None):
            await asyncio.sleep(60.0 if self.prompts else 0.0)
            return await super().__call__(model_input, stop, max_tokens=max_tokens)

    limits = RolloutLimits(rollout_timeout_seconds=0.1)
    env = make(Counting(last_reward=0.25), rollout_limits=limits)
    trajectory = run_in_virtual_time(do_single_rollout(SlowAtLast(renderer, [HI, HI]), env))
    assert trajectory.stop_reason == "rollout_timeout"
    assert [turn.reward for turn in trajectory.transitions] == [0.5, 0.25]


def test_the_time_limit_can_end_an_episode_before_the_first_turn(make, renderer):
    @dataclass
    class SlowStart(Counting):
        async def initial_observation(self):
            await asyncio.sleep(0.05)
            return await super().initial_observation()

    env = make(
        SlowStart(last_reward=0.25), rollout_limits=RolloutLimits(rollout_timeout_seconds=0.02)
    )
    policy = ScriptedPolicy(renderer, [HI])
    trajectory = run_in_virtual_time(do_single_rollout(policy, env))
    assert (trajectory.stop_reason, policy.prompts) == ("rollout_timeout", [])
    [turn] = trajectory.transitions
    assert (turn.reward, turn.metrics["asked"]) == (0.25, 1.0)


def test_max_tokens_of_an_answer_is_the_remaining_budget(make, renderer):
    @dataclass
    class Bounded(ScriptedPolicy):
        bounds: list[int | None] = field(default_factory=list)

        async def __call__(self, model_input, stop, *, max_tokens=None):
            self.bounds.append(max_tokens)
            return await super().__call__(model_input, stop, max_tokens=max_tokens)

    policy = Bounded(renderer, [HI] * 9)
    limits = RolloutLimits(max_sampled_tokens=8, max_turn_tokens=7)
    trajectory = asyncio.run(do_single_rollout(policy, make(rollout_limits=limits)))
    assert policy.bounds == [7, 5, 2]
    assert trajectory.stop_reason == "max_sampled_tokens"


def test_the_time_limit_cancels_the_environment(make):
    limits = RolloutLimits(rollout_timeout_seconds=0.02)
    env = make(Slow(seconds=60.0, last_reward=0.25), rollout_limits=limits)
    [step] = run_in_virtual_time(play_async(env, HI)).steps
    assert (step.reward, step.stop_reason) == (0.25, StopReason.ROLLOUT_TIMEOUT)


def test_a_timeout_of_the_environment_is_an_error(make):
    @dataclass
    class Hanging(Counting):
        async def step(self, message):
            raise TimeoutError("no answer from the opponent")

    with pytest.raises(TimeoutError, match="opponent"):
        play(make(Hanging(), rollout_limits=RolloutLimits(rollout_timeout_seconds=60)), HI)


def test_tool_calls_are_limited_only_if_counted(make):
    with pytest.raises(UserError, match="Counting does not count tool calls"):
        make(rollout_limits=RolloutLimits(max_tool_calls=3))


# Logs


def test_tool_calls_are_numbered_over_the_episode(make):
    counting = Counting()
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    rollout = play(make(counting), f"{call}{call}{END}", f"{call}{END}")
    ids = [call["id"] for message in counting.seen for call in message.get("tool_calls", [])]
    assert ids == ["call_0", "call_1", "call_2"]
    assert_appended(rollout)


def test_each_turn_is_logged(make):
    with logtree.init_trace("test") as trace:
        play(make(Counting(turns=2)), HI, f"Bye{END}")
    messages = [node.data["messages"] for node in trace.root.walk() if node.data]
    assert [[message["content"] for message in part] for part in messages] == [
        ["Count."],
        ["Hi", "That is 2."],
        ["Bye"],
    ]
    assert "Turn 2" in trace.to_html()


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    END,
    "<|endoftext|>",
    "\n",
    "\n\nUser:",
    " ",
    "é",
    '"',
    "{",
    "}",
]
CALLS = [
    '{"name": "f", "arguments": {"a": "\\ud800"}}',
    '{"name": "", "arguments": 3}',
    '{"name": "f"}',
    "hm",
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(PIECES + CALLS), max_size=8).map("".join), min_size=3, max_size=3
    )
)
def test_no_sampled_text_raises_an_error(tokenizer, answers):
    """After any sampled text, the next prompt extends it, unless the format rewrites history or the
    episode has ended.
    """
    for name in ("qwen3_instruct", "qwen3", "llama3", "role_colon"):
        renderer = get_renderer(name, tokenizer)
        policy, limits = ParseErrorPolicy(max_consecutive=9), RolloutLimits(max_turns=9)
        options: Any = {
            "parse_error_policy": policy,
            "rollout_limits": limits,
            "terminate_on_length": False,
        }
        stop = "\n\nUser:" if name == "role_colon" else "<|eot_id|>" if name == "llama3" else END
        rollout = play(
            EnvFromMessageEnv(renderer, Counting(keeps_all=True), **options),
            *[text + stop for text in answers],
        )
        if name in ("qwen3_instruct", "llama3"):
            assert_appended(rollout)
