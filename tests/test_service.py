"""Operations check the types of their fields, and copy values that their callers may change
later.
"""

from typing import Any

import pytest

from planish.errors import UserError
from planish.service import (
    MAX_METADATA,
    CreateModel,
    CreateSampler,
    DeferredForwardBackward,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.types import Datum, ModelInput, SamplingParams

PROMPT = ModelInput.from_ints([1, 2, 3])
DATUM = Datum(PROMPT, {"target_tokens": [1, 2, 3]})
WRONG: list[tuple[type[Any], dict[str, Any], str]] = [
    (CreateModel, {"base_model": "m", "lora": {"rank": 4}}, "lora is a dict; give LoraConfig"),
    (CreateModel, {"base_model": 5}, "base_model is a int; give a name"),
    (CreateModel, {"base_model": ""}, "base_model is empty"),
    (CreateModel, {}, "base_model and from_path are both missing"),
    (CreateModel, {"from_path": "model.pt"}, "checkpoint path 'model.pt': expected tinker://"),
    (CreateModel, {"base_model": "m", "user_metadata": {"a": 1}}, "user_metadata={'a': 1}: give"),
    (
        CreateModel,
        {"base_model": "m", "user_metadata": {"k": "x" * MAX_METADATA}},
        "user_metadata has 65,537 characters; give at most 65,536",
    ),
    (
        SaveWeights,
        {"name": "a", "user_metadata": {"x" * MAX_METADATA: "v"}},
        "user_metadata has 65,537 characters",
    ),
    (CreateSampler, {}, "base_model and model_path are both missing"),
    (CreateSampler, {"model_path": 5}, "checkpoint path 5"),
    (ForwardBackward, {"data": DATUM, "loss_fn": "ppo"}, "data is a Datum; give a list"),
    (ForwardBackward, {"data": [1], "loss_fn": "ppo"}, r"data\[0\] is a int; give a Datum"),
    (ForwardBackward, {"data": [DATUM], "loss_fn": None}, "loss_fn is a NoneType; give str"),
    (
        DeferredForwardBackward,
        {"data": None, "loss_fn": "ppo", "loss_fn_config": [1]},
        "loss_fn_config is a list; give a dictionary of numbers",
    ),
    (
        DeferredForwardBackward,
        {"data": None, "loss_fn": "ppo", "loss_fn_config": {"beta": "x"}},
        r"loss_fn_config\['beta'\]='x': give a finite number",
    ),
    (OptimStep, {"adam_params": {"learning_rate": 1}}, "adam_params is a dict; give AdamParams"),
    (SaveWeights, {"name": "a/b"}, "name='a/b': give up to 200 letters"),
    (SaveWeights, {"name": "a", "ttl_seconds": 0}, "ttl_seconds=0: give whole seconds"),
    (SaveWeightsForSampler, {"name": None}, "name=None: give up to 200 letters"),
    (LoadWeights, {"path": "model.pt"}, "checkpoint path 'model.pt'"),
]


@pytest.mark.parametrize(("kind", "given", "message"), WRONG)
def test_a_field_of_a_wrong_kind_is_named(kind: type[Any], given: dict[str, Any], message: str):
    owner = "sampler_id" if kind is CreateSampler else "model_id"
    with pytest.raises(UserError, match=message):
        kind(**{owner: "id", **given})


def test_metadata_at_the_limit_is_accepted():
    metadata = {"k": "x" * (MAX_METADATA - 1)}
    assert SaveWeights("id", "a", user_metadata=metadata).user_metadata == metadata


@pytest.mark.parametrize("name", ["prompt", "sampling_params"])
def test_a_sample_takes_no_lists_and_dictionaries(name: str):
    given: dict[str, Any] = {"prompt": PROMPT, "sampling_params": SamplingParams(), name: [1]}
    with pytest.raises(UserError, match=f"{name} is a list; give"):
        Sample("id", num_samples=1, **given)


def test_what_the_caller_changes_later_does_not_change_the_operation():
    data, config, metadata = [DATUM], {"temperature": 1.0}, {"a": "1"}
    gradient = ForwardBackward("id", data, "ppo", config)
    model = CreateModel("id", "m", user_metadata=metadata)
    save = SaveWeights("id", "a", user_metadata=metadata)
    data.clear()
    config["temperature"] = 0.0
    metadata["a"] = "2"
    assert len(gradient.data) == 1
    assert gradient.loss_fn_config == {"temperature": 1.0}
    assert model.user_metadata == save.user_metadata == {"a": "1"}
