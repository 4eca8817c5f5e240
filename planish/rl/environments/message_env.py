"""Environments that exchange messages with the policy, and the adapter that makes them environments
of tokens.

A `MessageEnv` handles messages; `EnvFromMessageEnv` handles tokens. The adapter parses the sampled
tokens, checks the answer, passes the message to the environment, and builds the next prompt by
appending to the last one (planish/rl/environments/conversation.py). Each episode has its own
adapter and environment.

A turn ends the episode in these cases, checked in this order:

1. The answer was cut off by its token limit: max_tokens, reward `context_overflow_reward`.
2. The answer has no stop sequence: parse_error, reward `failed_parse_reward`.
3. The environment ends it: the environment's reward and stop reason (default: completed).
4. The next prompt leaves no tokens for an answer: context_overflow, reward
   `context_overflow_reward`.
5. One of the `rollout_limits` is reached: the turn's reward plus the reward of
   `MessageEnv.stopped_by_limit`.

A `ParseErrorPolicy` adds a case between 2 and 3: the tool calls of the answer are all unreadable.
The adapter adds the metrics parse_error, max_tokens_reached and context_overflow to those of the
environment. They are 0 or 1 in every turn, so their means are fractions of all turns.
"""

# pyright: reportUnnecessaryIsInstance=false

import asyncio
import time
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass, field, replace

from planish import logtree
from planish.completers import StopCondition
from planish.errors import UserError
from planish.renderers import Message, Renderer
from planish.rl.environments.conversation import Conversation
from planish.rl.environments.message_turn import Turn, TurnOutcome, log_turn
from planish.rl.limits import ParseErrorPolicy, RolloutLimits
from planish.rl.rewards import read_bool, read_graded, read_reward
from planish.rl.types import (
    Action,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Logs,
    Metrics,
    Observation,
    StepResult,
    StopReason,
)
from planish.types import EncodedTextChunk


@dataclass
class MessageStepResult:
    """The result of one message of the policy."""

    reward: float
    episode_done: bool
    next_messages: list[Message]
    """The whole conversation: all earlier messages, the policy's answer, and the messages after
    it.
    """
    metrics: Metrics = field(default_factory=Metrics)
    logs: Logs = field(default_factory=Logs)
    next_stop_condition: StopCondition | None = None
    """Stop condition of the next answer; None = the renderer's stop sequences. If it is given, the
    adapter does not require a stop sequence of the renderer at the end of that answer.
    """
    stop_reason: StopReason | None = None
    """Why the episode is done; None = completed."""


class MessageEnv(ABC):
    """One episode of messages."""

    @abstractmethod
    async def initial_observation(self) -> list[Message]:
        """Return the messages of the first prompt."""

    @abstractmethod
    async def step(self, message: Message) -> MessageStepResult:
        """Apply the policy's message."""

    async def observe_truncated_response(self, message: Message) -> list[Message] | None:
        """Append a message that was cut off, without acting on it, and return the whole
        conversation. Return None (the default) if the environment cannot continue after such a
        message.

        The adapter calls this only with `terminate_on_length=False`.
        """
        return None

    async def add_messages(self, messages: list[Message]) -> list[Message] | None:
        """Append `messages` and return the whole conversation. The adapter calls this with two
        messages: an answer whose tool calls are unreadable, and the adapter's reply.

        If the result is None (the default), the adapter adds these messages to the prompt, and the
        environment does not see them.
        """
        return None

    async def stopped_by_limit(self, reason: StopReason) -> tuple[float, Metrics]:
        """Return what to add to the reward and the metrics of the last turn, after a limit ended
        the episode.
        """
        return 0.0, {}

    def set_step_timeout(self, timeout: asyncio.Timeout) -> None:  # noqa: B027  (optional)
        """Receive the timeout that will interrupt the next `step` when the episode's time is over.
        It is called before each `step`.

        An environment that grades within `step` may switch the timeout off with
        `timeout.reschedule(None)`. Otherwise a slow grader could discard an answer that came in
        time.
        """

    def limit_tool_calls(self, max_tool_calls: int) -> None:
        """Limit the tool calls of the episode; at the limit, it ends with the stop reason
        max_tool_calls. Raises UserError if the environment does not support this.
        """
        raise UserError(
            f"{type(self).__name__} does not count tool calls; leave max_tool_calls out of its "
            "rollout_limits"
        )


@dataclass(eq=False)
class EnvFromMessageEnv(Env):
    """The environment of tokens for a MessageEnv."""

    renderer: Renderer
    message_env: MessageEnv
    failed_parse_reward: float = -1.0
    """Reward of an answer without a stop sequence."""
    terminate_on_parse_error: bool = True
    """Whether an answer without a stop sequence ends the episode. If not, the answer is dropped and
    the policy gets the same prompt again; this needs `rollout_limits` that end the episode.
    """
    max_trajectory_tokens: int | None = None
    """The model's context window; None = no limit."""
    max_generation_tokens: int | None = None
    """Number of tokens to reserve for an answer; None = 0."""
    context_overflow_reward: float = -0.1
    """Reward of an answer that was cut off, or whose next prompt leaves no tokens for an answer."""
    terminate_on_length: bool = True
    """Whether an answer that was cut off ends the episode. If not, the answer stays and the episode
    continues; this needs `rollout_limits` that end the episode.
    """
    parse_error_policy: ParseErrorPolicy | None = None
    """Replaces `failed_parse_reward` and `terminate_on_parse_error`."""
    rollout_limits: RolloutLimits | None = None

    def __post_init__(self) -> None:
        self._check_limits()
        self._num_turns = 0
        self._num_sampled_tokens = 0
        self._consecutive_unreadable = 0
        self._env_stop_condition: StopCondition | None = None

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Return the first prompt, or an InitialObservationOverflow if it is too long."""
        self._start_time = time.monotonic()
        messages = await self.message_env.initial_observation()
        self._conversation = Conversation(self.renderer, messages)
        with logtree.scope_header("Prompt"):
            logtree.conversation(messages)
        length = self._conversation.prompt.length
        # If the environment needed all of the time for this prompt, return the prompt. The rollout
        # then ends the episode with ROLLOUT_TIMEOUT.
        if self._overflows() or self._reached_limit() not in (None, StopReason.ROLLOUT_TIMEOUT):
            limit = self.max_trajectory_tokens or self._limits.max_trajectory_tokens
            return InitialObservationOverflow(
                reward=self.context_overflow_reward,
                metrics={**_stop_metrics(StopReason.CONTEXT_OVERFLOW), "parse_error": 0.0},
                logs={
                    "initial_observation_overflow": f"the prompt has {length} tokens, and "
                    f"max_trajectory_tokens={limit} with "
                    f"max_generation_tokens={self.max_generation_tokens} leaves no room for an "
                    "answer"
                },
            )
        return self._conversation.prompt, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Parse the policy's tokens, pass the message to the environment, and return the reward and
        the next prompt.
        """
        self._num_turns += 1
        self._num_sampled_tokens += len(action)
        parsed, termination = self.renderer.parse_response(action)
        turn = Turn(self._conversation.with_call_ids(parsed), list(action))
        prompt = self._conversation.prompt
        if extra is not None and extra.get("stop_reason") == "length":
            outcome = await self._handle_truncated(turn)
        elif not termination.is_clean and self._env_stop_condition is None:
            outcome = self._handle_malformed()
        elif self.parse_error_policy is not None and turn.is_unreadable:
            outcome = await self._handle_unreadable(turn, self.parse_error_policy)
        else:
            self._consecutive_unreadable = 0
            outcome = await self._step_env(turn)
        outcome = await self._apply_limits(outcome)
        self._env_stop_condition = outcome.next_stop_condition
        log_turn(self._num_turns, turn, outcome)
        return StepResult(
            reward=outcome.reward,
            episode_done=outcome.stop_reason is not None,
            next_observation=self._conversation.prompt
            if outcome.stop_reason is None
            else prompt.append(EncodedTextChunk(list(action))),
            next_stop_condition=outcome.next_stop_condition or self.renderer.get_stop_sequences(),
            metrics={
                **outcome.metrics,
                **_stop_metrics(outcome.stop_reason),
                "parse_error": float(outcome.is_parse_error),
            },
            logs=outcome.logs,
            stop_reason=outcome.stop_reason,
            train_on_action=outcome.train_on_action,
        )

    async def stopped_by_limit(self, reason: StopReason) -> tuple[float, Metrics]:
        """Return the environment's last reward and metrics. The rollout calls this when the time
        limit ended the episode while the policy was sampling.
        """
        return await self.message_env.stopped_by_limit(reason)

    async def _handle_truncated(self, turn: Turn) -> TurnOutcome:
        messages = None
        if not self.terminate_on_length:
            messages = await self.message_env.observe_truncated_response(turn.message)
        if messages is None:
            return TurnOutcome(self.context_overflow_reward, StopReason.MAX_TOKENS)
        self._conversation.update(turn.message, turn.action, messages)
        logs: Logs = {"truncated_turn": "the answer was cut off; the episode continues after it"}
        return TurnOutcome(0.0, logs=logs, next_stop_condition=self._env_stop_condition)

    def _handle_malformed(self) -> TurnOutcome:
        logs: Logs = {"parse_error": "the answer has no stop sequence"}
        policy = self.parse_error_policy
        if policy is not None:
            return TurnOutcome(
                policy.terminal_reward,
                StopReason.PARSE_ERROR,
                logs=logs,
                is_parse_error=True,
                train_on_action=not policy.mask_error_turns,
            )
        stop_reason = StopReason.PARSE_ERROR if self.terminate_on_parse_error else None
        return TurnOutcome(self.failed_parse_reward, stop_reason, logs=logs, is_parse_error=True)

    async def _handle_unreadable(self, turn: Turn, policy: ParseErrorPolicy) -> TurnOutcome:
        self._consecutive_unreadable += 1
        details = "\n".join(call["error"] for call in turn.message.get("unparsed_tool_calls", []))
        outcome = TurnOutcome(
            0.0 - policy.penalty_per_error,
            logs={"parse_error": details},
            is_parse_error=True,
            train_on_action=not policy.mask_error_turns,
            next_stop_condition=self._env_stop_condition,
        )
        if self._consecutive_unreadable > policy.max_consecutive:
            return replace(
                outcome, reward=policy.terminal_reward, stop_reason=StopReason.PARSE_ERROR
            )
        reply: Message = {"role": "user", "content": policy.retry_message(details)}
        messages = await self.message_env.add_messages([turn.message, reply])
        if messages is None:
            self._conversation.insert(turn.message, turn.action, reply)
        else:
            self._conversation.update(turn.message, turn.action, messages)
        return replace(outcome, replies=[reply])

    async def _step_env(self, turn: Turn) -> TurnOutcome:
        timeout = asyncio.timeout(self._limits.seconds_left(self._start_time))
        self.message_env.set_step_timeout(timeout)
        try:
            async with timeout:
                step = await self.message_env.step(deepcopy(turn.message))
        except TimeoutError:
            if not timeout.expired():
                raise
            logs: Logs = {"rollout_timeout": "the environment was still processing the answer"}
            return await self._stop_by_limit(
                TurnOutcome(0.0, logs=logs), StopReason.ROLLOUT_TIMEOUT
            )
        name = f"{type(self.message_env).__name__}.step"
        if not isinstance(step, MessageStepResult):
            raise UserError(
                f"{name} returned a {type(step).__name__} in turn {self._num_turns}; return a "
                "MessageStepResult"
            )
        replies = self._conversation.replies(turn.message, step.next_messages)
        where = f" in turn {self._num_turns}"
        outcome = TurnOutcome(
            read_reward(step.reward, name, where),
            metrics=step.metrics,
            logs=step.logs,
            next_stop_condition=step.next_stop_condition,
            replies=step.next_messages if replies is None else replies,
        )
        if read_bool(step.episode_done, f"{name} returned episode_done=", where):
            return replace(outcome, stop_reason=step.stop_reason or StopReason.COMPLETED)
        self._conversation.update(turn.message, turn.action, step.next_messages)
        return outcome

    async def _apply_limits(self, outcome: TurnOutcome) -> TurnOutcome:
        """Return the outcome of a turn, with a stop reason if a limit allows no further turn."""
        if outcome.stop_reason is not None:
            return outcome
        if self._overflows():
            return replace(
                outcome,
                reward=self.context_overflow_reward,
                stop_reason=StopReason.CONTEXT_OVERFLOW,
            )
        reason = self._reached_limit()
        return outcome if reason is None else await self._stop_by_limit(outcome, reason)

    async def _stop_by_limit(self, outcome: TurnOutcome, reason: StopReason) -> TurnOutcome:
        """Return the outcome of a turn that is the last one because of a limit."""
        name = f"{type(self.message_env).__name__}.stopped_by_limit"
        reward, metrics = read_graded(await self.message_env.stopped_by_limit(reason), name)
        return replace(
            outcome,
            reward=outcome.reward + reward,
            stop_reason=reason,
            metrics={**outcome.metrics, **metrics},
        )

    @property
    def _limits(self) -> RolloutLimits:
        return self.rollout_limits or RolloutLimits()

    def _reached_limit(self) -> StopReason | None:
        return self._limits.reached(
            turns=self._num_turns,
            trajectory_tokens=self._conversation.prompt.length,
            sampled_tokens=self._num_sampled_tokens,
            seconds=time.monotonic() - self._start_time,
        )

    def _overflows(self) -> bool:
        num_tokens = self._conversation.prompt.length + (self.max_generation_tokens or 0)
        return self.max_trajectory_tokens is not None and num_tokens > self.max_trajectory_tokens

    def _check_limits(self) -> None:
        if self._limits.max_tool_calls is not None:
            self.message_env.limit_tool_calls(self._limits.max_tool_calls)
        retries_malformed = not self.terminate_on_parse_error and self.parse_error_policy is None
        if (
            retries_malformed or not self.terminate_on_length
        ) and not self._limits.ends_every_episode:
            option = "terminate_on_parse_error" if retries_malformed else "terminate_on_length"
            raise UserError(
                f"{option}=False may continue forever; give rollout_limits with max_turns, "
                "max_sampled_tokens or rollout_timeout_seconds"
            )


def _stop_metrics(stop_reason: StopReason | None) -> Metrics:
    """Return the metrics max_tokens_reached and context_overflow of a turn."""
    return {
        "max_tokens_reached": float(stop_reason is StopReason.MAX_TOKENS),
        "context_overflow": float(stop_reason is StopReason.CONTEXT_OVERFLOW),
    }
