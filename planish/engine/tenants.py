"""What the engine knows of those it serves: training models with their queues, samplers with their
versions, and jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from planish.engine.adapters import Adapter
from planish.engine.base_models import BaseModel
from planish.errors import UserError
from planish.model.lora import LoraLayout, LoraWeights
from planish.service import ForwardBackwardLater, Operation
from planish.types import CheckpointPath, GetInfoResponse, ModelData


@dataclass(eq=False)
class Tenant:
    """One training model. The engine's thread alone touches `adapter`, `queue`, `work` and
    `failure`.
    """

    model_id: str
    base: BaseModel
    base_model: str
    """The name that it was created with."""
    layout: LoraLayout
    user_metadata: Mapping[str, str]
    adapter: Adapter | None = None
    """None until it is created, and after it is unloaded."""
    failure: str | None = None
    """Why there is no adapter, once that is final."""
    queue: deque[Job] = field(default_factory=deque)
    key: object = field(default_factory=object)
    """Names it among the versions of weights: an id may be used again after an unload."""
    work: Generator[None, None, None] | None = None
    """The operation under way: that of queue[0]."""

    @property
    def is_ready(self) -> bool:
        """Whether there is something to do for it now."""
        if not self.queue:
            return False
        operation = self.queue[0].operation
        return not isinstance(operation, ForwardBackwardLater) or operation.data.done()

    @property
    def awaits_data(self) -> bool:
        """Whether somebody is making the data that it waits for."""
        operation = self.queue[0].operation if self.queue else None
        return isinstance(operation, ForwardBackwardLater) and operation.data.running()

    def created(self) -> Adapter:
        """The adapter; an error if its creation failed or it is gone."""
        if self.adapter is None:
            raise UserError(
                f"model_id={self.model_id!r}: {self.failure or 'it is not created yet'}"
            )
        return self.adapter

    def info(self) -> GetInfoResponse:
        data = ModelData(self.base.config.family, self.base_model, str(self.base.directory))
        return GetInfoResponse(self.model_id, data, True, self.layout.lora.rank)


@dataclass(eq=False)
class SamplerHandle:
    """One sampler: a base model, or one version of an adapter on it. The engine's thread alone
    touches what follows `model_path`.
    """

    sampler_id: str
    base: BaseModel
    base_model: str
    model_path: str | None = None
    weights: LoraWeights | None = None
    version: Hashable = None
    """Of the weights: equal for equal ones, the key of known prefixes. None until the sampler is
    ready.
    """
    failure: str | None = None
    waiting: list[Job] = field(default_factory=list)
    """Requests that came before the sampler was ready."""
    running: set[Future[Any]] = field(default_factory=set)
    """Futures of the requests that are not answered yet; each leaves by itself, in whichever thread
    it is done.
    """
    is_released: bool = False

    @property
    def is_unused(self) -> bool:
        """Whether it was released and all of its requests are answered."""
        return self.is_released and not self.waiting and not self.running


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """A checkpoint that was read and verified."""

    state: Mapping[str, Tensor]
    with_optimizer: bool
    layout: LoraLayout
    version: Hashable
    """Equal for equal weights."""


@dataclass(frozen=True, eq=False)
class Job:
    """One submitted operation, with what `submit` found out about it."""

    operation: Operation[Any]
    future: Future[Any]
    tenant: Tenant | None = None
    handle: SamplerHandle | None = None
    loaded: LoadedAdapter | None = None
    save_to: CheckpointPath | None = None
    asked_loss: str | None = None
    """The loss that the caller named; the operation has the one that is computed."""

    def fail(self, error: BaseException) -> None:
        """Answer with `error`, unless it was cancelled or answered."""
        if not self.future.done() and (
            self.future.running() or self.future.set_running_or_notify_cancel()
        ):
            self.future.set_exception(error)
