"""Questions whose answers a program checks: one message from the policy, one reward.

    reward = format_coef * (format - 1) + correct

`format` is 1 if the answer ends with a stop sequence and `check_format` returns True. So a wrong
format costs `format_coef`, and a right format alone earns nothing.

A check that raises UnjudgedAnswerError cannot judge the answer because of the answer's text. The
answer then counts as wrong, and the metric `unjudged` counts it. A check that raises AbstainError
cannot judge the answer for another reason. The answer is then left out of its group.

Both checks may be async. A plain check runs in a thread of its own, so that it may block. Checks
must be thread-safe, because several answers are graded at the same time.
"""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from planish import logtree
from planish.completers import StopCondition
from planish.errors import AbstainError, UnjudgedAnswerError, UserError
from planish.processes.blocking import call_function
from planish.renderers import Content, Message, Renderer, get_text_content
from planish.renderers.renderer import Messages
from planish.rl.rewards import read_verdict
from planish.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    StepResult,
    StopReason,
    Trajectory,
)
from planish.types import ModelInput


def final_step(
    renderer: Renderer,
    reward: float,
    extra: ActionExtra | None,
    metrics: Mapping[str, float] | None = None,
) -> StepResult:
    """Return the last step of an episode with one answer. Its stop reason is MAX_TOKENS if the
    answer was cut off, else COMPLETED. `reward` is that of the answer.
    """
    was_cut_off = extra is not None and extra.get("stop_reason") == "length"
    return StepResult(
        reward=reward,
        episode_done=True,
        next_observation=ModelInput.empty(),
        next_stop_condition=renderer.get_stop_sequences(),
        metrics=dict(metrics or {}),
        stop_reason=StopReason.MAX_TOKENS if was_cut_off else StopReason.COMPLETED,
    )


class ProblemEnv(Env):
    """An environment of one question and one answer."""

    def __init__(
        self,
        renderer: Renderer,
        convo_prefix: Messages | None = None,
        format_coef: float = 0.1,
        require_stop_sequence_for_format: bool = True,
    ) -> None:
        """`convo_prefix` comes before the question, such as a worked example.
        With `require_stop_sequence_for_format=False`, `format` can also be 1 for an answer that
        ends with the model's end-of-sequence token, as answers of base models do.
        """
        self.renderer = renderer
        self.convo_prefix: list[Any] = list(convo_prefix or ())
        self.format_coef = format_coef
        self.require_stop_sequence_for_format = require_stop_sequence_for_format

    @abstractmethod
    def get_question(self) -> Content:
        """Return the question: a text, or parts of text and images
        (docs/reference/renderers.md#messages).
        """

    @abstractmethod
    def check_answer(self, sample_str: str) -> bool | Awaitable[bool]:
        """Return whether `sample_str`, the text of the policy's message, is right: a bool and not a
        score.
        """

    @abstractmethod
    def check_format(self, sample_str: str) -> bool:
        """Return whether `sample_str`, the text of the message, has the format that the question
        asks for.
        """

    @abstractmethod
    def get_reference_answer(self) -> str:
        """Return the right answer, which is shown in reports."""

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Return the prompt with the question, and the renderer's stop sequences."""
        prompt = self.renderer.build_generation_prompt(self._messages())
        return prompt, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Grade the answer and end the episode."""
        message, termination = self.renderer.parse_response(action)
        text = get_text_content(message)
        with logtree.scope_header("Prompt"):
            logtree.conversation(self._messages())
        with logtree.scope_header("Policy Response"):
            logtree.conversation([message])
        needs_stop_sequence = self.require_stop_sequence_for_format
        has_ended = termination.is_stop_sequence if needs_stop_sequence else termination.is_clean
        format_score = float(has_ended and await self._call("check_format", text))
        verdict = await self._grade(text)
        correct = float(bool(verdict))
        reward = self.format_coef * (format_score - 1.0) + correct
        with logtree.scope_header("Reward"):
            logtree.table_from_dict(
                {
                    "reference_answer": self.get_reference_answer(),
                    "format_valid": bool(format_score),
                    "correct": "not judged" if verdict is None else verdict,
                    "format_coef": self.format_coef,
                    "reward": reward,
                }
            )
        metrics = {"format": format_score, "correct": correct, "unjudged": float(verdict is None)}
        return final_step(self.renderer, reward, extra, metrics)

    async def _grade(self, text: str) -> bool | None:
        """Return whether the answer is right; None if the grader cannot judge it."""
        try:
            return await self._call("check_answer", text)
        except UnjudgedAnswerError:
            return None

    async def _call(self, method: str, text: str) -> bool:
        """Return the verdict of a check, which runs in a thread unless it is async."""
        verdict = await call_function(partial(getattr(self, method), text))
        return read_verdict(verdict, f"{type(self).__name__}.{method}")

    def _messages(self) -> list[Message]:
        return [*self.convo_prefix, {"role": "user", "content": self.get_question()}]


@dataclass(frozen=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """A group of `num_envs` environments, each made by `env_thunk()`. For rollouts in worker
    processes, `env_thunk` and `episode_metrics` must be picklable: use module-level functions and
    functools.partial instead of lambdas.
    """

    env_thunk: Callable[[], Env]
    num_envs: int
    dataset_name: str = "problems"
    """Tag under which metrics of these groups are reported; "" = none."""
    episode_metrics: Callable[[Env], Metrics] | None = None
    """Returns the metrics of a finished environment. It is also called after cut-off answers."""

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise UserError(f"ProblemGroupBuilder.num_envs={self.num_envs}: give at least 1")

    async def make_envs(self) -> Sequence[Env]:
        """Return `num_envs` new environments."""
        return [self.env_thunk() for _ in range(self.num_envs)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics] | AbstainError]:
        """Return no further reward, and the metrics of each episode."""
        if self.episode_metrics is None:
            return [(0.0, {}) for _ in env_group]
        return [(0.0, self.episode_metrics(env)) for env in env_group]

    def logging_tags(self) -> list[str]:
        """Return `dataset_name` as the only tag, or no tag if it is empty."""
        return [self.dataset_name] if self.dataset_name else []
