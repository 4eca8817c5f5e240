"""Episodes with tool calls."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from planish import logtree
from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.errors import UnsupportedError, UserError
from planish.renderers import get_renderer
from planish.rl.data_processing import trajectory_to_data
from planish.rl.limits import (
    ParseErrorPolicy,
    RolloutConfig,
    RolloutLimits,
    TerminationRewardPolicy,
    agentic,
)
from planish.rl.rollout.rollouts import do_single_rollout
from planish.tool_use import AgentToolMessageEnv, ToolResult, build_agent_tool_env, tool

END = "<|im_end|>"
QUESTION: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
async def submit(answer: str) -> ToolResult:
    """Give the final answer."""
    return ToolResult("thank you", stop=True, metrics={"submitted": 1})


TOOLS = [add, submit]


def says(*parts: Any) -> str:
    """Return a message of texts and calls (name, arguments), as a model writes it."""
    texts = [
        part
        if isinstance(part, str)
        else f"<tool_call>\n{json.dumps({'name': part[0], 'arguments': part[1]})}\n</tool_call>"
        for part in parts
    ]
    return "\n".join(texts) + END


ADD = says(("add", {"a": 2, "b": 3}))
UNREADABLE = f"<tool_call>{{oh</tool_call>{END}"


@dataclass
class Scripted(TokenCompleter):
    renderer: Any
    answers: list[str]
    prompts: list[str] = field(default_factory=list)

    async def __call__(self, model_input, stop, *, max_tokens=None):
        answer = self.answers[len(self.prompts)]
        self.prompts.append(self.renderer.tokenizer.decode(model_input.to_ints()))
        tokens = self.renderer.tokenizer.encode(
            answer.removesuffix("..."), add_special_tokens=False
        )
        await asyncio.sleep(0)
        return TokensWithLogprobs(
            tokens, [-1.0] * len(tokens), "length" if answer.endswith("...") else "stop"
        )


@dataclass
class Reward:
    """A reward function that records its arguments."""

    value: float = 0.9
    seen: list[Any] | None = None
    times: int = 0

    def __call__(self, messages):
        self.seen = messages
        self.times += 1
        return self.value, {"graded": 1.0}

    def roles(self) -> str:
        return "".join(message["role"][0] for message in self.seen or [])


@pytest.fixture
def play(renderer):
    """Play an episode with the script, and return the trajectory and the texts of the prompts."""

    def play(*answers: str, reward: Any = None, tools=TOOLS, messages=QUESTION, **options):
        env = build_agent_tool_env(renderer, tools, messages, reward or Reward(), **options)
        policy = Scripted(renderer, list(answers))
        return asyncio.run(do_single_rollout(policy, env)), policy.prompts

    return play


def last(trajectory):
    return trajectory.transitions[-1]


def test_an_episode_from_question_to_reward(play, renderer):
    reward = Reward()
    trajectory, prompts = play(
        says("Let me see.", ("add", {"a": 2, "b": "3"})), says("It is 5."), reward=reward
    )
    assert trajectory.stop_reason == "completed"
    assert [turn.reward for turn in trajectory.transitions] == [0.0, 0.9]
    assert last(trajectory).metrics["graded"] == 1.0
    assert reward.roles() == "suata"
    [system, _, _, result, answer] = reward.seen or []
    assert {tool["name"] for tool in system["tools"]} == {"add", "submit"}
    assert result == {"role": "tool", "content": "5", "name": "add", "tool_call_id": "call_0"}
    assert answer == {"role": "assistant", "content": "It is 5."}
    assert '"description": "Add two numbers."' in prompts[0]
    assert prompts[1].endswith(
        "<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    [sequence] = trajectory_to_data(trajectory, 1.0)
    sampled = sum(len(turn.ac.tokens) for turn in trajectory.transitions)
    assert sequence.mask_N.sum() == sampled


def test_calls_written_with_other_blanks_stay_as_they_are(play):
    strange = f'<tool_call>{{"arguments":{{"b":3,"a":2}},  "name":"add"}}</tool_call>{END}'
    trajectory, prompts = play(strange, says("5"))
    assert strange in prompts[1]
    assert len(trajectory_to_data(trajectory, 1.0)) == 1


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_several_calls_of_a_message(play, execution):
    both = says(("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2}))
    trajectory, prompts = play(both, says("2 and 4"), tool_execution=execution)
    assert (
        "<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response>" in prompts[1]
    )
    assert trajectory.transitions[0].metrics["tool_calls/add"] == 2


def test_metrics_of_a_turn(play):
    trajectory, _ = play(
        says(("add", {"a": 1, "b": 1}), ("sub", {})), says(("submit", {"answer": "5"}))
    )
    first, second = (turn.metrics for turn in trajectory.transitions)
    expected = {
        "tool_calls": 2,
        "tool_errors": 1,
        "tool_calls/add": 1,
        "tool_calls/submit": 0,
        "parse_error": 0.0,
        "max_tokens_reached": 0.0,
        "context_overflow": 0.0,
    }
    assert {name: first[name] for name in expected} == expected
    assert (second["tool_calls"], second["tool_errors"], second["submitted"]) == (1, 0, 1)
    assert trajectory.transitions[0].logs["tool_call_0"] == 'add({"a": 1, "b": 1})'
    assert trajectory.transitions[0].logs["tool_result_0"] == "2"


def test_a_tool_ends_the_episode(play):
    reward = Reward()
    trajectory, _ = play(says(("submit", {"answer": "5"})), reward=reward)
    assert trajectory.stop_reason == "tool_stopped"
    assert last(trajectory).reward == 0.9
    assert reward.roles() == "suat"


def test_too_many_turns_are_graded(play):
    trajectory, prompts = play(*[ADD] * 9, max_turns=3)
    assert (trajectory.stop_reason, len(prompts)) == ("max_turns", 3)
    assert last(trajectory).reward == 0.9
    assert len(play(*[ADD] * 9)[1]) == 5


def test_too_many_calls_are_cut_off(play):
    reward = Reward()
    three = says(*[("add", {"a": 1, "b": 1})] * 3)
    trajectory, _ = play(ADD, three, reward=reward, max_tool_calls=3)
    assert trajectory.stop_reason == "max_tool_calls"
    assert last(trajectory).metrics["tool_calls/add"] == 2
    assert reward.roles() == "suatatt"
    trajectory, _ = play(ADD, three, ADD, max_tool_calls=4)
    assert trajectory.stop_reason == "max_tool_calls"
    assert last(trajectory).metrics["tool_calls/add"] == 0
    assert play(ADD, three, says("5"), max_tool_calls=4)[0].stop_reason == "completed"


def test_an_unreadable_call_is_answered_as_a_tool(play):
    trajectory, prompts = play(UNREADABLE, says("5"))
    assert "<tool_response>\nError: the tool call could not be read: not JSON" in prompts[1]
    assert trajectory.transitions[0].metrics["tool_errors"] == 1
    assert trajectory.stop_reason == "completed"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ('{"text": "\\ud83d"}', "could not be read"),
        ('{"text": 1, "\\ud83d": 2}', "could not be read"),
        ('{"text": "a"}', "\ufffd"),
    ],
)
def test_half_of_a_surrogate_pair_in_a_call_or_a_result_is_answered(play, arguments, answer):
    """JSON can contain it, but no tokenizer accepts it."""

    @tool
    def cut(text: str) -> str:
        """Return all but the end."""
        return text + "\ud83d"

    call = f'<tool_call>{{"name": "cut", "arguments": {arguments}}}</tool_call>{END}'
    trajectory, prompts = play(call, says("5"), tools=[cut])
    assert answer in prompts[1]
    assert trajectory.stop_reason == "completed"


def test_a_readable_call_beside_an_unreadable_one_is_run(play):
    _, prompts = play(
        ADD.removesuffix(END) + UNREADABLE, says("5"), parse_error_policy=ParseErrorPolicy()
    )
    assert (
        "<tool_response>\n5\n</tool_response>\n<tool_response>\nError: the tool call could not"
        in prompts[1]
    )


def test_the_grader_sees_what_a_policy_answered(play):
    reward = Reward()
    policy = ParseErrorPolicy(max_consecutive=1, penalty_per_error=0.1)
    trajectory, _ = play(UNREADABLE, ADD, says("5"), reward=reward, parse_error_policy=policy)
    assert [turn.reward for turn in trajectory.transitions] == [-0.1, 0.0, 0.9]
    assert reward.roles() == "suauata"


def test_reward_functions(play):
    async def patient(messages):
        await asyncio.sleep(0)
        return 0.25, {"m": 1}

    for reward, total in (
        (lambda messages: 0.5, 0.5),
        (lambda messages: (0.5, {}), 0.5),
        (patient, 0.25),
    ):
        assert play(says("5"), reward=reward)[0].step_rewards == total

    def faulty(messages):
        raise KeyError("no such key")

    with pytest.raises(KeyError):
        play(says("5"), reward=faulty)


def test_a_termination_policy_at_the_grader(play):
    reward = Reward()
    patient = RolloutConfig(termination=TerminationRewardPolicy(grader_timeout_seconds=60))
    play(ADD, says("5"), reward=reward, rollout_config=patient)
    assert reward.roles() == "ata"
    everything = RolloutConfig(
        termination=TerminationRewardPolicy(pass_all_messages_to_grader=True)
    )
    play(ADD, says("5"), reward=reward, rollout_config=everything)
    assert reward.roles() == "suata"

    async def hanging(messages):
        await asyncio.sleep(60)
        return 0.0

    quick = RolloutConfig(termination=TerminationRewardPolicy(grader_timeout_seconds=0.02))
    with pytest.raises(TimeoutError, match=r"grader_timeout_seconds=0\.02"):
        play(says("5"), reward=hanging, rollout_config=quick)


def test_limits_on_tokens_are_graded(play):
    reward = Reward()
    limits = RolloutLimits(max_sampled_tokens=100)
    trajectory, _ = play(ADD, ADD, ADD, reward=reward, rollout_config=RolloutConfig(limits=limits))
    assert trajectory.stop_reason == "max_sampled_tokens"
    assert last(trajectory).reward == 0.9
    assert reward.roles() == "suatat"


def test_a_cut_off_answer(play):
    reward = Reward()
    trajectory, _ = play("Let me think...", reward=reward)
    assert (trajectory.stop_reason, trajectory.step_rewards) == ("max_tokens", -0.1)
    assert reward.seen is None
    bounded = RolloutConfig(limits=RolloutLimits(max_turn_tokens=50))
    trajectory, prompts = play("Let me think...", says("5"), reward=reward, rollout_config=bounded)
    assert (trajectory.stop_reason, trajectory.step_rewards) == ("completed", 0.9)
    assert "Let me think<|im_end|>" in prompts[1]
    assert len(trajectory_to_data(trajectory, 1.0)) == 1


def advance_clock(seconds: float) -> None:
    """Advance the clock that the timeouts of the running event loop are measured by."""
    loop = asyncio.get_running_loop()
    loop.time = lambda: time.monotonic() + seconds


def test_time_that_is_up_during_a_call(play):
    @tool
    async def wait() -> str:
        """Wait."""
        advance_clock(61)
        await asyncio.sleep(60)
        return ""

    limits = RolloutLimits(rollout_timeout_seconds=60)
    for termination, total in ((None, 0.9), (agentic().termination, 0.0)):
        config = RolloutConfig(limits=limits, termination=termination)
        trajectory, _ = play(says(("wait", {})), tools=[wait], rollout_config=config)
        assert (trajectory.stop_reason, trajectory.step_rewards) == ("rollout_timeout", total)


def test_grading_is_no_part_of_the_time_of_an_episode(play):
    async def slow(messages):
        advance_clock(61)
        await asyncio.sleep(0.01)
        return reward(messages)

    limits = RolloutLimits(rollout_timeout_seconds=60)
    for termination in (None, agentic().termination):
        reward = Reward()
        config = RolloutConfig(limits=limits, termination=termination)
        trajectory, _ = play(says("5"), reward=slow, rollout_config=config)
        assert (trajectory.stop_reason, trajectory.step_rewards) == ("completed", 0.9)
        assert reward.times == 1


def test_agentic_in_one_episode(play):
    """Three calls, two unreadable calls that get a reply, then calls until the tenth turn. The
    episode is graded, and its reward is at most 0.
    """
    reward = Reward()
    trajectory, prompts = play(
        *[ADD] * 3, *[UNREADABLE] * 2, *[ADD] * 9, reward=reward, rollout_config=agentic()
    )
    assert (trajectory.stop_reason, len(prompts)) == ("max_turns", 10)
    assert (trajectory.step_rewards, reward.times) == (0.0, 1)
    assert sum(turn.metrics.get("tool_calls", 0) for turn in trajectory.transitions) == 8
    assert len(trajectory_to_data(trajectory, 1.0)) == 1


def test_tools_join_the_system_message(play):
    _, prompts = play(says("5"), messages=[{"role": "system", "content": "Be brief."}, *QUESTION])
    assert prompts[0].startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert prompts[0].count("<|im_start|>system") == 1


def test_tools_that_are_offered_already(play, renderer):
    offered = renderer.create_conversation_prefix_with_tools(
        [one.to_spec() for one in TOOLS], "Be brief."
    )
    _, prompts = play(says("5"), messages=[*offered, *QUESTION])
    assert prompts[0].count('"name": "add"') == 1
    with pytest.raises(UserError, match="give the same tools in both arguments"):
        play(says("5"), messages=[*offered, *QUESTION], tools=[add])


def test_a_renderer_without_tools_is_rejected(renderer):
    words = get_renderer("role_colon", renderer.tokenizer)
    with pytest.raises(UnsupportedError, match="role_colon has no form for tools"):
        build_agent_tool_env(words, TOOLS, QUESTION, Reward())


def test_invalid_options_are_rejected(renderer):
    for options in (
        {"max_turns": 0},
        {"max_tool_calls": 0},
        {"tool_execution": "both"},
        {"tool_timeout_seconds": -1},
    ):
        with pytest.raises(UserError, match=next(iter(options))):
            build_agent_tool_env(renderer, TOOLS, QUESTION, Reward(), **cast(Any, options))


def test_many_episodes_run_concurrently(renderer):
    async def one(number: int):
        reward = Reward()
        env = build_agent_tool_env(renderer, TOOLS, QUESTION, reward)
        calls = [says(("add", {"a": number, "b": turn})) for turn in range(3)]
        await do_single_rollout(Scripted(renderer, [*calls, says("done")]), env)
        return [message["content"] for message in reward.seen or [] if message["role"] == "tool"]

    async def all_of_them():
        return await asyncio.gather(*map(one, range(20)))

    results = asyncio.run(all_of_them())
    assert results == [[str(number + turn) for turn in range(3)] for number in range(20)]


def test_turns_are_shown_with_calls_and_results(play):
    with logtree.init_trace("test") as trace:
        play(ADD, says(("submit", {"answer": "5"})))
    conversations = [node.data["messages"] for node in trace.root.walk() if node.data]
    assert [[message["role"] for message in part] for part in conversations] == [
        ["system", "user"],
        ["assistant", "tool"],
        ["assistant", "tool"],
    ]
    assert conversations[1][0]["tool_calls"][0]["function"]["name"] == "add"
    assert conversations[2][1]["content"] == "thank you"


def test_the_environment_alone():
    """Messages go in and out, without the adapter."""
    env = AgentToolMessageEnv(TOOLS, QUESTION, Reward(), 2)
    call: Any = {"function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
    assert asyncio.run(env.initial_observation()) == QUESTION
    first = asyncio.run(env.step({"role": "assistant", "content": "", "tool_calls": [call]}))
    assert not first.episode_done
    assert first.next_messages[-1] == {"role": "tool", "content": "2", "name": "add"}
    second = asyncio.run(env.step({"role": "assistant", "content": "2"}))
    assert (second.reward, second.stop_reason) == (0.9, "completed")
