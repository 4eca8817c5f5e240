"""Run environments of the verifiers library (https://github.com/PrimeIntellect-ai/verifiers) as
environments of planish.

In verifiers, the environment calls the model. In planish, the training loop calls the environment.
To bridge the two, each verifiers rollout runs as an asyncio task with a `ProxyModel`. When the
rollout requests a completion, `VerifiersEnv` returns the prompt as its observation. The sampled
action then becomes the completion. So seeds, retries, reports, evaluations and worker processes
work as in any other environment.

The next prompt contains the exact tokens that were sampled, not a new tokenisation of their text
(planish/rl/environments/conversation.py). Only if an environment rewrites its history is the prompt
rendered anew. The environment's rubric computes rewards and metrics for a whole group at once.
Rewards and advantages that an environment assigns to single turns are not used; a warning says so.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish import logtree
from planish.completers import StopCondition
from planish.errors import PlanishError, UserError
from planish.integrations.verifiers.library import (
    POLICY_NAME,
    Completion,
    CompletionRequest,
    PromptTooLong,
    policy_client,
)
from planish.integrations.verifiers.messages import (
    answer_fields,
    read_answer,
    read_message,
    read_tool,
)
from planish.renderers import Message, Renderer
from planish.renderers.renderer import with_tools
from planish.rl.environments.conversation import Conversation
from planish.rl.rewards import read_reward
from planish.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    Observation,
    StepResult,
    StopReason,
    Trajectory,
)
from planish.runlog.evaluators import validate_metrics
from planish.types import ModelInput

_log = logging.getLogger(__name__)
_tags_with_turn_rewards: set[str] = set()
"""The environments of which this process has warned."""
_STOP_REASONS = {
    "timeout_reached": StopReason.ROLLOUT_TIMEOUT,
    "prompt_too_long": StopReason.CONTEXT_OVERFLOW,
    "max_total_completion_tokens_reached": StopReason.MAX_SAMPLED_TOKENS,
}
"""The stop conditions of verifiers that are limits. With any other, the episode is completed."""


@dataclass
class LatestAnswer:
    """The policy's latest answer, as the environment received it."""

    messages: list[Message]
    """The conversation including the answer, in the environment's form."""
    answer: Message
    """The answer in the renderer's form."""
    action: Action
    """The sampled tokens of the answer."""
    tools: Sequence[Any]


class ProxyModel:
    """The proxy model of one verifiers rollout. It handles one request at a time; concurrent
    requests wait.
    """

    def __init__(self, renderer: Renderer, max_prompt_tokens: int | None) -> None:
        self.prompts: asyncio.Queue[ModelInput] = asyncio.Queue()
        """The prompts that the policy has to answer."""
        self.messages: list[Message] = []
        """The messages of the newest prompt."""
        self._renderer = renderer
        self._max_prompt_tokens = max_prompt_tokens
        self._request_lock = asyncio.Lock()
        self._action: asyncio.Future[tuple[Action, bool]] | None = None
        self._conversation: Conversation | None = None
        self._latest: LatestAnswer | None = None

    async def complete(self, request: CompletionRequest) -> Completion:
        """Return the policy's answer to a request of the rollout. Raise PromptTooLong if the prompt
        has more than `max_prompt_tokens` tokens.
        """
        async with self._request_lock:
            messages = [read_message(message) for message in request.messages]
            tools = [read_tool(tool) for tool in request.tools]
            conversation = self._next_conversation(messages, tools)
            limit = self._max_prompt_tokens
            if limit is not None and conversation.prompt.length > limit:
                raise PromptTooLong
            self.messages = conversation.messages
            self._action = asyncio.get_running_loop().create_future()
            self.prompts.put_nowait(conversation.prompt)
            action, is_cut_off = await self._action
            answer = conversation.with_call_ids(self._renderer.parse_response(action).message)
            fields = answer_fields(answer)
            self._conversation = conversation
            self._latest = LatestAnswer([*messages, read_answer(fields)], answer, action, tools)
            return Completion(fields, action, conversation.prompt.length, is_cut_off)

    def provide_action(self, action: Action, is_cut_off: bool) -> bool:
        """Give the policy's action to the waiting rollout. Return False if the rollout no longer
        waits for it.
        """
        assert self._action is not None
        if self._action.done():
            return False
        self._action.set_result((action, is_cut_off))
        return True

    def _next_conversation(self, messages: list[Message], tools: Sequence[Any]) -> Conversation:
        """Return the conversation of the next prompt. If `messages` continues the previous
        conversation with the same tools, append the new messages to it. Otherwise render a new
        conversation.
        """
        latest, conversation = self._latest, self._conversation
        if latest is not None and conversation is not None and tools == latest.tools:
            num_known = len(latest.messages)
            if messages[:num_known] == latest.messages:
                conversation.update(
                    latest.answer,
                    latest.action,
                    [*conversation.messages, latest.answer, *messages[num_known:]],
                )
                return conversation
        return Conversation(self._renderer, with_tools(self._renderer, messages, tools))


@dataclass(eq=False)
class VerifiersEnv(Env):
    """One rollout of a verifiers environment on one row of its data."""

    environment: Any
    """A verifiers.Environment, which many rollouts may share."""
    row: Mapping[str, Any]
    renderer: Renderer
    max_prompt_tokens: int | None = None
    """A prompt with more tokens ends the rollout."""

    def __post_init__(self) -> None:
        self.state: Any = None
        """The final state of verifiers; None until the rollout has ended."""
        self._proxy = ProxyModel(self.renderer, self.max_prompt_tokens)
        self._rollout: asyncio.Task[Any] | None = None
        self._num_turns = 0

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        client = policy_client(self._proxy.complete)
        self._rollout = asyncio.create_task(
            self.environment.rollout(dict(self.row), client, POLICY_NAME, {})
        )
        prompt = await self._next_prompt()
        with logtree.scope_header("Prompt"):
            logtree.conversation(self._proxy.messages)
        if prompt is None:
            stop_condition = self.state.get("stop_condition") or "no stop condition"
            return InitialObservationOverflow(
                logs={"rollout": f"it ended without a request to the policy ({stop_condition})"}
            )
        return prompt, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        self._num_turns += 1
        is_cut_off = extra is not None and extra.get("stop_reason") == "length"
        num_known_messages = len(self._proxy.messages)
        was_delivered = self._proxy.provide_action(action, is_cut_off)
        prompt = await self._next_prompt()
        with logtree.scope_header(f"Turn {self._num_turns}"):
            answer = self.renderer.parse_response(action).message
            replies = self._proxy.messages[num_known_messages + 1 :] if prompt is not None else []
            logtree.conversation([answer, *replies])
        return StepResult(
            reward=0.0,
            episode_done=prompt is None,
            next_observation=prompt or ModelInput.empty(),
            next_stop_condition=self.renderer.get_stop_sequences(),
            stop_reason=self._stop_reason(is_cut_off) if prompt is None else None,
            train_on_action=was_delivered,
        )

    async def close(self) -> None:
        """Cancel the rollout if it is still running, and wait until it has cleaned up."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)

    async def _next_prompt(self) -> ModelInput | None:
        """Return the next prompt; None if the rollout has ended. If it failed, raise
        its error.
        """
        assert self._rollout is not None
        prompt_task = asyncio.ensure_future(self._proxy.prompts.get())
        try:
            await asyncio.wait({prompt_task, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if prompt_task.done():
                return prompt_task.result()
        finally:
            prompt_task.cancel()
        self.state = self._rollout.result()
        error = self.state.get("error")
        if error is not None:
            # verifiers wraps errors of the model in a ModelError.
            raise error.__cause__ if isinstance(error.__cause__, PlanishError) else error
        return None

    def _stop_reason(self, is_cut_off: bool) -> StopReason:
        condition = self.state.get("stop_condition")
        if condition in _STOP_REASONS:
            return _STOP_REASONS[condition]
        if is_cut_off:
            return StopReason.MAX_TOKENS
        is_limit = condition == "max_turns_reached" and self.environment.max_turns > 1
        return StopReason.MAX_TURNS if is_limit else StopReason.COMPLETED


@dataclass(frozen=True)
class VerifiersGroup(EnvGroupBuilder):
    """`num_envs` rollouts of one row. It can be pickled only if `load` and `make_renderer` can: use
    functools.partial instead of a lambda.
    """

    load: Callable[[], Any]
    """Returns the verifiers.Environment. It is called in the process that runs the rollouts."""
    make_renderer: Callable[[], Renderer]
    row: Mapping[str, Any]
    num_envs: int
    max_prompt_tokens: int | None = None
    tag: str = "verifiers"
    _envs: list[VerifiersEnv] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise UserError(f"VerifiersGroup.num_envs={self.num_envs}: give at least 1")

    async def make_envs(self) -> Sequence[Env]:
        environment, renderer = self.load(), self.make_renderer()
        envs = [
            VerifiersEnv(environment, self.row, renderer, self.max_prompt_tokens)
            for _ in range(self.num_envs)
        ]
        self._envs.extend(envs)
        return envs

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Return the rubric's reward and metrics of each rollout. A rollout that ended without a
        request to the policy gets reward 0.
        """
        states = [
            env.state
            for env in env_group
            if isinstance(env, VerifiersEnv) and env.state["trajectory"]
        ]
        if states:
            environment = self.load()
            warn_of_turn_rewards(states, self.tag)
            if environment.score_rollouts:
                await environment.rubric.score_group(states)
            else:
                await environment.rubric.dummy_score_group(states)
            for state in states:
                await environment.rubric.cleanup(state)
        return [
            _reward_and_metrics(env.state) for env in env_group if isinstance(env, VerifiersEnv)
        ]

    async def cleanup(self) -> None:
        envs = list(self._envs)
        self._envs.clear()
        for env in envs:
            await env.close()

    def logging_tags(self) -> list[str]:
        return [self.tag]


def warn_of_turn_rewards(states: Sequence[Any], tag: str) -> None:
    """Log, once in a process for each environment, that single turns have rewards or advantages of
    their own. `states` are those of rollouts that have not been scored.
    """
    names = {
        name
        for state in states
        for step in state["trajectory"]
        for name in ("reward", "advantage")
        if step.get(name) is not None
    }
    if names and tag not in _tags_with_turn_rewards:
        _tags_with_turn_rewards.add(tag)
        _log.warning(
            "%s: the environment sets the %s of single turns, which is not used; a rollout is trained "
            "on the reward of its rubric",
            tag,
            " and the ".join(sorted(names)),
        )


def _reward_and_metrics(state: Any) -> tuple[float, Metrics]:
    if not state["trajectory"]:
        return 0.0, {}
    metrics = validate_metrics(state["metrics"] or {}, "the rubric")
    reward = read_reward(state["reward"], "the rubric")
    return reward, {**metrics, "truncated": float(state["is_truncated"])}
