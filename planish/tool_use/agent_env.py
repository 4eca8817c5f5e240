"""An episode with tools: the model calls tools until it answers without a call, and is graded at
the end.

Each turn, the environment runs the tool calls of the model's message and appends their results as
messages of role "tool". The episode ends for one of these reasons (stop reasons in parentheses):
- The message has no tool calls (completed).
- A tool ends the episode (tool_stopped).
- The message has more calls than `max_tool_calls` still allows (max_tool_calls). The environment
  runs the calls that are allowed and drops the rest.
- The model has written `max_turns` messages (max_turns).

Then `reward_fn` grades the conversation, and its result becomes the reward of the last turn. The
episode's time limit does not include the grading. Episodes that a rollout limit ends are graded
too, unless the `termination` policy skips the grading. EnvFromMessageEnv gives a fixed reward,
without grading, to an episode that ends with a parse error, a truncated answer or a full context.

Metrics of a turn: tool_calls (calls that the model wrote), tool_errors (calls whose result is an
error), tool_calls/NAME for each tool, and the metrics of the tools and the reward function.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeAlias, cast

import chz

from planish.errors import UserError
from planish.processes.blocking import call_function
from planish.renderers import Message, Renderer, get_text_content
from planish.renderers.renderer import Messages, with_tools
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.limits import (
    ParseErrorPolicy,
    RolloutConfig,
    TerminationRewardPolicy,
    ToolExecution,
)
from planish.rl.rewards import Reward, function_name, read_graded
from planish.rl.rollout.group_rollout import time_limit
from planish.rl.types import Logs, Metrics, StopReason
from planish.tool_use.toolbox import CallResult, Toolbox
from planish.tool_use.tools import Tool, tool_spec

RewardResult: TypeAlias = tuple[float, Metrics]
RewardFn: TypeAlias = Callable[[list[Message]], Reward | Awaitable[Reward]]
"""Takes a copy of the messages of the whole episode and returns a reward (see `Reward`). A plain
function runs in a thread. Raise AbstainError to leave the episode out of its group.
"""

MAX_TURNS = 5


class AgentToolMessageEnv(MessageEnv):
    """One episode with tools."""

    def __init__(
        self,
        tools: Sequence[Tool],
        initial_messages: Messages,
        reward_fn: RewardFn,
        max_turns: int = MAX_TURNS,
        *,
        tool_execution: ToolExecution = "parallel",
        tool_timeout_seconds: float | None = 60.0,
        max_result_chars: int = 16384,
        termination: TerminationRewardPolicy | None = None,
    ) -> None:
        """Create the environment of one episode.

        `initial_messages` must already offer the tools to the model, as the result of `offer_tools`
        does. By default `reward_fn` gets all messages. With a `termination` policy it gets only the
        messages after the initial ones, unless `pass_all_messages_to_grader` is set. The policy may
        also limit the reward (see `TerminationRewardPolicy.clamp`).
        """
        if max_turns < 1:
            raise UserError(f"max_turns={max_turns!r}: give a whole number of at least 1")
        self.toolbox = Toolbox(list(tools), tool_execution, tool_timeout_seconds, max_result_chars)
        self.reward_fn = reward_fn
        self.max_turns = max_turns
        self.max_tool_calls: int | None = None
        self.termination = termination
        self.history = cast(list[Message], list(initial_messages))
        self._num_initial_messages = len(self.history)
        """The number of initial messages, which is the index of the first later message."""
        self._num_turns = 0
        self._num_calls_run = 0
        self._timeout: asyncio.Timeout | None = None

    async def initial_observation(self) -> list[Message]:
        """Return the messages with which the episode begins."""
        return self.history

    async def step(self, message: Message) -> MessageStepResult:
        """Run the tool calls of the policy's message, and return their results as the next
        messages. The episode ends, and is graded, at a message without calls, at a limit, or if a
        tool asks for it.
        """
        self._num_turns += 1
        self.history.append(message)
        calls = message.get("tool_calls") or []
        unparsed = message.get("unparsed_tool_calls") or []
        num_allowed = len(calls)
        if self.max_tool_calls is not None:
            num_allowed = self.max_tool_calls - self._num_calls_run
        results = await self.toolbox.run(calls[:num_allowed])
        self._num_calls_run += len(results)
        results += [self.toolbox.answer_unparsed(call) for call in unparsed]
        self.history += [result.message for result in results]
        stop = self._stop_reason(
            bool(calls or unparsed),
            any(result.stop for result in results),
            len(calls) > num_allowed,
        )
        metrics = self._metrics(len(calls) + len(unparsed), results)
        reward = 0.0
        if stop is not None:
            if self._timeout is not None and not self._timeout.expired():
                self._timeout.reschedule(None)
            reward, grade_metrics = await self._grade(stop)
            metrics |= grade_metrics
        return MessageStepResult(
            reward,
            stop is not None,
            self.history,
            metrics,
            _logs(message, results),
            stop_reason=stop,
        )

    async def observe_truncated_response(self, message: Message) -> list[Message]:
        """Return the conversation with a message that the limit of tokens cut off. Its calls do not
        run.
        """
        self.history.append(message)
        return self.history

    async def add_messages(self, messages: list[Message]) -> list[Message]:
        """Add messages of the user to the conversation, and return it."""
        self.history += messages
        return self.history

    async def stopped_by_limit(self, reason: StopReason) -> RewardResult:
        """Return the reward and the metrics of an episode that a limit ended."""
        if self.termination is not None and self.termination.skips_grading(reason):
            return 0.0, {}
        return await self._grade(reason)

    def set_step_timeout(self, timeout: asyncio.Timeout) -> None:
        """Take the timeout of the current step, which does not apply to grading."""
        self._timeout = timeout

    def limit_tool_calls(self, max_tool_calls: int) -> None:
        """Let the episode run at most `max_tool_calls` tool calls."""
        self.max_tool_calls = max_tool_calls

    def _stop_reason(
        self, has_calls: bool, is_stopped: bool, exceeds_limit: bool
    ) -> StopReason | None:
        if not has_calls:
            return StopReason.COMPLETED
        if is_stopped:
            return StopReason.TOOL_STOPPED
        if exceeds_limit:
            return StopReason.MAX_TOOL_CALLS
        return StopReason.MAX_TURNS if self._num_turns >= self.max_turns else None

    async def _grade(self, reason: StopReason) -> RewardResult:
        policy = self.termination
        messages = self.history
        if policy is not None and not policy.pass_all_messages_to_grader:
            messages = self.history[self._num_initial_messages :]
        async with time_limit(
            "grader_timeout_seconds", policy.grader_timeout_seconds if policy else None
        ):
            result = await call_function(partial(self.reward_fn, deepcopy(messages)))
        reward, metrics = read_graded(result, function_name(self.reward_fn))
        return (reward if policy is None else policy.clamp(reward, reason)), metrics

    def _metrics(self, num_calls: int, results: Sequence[CallResult]) -> Metrics:
        metrics: Metrics = {
            "tool_calls": num_calls,
            "tool_errors": sum(result.is_error for result in results),
        }
        for tool in self.toolbox.tools:
            metrics[f"tool_calls/{tool.name}"] = sum(result.tool == tool.name for result in results)
        for result in results:
            for name, value in result.metrics.items():
                metrics[name] = metrics.get(name, 0) + value
        return metrics


def offer_tools(renderer: Renderer, tools: Sequence[Tool], messages: Messages) -> list[Message]:
    """Return `messages` with a first system message that offers the tools in the renderer's form.
    The text of an existing system message is kept.

    Messages that offer the same tools already are returned unchanged. Raises UserError if they
    offer other tools.
    """
    message_list = cast(list[Message], list(messages))
    system = message_list[0] if message_list and message_list[0]["role"] == "system" else None
    offered_tools: list[Any] = list(system.get("tools", [])) if system else []
    names = [tool.name for tool in tools]
    if offered_tools and sorted(
        spec.get("function", spec)["name"] for spec in offered_tools
    ) != sorted(names):
        raise UserError(
            f"initial_messages offer other tools than tools={names}; give the same tools in both "
            "arguments"
        )
    if offered_tools or not tools:
        return message_list
    return with_tools(renderer, message_list, [tool_spec(tool) for tool in tools])


def build_agent_tool_env(
    renderer: Renderer,
    tools: Sequence[Tool],
    initial_messages: Messages,
    reward_fn: RewardFn,
    *,
    rollout_config: RolloutConfig | None = None,
    max_turns: int | None = None,
    max_tool_calls: int | None = None,
    tool_execution: ToolExecution | None = None,
    tool_timeout_seconds: float | None = 60.0,
    max_result_chars: int = 16384,
    failed_parse_reward: float = -0.1,
    terminate_on_parse_error: bool = True,
    max_trajectory_tokens: int | None = None,
    max_generation_tokens: int | None = None,
    context_overflow_reward: float = -0.1,
    terminate_on_length: bool | None = None,
    parse_error_policy: ParseErrorPolicy | None = None,
) -> EnvFromMessageEnv:
    """Return a token-level environment for an episode with tools.

    An argument that is given takes precedence over the same setting in `rollout_config`.
    `max_turns` is 5 by default. `terminate_on_length` says whether a truncated answer ends the
    episode. Its default is False if `rollout_config` has a token limit, else True. Raises UserError
    for an invalid argument. `failed_parse_reward` is the reward of a message that cannot be parsed,
    and `context_overflow_reward` that of an episode that reaches a limit of tokens.
    """
    config = rollout_config or RolloutConfig()
    num_turns = max_turns if max_turns is not None else config.limits.max_turns or MAX_TURNS
    num_tool_calls = max_tool_calls if max_tool_calls is not None else config.limits.max_tool_calls
    limits = chz.replace(config.limits, max_turns=num_turns, max_tool_calls=num_tool_calls)
    if terminate_on_length is None:
        terminate_on_length = not limits.can_truncate_answers
    env = AgentToolMessageEnv(
        tools,
        offer_tools(renderer, tools, initial_messages),
        reward_fn,
        num_turns,
        tool_execution=tool_execution or config.tool_execution,
        tool_timeout_seconds=tool_timeout_seconds,
        max_result_chars=max_result_chars,
        termination=config.termination,
    )
    return EnvFromMessageEnv(
        renderer,
        env,
        failed_parse_reward=failed_parse_reward,
        terminate_on_parse_error=terminate_on_parse_error,
        max_trajectory_tokens=max_trajectory_tokens,
        max_generation_tokens=max_generation_tokens,
        context_overflow_reward=context_overflow_reward,
        terminate_on_length=terminate_on_length,
        parse_error_policy=parse_error_policy or config.parse_errors,
        rollout_limits=limits,
    )


def _logs(message: Message, results: Sequence[CallResult]) -> Logs:
    """Return the calls and results as text, for the rollout files."""
    logs: Logs = {}
    for number, call in enumerate(message.get("tool_calls") or []):
        logs[f"tool_call_{number}"] = f"{call['function']['name']}({call['function']['arguments']})"
    for number, result in enumerate(results):
        logs[f"tool_result_{number}"] = get_text_content(result.message)
    return logs
