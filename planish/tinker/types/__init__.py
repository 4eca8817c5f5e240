"""The SDK's types: planish's own types under the SDK's names, and types that planish does not
support.

Each submodule of the SDK's `types` can be imported too. It has all names of this package.
"""

import re
import sys
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Literal

from planish.images import ImageChunk
from planish.tensors import TensorData, TensorDtype
from planish.tinker.refused import add_submodules, refused_type
from planish.types import (
    AdamParams,
    Checkpoint,
    CheckpointPath,
    CheckpointsListResponse,
    CheckpointType,
    Cursor,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    LoraConfig,
    ModelData,
    ModelInput,
    ModelInputChunk,
    OptimStepResponse,
    PromptAltTokens,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    StopReason,
    SupportedModel,
    TopkLogprobs,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)

LossFnType = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
]
LossFnInputs = dict[str, TensorData]
LossFnOutput = dict[str, TensorData]
ModelID = str
RequestID = str
SamplingClientKind = Literal["snapshot", "inflight"]
OptimParams = AdamParams


@dataclass(frozen=True)
class AdamOptimizerConfig:
    """Selects AdamW, the only optimizer of planish."""

    type: Literal["adamw"] = "adamw"


OptimizerConfig = AdamOptimizerConfig


@dataclass(frozen=True)
class ParsedCheckpointTinkerPath:
    """The parts of a checkpoint's path."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> "ParsedCheckpointTinkerPath":
        """Split a path tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME. Raise
        UserError for any other text.
        """
        path = CheckpointPath.parse(tinker_path)
        return cls(tinker_path, path.run_id, path.checkpoint_type, path.checkpoint_id)


class RequestErrorCategory(StrEnum):
    Unknown = auto()
    Server = auto()
    User = auto()


_NO_AUDIO = "planish reads text and images only"
_NO_ASSETS = "there are no stored images here; give the bytes of the image in an ImageChunk"
_NO_DIMUON = "the update rule of Dimuon is not public; AdamW is the one optimizer here"
_MESSAGE = "it is a message of the SDK's HTTP protocol, which planish does not expose"
_NO_ACCOUNTS = "there are no accounts, sessions, audits or bills here"

_ACCOUNT_TYPES = """
    AuditLogEntry AuditLogResponse BillingEventInfo BillingUsageEvent BillingUsageResponse
    BillingUsageSession CheckpointBillingEvent CurrentCheckpointStorageUsageItem
    CurrentCheckpointStorageUsageResponse GetBillingUsageRequest
    GetCurrentCheckpointStorageUsageRequest GetSessionResponse ListSessionsResponse
    AccessibleSearchOwner OwnSearchOwner UserSearchOwner SearchOwner SamplingPrefillBillingEvent
    SamplingSampleBillingEvent StorageBillingEvent TrainingBillingEvent WhoamiResponse
    ActiveSessionStatusQuery CancelledSessionStatusQuery ClientFinishedSessionStatusQuery
    FailedSessionStatusQuery SessionStatusQuery ClientSessionFinished ClientSessionFinishErrored
    ClientSessionFinishInterrupted ClientSessionFinishReason ClientSessionFinishReasonType
    ClientSessionFinishSuccess SessionActive SessionCancelled SessionFailed SessionFailedReason
    SessionFailedRequestReason SessionFailedSamplingSessionReason SessionFailedTrainingRunReason
    SessionStatus SessionSearchCursor SessionSearchRequest SessionSearchResponse SessionSummary
"""
_MESSAGE_TYPES = """
    AuthTokenResponse ClientConfigRequest ClientConfigResponse ClientDynamicConfigResponse
    CopyWeightsRequest CopyWeightsResponse CreateCustomLossRequest CreateCustomLossResponse
    CreateModelRequest CreateModelResponse CreateSamplingSessionRequest
    CreateSamplingSessionResponse CreateSessionRequest CreateSessionResponse CustomLossGraph
    CustomLossInput CustomLossInputRank CustomLossNode CustomLossNodeOp EventType
    ExternalWeightsUrlsResponse ForwardBackwardInput ForwardBackwardRequest ForwardRequest
    FutureCompletion FutureFailed FutureFinished FutureRetrieveRequest FutureRetrieveResponse
    FuturesRetrieveRequest FuturesRetrieveResponse GenericEvent GetInfoRequest
    GetSamplerResponse HealthResponse JoinSamplingSessionRequest JoinSamplingSessionResponse
    LoadWeightsRequest OptimStepRequest RequestFailedResponse SampleRequest
    SamplingSessionFuturesTarget SaveWeightsExternalRequest SaveWeightsExternalResponse
    SaveWeightsExternalResponseInternal SaveWeightsForSamplerRequest
    SaveWeightsForSamplerResponseInternal SaveWeightsRequest SessionEndEvent
    SessionHeartbeatRequest SessionHeartbeatResponse SessionStartEvent Severity TelemetryBatch
    TelemetryEvent TelemetryResponse TelemetrySendRequest TryAgainResponse
    UnhandledExceptionEvent UnloadModelRequest UnloadModelResponse UntypedAPIFuture
"""

REFUSED = {
    "DmelChunk": _NO_AUDIO,
    "ImageAssetPointerChunk": _NO_ASSETS,
    **dict.fromkeys(("DimuonOptimizerConfig", "DimuonParams"), _NO_DIMUON),
    **dict.fromkeys(("OptimizerConfigBase", "OptimParamsBase"), _NO_DIMUON),
    **dict.fromkeys(_ACCOUNT_TYPES.split(), _NO_ACCOUNTS),
    **dict.fromkeys(_MESSAGE_TYPES.split(), _MESSAGE),
}
"""The SDK's types that planish does not support, with the reason for each."""

DmelChunk = refused_type("DmelChunk", _NO_AUDIO)
ImageAssetPointerChunk = refused_type("ImageAssetPointerChunk", _NO_ASSETS)
DimuonOptimizerConfig = refused_type("DimuonOptimizerConfig", _NO_DIMUON)
DimuonParams = refused_type("DimuonParams", _NO_DIMUON)
OptimStepRequest = refused_type("OptimStepRequest", _MESSAGE)
SampleRequest = refused_type("SampleRequest", _MESSAGE)
__all__ = [
    "AdamOptimizerConfig",
    "AdamParams",
    "Checkpoint",
    "CheckpointType",
    "CheckpointsListResponse",
    "Cursor",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "GetServerCapabilitiesResponse",
    "ImageChunk",
    "LoadWeightsResponse",
    "LoraConfig",
    "LossFnInputs",
    "LossFnOutput",
    "LossFnType",
    "ModelData",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "OptimParams",
    "OptimStepResponse",
    "OptimizerConfig",
    "ParsedCheckpointTinkerPath",
    "PromptAltTokens",
    "PromptProvenanceSpan",
    "ProvenanceSpans",
    "RequestErrorCategory",
    "RequestID",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClientKind",
    "SamplingParams",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsResponse",
    "StopReason",
    "SupportedModel",
    "TensorData",
    "TensorDtype",
    "TopkLogprobs",
    "TrainingRun",
    "TrainingRunsResponse",
    "WeightsInfoResponse",
]


for _name, _reason in REFUSED.items():
    globals().setdefault(_name, refused_type(_name, _reason))


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.replace("ID", "Id")).lower()


add_submodules(
    sys.modules[__name__],
    sorted(
        {_snake(name) for name in (*__all__, *REFUSED)}
        | {
            "billing_usage_request",
            "current_checkpoint_storage_usage_request",
            "optimizer",
            "search_owner",
            "session_status_query",
            "shared",
        }
    ),
    sys.modules[__name__],
)
