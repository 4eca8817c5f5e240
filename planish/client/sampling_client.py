"""Sampling from one fixed version of the weights: a base model, a checkpoint, or what a training
client had at some moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, ClassVar

from planish.client.futures import Pending, awaiting, chained, in_thread
from planish.client.session import RefusesMethods, Session, discard, refuse_to_pickle
from planish.service import CreateSampler, ReleaseSampler, Sample
from planish.types import ModelInput, SampleResponse, SamplingParams, TensorData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SamplingClient(RefusesMethods):
    """Made by `ServiceClient.create_sampling_client` and the methods of TrainingClient. Dropping it
    frees the version it holds.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "get_sampler_handle": "a sampler belongs to the process that made it; save a checkpoint "
        "and give its path to another process",
        "on_queue_state_change": "there is no queue of a server to watch",
        "holder": "there is no connection to hold",
    }

    def __init__(
        self, session: Session, sampler_id: str, record_stability_info: bool = False
    ) -> None:
        info = session.service.sampler_info(sampler_id)
        self.sampler_id = sampler_id
        self.model_path = info.model_path
        self._base_model = info.base_model
        self._session = session
        self._record_stability_info = record_stability_info
        # At exit the engine goes as a whole.
        weakref.finalize(self, discard, session.service, ReleaseSampler(sampler_id)).atexit = False

    __reduce__ = refuse_to_pickle

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> Pending[SampleResponse]:
        """`num_samples` continuations of `prompt`; the prompt is computed once.

        `prompt_logprobs_last_n` leaves out all but the last n of the prompt's logprobs.
        `target_prompt_logprobs`: int64 [P - 1, K], token ids whose logprobs at prompt positions
        1..P-1 are wanted, -1 for none. `prompt_alt_tokens_k`: so many draws at each of those
        positions. ValueError at once for what cannot be served, such as a prompt that leaves no
        room for `max_tokens`.
        """
        operation = Sample(
            sampler_id=self.sampler_id,
            prompt=prompt,
            num_samples=num_samples,
            sampling_params=sampling_params,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )
        return Pending(self._session.service.submit(operation), withdraw=True)

    sample_async = awaiting(sample)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Pending[list[float | None]]:
        """The logprob of each token of `prompt` given those before it, at temperature 1; None for
        the first.
        """
        operation = Sample(
            sampler_id=self.sampler_id,
            prompt=prompt,
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=1),
            prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            prompt_only=True,
        )
        return Pending(
            chained(self._session.service.submit(operation), _prompt_logprobs), withdraw=True
        )

    compute_logprobs_async = awaiting(compute_logprobs)

    def get_base_model(self) -> str:
        """The name of the base model."""
        return self._base_model

    async def get_base_model_async(self) -> str:
        """As `get_base_model`."""
        return self._base_model

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer."""
        return self._session.tokenizer(self._base_model)

    get_tokenizer_async = in_thread(get_tokenizer)

    def get_telemetry(self) -> None:
        """Return None: planish reports nothing to anybody."""

    def result(self, timeout: float | None = None) -> SamplingClient:
        """Itself, for code that takes what made it for a future."""
        return self

    def __await__(self) -> Generator[None, None, SamplingClient]:
        """Itself, for code that awaits what made it."""
        return self
        yield


def create_sampling_client(
    session: Session,
    base_model: str | None,
    model_path: str | None,
    record_stability_info: bool = False,
) -> SamplingClient:
    """Of a base model or a checkpoint. Whatever ends the wait for it, Ctrl-C for instance, frees
    it.
    """
    operation = CreateSampler(session.new_sampler_id(), base_model, model_path)
    try:
        sampler_id = session.service.submit(operation).result()
        return SamplingClient(session, sampler_id, record_stability_info)
    except BaseException:
        discard(session.service, ReleaseSampler(operation.sampler_id))
        raise


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    assert response.prompt_logprobs is not None
    return response.prompt_logprobs
