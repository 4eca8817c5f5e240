"""The client classes, importable by the same path as in the SDK."""

import sys
from collections.abc import Callable
from typing import Any

from planish.client.futures import Pending as APIFuture
from planish.client.rest_client import RestClient
from planish.client.sampling_client import SamplingClient
from planish.client.training_client import TrainingClient
from planish.tinker.refused import add_submodules, refused_type
from planish.tinker.service_client import ServiceClient

AwaitableConcurrentFuture = APIFuture
BackcompatSamplingClientFuture = SamplingClient
BackcompatTrainingClientFuture = TrainingClient
AdminClient = refused_type("AdminClient", "there are no accounts, audits or bills here")
LossHandle = refused_type("LossHandle", "pass the loss function to forward_backward_custom")
PerDatumLossFn = Callable[..., Any]

__all__ = [
    "APIFuture",
    "AdminClient",
    "AwaitableConcurrentFuture",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "LossHandle",
    "PerDatumLossFn",
    "RestClient",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
]

add_submodules(
    sys.modules[__name__],
    [
        "admin_client",
        "api_future",
        "backcompat_sampling_client_future",
        "backcompat_training_client_future",
        "custom_loss",
        "rest_client",
        "sampling_client",
        "service_client",
        "training_client",
    ],
    sys.modules[__name__],
)
