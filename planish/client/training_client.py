"""TrainingClient: trains one adapter. Methods submit operations, which run in the order of the
calls.

For best throughput, submit several operations before waiting for the first result.
"""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from planish.client.futures import Pending, async_returning_pending, in_thread, map_future
from planish.client.model_operations import ModelOperations
from planish.client.sampling_client import SamplingClient, create_sampling_client
from planish.client.session import (
    RefusesMethods,
    Session,
    reject_options,
    reject_pickling,
    release_resource,
)
from planish.errors import UserError
from planish.service import (
    ForwardBackward,
    LoadWeights,
    OptimStep,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from planish.client.custom_loss import CustomLoss


class TrainingClient(RefusesMethods):
    """A client that trains one adapter. `ServiceClient` creates it.

    When the client is garbage-collected, the adapter's memory is freed. Its checkpoints and
    sampling clients are kept.
    """

    refused_methods: ClassVar[Mapping[str, str]] = {
        "get_console_url": "planish has no console; `planish runs` lists training runs",
        "save_weights_external": "save_weights_for_sampler writes a PEFT adapter, which "
        "`planish checkpoints download` copies",
        "holder": "planish clients have no connection holder",
        **dict.fromkeys(
            ("sample", "compute_logprobs"),
            "it is a method of the sampling client "
            "that save_weights_and_get_sampling_client() returns",
        ),
    }

    def __init__(self, session: Session, info: GetInfoResponse) -> None:
        """Make the client of an existing training model, which `info` describes."""
        self._session = session
        self._info = info
        self._operations = ModelOperations(session.service, info.model_id)
        # By default the finalizer would also run at interpreter exit. It is not needed there,
        # because the engine or session ends and frees the model.
        weakref.finalize(
            self, release_resource, session.service, UnloadModel(info.model_id)
        ).atexit = False

    __reduce__ = reject_pickling

    @property
    def model_id(self) -> str:
        """The id of the training model. Its checkpoints have paths that begin with this id:
        tinker://MODEL_ID/weights/NAME and tinker://MODEL_ID/sampler_weights/NAME.
        """
        return self._info.model_id

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> Pending[ForwardBackwardOutput]:
        """Compute loss and logprobs without a gradient."""
        config = loss_fn_config or {}
        operation = ForwardBackward(self.model_id, data, loss_fn, config, forward_only=True)
        return Pending(self._operations.submit(operation))

    forward_async = async_returning_pending(forward)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> Pending[ForwardBackwardOutput]:
        """Add the gradient of the loss, summed over all tokens and datums, to the accumulated
        gradient that the next `optim_step` applies.

        If this operation is rejected, fails or is cancelled, the next `optim_step` fails too.
        Invalid data are therefore reported by the result, not raised here. The losses are in
        planish/engine/training/losses.py, their options in planish.service.LOSS_OPTIONS.
        """
        # Callers may queue `optim_step` before they read this result, and expect that both succeed
        # or both fail. If this method raised, a caller would never submit the `optim_step` that
        # must fail.
        try:
            operation = ForwardBackward(self.model_id, data, loss_fn, loss_fn_config or {})
            return Pending(self._operations.submit(operation))
        except UserError as error:
            return Pending(self._operations.submit_failed_gradient(error))

    forward_backward_async = async_returning_pending(forward_backward)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss, *, loss_type_input: str | None = None
    ) -> Pending[ForwardBackwardOutput]:
        """Run `forward_backward` with a custom loss: a differentiable function
        `loss_fn(data, logprobs) -> (loss, metrics)`.

        `logprobs` has one leaf tensor per datum, in the shape of its target_tokens. `loss_fn` runs
        in a thread of its own. Later operations of this client and `ServiceClient.close` wait for
        it, so `loss_fn` must not call this client. If it raises, or the data are invalid, the next
        `optim_step` fails.
        """
        reject_options(loss_type_input=loss_type_input != "logprobs" and loss_type_input)
        return Pending(self._operations.submit_custom(data, loss_fn))

    forward_backward_custom_async = async_returning_pending(forward_backward_custom)

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> Pending[OptimStepResponse]:
        """Apply the accumulated gradient with AdamW, and clear it. `adam_params` is another name
        for `optim_params`. Raises UserError unless one of them is given.
        """
        if (optim_params is None) == (adam_params is None):
            raise UserError(
                "optim_step: give either optim_params or adam_params, as "
                "AdamParams(learning_rate=...)"
            )
        adam_params = optim_params if adam_params is None else adam_params
        assert adam_params is not None
        return Pending(self._operations.submit(OptimStep(self.model_id, adam_params)))

    optim_step_async = async_returning_pending(optim_step)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Pending[SaveWeightsResponse]:
        """Save a training checkpoint `name` with optimizer state. It does not include a gradient
        that has not been applied yet. The checkpoint expires after `ttl_seconds`; None keeps it.
        `overwrite` replaces an earlier checkpoint of the same name, which is otherwise an error.
        """
        operation = SaveWeights(self.model_id, name, ttl_seconds, overwrite, user_metadata or {})
        return Pending(self._operations.submit(operation))

    save_state_async = async_returning_pending(save_state)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> Pending[LoadWeightsResponse]:
        """Load the weights of the checkpoint at `path` with the same adapter shape, and reset the
        optimizer. planish has no access tokens, so `weights_access_token` must be None.
        """
        reject_options(weights_access_token=weights_access_token)
        return Pending(self._operations.submit(LoadWeights(self.model_id, path)))

    load_state_async = in_thread(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> Pending[LoadWeightsResponse]:
        """Load the weights, the optimizer state and the step count of the `save_state` checkpoint
        at `path`. planish has no access tokens, so `weights_access_token` must be None.
        """
        reject_options(weights_access_token=weights_access_token)
        return Pending(
            self._operations.submit(LoadWeights(self.model_id, path, with_optimizer=True))
        )

    load_state_with_optimizer_async = in_thread(load_state_with_optimizer)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        *,
        overwrite: bool = False,
    ) -> Pending[SaveWeightsForSamplerResponse]:
        """Save a sampler checkpoint `name`: the weights alone, in PEFT's format. The checkpoint
        expires after `ttl_seconds`; None keeps it. `overwrite` replaces an earlier checkpoint of
        the same name. Without it, this is an error unless the weights are equal.
        """
        operation = SaveWeightsForSampler(
            self.model_id, name, ttl_seconds, overwrite, user_metadata or {}
        )
        return Pending(self._operations.submit(operation))

    save_weights_for_sampler_async = async_returning_pending(save_weights_for_sampler)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: str = "snapshot",
    ) -> SamplingClient:
        """Return a client that samples from the weights after all operations submitted so far.
        Later training does not change its weights.

        With `name`, the weights are also saved as a sampler checkpoint. `kind` "inflight" has the
        same effect as "snapshot". `record_stability_info`: see `planish.service.Sample`.
        """
        if name is not None:
            path = self.save_weights_for_sampler(name).result().path
            return self.create_sampling_client(path, retry_config, record_stability_info)
        return self._publish(record_stability_info, kind).result()

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: str = "snapshot",
    ) -> SamplingClient:
        """Do what `save_weights_and_get_sampling_client` does, without blocking the event loop."""
        if name is not None:
            path = (await self.save_weights_for_sampler(name)).path
            return await self.create_sampling_client_async(
                path, retry_config, record_stability_info
            )
        return await self._publish(record_stability_info, kind)

    def _publish(self, record_stability_info: bool, kind: str) -> Pending[SamplingClient]:
        if kind not in ("snapshot", "inflight"):
            raise UserError(f"kind={kind!r}: give 'snapshot' or 'inflight'")
        session, sampler_id = self._session, self._session.new_sampler_id()
        id_future = self._operations.submit(PublishSampler(self.model_id, sampler_id))
        return Pending(
            map_future(
                id_future,
                lambda published_id: SamplingClient(session, published_id, record_stability_info),
            )
        )

    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """Create a client that samples from the checkpoint at `model_path`.

        The options, `retry_config` and `record_stability_info`, are those of
        `ServiceClient.create_sampling_client`.
        """
        return create_sampling_client(self._session, None, model_path, record_stability_info)

    create_sampling_client_async = in_thread(create_sampling_client)

    def get_telemetry(self) -> None:
        """Return None: planish sends no telemetry."""

    def get_info(self) -> GetInfoResponse:
        """Return the model's id, base model and LoRA rank."""
        return self._info

    async def get_info_async(self) -> GetInfoResponse:
        """Return the model's id, base model and LoRA rank."""
        return self._info

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the base model's tokenizer."""
        return self._session.tokenizer(self._info.model_data.model_name)

    get_tokenizer_async = in_thread(get_tokenizer)

    def result(self, timeout: float | None = None) -> TrainingClient:
        """Return this client at once. This method exists for callers that expect a future from
        `create_lora_training_client` and similar methods. `timeout` has no effect.
        """
        return self

    def __await__(self) -> Generator[None, None, TrainingClient]:
        """Return this client. This method lets callers await the result of
        `create_lora_training_client` and similar methods.
        """
        return self
        yield
