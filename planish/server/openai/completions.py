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
from planish.server.openai.models import OpenAIModels, ServedModel, TokenTexts
from planish.server.openai.protocol import (
    Envelope,
    PromptFinishedEvent,
    TokenEvent,
    Usage,
    answer,
    check_text,
)
from planish.server.openai.requests import CompletionRequest, TokenIds
from planish.server.results import Tenant
from planish.service import Sample
from planish.types import ModelInput, SampledSequence, SampleResponse

_MAX_CHARACTERS = 8 << 20
"""Maximum number of characters in all prompts of a request together. If the model's limit for one
prompt is higher, that limit applies instead.
"""


@dataclass(frozen=True)
class ParsedCompletion:
    """A parsed completion request."""

    model: ServedModel
    options: CompletionRequest
    operations: list[Sample]
    """One sample request for each prompt."""
    prompt_texts: list[str]
    """The text of each prompt."""

    def new_sample_parser(self) -> StreamedSample:
        """Return the parser of one sample."""
        return StreamedSample(
            read_text(self.model.tokenization.codec, self.model.tokenization.eos_token_ids),
            self.options.stop_strings,
            stop_ids=frozenset(self.options.stop_token_ids),
        )


async def completions(
    models: OpenAIModels, tenant: Tenant, request: Request, options: CompletionRequest
) -> Response:
    """Answer a completion request, streamed or in one body."""
    return await answer(
        models, tenant, request, options, _parse_completion, _stream_chunks, _response_body
    )


def _parse_completion(model: ServedModel, options: CompletionRequest) -> ParsedCompletion:
    prompt_only = options.max_tokens == 0
    if prompt_only and not (options.echo and options.logprobs is not None):
        raise WrongParameterError(
            "max_tokens",
            "max_tokens=0 samples nothing; give echo=true and logprobs to score the prompt",
        )
    if options.echo and options.stream:
        raise UnsupportedParameterError(
            "echo", "a stream contains sampled tokens only; leave echo or stream out"
        )
    params = options.sampling_params(model.tokenization.eos_token_ids, [], text_constraint(options))
    scores_prompt = options.echo and options.logprobs is not None
    prompts = _parse_prompts(options.prompt, model)
    operations = [
        Sample(
            sampler_id="",
            prompt=ModelInput.from_ints(prompt.tokens),
            num_samples=options.n,
            sampling_params=params,
            prompt_logprobs=scores_prompt,
            topk_prompt_logprobs=(options.logprobs or 0) if scores_prompt else 0,
            topk_sample_logprobs=options.logprobs or 0,
            prompt_only=prompt_only,
        )
        for prompt in prompts
    ]
    return ParsedCompletion(model, options, operations, [prompt.text for prompt in prompts])


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens and as text."""

    tokens: list[int]
    text: str


def _parse_prompts(
    value: str | TokenIds | list[str | TokenIds], model: ServedModel
) -> list[Prompt]:
    check_text("prompt", value, max(model.tokenization.max_characters, _MAX_CHARACTERS))
    if isinstance(value, str):
        return [_parse_prompt(value, model)]
    tokens = [one for one in value if isinstance(one, int)]
    if tokens:
        return [_parse_prompt(tokens, model)]
    return [_parse_prompt(one, model) for one in value if not isinstance(one, int)]


def _parse_prompt(value: str | TokenIds, model: ServedModel) -> Prompt:
    tokenizer = model.tokenization.tokenizer
    if isinstance(value, str):
        check_text("prompt", value, model.tokenization.max_characters)
        prompt = Prompt(tokenizer.encode(value), value)
    else:
        prompt = Prompt(value, tokenizer.decode(value, clean_up_tokenization_spaces=False))
    if not prompt.tokens:
        raise WrongParameterError("prompt", "prompt is empty; give at least one token")
    return prompt


@dataclass
class CompletionLogprobs:
    """The `logprobs` object of a choice: four parallel lists with one entry per token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    text_length: int = 0
    """Length of the text of all tokens so far, in characters."""

    def add(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        """Add a token."""
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(self.text_length)
        self.text_length += len(text)

    def to_json(self) -> dict[str, Any]:
        """Return the four lists."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: getattr(self, name) for name in names}

    def take_json(self) -> dict[str, Any]:
        """Return the four lists with the entries added since the last call, and empty the lists."""
        body = self.to_json()
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return body


def _response_body(
    completion: ParsedCompletion, responses: Sequence[SampleResponse]
) -> dict[str, Any]:
    choices = [
        choice
        for prompt_index, response in enumerate(responses)
        for choice in _choices(completion, prompt_index, response)
    ]
    envelope = Envelope.new("cmpl", "text_completion", completion.model.name)
    return envelope.body(choices, Usage.from_responses(completion.operations, responses))


def _choices(
    completion: ParsedCompletion, prompt_index: int, response: SampleResponse
) -> list[dict[str, Any]]:
    n = completion.options.n
    prompt_text = completion.prompt_texts[prompt_index] if completion.options.echo else ""
    if not response.sequences:
        body = {
            "text": prompt_text,
            "logprobs": _choice_logprobs(completion, prompt_index, response, None),
            "finish_reason": "length",
            **_token_ids(completion, prompt_index, []),
        }
        return [{"index": prompt_index * n + index, **body} for index in range(n)]
    choices = []
    for index, sequence in enumerate(response.sequences):
        parser = completion.new_sample_parser()
        parser.tokens = sequence.tokens
        choices.append(
            {
                "index": prompt_index * n + index,
                "text": prompt_text + parser.whole().content,
                "logprobs": _choice_logprobs(completion, prompt_index, response, sequence),
                "finish_reason": sequence.stop_reason,
                **_token_ids(completion, prompt_index, sequence.tokens),
            }
        )
    return choices


def _token_ids(
    completion: ParsedCompletion, prompt_index: int, tokens: list[int], is_first: bool = True
) -> dict[str, Any]:
    """Return the token ids of a whole choice, or of one streamed chunk of a choice. `is_first` is
    True for a whole choice and for the first chunk of a choice. The result then includes the
    prompt's token ids.
    """
    if not completion.options.return_token_ids:
        return {}
    ids: dict[str, Any] = {"token_ids": tokens}
    if is_first:
        ids["prompt_token_ids"] = completion.operations[prompt_index].prompt.to_ints()
    return ids


def _choice_logprobs(
    completion: ParsedCompletion,
    prompt_index: int,
    response: SampleResponse,
    sequence: SampledSequence | None,
) -> dict[str, Any] | None:
    if completion.options.logprobs is None:
        return None
    tokenization, scores = completion.model.tokenization, CompletionLogprobs()
    if completion.options.echo:
        tokens = completion.operations[prompt_index].prompt.to_ints()
        logprobs = response.prompt_logprobs or [None] * len(tokens)
        top_tokens = response.topk_prompt_logprobs or [None] * len(tokens)
        for token, logprob, top in zip(tokens, logprobs, top_tokens, strict=True):
            text = tokenization.token_texts.decode_token(token)[0]
            # A BOS token that the tokenizer added is not part of the client's text.
            is_added = not scores.tokens and not completion.prompt_texts[prompt_index].startswith(
                text
            )
            scores.add(
                "" if is_added else text, logprob, _top_logprobs(tokenization.token_texts, top)
            )
    if sequence is not None:
        top_tokens = sequence.topk_logprobs or [None] * len(sequence.tokens)
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, top_tokens, strict=True):
            if token not in tokenization.eos_token_ids:
                scores.add(
                    tokenization.token_texts.decode_token(token)[0],
                    logprob,
                    _top_logprobs(tokenization.token_texts, top),
                )
    return scores.to_json()


def _top_logprobs(
    token_texts: TokenTexts, top: Sequence[tuple[int, float]] | None
) -> dict[str, float] | None:
    """Map the texts of the top tokens to their logprobs. If two tokens have the same text, the
    result contains the likelier one.
    """
    if not top:
        return None
    return {token_texts.decode_token(token)[0]: logprob for token, logprob in reversed(top)}


async def _stream_chunks(
    completion: ParsedCompletion, events: AsyncIterator[TokenEvent | PromptFinishedEvent]
) -> AsyncIterator[dict[str, Any]]:
    envelope = Envelope.new("cmpl", "text_completion", completion.model.name)
    n, tokenization = completion.options.n, completion.model.tokenization
    parsers = [completion.new_sample_parser() for _ in range(n * len(completion.operations))]
    scores = [CompletionLogprobs() for _ in parsers]
    num_sent_tokens = [0] * len(parsers)
    responses: list[SampleResponse] = []

    def chunk(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
        logprobs = None if completion.options.logprobs is None else scores[index].take_json()
        body = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        tokens, begin = parsers[index].tokens, num_sent_tokens[index]
        num_sent_tokens[index] = len(tokens)
        ids = _token_ids(completion, index // n, list(tokens[begin:]), begin == 0)
        return envelope.body([{**body, **ids}])

    async for event in events:
        match event:
            case TokenEvent(prompt_index, token):
                index = prompt_index * n + token.sample
                parsers[index].add(token.token)
                if token.token not in tokenization.eos_token_ids:
                    scores[index].add(
                        tokenization.token_texts.decode_token(token.token)[0],
                        token.logprob,
                        _top_logprobs(tokenization.token_texts, token.topk),
                    )
                if parsers[index].is_due and (text := parsers[index].delta().content):
                    yield chunk(index, text)
            case PromptFinishedEvent(prompt_index, response):
                responses.append(response)
                for index, sequence in enumerate(response.sequences, start=prompt_index * n):
                    yield chunk(index, parsers[index].rest().content, sequence.stop_reason)
    if completion.options.include_usage:
        yield envelope.body([], Usage.from_responses(completion.operations, responses))
