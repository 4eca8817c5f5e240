"""POST /v1/completions: continues a prompt as it is, for base models and evaluation tools.

A request has one prompt (a string or a list of token ids) or a list of prompts. The response has
`n` choices for each prompt. With `echo` and `logprobs`, the response has the logprobs of the
prompt. So an evaluation tool can score a text with `max_tokens=1`, or with `max_tokens=0`, which
samples no tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from planish.renderers.stream_parser import StreamedSample, read_text
from planish.server.http.context import (
    UnsupportedParameterError,
    WrongParameterError,
)
from planish.server.openai.constraints import text_constraint
from planish.server.openai.models import OpenAIModels, Served, TokenTexts
from planish.server.openai.protocol import (
    Envelope,
    Finished,
    Sampled,
    Usage,
    answer,
    check_text,
)
from planish.server.openai.requests import CompletionRequest, Tokens
from planish.server.results import Tenant
from planish.service import Sample
from planish.types import ModelInput, SampledSequence, SampleResponse

_MAX_CHARACTERS = 8 << 20
"""Maximum number of characters in all prompts of a request together. If the model's limit for one
prompt is higher, that limit applies instead.
"""


@dataclass(frozen=True)
class Completion:
    """A parsed completion request."""

    model: Served
    options: CompletionRequest
    operations: list[Sample]
    """One sample request for each prompt."""
    prompt_texts: list[str]
    """The text of each prompt."""

    def growing(self) -> StreamedSample:
        """Return the parser of one sample."""
        return StreamedSample(
            read_text(self.model.texts.codec, self.model.texts.end_ids),
            self.options.stop_strings,
            stop_ids=frozenset(self.options.stop_token_ids),
        )


async def completions(
    models: OpenAIModels, tenant: Tenant, request: Request, options: CompletionRequest
) -> Response:
    """Answer a completion request, streamed or in one body."""
    return await answer(models, tenant, request, options, _parsed, _stream, _whole)


def _parsed(model: Served, options: CompletionRequest) -> Completion:
    samples_nothing = options.max_tokens == 0
    if samples_nothing and not (options.echo and options.logprobs is not None):
        raise WrongParameterError(
            "max_tokens",
            "max_tokens=0 samples nothing; give echo=true and logprobs to score the prompt",
        )
    if options.echo and options.stream:
        raise UnsupportedParameterError(
            "echo", "a stream contains sampled tokens only; leave echo or stream out"
        )
    params = options.sampling_params(model.texts.end_ids, [], text_constraint(options))
    scored = options.echo and options.logprobs is not None
    prompts = _prompts(options.prompt, model)
    operations = [
        Sample(
            sampler_id="",
            prompt=ModelInput.from_ints(prompt.tokens),
            num_samples=options.n,
            sampling_params=params,
            prompt_logprobs=scored,
            topk_prompt_logprobs=(options.logprobs or 0) if scored else 0,
            topk_sample_logprobs=options.logprobs or 0,
            prompt_only=samples_nothing,
        )
        for prompt in prompts
    ]
    return Completion(model, options, operations, [prompt.text for prompt in prompts])


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens and as text."""

    tokens: list[int]
    text: str


def _prompts(given: str | Tokens | list[str | Tokens], model: Served) -> list[Prompt]:
    check_text("prompt", given, max(model.texts.max_characters, _MAX_CHARACTERS))
    if isinstance(given, str):
        return [_prompt(given, model)]
    tokens = [one for one in given if isinstance(one, int)]
    if tokens:
        return [_prompt(tokens, model)]
    return [_prompt(one, model) for one in given if not isinstance(one, int)]


def _prompt(given: str | Tokens, model: Served) -> Prompt:
    tokenizer = model.texts.tokenizer
    if isinstance(given, str):
        check_text("prompt", given, model.texts.max_characters)
        prompt = Prompt(tokenizer.encode(given), given)
    else:
        prompt = Prompt(given, tokenizer.decode(given, clean_up_tokenization_spaces=False))
    if not prompt.tokens:
        raise WrongParameterError("prompt", "prompt is empty; give at least one token")
    return prompt


@dataclass
class Scores:
    """The `logprobs` object of a choice: four parallel lists with one entry per token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    length: int = 0
    """Length of the text of all tokens so far, in characters."""

    def add(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        """Add a token."""
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(self.length)
        self.length += len(text)

    def to_json(self) -> dict[str, Any]:
        """Return the four lists."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: getattr(self, name) for name in names}

    def taken(self) -> dict[str, Any]:
        """Return the four lists with the entries added since the last call, and empty the lists."""
        body = self.to_json()
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return body


def _whole(completion: Completion, responses: Sequence[SampleResponse]) -> dict[str, Any]:
    choices = [
        choice
        for prompt, response in enumerate(responses)
        for choice in _choices(completion, prompt, response)
    ]
    envelope = Envelope.of("cmpl", "text_completion", completion.model.name)
    return envelope.body(choices, Usage.of(completion.operations, responses))


def _choices(completion: Completion, prompt: int, response: SampleResponse) -> list[dict[str, Any]]:
    n = completion.options.n
    prompt_text = completion.prompt_texts[prompt] if completion.options.echo else ""
    if not response.sequences:
        body = {
            "text": prompt_text,
            "logprobs": _scores(completion, prompt, response, None),
            "finish_reason": "length",
            **_token_ids(completion, prompt, []),
        }
        return [{"index": prompt * n + index, **body} for index in range(n)]
    choices = []
    for index, sequence in enumerate(response.sequences):
        growing = completion.growing()
        growing.tokens = sequence.tokens
        choices.append(
            {
                "index": prompt * n + index,
                "text": prompt_text + growing.whole().content,
                "logprobs": _scores(completion, prompt, response, sequence),
                "finish_reason": sequence.stop_reason,
                **_token_ids(completion, prompt, sequence.tokens),
            }
        )
    return choices


def _token_ids(
    completion: Completion, prompt: int, tokens: list[int], is_first: bool = True
) -> dict[str, Any]:
    """Return the token ids of a whole choice, or of one streamed chunk of a choice. `is_first` is
    True for a whole choice and for the first chunk of a choice. The result then includes the
    prompt's token ids.
    """
    if not completion.options.return_token_ids:
        return {}
    ids: dict[str, Any] = {"token_ids": tokens}
    if is_first:
        ids["prompt_token_ids"] = completion.operations[prompt].prompt.to_ints()
    return ids


def _scores(
    completion: Completion, prompt: int, response: SampleResponse, sequence: SampledSequence | None
) -> dict[str, Any] | None:
    if completion.options.logprobs is None:
        return None
    texts, scores = completion.model.texts, Scores()
    if completion.options.echo:
        tokens = completion.operations[prompt].prompt.to_ints()
        logprobs = response.prompt_logprobs or [None] * len(tokens)
        tops = response.topk_prompt_logprobs or [None] * len(tokens)
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
            text = texts.tokens.of(token)[0]
            # A BOS token that the tokenizer added is not part of the client's text.
            is_added = not scores.tokens and not completion.prompt_texts[prompt].startswith(text)
            scores.add("" if is_added else text, logprob, _top(texts.tokens, top))
    if sequence is not None:
        tops = sequence.topk_logprobs or [None] * len(sequence.tokens)
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, tops, strict=True):
            if token not in texts.end_ids:
                scores.add(texts.tokens.of(token)[0], logprob, _top(texts.tokens, top))
    return scores.to_json()


def _top(texts: TokenTexts, top: Sequence[tuple[int, float]] | None) -> dict[str, float] | None:
    """Map the texts of the top tokens to their logprobs. If two tokens have the same text, the
    result contains the likelier one.
    """
    if not top:
        return None
    return {texts.of(token)[0]: logprob for token, logprob in reversed(top)}


async def _stream(
    completion: Completion, events: AsyncIterator[Sampled | Finished]
) -> AsyncIterator[dict[str, Any]]:
    envelope = Envelope.of("cmpl", "text_completion", completion.model.name)
    n, texts = completion.options.n, completion.model.texts
    growing = [completion.growing() for _ in range(n * len(completion.operations))]
    scores = [Scores() for _ in growing]
    sent = [0] * len(growing)
    responses: list[SampleResponse] = []

    def chunk(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
        logprobs = None if completion.options.logprobs is None else scores[index].taken()
        body = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        tokens, begin = growing[index].tokens, sent[index]
        sent[index] = len(tokens)
        ids = _token_ids(completion, index // n, list(tokens[begin:]), begin == 0)
        return envelope.body([{**body, **ids}])

    async for event in events:
        match event:
            case Sampled(prompt, token):
                index = prompt * n + token.sample
                growing[index].add(token.token)
                if token.token not in texts.end_ids:
                    scores[index].add(
                        texts.tokens.of(token.token)[0],
                        token.logprob,
                        _top(texts.tokens, token.topk),
                    )
                if growing[index].is_due and (text := growing[index].delta().content):
                    yield chunk(index, text)
            case Finished(prompt, response):
                responses.append(response)
                for index, sequence in enumerate(response.sequences, start=prompt * n):
                    yield chunk(index, growing[index].rest().content, sequence.stop_reason)
    if completion.options.include_usage:
        yield envelope.body([], Usage.of(completion.operations, responses))
