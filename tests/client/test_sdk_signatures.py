"""The public SDK's methods exist with the same arguments in the same order, so its programs need
only another import.
"""

import inspect
from typing import Any

import pytest
import tinker

import planish

# What the SDK's methods take and planish refuses as an unknown argument: there is nothing behind it
# here.
NOT_OFFERED = {"project_id"}
METHODS = [
    (kind, name)
    for kind in ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
    for name in vars(getattr(planish, kind))
    if not name.startswith("_") and hasattr(getattr(tinker, kind), name)
]


def arguments(function: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if name not in {*NOT_OFFERED, "self"}}


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_arguments_equal_those_of_the_public_sdk(kind, name):
    theirs = getattr(getattr(tinker, kind), name)
    if not callable(theirs):
        return
    ours, theirs = arguments(getattr(getattr(planish, kind), name)), arguments(theirs)
    assert list(theirs) == [name for name in ours if name in theirs]
    for argument, parameter in theirs.items():
        if parameter.default is not inspect.Parameter.empty:
            assert ours[argument].default == parameter.default
    added = [parameter for argument, parameter in ours.items() if argument not in theirs]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in added)


def test_the_sdk_comparison_covers_the_methods_of_training_loops():
    assert {
        ("TrainingClient", "forward_backward_async"),
        ("SamplingClient", "sample"),
        ("RestClient", "list_checkpoints"),
    } <= set(METHODS)
    assert len(METHODS) > 40


@pytest.mark.parametrize(
    "kind",
    ["Datum", "ModelInput", "TensorData", "EncodedTextChunk", "SampleResponse", "SampledSequence"],
)
def test_types_have_the_attributes_of_the_public_sdk(kind):
    theirs = getattr(tinker, kind)
    names = {name for name in dir(theirs) if not name.startswith("_")} - set(
        dir(tinker.types.AdamParams)
    )
    ours = getattr(planish, kind)
    fields = set(getattr(ours, "__dataclass_fields__", {})) | set(dir(ours))
    missing = {name for name in names if name not in fields}
    assert missing <= {"model_config", "convert_tensors", "to_dict"}
