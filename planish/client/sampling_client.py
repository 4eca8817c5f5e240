"""SamplingClient: sampling from one fixed version of the weights, which is a base model, a
checkpoint, or the state of a training client at some point.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, ClassVar

from planish.client.futures import Pending, async_returning_result, in_thread, map_future
from planish.client.session import RefusesMethods, Session, reject_pickling, release_resource
from planish.service import CreateSampler, ReleaseSampler, Sample
from planish.types import ModelInput, SampleResponse, SamplingParams, TensorData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SamplingClient(RefusesMethods):
    """Samples from one version of the weights. Made by `ServiceClient.create_sampling_client` and
    by methods of TrainingClient. When it is garbage-collected, this version is freed.
    """

    refused_methods: ClassVar[Mapping[str, str]] = {
        "get_sampler_handle": "a sampler belongs to the process that made it; save a checkpoint "
        "and give its path to another process",
        "on_queue_state_change": "planish does not report the state of its queue",
        "holder": "planish clients have no connection holder",
        **dict.fromkeys(
            ("forward_backward", "optim_step", "save_state"),
            "it is a method of the "
            "training client that ServiceClient.create_lora_training_client returns",
        ),
    }

    def __init__(
        self, session: Session, sampler_id: str, record_stability_info: bool = False
    ) -> None:
        """Make the client of an existing sampler. `record_stability_info`: see
        `planish.service.Sample`.
        """
        info = session.service.sampler_info(sampler_id)
        self.sampler_id = sampler_id
        self.model_path = info.model_path
        self._base_model = info.base_model
        self._session = session
        self._record_stability_info = record_stability_info
        # By default the finalizer would also run at interpreter exit. It is not needed there,
        # because the engine or session ends and frees the sampler.
        weakref.finalize(
            self, release_resource, session.service, ReleaseSampler(sampler_id)
        ).atexit = False

    __reduce__ = reject_pickling

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
        """Sample `num_samples` continuations of `prompt`; the prompt is prefilled once.

        `prompt_logprobs_last_n` limits the prompt logprobs to the last n positions.
        `target_prompt_logprobs` (int64 [P - 1, K]) contains K token ids for each of the prompt
        positions 1..P-1. The response has the logprobs of these tokens; the id -1 is a placeholder
        for no token. `prompt_alt_tokens_k` is the number of alternative tokens to sample at each of
        these positions.

        An invalid request, such as a prompt too long for `max_tokens`, raises ValueError: in this
        call with a local engine, and in `result()` with a server.
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
        return Pending(self._session.service.submit(operation), cancel_with_waiter=True)

    sample_async = async_returning_result(sample)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Pending[list[float | None]]:
        """Return the logprob of each token of `prompt`, given the tokens before it, at temperature
        1.

        The first token has the value None. With `prompt_logprobs_last_n`, all tokens before the
        last n have the value None too.
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
            map_future(self._session.service.submit(operation), _prompt_logprobs),
            cancel_with_waiter=True,
        )

    compute_logprobs_async = async_returning_result(compute_logprobs)

    def get_base_model(self) -> str:
        """Return the name of the base model."""
        return self._base_model

    async def get_base_model_async(self) -> str:
        """Return the name of the base model."""
        return self._base_model

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the base model's tokenizer."""
        return self._session.tokenizer(self._base_model)

    get_tokenizer_async = in_thread(get_tokenizer)

    def get_telemetry(self) -> None:
        """Return None: planish sends no telemetry."""

    def result(self, timeout: float | None = None) -> SamplingClient:
        """Return this client. This method lets callers treat the client, which
        `create_sampling_client` and similar methods return, as a future. It is ready at once, so
        `timeout` has no effect.
        """
        return self

    def __await__(self) -> Generator[None, None, SamplingClient]:
        """Return this client. This method lets callers await the result of
        `create_sampling_client` and similar methods.
        """
        return self
        yield


def create_sampling_client(
    session: Session,
    base_model: str | None,
    model_path: str | None,
    record_stability_info: bool = False,
) -> SamplingClient:
    """Create a sampler for a base model or a checkpoint, and return its client. If the wait fails
    or is interrupted, the sampler is released.
    """
    operation = CreateSampler(session.new_sampler_id(), base_model, model_path)
    try:
        sampler_id = session.service.submit(operation).result()
        return SamplingClient(session, sampler_id, record_stability_info)
    except BaseException:
        release_resource(session.service, ReleaseSampler(operation.sampler_id))
        raise


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    assert response.prompt_logprobs is not None
    return response.prompt_logprobs
