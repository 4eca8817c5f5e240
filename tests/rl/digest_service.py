"""A service whose "weights" are a digest of all training data so far, in order.

Samples are a function of (weights, prompt, seed). So two runs end with equal weights only if every
sample, datum and optimizer step was the same. `die_at` ends a run before that operation with an
exception that nothing catches. Saved states remain, like files after a crash.
"""

import asyncio
import hashlib
import random
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from planish.errors import CheckpointError, UserError
from planish.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetServerCapabilitiesResponse,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SupportedModel,
    TensorData,
)

GAP = 0.01
"""The sampled minus the trained logprob of every token."""


class Killed(BaseException):
    """Ends a run as a kill would: nothing catches it."""


def done(value: Any) -> Any:
    """Return a finished API future."""
    future: Future[Any] = Future()
    future.set_result(value)

    class Ready:
        def result(self) -> Any:
            return value

        def __await__(self) -> Any:
            return asyncio.wrap_future(future).__await__()

    return Ready()


@dataclass
class Weights:
    digest: str = "new"
    steps: int = 0


@dataclass
class FakeService:
    tokenizer: Any
    die_at: int | None = None
    delay: Any = None
    """Returns the seconds that a sample takes, given the tokens of its prompt and its seed."""
    states: dict[str, Weights] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)
    clients: list["FakeTrainingClient"] = field(default_factory=list)
    seeds: set[int | None] = field(default_factory=set)
    """The seeds of all samples."""
    context: int | None = None
    """The context length of the model, in tokens."""

    def count(self, operation: str) -> None:
        if self.die_at is not None and len(self.operations) >= self.die_at:
            raise Killed
        self.operations.append(operation)

    def create_lora_training_client(
        self, base_model, rank, seed, user_metadata=None
    ) -> "FakeTrainingClient":
        self.count("create")
        return self._client(Weights(), user_metadata)

    def create_training_client_from_state(self, path, user_metadata=None) -> "FakeTrainingClient":
        return self._client(Weights(self.state(path).digest), user_metadata)

    def create_training_client_from_state_with_optimizer(
        self, path, user_metadata=None
    ) -> "FakeTrainingClient":
        saved = self.state(path)
        return self._client(Weights(saved.digest, saved.steps), user_metadata)

    async def create_sampling_client_async(
        self, model_path=None, base_model=None
    ) -> "FakeSamplingClient":
        return FakeSamplingClient(self, self.state(model_path) if model_path else Weights("base"))

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        return GetServerCapabilitiesResponse([SupportedModel("tiny", self.context)])

    def create_rest_client(self) -> Any:
        def delete(path: str) -> Any:
            self.state(path)
            del self.states[path]
            return done(None)

        return SimpleNamespace(delete_checkpoint_from_tinker_path=delete)

    def state(self, path: str) -> Weights:
        if path not in self.states:
            raise CheckpointError(f"there is no checkpoint {path}")
        return self.states[path]

    def _client(self, weights: Weights, metadata: dict[str, str] | None) -> "FakeTrainingClient":
        self.clients.append(FakeTrainingClient(self, f"run{len(self.clients)}", weights, metadata))
        return self.clients[-1]


@dataclass
class FakeTrainingClient:
    service: FakeService
    run_id: str
    weights: Weights
    metadata: dict[str, str] | None = None
    rates: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """The number of datums of each forward_backward."""
    pending: list[str] = field(default_factory=list)

    def get_tokenizer(self) -> Any:
        return self.service.tokenizer

    def get_info(self) -> Any:
        return SimpleNamespace(model_data=SimpleNamespace(model_name="tiny"), lora_rank=32)

    async def save_weights_and_get_sampling_client_async(self) -> "FakeSamplingClient":
        self.service.count("publish")
        return FakeSamplingClient(self.service, self.weights)

    async def forward_async(
        self, data: list[Datum], loss_fn: str, loss_fn_config: Any = None
    ) -> Any:
        return done(scored(data))

    async def forward_backward_async(
        self, data: list[Datum], loss_fn: str, loss_fn_config: Any = None
    ) -> Any:
        self.service.count("forward_backward")
        for datum in data:
            assert {
                tensor.shape[0] for tensor in datum.loss_fn_inputs.values() if tensor.shape
            } == {datum.model_input.length}
            self.pending.append(digest(datum))
        self.calls.append(len(data))
        return done(scored(data))

    async def optim_step_async(self, params: AdamParams) -> Any:
        self.service.count("optim_step")
        self.rates.append(params.learning_rate)
        content = [self.weights.digest, *self.pending, str(params.learning_rate)]
        self.weights = Weights(
            hashlib.sha256("|".join(content).encode()).hexdigest(), self.weights.steps + 1
        )
        self.pending = []
        return done(OptimStepResponse({"grad_norm": 1.0, "adam_step": float(self.weights.steps)}))

    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> Any:
        self.service.count("save_state")
        path = f"tinker://{self.run_id}/weights/{name}"
        self.service.states[path] = self.weights
        return done(SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Any:
        self.service.count("save_weights_for_sampler")
        path = f"tinker://{self.run_id}/sampler_weights/{name}"
        self.service.states[path] = self.weights
        return done(SimpleNamespace(path=path))


@dataclass
class FakeSamplingClient:
    service: FakeService
    weights: Weights

    async def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        self.service.count("sample")
        self.service.seeds.add(sampling_params.seed)
        tokens = prompt.to_ints()
        if (
            self.service.context is not None
            and len(tokens) + (sampling_params.max_tokens or 0) > self.service.context
        ):
            raise UserError(
                f"the prompt leaves no room for max_tokens={sampling_params.max_tokens}"
            )
        if self.service.delay is not None:
            await asyncio.sleep(self.service.delay(tokens, sampling_params.seed))
        draw = random.Random(f"{self.weights.digest}:{tokens}:{sampling_params.seed}")
        sampled = [draw.randrange(48, 58) for _ in range(3)]
        logprobs = np.array([-draw.random() for _ in sampled], np.float32)
        sequence = SampledSequence(
            "stop", str(draw.random()), np.array(sampled, np.int32), logprobs
        )
        return SampleResponse([sequence], prompt_cache_hit_tokens=len(tokens) // 2)

    def get_base_model(self) -> str:
        return "tiny"

    async def compute_logprobs_async(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        return [None, *(-0.5 for _ in prompt.to_ints()[1:])]


def scored(data: list[Datum]) -> ForwardBackwardOutput:
    outputs = []
    for datum in data:
        sampled = datum.loss_fn_inputs["logprobs"].to_numpy()
        outputs.append(
            {"logprobs": TensorData((sampled - GAP).tolist(), "float32", [len(sampled)])}
        )
    return ForwardBackwardOutput("arrays", outputs, {"loss:sum": 1.0})


def digest(datum: Datum) -> str:
    tensors = {name: tensor.tolist() for name, tensor in sorted(datum.loss_fn_inputs.items())}
    return hashlib.sha256(repr((datum.model_input.to_ints(), tensors)).encode()).hexdigest()
