"""The names of the public `tinker` SDK, for scripts that were written for it.

    import planish.tinker as tinker

This package has every public name of the SDK. A name that planish supports is planish's own class.
Any other name is a class that raises UnsupportedError, with the reason, when it is instantiated.
`planish run SCRIPT` executes an unmodified script with this package as its `tinker`. The
ServiceClients of a process share one engine if their options are equal.
"""

from planish.tinker import auth, types
from planish.tinker.exceptions import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestFailedError,
    TinkerError,
    UnprocessableEntityError,
)
from planish.tinker.lib.public_interfaces import (
    AdminClient,
    APIFuture,
    BackcompatSamplingClientFuture,
    BackcompatTrainingClientFuture,
    LossHandle,
    PerDatumLossFn,
    RestClient,
    SamplingClient,
    ServiceClient,
    TrainingClient,
)
from planish.tinker.refused import NO_HTTP, refused_type
from planish.tinker.types import (
    AdamOptimizerConfig,
    AdamParams,
    Checkpoint,
    CheckpointType,
    Datum,
    DimuonOptimizerConfig,
    DimuonParams,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    LoraConfig,
    ModelID,
    ModelInput,
    ModelInputChunk,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
    ParsedCheckpointTinkerPath,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    StopReason,
    TensorData,
    TensorDtype,
    TrainingRun,
)

__title__ = "tinker"
__version__ = "0.38.0+planish"
"""The version of the SDK that this package follows."""

RequestOptions = refused_type("RequestOptions", NO_HTTP)
Timeout = refused_type("Timeout", NO_HTTP)
APIResponse = refused_type("APIResponse", NO_HTTP)
AsyncAPIResponse = refused_type("AsyncAPIResponse", NO_HTTP)


class ExperimentalWarning(FutureWarning):
    """The SDK's warning for experimental features. planish never issues it."""


__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AdminClient",
    "AuthenticationError",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "BadRequestError",
    "BillingError",
    "Checkpoint",
    "CheckpointType",
    "ConflictError",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ExperimentalWarning",
    "ForwardBackwardOutput",
    "InternalServerError",
    "LoraConfig",
    "LossHandle",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PerDatumLossFn",
    "PermissionDeniedError",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RequestFailedError",
    "RequestOptions",
    "RestClient",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "Timeout",
    "TinkerError",
    "TrainingClient",
    "TrainingRun",
    "UnprocessableEntityError",
    "__title__",
    "__version__",
    "auth",
    "types",
]
