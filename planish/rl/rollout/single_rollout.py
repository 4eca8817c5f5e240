"""One episode: the policy and an environment take turns until the environment is done.

The rollout records why the episode ended, as `Trajectory.stop_reason` and as metrics stop/REASON of
the last turn. The metric of the actual reason is 1 and the others are 0, so their means are
fractions of the episodes. The environment has to apply most of its `rollout_limits` itself. The
rollout applies only those that limit calls of the policy:

* `RolloutLimits.max_answer_tokens` limits the tokens of each answer.
* `sampling_turn_timeout_seconds`: a policy that takes longer for an answer fails with TimeoutError.
* `rollout_timeout_seconds` ends the episode, even while the policy samples. The incomplete answer
  is lost and the turns before it are kept. If the environment has a method
  `stopped_by_limit(reason)`, this method returns the last reward and metrics.

If the time is over before an answer is complete, or the first prompt is too long, the episode gets
a last turn without tokens. The reward of that turn counts, but it has no tokens to train on.

The rollout opens no log scope and starts no task, so the environment logs to the caller's scope.
"""

# pyright: reportUnnecessaryIsInstance=false

import asyncio
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from planish.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from planish.errors import UserError
from planish.rl.limits import RolloutLimits
from planish.rl.rewards import read_bool, read_graded, read_reward
from planish.rl.types import (
    Env,
    InitialObservationOverflow,
    Logs,
    Metrics,
    Observation,
    StepResult,
    StopReason,
    Trajectory,
    Transition,
)
from planish.runlog.evaluators import validate_metrics
from planish.types import ModelInput

OnTurn = Callable[[TokensWithLogprobs], None]
"""Called with each answer of the policy as soon as it is sampled; it must return at once."""


async def do_single_rollout(
    policy: TokenCompleter, env: Env, *, on_turn: OnTurn | None = None
) -> Trajectory:
    """Roll out one episode. Errors of the environment and the policy are raised unchanged."""
    turns = PolicyTurns(policy, getattr(env, "rollout_limits", None))
    initial = await env.initial_observation()
    if isinstance(initial, InitialObservationOverflow):
        name = f"{type(env).__name__}.initial_observation"
        reward = read_reward(initial.reward, name)
        metrics = validate_metrics(initial.metrics, name)
        last_turn = transition_without_action(
            ModelInput.empty(), reward, StopReason.CONTEXT_OVERFLOW, metrics, initial.logs
        )
        return Trajectory([last_turn], ModelInput.empty(), StopReason.CONTEXT_OVERFLOW)
    if not isinstance(initial, tuple) or len(initial) != 2:
        raise UserError(
            f"{type(env).__name__}.initial_observation returned a {type(initial).__name__}; return "
            "(ModelInput, stop), or wrap an environment of messages in "
            "EnvFromMessageEnv(renderer, env)"
        )
    observation, stop = initial
    check_observation(
        observation, f"{type(env).__name__}.initial_observation returned a prompt that"
    )
    takes_extra = accepts_extra(env)
    transitions: list[Transition] = []
    while True:
        action = await turns.answer(observation, stop)
        if action is None:
            transitions.append(await timeout_transition(env, observation))
            return Trajectory(transitions, observation, StopReason.ROLLOUT_TIMEOUT)
        if on_turn is not None:
            on_turn(action)
        if takes_extra:
            result = await env.step(action.tokens, extra={"stop_reason": action.stop_reason})
        else:
            result = await env.step(action.tokens)
        result = validate_step_result(result, env, len(transitions) + 1)
        transitions.append(make_transition(observation, action, result))
        if result.episode_done:
            return Trajectory(
                transitions, result.next_observation, result.stop_reason or StopReason.COMPLETED
            )
        observation, stop = result.next_observation, result.next_stop_condition


@dataclass
class PolicyTurns:
    """Calls the policy within the limits of an episode."""

    policy: TokenCompleter
    limits: RolloutLimits | None

    def __post_init__(self) -> None:
        self._sampled_tokens = 0
        self._start_time = time.monotonic()

    async def answer(
        self, observation: Observation, stop: StopCondition
    ) -> TokensWithLogprobs | None:
        """Return the policy's next action; None if `rollout_timeout_seconds` is over."""
        if self.limits is None:
            return await self.policy(observation, stop)
        seconds_left = self.limits.seconds_left(self._start_time)
        if seconds_left is not None and seconds_left <= 0:
            return None
        max_tokens = self.limits.max_answer_tokens(observation.length, self._sampled_tokens)
        options = {} if max_tokens is None else {"max_tokens": max_tokens}
        episode = asyncio.timeout(seconds_left)
        turn = asyncio.timeout(self.limits.sampling_turn_timeout_seconds)
        try:
            async with episode, turn:
                action = await self.policy(observation, stop, **options)
        except TimeoutError:
            if episode.expired():
                return None
            if turn.expired():
                seconds = self.limits.sampling_turn_timeout_seconds
                raise TimeoutError(
                    f"the policy returned no answer within sampling_turn_timeout_seconds={seconds}"
                ) from None
            raise
        self._sampled_tokens += len(action.tokens)
        return action


def accepts_extra(env: Env) -> bool:
    """Return whether `env.step` takes `extra`. Environments written for older interfaces do not."""
    parameters = inspect.signature(env.step).parameters
    return "extra" in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def validate_step_result(result: Any, env: Env, turn: int) -> StepResult:
    """Return the result of `env.step` with its values as plain numbers. Raises UserError or
    NonFiniteError for an invalid value.
    """
    name = f"{type(env).__name__}.step"
    if not isinstance(result, StepResult):
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise UserError(
            f"{name} returned a {kind} in turn {turn}; return a planish.rl.types.StepResult"
        )
    where = f" in turn {turn}"
    reward = read_reward(result.reward, name, where)
    is_done = read_bool(result.episode_done, f"{name} returned episode_done=", where)
    if not is_done:
        check_observation(
            result.next_observation, f"{name} returned a next_observation, in turn {turn}, that"
        )
    if result.stop_reason is not None and result.stop_reason not in set(StopReason):
        raise UserError(
            f"{name} returned stop_reason={result.stop_reason!r}; return {', '.join(StopReason)}"
        )
    metrics = validate_metrics(result.metrics, f"{name}, in turn {turn},")
    is_trained = read_bool(result.train_on_action, f"{name} returned train_on_action=", where)
    return replace(
        result, reward=reward, episode_done=is_done, metrics=metrics, train_on_action=is_trained
    )


def check_observation(observation: Any, what: str) -> None:
    """Raise UserError unless `observation` is a ModelInput. `what` begins the message."""
    if not isinstance(observation, ModelInput):
        raise UserError(
            f"{what} is a {type(observation).__name__}; give a ModelInput, such as "
            "ModelInput.from_ints(tokens)"
        )


def make_transition(
    observation: Observation, action: TokensWithLogprobs, result: StepResult
) -> Transition:
    """Return a turn. The metrics of the last turn also have the stop reason."""
    reason = (result.stop_reason or StopReason.COMPLETED) if result.episode_done else None
    return Transition(
        ob=observation,
        ac=action,
        reward=result.reward,
        episode_done=result.episode_done,
        metrics=result.metrics if reason is None else {**result.metrics, **stop_metrics(reason)},
        logs=result.logs,
        train_on_action=result.train_on_action,
    )


def transition_without_action(
    observation: Observation, reward: float, reason: StopReason, metrics: Metrics, logs: Logs
) -> Transition:
    """Return the last turn of an episode that ended without an action."""
    return Transition(
        ob=observation,
        ac=TokensWithLogprobs([], []),
        reward=reward,
        episode_done=True,
        metrics={**metrics, **stop_metrics(reason)},
        logs=logs,
        train_on_action=False,
    )


async def timeout_transition(env: Env, observation: Observation) -> Transition:
    """Return the last turn of an episode whose time was over before the policy had answered."""
    reason = StopReason.ROLLOUT_TIMEOUT
    grade = getattr(env, "stopped_by_limit", None)
    name = f"{type(env).__name__}.stopped_by_limit"
    reward, metrics = (0.0, {}) if grade is None else read_graded(await grade(reason), name)
    logs: Logs = {"rollout_timeout": "the time was over before the policy had answered"}
    return transition_without_action(observation, reward, reason, metrics, logs)


def stop_metrics(reason: StopReason) -> Metrics:
    """Return stop/NAME for every stop reason: 1 for `reason`, 0 for the others."""
    return {f"stop/{name}": float(name == reason) for name in StopReason}
