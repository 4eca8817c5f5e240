"""Sample answers of a model and show them while they are sampled.

An engine in this process reports each token as it is sampled. A server returns a sample only when
it is complete, so its answers appear all at once. Text that was shown cannot be taken back. So text
that may still change (half a character, the beginning of a control token) is held back. The parser
that does this also streams answers for the server's /v1 endpoints.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from planish.client.local import connect, resolve_server_url, start_engine
from planish.detokenizer import Detokenizer
from planish.errors import UserError, as_user_errors
from planish.model.architecture.config import ModelConfig
from planish.renderers import Renderer
from planish.renderers.messages import get_text_content, get_thinking_content
from planish.renderers.stream_parser import SampleParser, message_parser
from planish.renderers.termination import eos_ids
from planish.runlog.checkpoints import choose_renderer
from planish.runlog.run_directory import weights_of
from planish.service import CreateSampler, Sample, SampledToken, Service
from planish.tokenizer import load_tokenizer
from planish.types import SamplingParams

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer."""

    text: str
    reasoning: str = ""
    is_first_text: bool = False
    """Whether this is the first part that has text."""
    had_reasoning: bool = False
    """Whether reasoning was shown in this part or an earlier one."""


ShowFunction = Callable[[AnswerPart], None]


@dataclass(frozen=True)
class Answer:
    """A complete answer, or the part of it that was sampled before Ctrl-C."""

    message: Mapping[str, Any]
    """The message as the renderer parses it."""
    num_tokens: int
    stop_reason: str
    """Why the answer ended: stop, length (max_tokens), or stopped (Ctrl-C)."""


@dataclass(eq=False)
class ChatSampler:
    """A sampler with a chat format."""

    service: Service
    sampler_id: str
    name: str
    renderer: Renderer
    context_window: int | None
    """The maximum number of tokens of prompt and answer; None if it is not known."""
    streams: bool
    """Whether tokens are reported as they are sampled."""

    def answer(
        self,
        messages: Messages,
        temperature: float,
        max_tokens: int,
        seed: int | None,
        show: ShowFunction,
    ) -> Answer:
        """Sample the assistant's next message; Ctrl-C stops it and keeps what was sampled.

        Raise UserError if the conversation leaves no room for an answer.
        """
        with as_user_errors("the conversation"):
            prompt = self.renderer.build_generation_prompt(messages)
        params = SamplingParams(
            max_tokens=self._max_answer_tokens(prompt.length, max_tokens),
            temperature=temperature,
            seed=seed,
            stop=self.renderer.get_stop_sequences(),
            # `parse_response` ends a message at these tokens too.
            stop_token_ids=sorted(eos_ids(self.renderer.codec)),
        )
        tokens: SimpleQueue[SampledToken | None] = SimpleQueue()
        on_token = tokens.put if self.streams else None
        future = self.service.submit(Sample(self.sampler_id, prompt, 1, params, on_token=on_token))
        future.add_done_callback(lambda _: tokens.put(None))
        streamed_answer = _StreamedAnswer(self._new_parser(), show)
        try:
            while (token := tokens.get()) is not None:
                streamed_answer.add(token)
            [sequence] = future.result().sequences
        except KeyboardInterrupt:
            future.cancel()
            streamed_answer.finish()
            return self._answer(streamed_answer.tokens, "stopped")
        answer = self._answer(sequence.tokens, sequence.stop_reason)
        if self.streams:
            streamed_answer.finish()
        else:
            streamed_answer.show_message(answer.message)
        return answer

    def _new_parser(self) -> SampleParser:
        return message_parser(self.renderer, Detokenizer.of_tokenizer(self.renderer.tokenizer))

    def _answer(self, tokens: Sequence[int], stop_reason: str) -> Answer:
        return Answer(self.renderer.parse_response(tokens).message, len(tokens), stop_reason)

    def _max_answer_tokens(self, prompt_length: int, max_tokens: int) -> int:
        if self.context_window is None:
            return max_tokens
        if prompt_length >= self.context_window:
            raise UserError(
                f"the conversation has {prompt_length} tokens, and the model reads "
                f"{self.context_window}; /undo or /reset"
            )
        return min(max_tokens, self.context_window - prompt_length)


@dataclass
class _StreamedAnswer:
    """Parses the tokens of an answer and shows its text."""

    parser: SampleParser
    show: ShowFunction
    tokens: list[int] = field(default_factory=list)
    """The tokens of the answer so far."""
    _has_text: bool = False
    _has_reasoning: bool = False

    def add(self, token: SampledToken) -> None:
        self.tokens.append(token.token)
        self.parser.add(token.token, token.num_unsettled, token.text_end)
        self._show_parts()

    def finish(self) -> None:
        self.parser.finish()
        self._show_parts()

    def show_message(self, message: Mapping[str, Any]) -> None:
        """Show an answer that was not streamed."""
        read: Any = message
        calls = [call["raw_text"] for call in message.get("unparsed_tool_calls", ())]
        text = "\n".join(filter(None, (get_text_content(read), *calls)))
        self._show(text, get_thinking_content(read))

    def _show_parts(self) -> None:
        parts = self.parser.take()
        text = "".join(part.text for part in parts if part.kind == "text")
        self._show(text, "".join(part.text for part in parts if part.kind == "reasoning"))

    def _show(self, text: str, reasoning: str) -> None:
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        if text or reasoning:
            is_first_text = bool(text) and not self._has_text
            self.show(AnswerPart(text, reasoning, is_first_text, self._has_reasoning))
        self._has_text = self._has_text or bool(text)


@contextmanager
def open_chat_sampler(
    model: str,
    renderer_name: str | None,
    base_url: str | None,
    api_key: str | None,
    data_dir: Path | None,
    quantize: str | None = None,
) -> Iterator[ChatSampler]:
    """Yield the sampler of a base model, a checkpoint, or the newest checkpoint of a run
    directory. `quantize`: the scheme of the base weights of an engine in this process.
    """
    url = resolve_server_url(base_url, api_key, {"data_dir": data_dir, "quantize": quantize})
    with as_user_errors("--base-url"):
        options = {"quantize": quantize}
        service = connect(url, api_key, {}) if url else start_engine(None, data_dir, options)
    try:
        with as_user_errors("--model"):
            sampler = create_chat_sampler(
                service, weights_of(model), renderer_name, streams=url is None
            )
        yield sampler
    finally:
        service.close(finish=False)


def create_chat_sampler(
    service: Service, model: str, renderer_name: str | None, streams: bool
) -> ChatSampler:
    """Return a sampler of a base model or a checkpoint. `streams`: whether the service reports
    tokens as they are sampled.
    """
    is_checkpoint = model.startswith("tinker://")
    sampler_id = f"{secrets.token_hex(8)}:sample:0"
    source = {"model_path": model} if is_checkpoint else {"base_model": model}
    sampler_id = service.submit(CreateSampler(sampler_id, **source)).result()
    base_model = service.sampler_info(sampler_id).base_model
    if is_checkpoint and renderer_name is None:
        metadata = service.checkpoint_info(model).checkpoint.user_metadata or {}
        renderer_name = metadata.get("renderer_name")
    tokenizer = load_tokenizer(service.tokenizer_directory(base_model))
    renderer = choose_renderer(renderer_name, base_model, tokenizer)
    return ChatSampler(
        service, sampler_id, model, renderer, _context_window(service, base_model), streams
    )


def _context_window(service: Service, base_model: str) -> int | None:
    """Return the model's maximum number of tokens; None if it is unknown."""
    if (context_window := service.capabilities().context_length_of(base_model)) is not None:
        return context_window
    directory = service.tokenizer_directory(base_model)
    if not (directory / "config.json").is_file():
        return None
    return ModelConfig.from_directory(directory).max_context
