"""Check before a run begins that its judge can read what it will be asked.

A request to the judge has a prompt about one criterion of a row, the policy's answer, a reply
without a score, and the second request with its reply. If it exceeds the judge's context window,
the run would fail at the first long answer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from planish.completers import MessageCompleter, PromptSize, TinkerMessageCompleter
from planish.errors import UserError
from planish.renderers import Message, get_text_content
from planish.renderers.codec import token_bounds
from planish.rubric.grading import judge_prompt, retry_prompt
from planish.rubric.rubrics import RubricRow

NUM_REPLIES = 2
"""The number of replies in the longest request: the first one has no score."""


@runtime_checkable
class MeasuringJudge(Protocol):
    """A judge that can measure a prompt, such as ChatEndpoint."""

    @property
    def max_tokens(self) -> int | None:
        """The maximum number of tokens in a reply; None = the judge's own limit."""
        ...

    async def measure(self, messages: Sequence[Message]) -> PromptSize:
        """Return the size of a prompt, as far as the judge tells it."""
        ...


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
class JudgeLimits:
    """What a judge can read."""

    name: str
    """The judge's name in messages."""
    context_window: int
    """The maximum number of tokens of a prompt and its reply together."""
    reply_tokens: int
    """The maximum number of tokens of a reply."""

    def sampled_tokens(self, answer_tokens: int) -> int:
        """Return the number of tokens of all sampled texts in the longest request."""
        return answer_tokens + NUM_REPLIES * self.reply_tokens

    def require_fits(self, request: JudgeRequest, num_tokens: int, answer_tokens: int) -> None:
        """Raise UserError if a request whose prompt has `num_tokens` tokens is too long with an
        answer of `answer_tokens` tokens.
        """
        if num_tokens + self.sampled_tokens(answer_tokens) > self.context_window:
            raise UserError(
                f"the judge ({self.name}) has a context window of {self.context_window} tokens. For "
                f"{request.where} it needs {num_tokens} tokens for the prompt, "
                f"max_tokens={answer_tokens} for the answer, and {NUM_REPLIES} times "
                f"{self.reply_tokens} for its replies; give smaller numbers, a judge with a longer "
                "context, or a shorter row"
            )


async def answer_check(
    judge: MessageCompleter, name: str, rows: Sequence[RubricRow]
) -> Callable[[int], None] | None:
    """Return a function that raises UserError if the judge cannot read answers of a number of
    tokens to one of the rows.

    All rows are checked for a TinkerMessageCompleter, and the row with the most characters for a
    MeasuringJudge. If one of these judges does not know its limits, a line is printed, and None is
    returned. Other judges are not checked.
    """
    requests = list(judge_requests(rows))
    if isinstance(judge, TinkerMessageCompleter):
        if judge.context_window is not None:
            limits = JudgeLimits(name, judge.context_window, judge.max_tokens)
            return partial(_require_all_fit, judge, limits, requests)
    elif isinstance(judge, MeasuringJudge):
        longest = max(requests, key=lambda request: request.num_characters)
        size = await judge.measure(longest.messages)
        if size.num_tokens is not None and size.context_window is not None:
            limits = JudgeLimits(name, size.context_window, judge.max_tokens or 0)
            return partial(limits.require_fits, longest, size.num_tokens)
    else:
        return None
    print(
        f"the judge ({name}) does not tell how long a prompt is, or may be; so this run does not "
        "check whether it can read the longest answers"
    )
    return None


def judge_requests(rows: Sequence[RubricRow]) -> Iterator[JudgeRequest]:
    """Yield the request for each criterion of each row."""
    for row in rows:
        for criterion in row.criteria:
            place = row.location or f"the row {get_text_content(row.messages[-1])!r:.100}"
            prompt = retry_prompt(judge_prompt(row.messages, "", criterion), "", criterion)
            yield JudgeRequest(f"{place} and the criterion {criterion.name}", prompt)


def _require_all_fit(
    judge: TinkerMessageCompleter,
    limits: JudgeLimits,
    requests: Sequence[JudgeRequest],
    answer_tokens: int,
) -> None:
    for request in requests:
        with token_bounds():
            bound = judge.renderer.build_generation_prompt(request.messages).length
        if bound + limits.sampled_tokens(answer_tokens) > limits.context_window:
            num_tokens = judge.renderer.build_generation_prompt(request.messages).length
            limits.require_fits(request, num_tokens, answer_tokens)
