"""The engine's records of training models, samplers and queued operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from planish.engine.base_models import BaseModel
from planish.engine.replication import ComputePart, FinishParts
from planish.engine.training.adapters import Adapter
from planish.engine.training.trainer import TrainingBatch
from planish.errors import UserError
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.service import (
    DeferredForwardBackward,
    ForwardBackward,
    LoadWeights,
    Operation,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.types import CheckpointPath, GetInfoResponse, ModelData


@dataclass(eq=False)
class TrainingModel:
    """One training model and its queue of operations.

    Only the engine thread may access `adapter`, `queue` and `work`, and only that thread may change
    `failure`.
    """

    model_id: str
    base: BaseModel
    base_model: str
    """The name of the base model that the caller gave at creation."""
    layout: LoraLayout
    user_metadata: Mapping[str, str]
    adapter: Adapter | None = None
    """The LoRA adapter. None until the model is created, and after it is unloaded."""
    failure: str | None = None
    """Why the model will never have an adapter again: its creation failed, or it was unloaded."""
    queue: deque[QueuedTraining] = field(default_factory=lambda: deque())
    key: object = field(default_factory=object)
    """A unique object that stands for this model in the versions of its weights. The `model_id` is
    not unique, because it may be reused after an unload.
    """
    work: Generator[None, None, None] | None = None
    """The generator that runs the operation queue[0]. Each call of `next` runs it for one turn."""

    @property
    def is_ready(self) -> bool:
        """Whether the first operation in the queue can be started or continued now."""
        if not self.queue:
            return False
        operation = self.queue[0].operation
        return not isinstance(operation, DeferredForwardBackward) or operation.data.done()

    @property
    def awaits_data(self) -> bool:
        """Whether the first operation in the queue waits for data that are being prepared."""
        operation = self.queue[0].operation if self.queue else None
        return isinstance(operation, DeferredForwardBackward) and operation.data.running()

    def require_adapter(self) -> Adapter:
        """Return the adapter. Raise UserError if it is not created or was unloaded."""
        if self.adapter is None:
            raise UserError(
                f"model_id={self.model_id!r}: {self.failure or 'it is not created yet'}"
            )
        return self.adapter

    def info(self) -> GetInfoResponse:
        """Return the response of `get_info` for this model."""
        data = ModelData(self.base.config.family, self.base_model, str(self.base.directory))
        return GetInfoResponse(self.model_id, data, True, self.layout.lora_config.rank)


@dataclass(eq=False)
class SamplerSession:
    """One sampler: a base model, or one version of an adapter on it.

    Only the engine thread may access the attributes after `model_path`. As an exception, callbacks
    remove futures from `running_futures` in any thread.
    """

    sampler_id: str
    base: BaseModel
    base_model: str
    model_path: str | None = None
    weights: LoraWeights | None = None
    version: Hashable = None
    """The version of the weights, which is part of the prefix cache key. Samplers with equal
    versions share cached prefixes. None until the sampler is ready.
    """
    failure: str | None = None
    """Why the creation of the sampler failed."""
    waiting_requests: list[QueuedSample] = field(default_factory=lambda: [])
    """The requests that arrived before the sampler was ready."""
    running_futures: set[Future[Any]] = field(default_factory=set[Future[Any]])
    """The futures of requests without a response. A callback removes each future when the future is
    done, in the thread that completes or cancels it.
    """
    is_released: bool = False
    """Whether the caller has released the sampler."""

    @property
    def is_unused(self) -> bool:
        """Whether the sampler was released and has no open requests."""
        return self.is_released and not self.waiting_requests and not self.running_futures


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """The contents of a checkpoint that was read and verified."""

    state: Mapping[str, Tensor]
    with_optimizer: bool
    layout: LoraLayout
    version: Hashable
    """The version of the weights (see `SamplerSession.version`)."""

    def sampler_weights(self, base: BaseModel) -> LoraWeights:
        """Return the compute copy for a sampler."""
        return base.backend.lora_weights(self.layout, self.state["master"])


@dataclass(eq=False)
class AddedVersion:
    """A version of an adapter whose home is another engine (see replication.py)."""

    version: str
    """The name of the version, which is a hash of its content."""
    model: TrainingModel
    """A training model without an adapter, in whose turns the version's gradients are computed."""
    vector: Tensor
    """The flat vector of the adapter, in the dtype of the base model."""
    weights: LoraWeights | None = None
    """The compute copy; the engine thread makes it at the first use."""

    def sampler_weights(self, base: BaseModel) -> LoraWeights:
        """Return the compute copy, which samplers and the trainer share."""
        if self.weights is None:
            self.weights = base.backend.lora_weights(
                self.model.layout, self.vector, requires_grad=True
            )
        return self.weights


@dataclass(frozen=True, eq=False)
class QueuedOperation:
    """A submitted operation and the future of its result.

    The subclasses add what `Engine.submit` looked up or read for the operation.
    """

    operation: Operation[Any]
    future: Future[Any]

    def fail(self, error: BaseException) -> None:
        """Set `error` on the future, unless the operation is already done or cancelled."""
        if not self.future.done() and (
            self.future.running() or self.future.set_running_or_notify_cancel()
        ):
            self.future.set_exception(error)


@dataclass(frozen=True, eq=False)
class QueuedTraining(QueuedOperation):
    """An operation in the queue of a training model.

    Operations without data of their own, such as an optimizer step, have no subclass.
    """

    model: TrainingModel


@dataclass(frozen=True, eq=False)
class QueuedCreation(QueuedTraining):
    """The creation of a training model, from a checkpoint if `loaded_adapter` is given."""

    loaded_adapter: LoadedAdapter | None


@dataclass(frozen=True, eq=False)
class QueuedForwardBackward(QueuedTraining):
    """A forward pass, with gradients unless `operation.forward_only`, over datums already read."""

    operation: ForwardBackward
    batch: TrainingBatch


@dataclass(frozen=True, eq=False)
class QueuedDeferredForwardBackward(QueuedTraining):
    """A forward and backward pass over datums that are still being prepared."""

    operation: DeferredForwardBackward
    loss_fn: str
    """The loss to compute: the requested loss, or its substitute."""


@dataclass(frozen=True, eq=False)
class QueuedPart(QueuedTraining):
    """The computation of some micro-batches, whose results go to the model's home."""

    operation: ComputePart
    batch: TrainingBatch
    added_version: AddedVersion | None
    """The weights; None for those of the training model."""


@dataclass(frozen=True, eq=False)
class QueuedFinish(QueuedTraining):
    """The end of a `ForwardBackward` whose parts are computed."""

    operation: FinishParts
    loss_fn: str
    """The loss that was computed: the requested loss, or its substitute."""


@dataclass(frozen=True, eq=False)
class QueuedLoad(QueuedTraining):
    """The replacement of a training model's state by a checkpoint."""

    operation: LoadWeights
    loaded_adapter: LoadedAdapter


@dataclass(frozen=True, eq=False)
class QueuedSave(QueuedTraining):
    """The saving of a checkpoint."""

    operation: SaveWeights | SaveWeightsForSampler
    path: CheckpointPath


@dataclass(frozen=True, eq=False)
class QueuedPublish(QueuedTraining):
    """The publication of a training model's current weights as a new sampler."""

    session: SamplerSession


@dataclass(frozen=True, eq=False)
class QueuedSampling(QueuedOperation):
    """An operation on a sampler."""

    session: SamplerSession


@dataclass(frozen=True, eq=False)
class QueuedSamplerCreation(QueuedSampling):
    """The creation of a sampler, from a checkpoint or a version if `loaded_adapter` is given."""

    loaded_adapter: LoadedAdapter | AddedVersion | None


@dataclass(frozen=True, eq=False)
class QueuedSample(QueuedSampling):
    """A sampling request."""

    operation: Sample
