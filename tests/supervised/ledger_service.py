"""A service whose "weights" are a digest of all trained data, in order, with each learning rate.
Two runs end with equal weights only if every datum and every optimizer step was the same. `die_at`
ends a run, by an exception that nothing catches, before that many operations; saved states remain,
as files would.
"""

import asyncio
import hashlib
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from planish.client.futures import Pending
from planish.errors import NonFiniteError
from planish.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetServerCapabilitiesResponse,
    OptimStepResponse,
    SupportedModel,
    TensorData,
)

LOGPROB = -0.5


class Killed(BaseException):
    """Simulates a kill of the process."""


def done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return Pending(future)


@dataclass(frozen=True)
class Weights:
    digest: str = "new"
    steps: int = 0


@dataclass
class LedgerService:
    tokenizer: Any
    die_at: int | None = None
    context: int = 1 << 16
    states: dict[str, Weights] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)
    clients: list["LedgerClient"] = field(default_factory=list)

    def count(self, operation: str) -> None:
        if self.die_at is not None and len(self.operations) >= self.die_at:
            raise Killed
        self.operations.append(operation)

    @property
    def weights(self) -> Weights:
        return self.clients[-1].weights

    def create_lora_training_client(
        self, base_model, rank, seed, user_metadata=None
    ) -> "LedgerClient":
        return self._client(Weights())

    def create_training_client_from_state(self, path, user_metadata=None) -> "LedgerClient":
        return self._client(Weights(self.states[path].digest))

    def create_training_client_from_state_with_optimizer(
        self, path, user_metadata=None
    ) -> "LedgerClient":
        return self._client(self.states[path])

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        return GetServerCapabilitiesResponse([SupportedModel("tiny", self.context)])

    def create_rest_client(self) -> Any:
        def delete(path: str) -> Any:
            self.count("delete")
            del self.states[path]
            return done(None)

        return SimpleNamespace(delete_checkpoint_from_tinker_path=delete)

    def _client(self, weights: Weights) -> "LedgerClient":
        self.clients.append(LedgerClient(self, weights))
        return self.clients[-1]


@dataclass
class LedgerClient:
    service: LedgerService
    weights: Weights
    updates: list[AdamParams] = field(default_factory=list)
    """As they were asked for."""
    texts: list[list[str]] = field(default_factory=list)
    """What each batch had to learn."""
    pending: list[str] = field(default_factory=list)
    gradients: int = 0
    """Asked for so far."""
    refuses: ClassVar[tuple[str, int] | None] = None
    """The gradient or the update of that step, as by an engine that finds it not finite: nothing is
    applied.
    """

    @property
    def rates(self) -> list[float]:
        return [params.learning_rate for params in self.updates]

    def get_tokenizer(self) -> Any:
        return self.service.tokenizer

    def get_info(self) -> Any:
        return SimpleNamespace(model_data=SimpleNamespace(model_name="tiny"), lora_rank=32)

    async def save_weights_and_get_sampling_client_async(self) -> Any:
        self.service.count("publish")
        return SimpleNamespace(weights=self.weights)

    async def forward_async(self, data: list[Datum], loss_fn: str) -> Any:
        self.service.count("forward")
        return done(scored(data))

    async def forward_backward_async(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Any:
        self.service.count("forward_backward")
        self.pending += [digest(datum) for datum in data]
        self.texts.append([learned(datum, self.service.tokenizer) for datum in data])
        self.gradients += 1
        return self.refused("gradient") or later(scored(data))

    async def optim_step_async(self, params: AdamParams) -> Any:
        self.service.count("optim_step")
        self.updates.append(params)
        if (refused := self.refused("gradient") or self.refused("update")) is not None:
            self.pending = []
            return refused
        content = "|".join([self.weights.digest, *self.pending, str(params.learning_rate)])
        self.weights = Weights(hashlib.sha256(content.encode()).hexdigest(), self.weights.steps + 1)
        self.pending = []
        return later(OptimStepResponse({"grad_norm": 1.0, "adam_step": float(self.weights.steps)}))

    def refused(self, part: str) -> Any:
        """Return a failed result if this part of this step is to be rejected, else None."""
        if self.refuses != (part, self.gradients - 1):
            return None
        future: Future[Any] = Future()
        error = NonFiniteError(f"step {self.gradients - 1} is not finite")
        asyncio.get_running_loop().call_later(0.001, future.set_exception, error)
        return Pending(future)

    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> Any:
        self.service.count("save_state")
        path = f"tinker://run/weights/{name}"
        self.service.states[path] = self.weights
        return done(SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Any:
        self.service.count("save_weights_for_sampler")
        return done(SimpleNamespace(path=f"tinker://run/sampler_weights/{name}"))


def later(value: Any) -> Any:
    """Return a result that is ready a moment after its request, as an engine's is."""
    future: Future[Any] = Future()
    asyncio.get_running_loop().call_later(0.001, future.set_result, value)
    return Pending(future)


def scored(data: list[Datum]) -> ForwardBackwardOutput:
    outputs = [
        {
            "logprobs": TensorData(
                np.full(d.model_input.length, LOGPROB), "float32", [d.model_input.length]
            )
        }
        for d in data
    ]
    return ForwardBackwardOutput("arrays", outputs, {"loss:sum": 1.0})


def digest(datum: Datum) -> str:
    tensors = {name: tensor.tolist() for name, tensor in sorted(datum.loss_fn_inputs.items())}
    return hashlib.sha256(repr((datum.model_input.to_ints(), tensors)).encode()).hexdigest()


def learned(datum: Datum, tokenizer: Any) -> str:
    targets, weights = (
        datum.loss_fn_inputs[name].tolist() for name in ("target_tokens", "weights")
    )
    return tokenizer.decode(
        [token for token, weight in zip(targets, weights, strict=True) if weight]
    )
