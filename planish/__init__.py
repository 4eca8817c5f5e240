"""planish: reinforcement learning of language models on your own machine.

    service_client = planish.ServiceClient()
    training_client = service_client.create_lora_training_client(base_model=..., rank=32)
    sampling_client = training_client.save_weights_and_get_sampling_client()

Importing this loads no torch: the engine is imported by the first ServiceClient.
"""

from planish import errors, types
from planish.client.futures import Pending
from planish.client.rest_client import RestClient
from planish.client.sampling_client import SamplingClient
from planish.client.service_client import ServiceClient
from planish.client.training_client import TrainingClient
from planish.errors import (
    CheckpointError,
    DamagedFileError,
    EngineClosedError,
    NonFiniteError,
    PlanishError,
    StorageError,
    UnknownModelError,
    UnsupportedError,
    UserError,
)
from planish.processes.threads import spin_shortly as _spin_shortly
from planish.types import (
    AdamParams,
    Checkpoint,
    Constraint,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)

_spin_shortly()  # before torch is loaded, which reads it then

APIFuture = Pending

__all__ = [
    "APIFuture",
    "AdamParams",
    "Checkpoint",
    "CheckpointError",
    "Constraint",
    "DamagedFileError",
    "Datum",
    "EncodedTextChunk",
    "EngineClosedError",
    "ForwardBackwardOutput",
    "LoraConfig",
    "ModelInput",
    "NonFiniteError",
    "OptimStepResponse",
    "PlanishError",
    "RestClient",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StorageError",
    "TensorData",
    "TrainingClient",
    "UnknownModelError",
    "UnsupportedError",
    "UserError",
    "errors",
    "types",
]
