"""A service whose "weights" are one number: the probability that it answers a sum correctly. It
stands for an engine that may be killed. `die_at` ends the run, by an exception that nothing
catches, before that many operations. Saved states remain, as files would. It has the methods of the
real clients that recipes use.
"""

import random
import re
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

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

LOGPROB = -0.5
GAP = 0.01
"""Sampled logprobs are LOGPROB, trained ones LOGPROB - GAP."""


class Killed(BaseException):
    """Simulates a kill of the process."""


@dataclass
class Weights:
    chance: float = 0.3
    step: int = 0


@dataclass
class FakeService:
    tokenizer: Any
    die_at: int | None = None
    states: dict[str, Weights] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)

    models: list[str] = field(default_factory=list)
    """The base models of the training clients, which were loaded."""
    context: int | None = None
    """The context length of the model, in tokens."""

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        return GetServerCapabilitiesResponse([SupportedModel("tiny", self.context)])

    def count(self, operation: str) -> None:
        if self.die_at is not None and len(self.operations) >= self.die_at:
            raise Killed
        self.operations.append(operation)

    def get_tokenizer(self, base_model: str) -> Any:
        return self.tokenizer

    def create_rest_client(self) -> "FakeRestClient":
        return FakeRestClient(self)

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int,
        seed: int | None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> "FakeTrainingClient":
        self.models.append(base_model)
        return FakeTrainingClient(self, Weights(), base_model, rank)

    def create_training_client_from_state(
        self, path: str, user_metadata: Mapping[str, str] | None = None
    ) -> "FakeTrainingClient":
        return FakeTrainingClient(self, Weights(self.states[path].chance), "tiny", 4)

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: Mapping[str, str] | None = None
    ) -> "FakeTrainingClient":
        saved = self.states[path]
        return FakeTrainingClient(self, Weights(saved.chance, saved.step), "tiny", 4)


@dataclass
class FakeRestClient:
    service: FakeService

    def delete_checkpoint_from_tinker_path(self, path: str) -> Future[None]:
        self.service.states.pop(path, None)
        return done(None)


@dataclass
class FakeTrainingClient:
    service: FakeService
    weights: Weights
    base_model: str
    rank: int
    rates: list[float] = field(default_factory=list)

    def get_tokenizer(self) -> Any:
        return self.service.tokenizer

    def get_info(self) -> Any:
        return SimpleNamespace(
            model_data=SimpleNamespace(model_name=self.base_model), lora_rank=self.rank
        )

    def save_weights_and_get_sampling_client(self) -> "FakeSamplingClient":
        self.service.count("publish")
        return FakeSamplingClient(self.service, self.weights.chance)

    def forward(self, data: list[Datum], loss_fn: str) -> Future[ForwardBackwardOutput]:
        return done(self._scored(data))

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: Any = None
    ) -> Future[ForwardBackwardOutput]:
        self.service.count(f"forward_backward {loss_fn} {loss_fn_config}")
        for datum in data:
            assert {
                tensor.shape[0] for tensor in datum.loss_fn_inputs.values() if tensor.shape
            } == {datum.model_input.length}
        return done(self._scored(data))

    def optim_step(self, params: AdamParams) -> Future[OptimStepResponse]:
        self.service.count("optim_step")
        self.rates.append(params.learning_rate)
        self.weights = Weights(min(1.0, self.weights.chance + 0.1), self.weights.step + 1)
        return done(OptimStepResponse({"grad_norm": 1.0, "adam_step": float(self.weights.step)}))

    def save_state(
        self, name: str, ttl_seconds: int | None = None, overwrite: bool = False
    ) -> Future[Any]:
        self.service.count("save_state")
        path = f"planish://run/weights/{name}"
        self.service.states[path] = self.weights
        return done(SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Future[Any]:
        self.service.count("save_weights_for_sampler")
        return done(SimpleNamespace(path=f"planish://run/sampler_weights/{name}"))

    def _scored(self, data: list[Datum]) -> ForwardBackwardOutput:
        outputs = [
            {
                "logprobs": TensorData(
                    np.full(d.model_input.length, LOGPROB - GAP), "float32", [d.model_input.length]
                )
            }
            for d in data
        ]
        return ForwardBackwardOutput("arrays", outputs, {"loss:sum": 1.0})


@dataclass
class FakeSamplingClient:
    service: FakeService
    chance: float

    def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> Future[SampleResponse]:
        self.service.count("sample")
        text = self.service.tokenizer.decode(prompt.to_ints())
        left, right = (int(number) for number in re.findall(r"(\d+) \+ (\d+)", text)[-1])
        sequences = []
        for index in range(num_samples):
            luck = random.Random(f"{sampling_params.seed}:{index}").random()
            value = left + right if luck < self.chance else -1
            answer = f" {value}" if "boxed" not in text else f" \\boxed{{{value}}}"
            tokens = self.service.tokenizer.encode(f"{answer}\n\nUser:")
            sequences.append(
                SampledSequence(
                    "stop", str(index), np.array(tokens), np.full(len(tokens), LOGPROB, np.float32)
                )
            )
        return done(SampleResponse(sequences))


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
