"""Check before a run begins that its judge can read what it will be asked.

A request to the judge has a prompt about one criterion of a row, the policy's answer, a reply
without a score, and the second request with its reply. If it exceeds the judge's context window,
the run would fail at the first long answer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planish.errors import UserError
from planish.renderers import Message, Renderer
from planish.renderers.codec import token_bounds
from planish.rubric.env import RubricRows
from planish.rubric.grading import judge_prompt, retry_prompt


@dataclass(frozen=True)
class JudgeRequest:
    """The longest request about a criterion of a row, without the texts that are sampled."""

    where: str
    """Names the row and the criterion."""
    messages: Sequence[Message]

    @property
    def num_characters(self) -> int:
        """The number of characters in the messages."""
        return sum(len(str(message["content"])) for message in self.messages)


@dataclass(frozen=True)
class SampledTokens:
    """The tokens that are added to a request: an answer, and two replies of the judge."""

    answer: int
    """The option `max_tokens`."""
    reply: int
    """The option `judge_max_tokens`."""

    @property
    def total(self) -> int:
        """The number of tokens of all sampled texts."""
        return self.answer + 2 * self.reply


def judge_requests(rows: RubricRows) -> Iterator[JudgeRequest]:
    """Yield the request for each criterion of each row."""
    for split, split_rows in (("train", rows.train), ("test", rows.test)):
        for number, row in enumerate(split_rows, start=1):
            for criterion in row.criteria:
                place = row.location or f"{split} row {number}"
                prompt = retry_prompt(judge_prompt(row.messages, "", criterion), "", criterion)
                yield JudgeRequest(f"{place} and the criterion {criterion.name}", prompt)


def require_judge_fits(
    requests: Iterable[JudgeRequest],
    sampled: SampledTokens,
    renderer: Renderer,
    model: str,
    context_window: int | None,
) -> None:
    """Raise UserError for the first request that exceeds the context window of a judge on the
    engine; None = not known.
    """
    if context_window is None:
        return
    for request in requests:
        with token_bounds():
            bound = renderer.build_generation_prompt(request.messages).length
        if bound + sampled.total > context_window:
            tokens = renderer.build_generation_prompt(request.messages).length
            require_request_fits(request, tokens, sampled, model, context_window)


def require_request_fits(
    request: JudgeRequest, tokens: int, sampled: SampledTokens, model: str, context_window: int
) -> None:
    """Raise UserError if a request whose prompt has `tokens` tokens exceeds the context window."""
    if tokens + sampled.total > context_window:
        raise UserError(
            f"the judge {model} has a context window of {context_window} tokens. For "
            f"{request.where} it needs {tokens} tokens for the prompt, max_tokens={sampled.answer} "
            f"for the answer, and twice judge_max_tokens={sampled.reply} for its replies; give "
            "smaller numbers, a judge with a longer context, or a shorter row"
        )
