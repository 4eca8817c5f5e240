"""POST /v1/completions: continues a prompt as it is, for base models and evaluation tools.

A request has one prompt (a string or a list of token ids) or a list of prompts. The response has
`n` choices for each prompt. With `echo` and `logprobs`, the response has the logprobs of the
prompt. So an evaluation tool can score a text with `max_tokens=1`, or with `max_tokens=0`, which
samples no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from planish.renderers.stream_parser import SampleParser, text_parser
from planish.server.http.openai_errors import UnsupportedParameterError, WrongParameterError
from planish.server.openai.constraints import text_constraint
from planish.server.openai.logprobs import (
    CompletionLogprobs,
    ScoredToken,
    score_tokens,
    scored_tokens,
)
from planish.server.openai.models import OpenAIModels, ServedModel
from planish.server.openai.protocol import (
    Envelope,
    SampledPrompt,
    Usage,
    answer,
    check_text,
    error_events,
)
from planish.server.openai.requests import CompletionRequest, TokenIds
from planish.server.openai.streaming import DONE_EVENT
from planish.server.results import Tenant
from planish.service import Sample, SampledToken
from planish.types import ModelInput, SampledSequence, SampleResponse
from planish.wire.pacing import pause_if_due

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

    def new_parser(self) -> SampleParser:
        """Return the parser of one sample."""
        tokenization = self.model.tokenization
        return text_parser(tokenization.detokenizer, tokenization.special_ids)

    def new_logprobs(self) -> CompletionLogprobs:
        """Return an empty list of logprobs."""
        tokenization = self.model.tokenization
        return CompletionLogprobs(tokenization.detokenizer, tokenization.special_ids)


async def completions(
    models: OpenAIModels, tenant: Tenant, request: Request, options: CompletionRequest
) -> Response:
    """Answer a completion request, streamed or in one body."""
    return await answer(
        models, tenant, request, options, _parse_completion, CompletionStreamWriter, _response_body
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
            logprob_token_ids=options.logprob_token_ids or (),
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


def _response_body(
    completion: ParsedCompletion, prompts: Sequence[SampledPrompt]
) -> dict[str, Any]:
    choices = [
        choice
        for prompt_index, prompt in enumerate(prompts)
        for choice in _choices(completion, prompt_index, prompt)
    ]
    envelope = Envelope.new("cmpl", "text_completion", completion.model.name)
    responses = [prompt.response for prompt in prompts]
    return envelope.body(choices, Usage.from_responses(completion.operations, responses))


def _choices(
    completion: ParsedCompletion, prompt_index: int, prompt: SampledPrompt
) -> list[dict[str, Any]]:
    n, response = completion.options.n, prompt.response
    prompt_text = completion.prompt_texts[prompt_index] if completion.options.echo else ""
    if not response.sequences:
        body = {
            "text": prompt_text,
            "logprobs": _choice_logprobs(completion, prompt_index, response, None),
            "finish_reason": "length",
            **_token_ids(completion, prompt_index, []),
        }
        return [{"index": prompt_index * n + index, **body} for index in range(n)]
    choices: list[dict[str, Any]] = []
    for index, sequence in enumerate(response.sequences):
        parser = completion.new_parser()
        parser.add_all(sequence.tokens, prompt.text_ends.get(index))
        choices.append(
            {
                "index": prompt_index * n + index,
                "text": prompt_text + _text(parser),
                "logprobs": _choice_logprobs(completion, prompt_index, response, sequence),
                "finish_reason": sequence.stop_reason,
                **_token_ids(completion, prompt_index, sequence.tokens),
            }
        )
    return choices


def _text(parser: SampleParser) -> str:
    """Return the text that a parser has parsed since the last call."""
    return "".join(part.text for part in parser.take())


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
    scores = completion.new_logprobs()
    if completion.options.echo:
        tokens = completion.operations[prompt_index].prompt.to_ints()
        scores.add_prompt(
            completion.prompt_texts[prompt_index],
            score_tokens(tokens, response.prompt_logprobs, response.topk_prompt_logprobs),
        )
    if sequence is not None:
        for one in scored_tokens(sequence):
            pause_if_due()
            scores.add(one)
    return scores.take_json()


@dataclass
class _ChoiceStream:
    """The state of one sample while its text is streamed."""

    completion: ParsedCompletion
    index: int
    parser: SampleParser
    scores: CompletionLogprobs
    unsent_tokens: list[int] = field(default_factory=list[int])
    """The sampled tokens that no chunk contains yet."""
    is_first: bool = True
    """Whether no chunk was sent yet."""

    def add(self, token: SampledToken) -> None:
        """Add a token."""
        self.parser.add(token.token, token.num_unsettled, token.text_end)
        self.unsent_tokens.append(token.token)
        if self.completion.options.logprobs is not None:
            self.scores.add(ScoredToken.of_sample(token))

    def choice(self, text: str, reason: str | None = None) -> dict[str, Any]:
        """Return a choice with `text`, and with the tokens that no earlier chunk contains."""
        options = self.completion.options
        logprobs = None if options.logprobs is None else self.scores.take_json()
        body = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        tokens, self.unsent_tokens = self.unsent_tokens, []
        ids = _token_ids(self.completion, self.index // options.n, tokens, self.is_first)
        self.is_first = False
        return {**body, **ids}


class CompletionStreamWriter:
    """Writes the chunks of a streamed text completion."""

    def __init__(self, completion: ParsedCompletion) -> None:
        """`completion` is the parsed request."""
        self._completion = completion
        self._envelope = Envelope.new("cmpl", "text_completion", completion.model.name)
        self._choices = [
            _ChoiceStream(completion, index, completion.new_parser(), completion.new_logprobs())
            for index in range(completion.options.n * len(completion.operations))
        ]
        self._changed: dict[int, _ChoiceStream] = {}
        """The choices with new tokens."""
        self._responses: list[SampleResponse] = []

    def begin(self) -> Iterator[bytes]:
        """Yield nothing: the first chunk of a choice has text."""
        return iter(())

    def add(self, prompt_index: int, token: SampledToken) -> None:
        """Add a token."""
        index = prompt_index * self._completion.options.n + token.sample
        choice = self._choices[index]
        choice.add(token)
        self._changed[index] = choice

    def flush(self) -> Iterator[bytes]:
        """Yield chunks with the text that the new tokens add."""
        changed, self._changed = self._changed, {}
        for choice in changed.values():
            if text := _text(choice.parser):
                yield self._envelope.event([choice.choice(text)])

    def finish_prompt(self, prompt_index: int, response: SampleResponse) -> Iterator[bytes]:
        """Yield the last chunks of the choices of a prompt."""
        self._responses.append(response)
        begin = prompt_index * self._completion.options.n
        for choice, sequence in zip(self._choices[begin:], response.sequences, strict=False):
            choice.parser.finish()
            body = choice.choice(_text(choice.parser), sequence.stop_reason)
            yield self._envelope.event([body])

    def end(self) -> Iterator[bytes]:
        """Yield the chunk with the token counts, if the request asks for them."""
        if self._completion.options.include_usage:
            usage = Usage.from_responses(self._completion.operations, self._responses)
            yield self._envelope.event([], usage)
        yield DONE_EVENT

    def fail(self, error: Exception) -> Iterator[bytes]:
        """Yield the error as an event."""
        return error_events(error)
