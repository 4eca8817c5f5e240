# pyright: reportMissingImports=false
"""A model provider for Inspect (https://inspect.aisi.org.uk):

    inspect eval task.py --model planish/HuggingFaceTB/SmolLM2-135M-Instruct
    inspect eval task.py --model planish/tinker://RUN/sampler_weights/NAME -M renderer=chatml -M data_dir=DIR
    inspect eval task.py --model planish/Qwen/Qwen3-8B --model-base-url http://gpu:8000

The model's renderer converts messages to tokens, so evaluation uses the same prompts as training.
Only text is supported. A task with tools or other content is rejected at its first request.
"""

import asyncio
import time

from inspect_ai.model import ChatMessage, GenerateConfig, ModelAPI, ModelOutput, ModelUsage
from inspect_ai.tool import ToolChoice, ToolInfo

from planish.client.service_client import ServiceClient
from planish.errors import UnsupportedError
from planish.evaluation.models import OpenedModel, open_model
from planish.integrations.inspect.messages import make_choice, renderer_messages
from planish.integrations.inspect.options import check_options, sampling_params

MAX_TOKENS = 2048
"""The length limit of an answer if the task gives none. Inspect's own providers use the same value.
The limit is lower if the context window has less room.
"""
MAX_CONNECTIONS = 64


class PlanishAPI(ModelAPI):
    """Inspect's interface to a model of planish, in this process or on a server."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008, as Inspect's providers have it
        *,
        renderer: str | None = None,
        data_dir: str | None = None,
        model: OpenedModel | None = None,
    ) -> None:
        """`renderer` and `data_dir` are set by `-M` arguments. If `model` is given, it is used
        instead of opening one, and stays open.
        """
        super().__init__(model_name, base_url, api_key, ["PLANISH_API_KEY"], config)
        self._service: ServiceClient | None = None
        if model is None:
            self._service = ServiceClient(
                base_url=base_url, api_key=self.api_key, data_dir=data_dir
            )
            model = open_model(self._service, model_name, renderer)
        self.model = model

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Sample the answers to a conversation. Raises UnsupportedError for options, tools or
        content that planish does not support.
        """
        check_options(config)
        if tools and tool_choice != "none":
            raise UnsupportedError(
                "the task gives the model tools; planish's Inspect provider supports no tools"
            )
        renderer = self.model.renderer
        prompt = renderer.build_generation_prompt(renderer_messages(input))
        requested_tokens = config.max_tokens or MAX_TOKENS
        context_window = self.model.context_window
        max_tokens = (
            requested_tokens
            if context_window is None
            else min(requested_tokens, context_window - prompt.length)
        )
        if max_tokens < 1:
            message = (
                f"the prompt has {prompt.length} tokens, and the model's context holds "
                f"{context_window}"
            )
            return ModelOutput.from_content(self.model_name, message, "model_length")
        start_time = time.monotonic()
        response = await self.model.sampling_client.sample_async(
            prompt=prompt,
            num_samples=config.num_choices or 1,
            sampling_params=sampling_params(
                config, max_tokens, self._stop_sequences(config.stop_seqs or [])
            ),
            topk_sample_logprobs=(config.top_logprobs or 0) if config.logprobs else 0,
        )
        num_sampled = sum(len(sequence.tokens) for sequence in response.sequences)
        num_cached = response.prompt_cache_hit_tokens
        return ModelOutput(
            model=self.model_name,
            choices=[
                make_choice(
                    sequence,
                    renderer,
                    self.model_name,
                    stop=config.stop_seqs or [],
                    was_bounded_by_context=max_tokens < requested_tokens,
                    with_logprobs=bool(config.logprobs),
                )
                for sequence in response.sequences
            ],
            usage=ModelUsage(
                input_tokens=prompt.length - num_cached,
                output_tokens=num_sampled,
                total_tokens=prompt.length + num_sampled,
                input_tokens_cache_read=num_cached,
            ),
            time=time.monotonic() - start_time,
        )

    def _stop_sequences(self, strings: list[str]) -> list[str] | list[int]:
        """Return the stops of the format and of the task. The sampler takes either tokens or
        strings, so with the task's strings, the format's stop tokens are decoded to text.
        """
        renderer_stops = self.model.renderer.get_stop_sequences()
        if not strings:
            return renderer_stops
        tokenizer = self.model.renderer.tokenizer
        return [
            *strings,
            *(
                stop if isinstance(stop, str) else tokenizer.decode([stop])
                for stop in renderer_stops
            ),
        ]

    async def count_text_tokens(self, text: str) -> int:
        return len(self.model.renderer.tokenizer.encode(text, add_special_tokens=False))

    async def tokenize(self, text: str) -> list[int]:
        return list(self.model.renderer.tokenizer.encode(text, add_special_tokens=False))

    def max_tokens(self) -> int | None:
        return MAX_TOKENS

    def max_connections(self) -> int:
        return MAX_CONNECTIONS

    def connection_key(self) -> str:
        return self.base_url or "this process"

    async def aclose(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            await asyncio.to_thread(service.close)
