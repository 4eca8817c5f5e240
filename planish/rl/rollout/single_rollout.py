"""One episode: the policy and an environment take turns until the environment is done.

What the rollout adds to the environment's word: the reason why the episode ended, as
`Trajectory.stop_reason` and as metrics stop/REASON of the last turn (1 for the one that holds, 0
for the others, so that their means are shares of the episodes), and the part of an environment's
`rollout_limits` that only the caller of the policy can keep:

* each answer gets the tokens that `RolloutLimits.turn_tokens` leaves it;
* `sampling_turn_timeout_seconds`: a policy that takes longer for an answer has failed, by
  TimeoutError;
* `rollout_timeout_seconds` ends the episode also before the policy writes, or while it does. The
  answer under way is lost, the turns before it are kept, and an environment with a method
  `stopped_by_limit(reason)` gives the reward and metrics of the end.

An end without an action, which is that one or a first prompt that is too long, is a turn without
tokens: its reward counts, and nothing is trained on it.

The rollout opens no scope and starts no task of its own, so what an environment logs stands where
it is called.
"""

import asyncio
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from planish.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from planish.errors import NonFiniteError, UserError
from planish.rl.limits import RolloutLimits
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
from planish.runlog.evaluators import checked_metrics
from planish.types import ModelInput

OnTurn = Callable[[TokensWithLogprobs], None]
"""Told of each answer of the policy as soon as it is there; it must return at once."""


async def do_single_rollout(
    policy: TokenCompleter, env: Env, *, on_turn: OnTurn | None = None
) -> Trajectory:
    """Play `env` to its end. Errors of the environment and the policy are raised as they are."""
    turns = PolicyTurns(policy, getattr(env, "rollout_limits", None))
    first = await env.initial_observation()
    if isinstance(first, InitialObservationOverflow):
        name = f"{type(env).__name__}.initial_observation"
        reward, metrics = checked_reward(first.reward, name), checked_metrics(first.metrics, name)
        end = end_without_action(
            ModelInput.empty(), reward, StopReason.CONTEXT_OVERFLOW, metrics, first.logs
        )
        return Trajectory([end], ModelInput.empty(), StopReason.CONTEXT_OVERFLOW)
    if not isinstance(first, tuple) or len(first) != 2:
        raise UserError(
            f"{type(env).__name__}.initial_observation gave a {type(first).__name__}; an Env gives (ModelInput, stop), and one of "
            "messages is wrapped: EnvFromMessageEnv(renderer, env)"
        )
    observation, stop = first
    check_observation(observation, f"{type(env).__name__}.initial_observation gave a prompt that")
    takes_extra = accepts_extra(env)
    transitions: list[Transition] = []
    while True:
        action = await turns.answer(observation, stop)
        if action is None:
            transitions.append(await timed_out(env, observation))
            return Trajectory(transitions, observation, StopReason.ROLLOUT_TIMEOUT)
        if on_turn is not None:
            on_turn(action)
        if takes_extra:
            result = await env.step(action.tokens, extra={"stop_reason": action.stop_reason})
        else:
            result = await env.step(action.tokens)
        result = checked_result(result, env, len(transitions) + 1)
        transitions.append(played(observation, action, result))
        if result.episode_done:
            return Trajectory(
                transitions, result.next_observation, result.stop_reason or StopReason.COMPLETED
            )
        observation, stop = result.next_observation, result.next_stop_condition


@dataclass
class PolicyTurns:
    """The policy's part of an episode, within its limits."""

    policy: TokenCompleter
    limits: RolloutLimits | None

    def __post_init__(self) -> None:
        self._sampled_tokens = 0
        self._began = time.monotonic()

    async def answer(
        self, observation: Observation, stop: StopCondition
    ) -> TokensWithLogprobs | None:
        """The policy's next action; None if the time of the episode is over."""
        if self.limits is None:
            return await self.policy(observation, stop)
        left = self._seconds_left()
        if left is not None and left <= 0:
            return None
        most = self.limits.turn_tokens(observation.length, self._sampled_tokens)
        bound = {} if most is None else {"max_tokens": most}
        episode = asyncio.timeout(left)
        turn = asyncio.timeout(self.limits.sampling_turn_timeout_seconds)
        try:
            async with episode, turn:
                action = await self.policy(observation, stop, **bound)
        except TimeoutError:
            if episode.expired():
                return None
            if turn.expired():
                seconds = self.limits.sampling_turn_timeout_seconds
                raise TimeoutError(
                    f"the policy gave no answer in sampling_turn_timeout_seconds={seconds}"
                ) from None
            raise
        self._sampled_tokens += len(action.tokens)
        return action

    def _seconds_left(self) -> float | None:
        assert self.limits is not None
        seconds = self.limits.rollout_timeout_seconds
        return None if seconds is None else seconds - (time.monotonic() - self._began)


def accepts_extra(env: Env) -> bool:
    """Whether `env.step` can be told more than the tokens. Environments of older programs cannot."""
    parameters = inspect.signature(env.step).parameters
    return "extra" in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def checked_result(result: Any, env: Env, turn: int) -> StepResult:
    """What `env.step` gave; UserError if it cannot be a turn."""
    name = f"{type(env).__name__}.step"
    if not isinstance(result, StepResult):
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise UserError(f"{name} gave a {kind} in turn {turn}; give a planish.rl.types.StepResult")
    reward = checked_reward(result.reward, name, f" in turn {turn}")
    is_done = checked_done(result.episode_done, name, f" in turn {turn}")
    if not is_done:
        check_observation(
            result.next_observation, f"{name} gave a next_observation, in turn {turn}, that"
        )
    if result.stop_reason is not None and result.stop_reason not in set(StopReason):
        raise UserError(
            f"{name} gave stop_reason={result.stop_reason!r}; there are {', '.join(StopReason)}"
        )
    metrics = checked_metrics(result.metrics, f"{name}, in turn {turn},")
    return replace(result, reward=reward, episode_done=is_done, metrics=metrics)


def check_observation(observation: Any, what: str) -> None:
    if not isinstance(observation, ModelInput):
        raise UserError(
            f"{what} is a {type(observation).__name__}; give a ModelInput, such as ModelInput.from_ints(tokens)"
        )


def checked_done(episode_done: Any, name: str, where: str) -> bool:
    """Whether the episode is over; UserError for None, which is no answer, and for text, which
    Python takes for True.
    """
    value = episode_done.item() if hasattr(episode_done, "item") else episode_done
    if value not in (0, 1):
        raise UserError(f"{name} gave episode_done={episode_done!r}{where}; give True or False")
    return bool(value)


def checked_reward(reward: Any, name: str, where: str = "") -> float:
    """What `name` gave as a reward; UserError, NonFiniteError if it is a number, unless it is a
    finite one.
    """
    try:
        value = float(reward)
    except (TypeError, ValueError):
        raise UserError(f"{name} gave reward={reward!r}{where}; give a number") from None
    if not math.isfinite(value):
        raise NonFiniteError(f"{name} gave reward={value}{where}; give a finite number")
    return value


def played(observation: Observation, action: TokensWithLogprobs, result: StepResult) -> Transition:
    """A turn, with the reason of the end in its metrics if it is the last."""
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


def end_without_action(
    observation: Observation, reward: float, reason: StopReason, metrics: Metrics, logs: Logs
) -> Transition:
    return Transition(
        ob=observation,
        ac=TokensWithLogprobs([], []),
        reward=reward,
        episode_done=True,
        metrics={**metrics, **stop_metrics(reason)},
        logs=logs,
        train_on_action=False,
    )


async def timed_out(env: Env, observation: Observation) -> Transition:
    """The end of an episode whose time was over before the policy's answer was there."""
    reason = StopReason.ROLLOUT_TIMEOUT
    grade = getattr(env, "stopped_by_limit", None)
    reward, metrics = (0.0, {}) if grade is None else await grade(reason)
    logs: Logs = {"rollout_timeout": "the time was up before the answer was there"}
    name = f"{type(env).__name__}.stopped_by_limit"
    return end_without_action(
        observation, checked_reward(reward, name), reason, checked_metrics(metrics, name), logs
    )


def stop_metrics(reason: StopReason) -> Metrics:
    return {f"stop/{name}": float(name == reason) for name in StopReason}
