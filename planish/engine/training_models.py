"""The engine's records of training models, samplers and jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from planish.engine.base_models import BaseModel
from planish.engine.training.adapters import Adapter
from planish.errors import UserError
from planish.model.lora import LoraLayout, LoraWeights
from planish.service import ForwardBackwardLater, Operation
from planish.types import CheckpointPath, GetInfoResponse, ModelData


@dataclass(eq=False)
class Tenant:
    """One training model and its queue of jobs.

    Only the engine thread may access `adapter`, `queue`, `work` and `failure`.
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
    """Why the model permanently has no adapter."""
    queue: deque[Job] = field(default_factory=deque)
    key: object = field(default_factory=object)
    """A unique object that identifies this model within versions of weights. A `model_id` would not
    be unique, because it may be reused after an unload.
    """
    work: Generator[None, None, None] | None = None
    """The operation in progress, which belongs to queue[0]. Each `next` does one turn of it."""

    @property
    def is_ready(self) -> bool:
        """Whether the first job in the queue can be started or continued now."""
        if not self.queue:
            return False
        operation = self.queue[0].operation
        return not isinstance(operation, ForwardBackwardLater) or operation.data.done()

    @property
    def awaits_data(self) -> bool:
        """Whether the first job in the queue waits for data that are being prepared."""
        operation = self.queue[0].operation if self.queue else None
        return isinstance(operation, ForwardBackwardLater) and operation.data.running()

    def created(self) -> Adapter:
        """Return the adapter. Raise UserError if it is not created or was unloaded."""
        if self.adapter is None:
            raise UserError(
                f"model_id={self.model_id!r}: {self.failure or 'it is not created yet'}"
            )
        return self.adapter

    def info(self) -> GetInfoResponse:
        """Return the response of `get_info` for this model."""
        data = ModelData(self.base.config.family, self.base_model, str(self.base.directory))
        return GetInfoResponse(self.model_id, data, True, self.layout.lora.rank)


@dataclass(eq=False)
class SamplerHandle:
    """One sampler: a base model, or one version of an adapter on it.

    Only the engine thread may access the attributes after `model_path`.
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
    waiting: list[Job] = field(default_factory=list)
    """The requests that arrived before the sampler was ready."""
    running: set[Future[Any]] = field(default_factory=set)
    """The futures of requests without a response. A callback removes each one when it is done, in
    the thread that completes or cancels it.
    """
    is_released: bool = False
    """Whether the caller has released the sampler."""

    @property
    def is_unused(self) -> bool:
        """Whether the sampler was released and has no open requests."""
        return self.is_released and not self.waiting and not self.running


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """The contents of a checkpoint that was read and verified."""

    state: Mapping[str, Tensor]
    with_optimizer: bool
    layout: LoraLayout
    version: Hashable
    """The version of the weights (see `SamplerHandle.version`)."""


@dataclass(frozen=True, eq=False)
class Job:
    """One submitted operation and what `submit` looked up for it.

    A job of a training model has a `tenant`, and a job of a sampler has a `handle`. A job that
    publishes a model's weights as a new sampler has both.
    """

    operation: Operation[Any]
    future: Future[Any]
    tenant: Tenant | None = None
    handle: SamplerHandle | None = None
    loaded: LoadedAdapter | None = None
    save_to: CheckpointPath | None = None
    asked_loss: str | None = None
    """The loss that the caller named. The operation itself has the loss that is computed."""

    def fail(self, error: BaseException) -> None:
        """Set `error` on the future, unless the job is already done or cancelled."""
        if not self.future.done() and (
            self.future.running() or self.future.set_running_or_notify_cancel()
        ):
            self.future.set_exception(error)
