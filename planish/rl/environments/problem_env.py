"""Questions with answers that a program checks: one message from the policy, one reward.

    reward = format_coef * (format - 1) + correct

`format` is 1 if the answer is properly ended and `check_format` holds, so a wrong form costs
`format_coef`, and a right form earns nothing by itself. An answer that cannot be judged counts as
wrong, and as `unjudged` in the metrics.
"""

import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planish import logtree
from planish.completers import StopCondition
from planish.errors import UnjudgedAnswerError, UserError
from planish.renderers import Message, Renderer, get_text_content
from planish.renderers.renderer import Messages
from planish.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Observation,
    StepResult,
    StopReason,
)
from planish.types import ModelInput


def only_step(
    renderer: Renderer,
    reward: float,
    extra: ActionExtra | None,
    metrics: Mapping[str, float] | None = None,
) -> StepResult:
    """The end of an episode of one answer: cut off, or completed."""
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
    """One question."""

    def __init__(
        self,
        renderer: Renderer,
        convo_prefix: Messages | None = None,
        format_coef: float = 0.1,
        require_stop_sequence_for_format: bool = True,
    ) -> None:
        """`convo_prefix` comes before the question, such as a worked example.
        `require_stop_sequence_for_format=False`: an answer that ends with the model's
        end-of-sequence token is also properly ended, as base models end theirs.
        """
        self.renderer = renderer
        self.convo_prefix: list[Any] = list(convo_prefix or ())
        self.format_coef = format_coef
        self.require_stop_sequence_for_format = require_stop_sequence_for_format

    @abstractmethod
    def get_question(self) -> str:
        """What the policy is asked."""

    @abstractmethod
    def check_answer(self, sample_str: str) -> bool | Awaitable[bool]:
        """Whether the text of the policy's message is right; no score. A check that takes long is
        an async method.
        """

    @abstractmethod
    def check_format(self, sample_str: str) -> bool:
        """Whether the text has the form that was asked for."""

    @abstractmethod
    def get_reference_answer(self) -> str:
        """The right answer, for the reports."""

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        prompt = self.renderer.build_generation_prompt(self._messages())
        return prompt, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        message, termination = self.renderer.parse_response(action)
        text = get_text_content(message)
        strict = self.require_stop_sequence_for_format
        ended = termination.is_stop_sequence if strict else termination.is_clean
        form = float(ended and self._is_true("check_format", self.check_format(text)))
        verdict = await self._judge(text)
        correct = float(bool(verdict))
        reward = self.format_coef * (form - 1.0) + correct
        with logtree.scope_header("Prompt"):
            logtree.conversation(self._messages())
        with logtree.scope_header("Policy Response"):
            logtree.conversation([message])
        with logtree.scope_header("Reward"):
            logtree.table_from_dict(
                {
                    "reference_answer": self.get_reference_answer(),
                    "format_valid": bool(form),
                    "correct": "not judged" if verdict is None else verdict,
                    "format_coef": self.format_coef,
                    "reward": reward,
                }
            )
        metrics = {"format": form, "correct": correct, "unjudged": float(verdict is None)}
        return only_step(self.renderer, reward, extra, metrics)

    async def _judge(self, text: str) -> bool | None:
        """Whether the answer is right; None if nobody can say."""
        try:
            verdict = self.check_answer(text)
            verdict = await verdict if inspect.isawaitable(verdict) else verdict
        except UnjudgedAnswerError:
            return None
        return self._is_true("check_answer", verdict)

    def _is_true(self, method: str, verdict: Any) -> bool:
        """As Python has it, but a score of 0.5 or a judge's "No" is not taken for a yes."""
        value = verdict.item() if hasattr(verdict, "item") else verdict
        if isinstance(value, str) or (isinstance(value, (int, float)) and value not in (0, 1)):
            raise UserError(
                f"{type(self).__name__}.{method} gave {value!r}; give True or False (for scores there is RewardEnv)"
            )
        return bool(value)

    def _messages(self) -> list[Message]:
        return [*self.convo_prefix, {"role": "user", "content": self.get_question()}]


@dataclass(frozen=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """`num_envs` times the same question. It pickles if `env_thunk` does: give a functools.partial,
    not a lambda.
    """

    env_thunk: Callable[[], Env]
    num_envs: int
    dataset_name: str = "problems"

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise UserError(f"ProblemGroupBuilder.num_envs={self.num_envs}: give at least 1")

    async def make_envs(self) -> Sequence[Env]:
        return [self.env_thunk() for _ in range(self.num_envs)]

    def logging_tags(self) -> list[str]:
        return [self.dataset_name]
