"""Ask a model one question: sample answers, or score the given choices."""

from dataclasses import dataclass, replace
from functools import partial
from string import ascii_uppercase as LETTERS
from typing import Any

from planish import SamplingClient
from planish.completers import derived_seed
from planish.errors import UserError
from planish.evaluation.types import (
    ChosenAnswer,
    Question,
    SampledAnswer,
    SampledTask,
    Sampling,
    ScoredChoice,
    Verdict,
)
from planish.processes.blocking import call_function
from planish.processes.interruption import gather_or_cancel
from planish.renderers import Message, Renderer, get_text_content
from planish.reports.rollout_tokens import decode_keys
from planish.rl.rewards import read_bool
from planish.rl.types import prompt_id
from planish.types import EncodedTextChunk, ModelInput, SamplingParams


@dataclass(frozen=True)
class RenderedQuestion:
    """A question with its tokens."""

    question: Question
    prompt: ModelInput
    choice_tokens: tuple[list[int], ...] = ()
    """The tokens of the assistant message after the prompt, for each choice."""


def render_question(question: Question, renderer: Renderer) -> RenderedQuestion:
    """Render a question whose answers are sampled."""
    return RenderedQuestion(question, renderer.build_generation_prompt(question.messages))


def render_choices(question: Question, renderer: Renderer) -> RenderedQuestion:
    """Render a question with each of its choices as the assistant's message.

    Each message includes its end-of-message token, as in training. Without that token, a choice
    that is a prefix of another one would always be likelier.
    """
    prompt = renderer.build_generation_prompt(question.messages)
    messages = []
    for choice in question.choices:
        answer: Message = {"role": "assistant", "content": choice}
        tokens, _ = renderer.build_supervised_example([*question.messages, answer])
        messages.append(tokens.to_targets()[prompt.length :])
    return RenderedQuestion(question, prompt, tuple(messages))


async def grade(task: SampledTask, question: Question, text: str) -> Verdict:
    """Return the verdict of the task's grader, which runs in a thread unless it is async. Raises
    UserError if the grader returns anything else.
    """
    name = f"grade of the task {task.name}"
    verdict: Any = await call_function(partial(task.grade, question, text))
    if not isinstance(verdict, Verdict):
        raise UserError(f"{name} returned {verdict!r}; return a planish.evaluation.Verdict")
    return replace(verdict, correct=read_bool(verdict.correct, f"{name} returned correct="))


@dataclass(frozen=True)
class Answerer:
    """Asks a model the questions of an evaluation.

    `context_window` is the maximum number of tokens of a prompt and its answer together; None for
    no limit.
    """

    sampling_client: SamplingClient
    renderer: Renderer
    context_window: int | None

    async def sample(
        self, rendered: RenderedQuestion, task: SampledTask, sampling: Sampling
    ) -> list[SampledAnswer]:
        """Sample the answers to a question and grade them.

        A prompt that leaves no room for an answer gives answers with an error.
        """
        prompt, question = rendered.prompt, rendered.question
        max_tokens = sampling.max_tokens
        if self.context_window is not None:
            max_tokens = min(max_tokens, self.context_window - prompt.length)
        if max_tokens < 1:
            error = self._too_long_message(prompt.length)
            return [
                self._sampled_answer(rendered, index, [], None, Verdict(False, None, error))
                for index in range(sampling.samples)
            ]
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=derived_seed(sampling.seed, question.number),
            stop=self.renderer.get_stop_sequences(),
            temperature=sampling.temperature,
        )
        response = await self.sampling_client.sample_async(
            prompt=prompt, num_samples=sampling.samples, sampling_params=params
        )
        messages = [self.renderer.parse_response(seq.tokens).message for seq in response.sequences]
        verdicts = await gather_or_cancel(
            grade(task, question, get_text_content(message)) for message in messages
        )
        return [
            self._sampled_answer(
                rendered, index, list(sequence.tokens), sequence.stop_reason, verdict
            )
            for index, (sequence, verdict) in enumerate(
                zip(response.sequences, verdicts, strict=True)
            )
        ]

    async def choose(self, rendered: RenderedQuestion) -> ChosenAnswer:
        """Score each choice of a question by the logprob of its message.

        If the longest choice exceeds the context window, the answer has an error and no scores.
        """
        question, prompt = rendered.question, rendered.prompt
        text = self._decode(prompt.to_keys())
        make_answer = partial(ChosenAnswer, question.number, text, reference=question.reference)
        longest_length = prompt.length + max(map(len, rendered.choice_tokens))
        if self.context_window is not None and longest_length > self.context_window:
            return make_answer(
                choices=[],
                answer=None,
                answer_length_normalized=None,
                reward=0.0,
                reward_length_normalized=0.0,
                error=self._too_long_message(longest_length),
            )
        logprobs = await gather_or_cancel(
            self._choice_logprob(prompt, message) for message in rendered.choice_tokens
        )
        scored = zip(LETTERS, question.choices, rendered.choice_tokens, logprobs, strict=False)
        choices = [
            ScoredChoice(letter, text, score, len(message))
            for letter, text, message, score in scored
        ]
        likeliest_letter = max(choices, key=lambda choice: choice.logprob).letter
        normalized_letter = max(choices, key=lambda choice: choice.mean_logprob).letter
        return make_answer(
            choices=choices,
            answer=likeliest_letter,
            answer_length_normalized=normalized_letter,
            reward=float(likeliest_letter == question.reference),
            reward_length_normalized=float(normalized_letter == question.reference),
        )

    async def _choice_logprob(self, prompt: ModelInput, message_tokens: list[int]) -> float:
        full_sequence = prompt.append(EncodedTextChunk(message_tokens))
        logprobs = await self.sampling_client.compute_logprobs_async(
            full_sequence, prompt_logprobs_last_n=len(message_tokens)
        )
        message_logprobs = [
            logprob for logprob in logprobs[-len(message_tokens) :] if logprob is not None
        ]
        assert len(message_logprobs) == len(message_tokens), (
            "only the first token of a prompt has no logprob"
        )
        return sum(message_logprobs)

    def _sampled_answer(
        self,
        rendered: RenderedQuestion,
        index: int,
        tokens: list[int],
        stop_reason: Any,
        verdict: Verdict,
    ) -> SampledAnswer:
        return SampledAnswer(
            rendered.question.number,
            index,
            prompt_id=prompt_id(rendered.prompt),
            prompt=self._decode(rendered.prompt.to_keys()),
            answer=self._decode(tokens),
            tokens=tokens,
            stop_reason=stop_reason,
            reward=float(verdict.correct),
            extracted=verdict.extracted,
            reference=rendered.question.reference,
            error=verdict.error,
        )

    def _decode(self, tokens: list[int]) -> str:
        return decode_keys(tokens, self.renderer.codec.decode)

    def _too_long_message(self, num_tokens: int) -> str:
        return f"{num_tokens} tokens do not fit the model's context of {self.context_window}"
