"""The public types: accepted and rejected values, and agreement with the public SDK's types."""

import dataclasses
import inspect
import itertools
import math
import pickle
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given, strategies as st

from planish.errors import UserError
from planish.images import MAX_IMAGE_BYTES, MAX_IMAGES, ImageChunk
from planish.service import Sample
from planish.types import (
    MAX_CONSTRAINT_BYTES,
    MAX_CONSTRAINT_CHOICES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    AdamParams,
    CheckpointPath,
    Constraint,
    Datum,
    EncodedTextChunk,
    LoraConfig,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
    TopkLogprobs,
)

SAMPLE: dict[str, Any] = {
    "sampler_id": "s",
    "prompt": ModelInput.empty(),
    "num_samples": 1,
    "sampling_params": SamplingParams(),
}


@pytest.mark.parametrize("name", ["AdamParams", "LoraConfig", "SamplingParams"])
def test_defaults_are_the_public_sdks(name):
    import planish.types

    ours, theirs = getattr(planish.types, name), getattr(tinker, name)
    fields = {field.name: field.default for field in dataclasses.fields(ours)}
    for key, field in theirs.model_fields.items():
        if key in fields and not field.is_required():
            assert fields[key] == field.default, key
    assert {key for key, field in theirs.model_fields.items() if key not in fields} <= {"type"}


def test_model_input_joins_chunks():
    prompt = ModelInput.from_ints([1, 2]).append(EncodedTextChunk(tokens=[3])).append_int(4)
    assert prompt.to_ints() == [1, 2, 3, 4]
    assert prompt.length == 4
    assert ModelInput.empty().length == 0
    assert ModelInput.from_ints(np.array([5, 6])).to_ints() == [5, 6]
    assert ModelInput.from_ints(torch.tensor([5, 6])).to_ints() == [5, 6]


def test_model_input_does_not_change_with_the_callers_list():
    tokens = [1, 2, 3]
    prompt = ModelInput.from_ints(tokens)
    tokens[0] = 9
    assert prompt.to_ints() == [1, 2, 3]


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [True], [None]])
def test_tokens_are_whole_numbers(tokens):
    with pytest.raises(ValueError, match="whole numbers"):
        ModelInput.from_ints(tokens)


@pytest.mark.parametrize("tokens", ["text", b"text", {1: 2}, None, 5, torch.tensor(5)])
def test_invalid_token_lists_are_rejected_with_their_type(tokens):
    with pytest.raises(
        ValueError, match=rf"is a {type(tokens).__name__}; give a list of token ids.*tokenizer"
    ):
        ModelInput.from_ints(tokens)
    with pytest.raises(ValueError, match=r"is a dict.*give its \['input_ids'\]"):
        ModelInput.from_ints({"input_ids": [1]})  # type: ignore[arg-type]


def test_chunks_other_than_text_and_images_are_rejected():
    with pytest.raises(UserError, match="supports text and images"):
        ModelInput(chunks=[tinker.types.ImageChunk(data=b"", format="png")])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"data": "text"}, "data is a str"),
        ({"data": b""}, "data has 0 bytes"),
        ({"data": bytes(MAX_IMAGE_BYTES + 1)}, "16,777,217 bytes"),
        ({"format": "gif"}, "format='gif'"),
        ({"expected_tokens": 0}, "expected_tokens=0"),
        ({"expected_tokens": True}, "expected_tokens=True"),
    ],
)
def test_images_are_checked(options, problem):
    with pytest.raises(UserError, match=problem):
        ImageChunk(**{"data": b"png", "format": "png", **options})
    ImageChunk(bytes(MAX_IMAGE_BYTES), "png", 1)


def test_an_input_with_images_has_a_length_and_no_token_ids():
    chunks = [EncodedTextChunk([1, 2]), ImageChunk(b"png", "png", 5), EncodedTextChunk([3])]
    model_input = ModelInput(chunks)
    assert model_input.length == 8
    with pytest.raises(UserError, match="contains an image"):
        model_input.to_ints()
    unknown = model_input.append(ImageChunk(b"png", "png"))
    with pytest.raises(UserError, match="give expected_tokens"):
        _ = unknown.length
    with pytest.raises(UserError, match=f"at most {MAX_IMAGES}"):
        ModelInput([ImageChunk(b"png", "png")] * (MAX_IMAGES + 1))
    assert len(ModelInput([ImageChunk(b"png", "png")] * MAX_IMAGES).images) == MAX_IMAGES


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1, 2, 3]),
        np.array([1, 2, 3], np.int32),
        [1, 2, 3],
        (1, 2, 3),
        TensorData([1, 2, 3], "int64", [3]),
    ],
)
def test_a_datum_takes_tensors_arrays_and_lists(value):
    target = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": value}).loss_fn_inputs[
        "target_tokens"
    ]
    assert (target.dtype, target.shape, target.data) == ("int64", [3], [1, 2, 3])


def test_lists_take_the_dtype_of_their_key():
    inputs = Datum(
        ModelInput.from_ints([1]), {"weights": [1], "advantages": [2], "logprobs": [[1, 2]]}
    ).loss_fn_inputs
    assert {data.dtype for data in inputs.values()} == {"float32"}
    assert inputs["logprobs"].shape == [1, 2]
    with pytest.raises(ValueError, match="'other'"):
        Datum(ModelInput.from_ints([1]), {"other": [1]})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1], [1, 2]], "unequal"),
        ([0.5], "fractions"),
        (["a"], "not numbers"),
        ([None, 1.0], "None are not numbers; give"),
        (np.array([True]), "bool"),
        (7, "is a int"),
    ],
)
def test_bad_loss_inputs_name_their_key(value, message):
    with pytest.raises(ValueError, match=message) as caught:
        Datum(ModelInput.from_ints([1]), {"target_tokens": value})
    assert "target_tokens" in str(caught.value)


def test_invalid_inputs_and_tensors_are_rejected_with_their_type():
    with pytest.raises(ValueError, match="loss_fn_inputs is a list; give a dictionary"):
        Datum(ModelInput.from_ints([1]), [1])  # type: ignore[arg-type]
    for other in ([1.0], np.ones(1)):
        with pytest.raises(ValueError, match=f"from_torch: got a {type(other).__name__}"):
            TensorData.from_torch(other)  # type: ignore[arg-type]
    for other in ([1.0], torch.ones(1)):
        with pytest.raises(ValueError, match=f"from_numpy: got a {type(other).__name__}"):
            TensorData.from_numpy(other)  # type: ignore[arg-type]


def test_tensor_data_copies_its_values():
    for given_values in (np.ones(3, np.float32), torch.ones(3)):
        data = (
            TensorData.from_numpy(given_values)
            if isinstance(given_values, np.ndarray)
            else TensorData.from_torch(given_values)
        )
        given_values *= 7
        assert data.tolist() == [1, 1, 1]


@given(st.integers(0, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_csr_equals_dense(rows, columns, seed):
    rng = np.random.default_rng(seed)
    dense = rng.integers(0, 3, (rows, columns)) * rng.integers(0, 2, (rows, columns))
    tensor = torch.from_numpy(dense)
    sparse = TensorData.from_torch_sparse(tensor)
    assert sparse.to_torch().tolist() == tensor.tolist()
    crow = np.concatenate([[0], np.cumsum((dense != 0).sum(1))]).tolist()
    built = TensorData(dense[dense != 0], "int64", dense.shape, crow, np.nonzero(dense)[1].tolist())
    assert built.to_numpy().tolist() == dense.tolist()
    assert len(built) == rows
    assert built.data == dense[dense != 0].tolist()


def test_csr_is_used_where_it_is_smaller_and_pads():
    tensor = torch.zeros(20, 30)
    tensor[3, 4] = 2.0
    sparse = TensorData.from_torch_sparse(tensor)
    assert sparse.sparse_crow_indices is not None
    assert sparse.data == [2.0]
    assert sparse.to_numpy(pad_value=-1)[0, 0] == -1


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float64"},
        {"dtype": None},
        {"dtype": "int64", "shape": [3]},
        {"dtype": "int64", "shape": [1, 2], "sparse_crow_indices": [0, 2]},
        {
            "dtype": "int64",
            "shape": [1, 2],
            "sparse_crow_indices": [0, 1],
            "sparse_col_indices": [5, 1],
        },
        {
            "dtype": "int64",
            "shape": [2],
            "sparse_crow_indices": [0, 2],
            "sparse_col_indices": [0, 1],
        },
        {
            "dtype": "int64",
            "shape": [1, 9],
            "sparse_crow_indices": [0, 2],
            "sparse_col_indices": [0, 9],
        },
    ],
)
def test_invalid_tensors_are_rejected(arguments):
    with pytest.raises(ValueError):
        TensorData([1, 2], **arguments)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]
)
def test_torch_round_trip(dtype):
    tensor = torch.arange(6, dtype=dtype).reshape(2, 3)
    back = TensorData.from_torch(tensor).to_torch()
    assert back.dtype == (torch.float32 if dtype.is_floating_point else torch.int64)
    assert torch.equal(back.double(), tensor.double())


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (SamplingParams, {"max_tokens": 0}),
        (SamplingParams, {"max_tokens": 1.5}),
        (SamplingParams, {"temperature": -1}),
        (SamplingParams, {"temperature": math.nan}),
        (SamplingParams, {"top_p": 0}),
        (SamplingParams, {"top_p": 1.1}),
        (SamplingParams, {"top_k": 0}),
        (SamplingParams, {"min_p": 2}),
        (SamplingParams, {"seed": "1"}),
        (SamplingParams, {"stop": ""}),
        (SamplingParams, {"stop": ["a", 1]}),
        (SamplingParams, {"stop": ["a", ""]}),
        (SamplingParams, {"stop": 5}),
        (SamplingParams, {"stop": b"x"}),
        (SamplingParams, {"stop": "x" * (MAX_STOP_BYTES + 1)}),
        (SamplingParams, {"stop": ["é" * (MAX_STOP_BYTES // 2 + 1)]}),
        (SamplingParams, {"stop": ["x"] * (MAX_STOP_STRINGS + 1)}),
        (SamplingParams, {"stop": [1] * (MAX_STOP_TOKENS + 1)}),
        (SamplingParams, {"stop": itertools.repeat("x")}),
        (SamplingParams, {"temperature": 1e-38}),
        (SamplingParams, {"temperature": 1e31}),
        (SamplingParams, {"stop_token_ids": ["x"]}),
        (SamplingParams, {"stop_token_ids": "x"}),
        (SamplingParams, {"stop_token_ids": [1] * (MAX_STOP_TOKENS + 1)}),
        (SamplingParams, {"min_tokens": -1}),
        (SamplingParams, {"min_tokens": 3, "max_tokens": 2}),
        (SamplingParams, {"repetition_penalty": 0}),
        (SamplingParams, {"frequency_penalty": math.inf}),
        (SamplingParams, {"presence_penalty": -101}),
        (SamplingParams, {"constraint": "json"}),
        (Constraint, {"kind": "xml"}),
        (Constraint, {"text": {"type": "object"}, "kind": "json_schema"}),
        (Constraint, {"text": "{", "kind": "json_schema"}),
        (Constraint, {"text": "[1]", "kind": "json_schema"}),
        (Constraint, {"text": "[" * 60_000, "kind": "json_schema"}),
        (Constraint, {"text": "", "kind": "regex"}),
        (Constraint, {"text": "x", "kind": "json_object"}),
        (Constraint, {"choices": [], "kind": "choice"}),
        (Constraint, {"choices": ["a", ""], "kind": "choice"}),
        (Constraint, {"choices": "ab", "kind": "choice"}),
        (Constraint, {"choices": ["a"], "kind": "regex", "text": "a"}),
        (Constraint, {"choices": ["a"] * (MAX_CONSTRAINT_CHOICES + 1), "kind": "choice"}),
        (Constraint, {"text": "é" * (MAX_CONSTRAINT_BYTES // 2 + 1), "kind": "regex"}),
        (Constraint, {"text": "\ud800", "kind": "lark"}),
        (SamplingParams, {"max_tokens": True}),
        (AdamParams, {"learning_rate": -1e-4}),
        (AdamParams, {"learning_rate": math.nan}),
        (AdamParams, {"beta1": 1.0}),
        (AdamParams, {"eps": math.inf}),
        (AdamParams, {"grad_clip_norm": -1}),
        (AdamParams, {"weight_decay": 10**400}),
        (LoraConfig, {"rank": 0}),
        (LoraConfig, {"rank": 257}),
        (LoraConfig, {"rank": 8.0}),
        (LoraConfig, {"seed": 0.5}),
        (LoraConfig, {"seed": 2**64}),
        (LoraConfig, {"seed": -(2**63) - 1}),
    ],
)
def test_errors_name_the_option_that_is_out_of_range(cls, arguments):
    with pytest.raises(ValueError) as caught:
        cls(**arguments)
    assert next(iter(arguments)) in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "arguments", "kinds"),
    [
        (
            SamplingParams,
            {"max_tokens": np.int64(5), "seed": np.int64(3), "temperature": np.float32(0.5)},
            {int, float},
        ),
        (
            SamplingParams,
            {"seed": 2**64 - 1, "temperature": 1, "top_p": 1, "min_p": 0},
            {int, float},
        ),
        (
            AdamParams,
            {"learning_rate": np.float32(1e-3), "beta1": np.float32(0.5), "beta2": 0},
            {float},
        ),
        (
            LoraConfig,
            {"rank": np.int64(4), "seed": np.int64(4), "train_unembed": np.bool_(True)},
            {int, bool},
        ),
        (
            Sample,
            {**SAMPLE, "num_samples": np.int64(2), "topk_sample_logprobs": np.int8(2)},
            {int, bool},
        ),
    ],
)
def test_numpy_numbers_become_python_numbers(cls, arguments, kinds):
    """Random generators, optimizers and JSON accept only Python numbers."""
    values = [
        value
        for value in vars(cls(**arguments)).values()
        if isinstance(value, (int, float, np.generic))
    ]
    assert values
    assert {type(value) for value in values} <= kinds


def test_all_tokens_are_checked_after_a_numpy_token():
    with pytest.raises(ValueError, match="contains 1.7; give one list"):
        EncodedTextChunk([np.int64(1), 1.7])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="64 bits"):
        EncodedTextChunk([1, 2**70])
    mixed: list[Any] = [1, np.int64(2)]
    assert [type(token) for token in EncodedTextChunk(mixed).tokens] == [int, int]


@pytest.mark.parametrize(
    "name", ["num_samples", "topk_sample_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"]
)
@pytest.mark.parametrize("value", [5.0, True, "2"])
def test_counts_of_a_sample_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}: give a whole number"):
        Sample(**{**SAMPLE, name: value})


def test_an_adapter_without_trained_modules_is_rejected():
    with pytest.raises(ValueError, match="nothing would be trained"):
        LoraConfig(train_attn=False, train_mlp=False, train_unembed=False)


def test_results_are_python_lists_with_none_where_undefined():
    top = TopkLogprobs(
        np.array([[0, 0], [5, 6]], np.int32), np.array([[np.nan, np.nan], [-1, -2]], np.float32)
    )
    sequence = SampledSequence("stop", "s:0", np.array([5], np.int32), np.array([-1.0], np.float32))
    response = SampleResponse([sequence], np.array([np.nan, -0.5], np.float32), top)
    assert response.sequences[0].tokens == [5]
    assert type(response.sequences[0].tokens[0]) is int
    assert response.sequences[0].logprobs == [-1.0]
    assert response.prompt_logprobs == [None, -0.5]
    assert response.topk_prompt_logprobs == [None, [(5, -1.0), (6, -2.0)]]
    assert response.sequences[0].topk_logprobs is None


def test_checkpoint_paths_round_trip():
    path = CheckpointPath("abc:train:0", "sampler", "final")
    assert str(path) == "tinker://abc:train:0/sampler_weights/final"
    assert CheckpointPath.parse(str(path)) == path
    assert path.checkpoint_id == "sampler_weights/final"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "abc",
        "tinker://a/weights",
        "tinker://a/other/b",
        "tinker://a/weights/b/c",
        "http://a/weights/b",
        None,
    ],
)
def test_invalid_checkpoint_paths_are_rejected(path):
    with pytest.raises(ValueError, match="tinker://"):
        CheckpointPath.parse(path)


@pytest.mark.parametrize(
    "stop",
    [
        "x" * MAX_STOP_BYTES,
        ["é" * (MAX_STOP_BYTES // 2)] * MAX_STOP_STRINGS,
        [1] * MAX_STOP_TOKENS,
    ],
)
def test_stop_conditions_at_the_limits_are_accepted(stop):
    kept = SamplingParams(stop=stop).stop
    assert kept is not None
    assert len(kept) == len(stop)


@pytest.mark.parametrize("name", ["max_tokens", "seed", "top_k", "stop"])
def test_numbers_above_64_bits_are_rejected_at_once(name):
    """Local engines used to accept these numbers, and requests to servers failed with another
    error.
    """
    for number in (2**64, -(2**63) - 1, 10**5000):
        with pytest.raises(ValueError, match=f"^SamplingParams.{name} has more than 64 bits: give"):
            SamplingParams(**cast("Any", {name: [number] if name == "stop" else number}))


def sampled(tokens: list[int], logprobs: list[float]) -> SampledSequence:
    topk = TopkLogprobs(np.array([tokens]), np.array([logprobs], np.float32))
    return SampledSequence(
        "stop", "s:0", np.array(tokens, np.int32), np.array(logprobs, np.float32), topk
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda last: TensorData([1.0, last], "float32"),
        lambda last: TensorData([last], "float32", [2, 2], [0, 1, 1], [0]),
        lambda last: Datum(
            ModelInput.from_ints([1, 2]), {"target_tokens": [1, 2], "weights": [1.0, last]}
        ),
        lambda last: sampled([1, 2], [-1.0, last]),
        lambda last: SampleResponse(
            [sampled([1, 2], [-1.0, -1.0])], np.array([np.nan, last], np.float32)
        ),
    ],
)
def test_objects_with_arrays_compare_their_values(make):
    assert make(2.0) == make(2.0)
    assert make(2.0) == pickle.loads(pickle.dumps(make(2.0)))
    assert make(math.nan) == make(math.nan)
    assert make(2.0) != make(3.0)
    assert make(2.0) != [2.0]


def test_the_repr_of_large_objects_is_short():
    tokens = list(range(100_000))
    prompt = ModelInput.from_ints(tokens)
    datum = Datum(prompt, {"target_tokens": tokens, "weights": [1.0] * len(tokens)})
    sparse = TensorData(tokens, "int64", [1, 100_000], [0, 100_000], tokens)
    assert (
        repr(ModelInput.from_ints([1, 2])) == "ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2])])"
    )
    assert "[0, 1, 2, " in repr(prompt)
    assert "99984 more" in repr(prompt)
    assert repr(sparse) == "TensorData(dtype='int64', shape=[1, 100000], sparse)"
    assert max(map(len, map(repr, [prompt, datum, sparse]))) < 400


def test_invalid_values_raise_planish_errors():
    wrong: list[Callable[[], object]] = [
        lambda: LoraConfig(rank=0),
        lambda: LoraConfig(train_mlp=None),  # type: ignore[arg-type]
        lambda: LoraConfig(train_mlp="False"),  # type: ignore[arg-type]
        lambda: SamplingParams(stop=torch.tensor(1)),  # type: ignore[arg-type]
        lambda: AdamParams(learning_rate=-1),
        lambda: CheckpointPath.parse("abc"),
        lambda: ModelInput.from_ints({3, 1}),  # type: ignore[arg-type]
        lambda: Datum(ModelInput.empty(), {"weights": 1.0}),  # type: ignore[arg-type]
        lambda: TensorData([1], "int8"),  # type: ignore[arg-type]
    ]
    for make in wrong:
        with pytest.raises(UserError, match="give|expected"):
            make()


@pytest.mark.parametrize(
    ("cls", "name", "hint"),
    [
        (AdamParams, "lr", "give learning_rate"),
        (AdamParams, "learnin_rate", "did you mean learning_rate?"),
        (AdamParams, "betas", "give beta1 and beta2"),
        (AdamParams, "amsgrad", "it takes learning_rate, beta1"),
        (SamplingParams, "max_new_tokens", "give max_tokens"),
        (SamplingParams, "n", "give num_samples to SamplingClient.sample"),
        (LoraConfig, "r", "give rank"),
    ],
)
def test_an_unknown_argument_names_the_right_one(cls, name, hint):
    message = f"{cls.__name__} got an unexpected keyword argument '{name}'; {hint}"
    for kind in (UserError, TypeError):
        with pytest.raises(kind, match=re.escape(message)):
            cls(**{name: 1})
    assert pickle.loads(pickle.dumps(cls())) == cls() == dataclasses.replace(cls())
    assert "kwargs" not in str(inspect.signature(cls))
