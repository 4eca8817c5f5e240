"""Every kind of bad input raises an error with the argument and the remedy, in process and over
HTTP, and changes nothing.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from short_datum import STEP, WAIT, datum, logprobs
from variants import slow_after

import planish
from planish import (
    AdamParams,
    CheckpointError,
    Datum,
    ModelInput,
    NonFiniteError,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TensorData,
    TrainingClient,
    UnknownModelError,
    UserError,
)
from planish.client.futures import Pending
from planish.testing import VOCAB_SIZE, tiny_model


@pytest.fixture
def training_client(embedded_client) -> TrainingClient:
    return embedded_client.create_lora_training_client("tiny", rank=4, seed=1)


def put_in_later() -> Datum:
    late = datum()
    late.loss_fn_inputs["weights"] = [1.0] * 6  # pyright: ignore[reportIndexIssue]
    return late


PROMPT = ModelInput.from_ints([1, 2, 3])


def sample(
    client: SamplingClient, prompt: Any = PROMPT, n: Any = 1, params: Any = None, **more: Any
) -> Any:
    return client.sample(prompt, n, params or SamplingParams(max_tokens=2), **more)


def backward(
    client: TrainingClient, *data: Datum, loss_fn: str = "cross_entropy", **more: Any
) -> Any:
    return client.forward_backward(list(data), loss_fn, **more)


BAD_GRADIENTS: list[tuple[str, Any, str]] = [
    ("empty data", lambda c: backward(c), "data is empty"),
    (
        "one datum for a list",
        lambda c: c.forward_backward(datum(), "cross_entropy"),
        "list of Datum",
    ),
    ("no datum", lambda c: c.forward_backward([1], "cross_entropy"), r"data\[0\]"),
    (
        "unknown loss",
        lambda c: backward(c, datum(), loss_fn="dpo"),
        "loss_fn='dpo'.*importance_sampling",
    ),
    (
        "a loss that is not served",
        lambda c: backward(c, datum(), loss_fn="stable_reinforce"),
        "not supported",
    ),
    (
        "unknown option",
        lambda c: backward(c, datum(), loss_fn_config={"epsilon": 0.2}),
        "'epsilon'.*takes",
    ),
    (
        "option of another loss",
        lambda c: backward(c, datum(), loss_fn_config={"beta": 0.2}),
        "'beta'",
    ),
    (
        "option that is no number",
        lambda c: backward(c, datum(), loss_fn_config={"temperature": "1"}),
        "temperature",
    ),
    (
        "options that are none",
        lambda c: backward(c, datum(), loss_fn_config=[("temperature", 1)]),
        "loss_fn_config",
    ),
    ("temperature 0", lambda c: backward(c, datum(), loss_fn_config={"temperature": 0}), "above 0"),
    (
        "empty input",
        lambda c: backward(c, Datum(ModelInput.empty(), {"target_tokens": []})),
        "empty",
    ),
    ("lengths", lambda c: backward(c, datum(weights=[1.0] * 5)), r"weights.*\[5\].*\[6\]"),
    (
        "target lengths",
        lambda c: backward(c, Datum(PROMPT, {"target_tokens": [1, 2]})),
        "target_tokens.*3 tokens",
    ),
    (
        "targets missing",
        lambda c: backward(c, Datum(PROMPT, {"weights": [1.0] * 3})),
        "target_tokens",
    ),
    (
        "input missing",
        lambda c: backward(c, datum(logprobs=[0.0] * 6), loss_fn="ppo"),
        "'advantages'",
    ),
    (
        "vocabulary",
        lambda c: backward(c, Datum(ModelInput.from_ints([VOCAB_SIZE]), {"target_tokens": [1]})),
        "vocabulary",
    ),
    (
        "negative token",
        lambda c: backward(c, Datum(ModelInput.from_ints([-1]), {"target_tokens": [1]})),
        "vocabulary",
    ),
    (
        "target vocabulary",
        lambda c: backward(c, Datum(PROMPT, {"target_tokens": [1, 2, 9999]})),
        "target_tokens.*9999",
    ),
    (
        "ignored targets",
        lambda c: backward(c, Datum(PROMPT, {"target_tokens": [-100, 1, 2]})),
        "-100.*weight",
    ),
    (
        "inputs put in later",
        lambda c: backward(c, put_in_later()),
        r"'weights'\] is a list; give TensorData",
    ),
    ("float targets", lambda c: backward(c, Datum(PROMPT, {"target_tokens": np.ones(3)})), "int64"),
    ("NaN", lambda c: backward(c, datum(weights=[math.nan] * 6)), "weights.*not finite"),
    (
        "infinity",
        lambda c: backward(c, datum(logprobs=[0.0] * 6, advantages=[math.inf] * 6), loss_fn="ppo"),
        "advantages.*not finite",
    ),
    (
        "probabilities as logprobs",
        lambda c: backward(
            c, datum(logprobs=[0.0] * 5 + [0.5], advantages=[1.0] * 6), loss_fn="ppo"
        ),
        r"data\[0\].*'logprobs'\] is 0.5 at position 5, and a logprob is at most 0",
    ),
    (
        "no list",
        lambda c: c.forward_backward(None, "cross_entropy"),
        "data is a NoneType; give a list",
    ),
    ("no name of a loss", lambda c: c.forward_backward([datum()], ["ppo"]), "loss_fn is a list"),
    (
        "option of no name",
        lambda c: backward(c, datum(), loss_fn_config={1: 2.0}),
        r"loss_fn_config\[1\]",
    ),
    (
        "option yes",
        lambda c: backward(c, datum(), loss_fn_config={"temperature": True}),
        "temperature'\\]=True",
    ),
    (
        "option of any size",
        lambda c: backward(c, datum(), loss_fn_config={"temperature": 10**400}),
        "finite number",
    ),
    ("too long", lambda c: backward(c, datum(2049)), "2049 tokens.*2048"),
    (
        "custom without targets",
        lambda c: c.forward_backward_custom([Datum(PROMPT, {})], len),
        "target_tokens",
    ),
    ("custom with other data", lambda c: c.forward_backward_custom([1], len), r"data\[0\]"),
    (
        "custom of too much",
        lambda c: c.forward_backward_custom([datum(2049)], len),
        "2049 tokens.*2048",
    ),
    ("custom of nothing", lambda c: c.forward_backward_custom([], len), "data is empty"),
]


@pytest.mark.parametrize(
    ("call", "message"), [pytest.param(c, m, id=n) for n, c, m in BAD_GRADIENTS]
)
@pytest.mark.parametrize("client", slow_after(1, ["training_client", "remote_training_client"]))
def test_a_step_after_a_rejected_forward_backward_is_rejected(request, client, call, message):
    """Both are submitted together, to an engine and to a server. Without the rejected part, the
    step would apply an incomplete gradient.
    """
    client = request.getfixturevalue(client)
    before = logprobs(client)
    client.forward_backward([datum()], "cross_entropy")
    part, update = call(client), client.optim_step(STEP)
    with pytest.raises(UserError, match=message) as refused:
        part.result(WAIT)
    with pytest.raises(
        UserError,
        match=f"(?s)nothing was applied: the forward_backward before it failed.*{message}",
    ) as torn:
        update.result(WAIT)
    assert isinstance(torn.value, NonFiniteError) == isinstance(refused.value, NonFiniteError)
    assert logprobs(client) == before
    client.forward_backward([datum()], "cross_entropy")
    assert client.optim_step(AdamParams(learning_rate=0)).result(WAIT).metrics["adam_step"] >= 1


BAD_TRAINING: list[tuple[str, Any, str]] = [
    ("adam", lambda c: c.optim_step({"learning_rate": 1}), "adam_params.*AdamParams"),
    ("slash", lambda c: c.save_state("a/b"), "^name='a/b'"),
    ("sampler slash", lambda c: c.save_weights_for_sampler("a/b"), "^name='a/b'"),
    ("no name", lambda c: c.save_state(""), "name=''"),
    ("ttl", lambda c: c.save_state("a", ttl_seconds=-1), "ttl_seconds=-1"),
    (
        "a ttl without end",
        lambda c: c.save_state("a", ttl_seconds=10**30),
        "ttl_seconds has more than 64 bits",
    ),
    (
        "half a second",
        lambda c: c.save_state("a", ttl_seconds=1.5),
        "ttl_seconds=1.5: give a whole number",
    ),
    (
        "a ttl that is whole and no int",
        lambda c: c.save_weights_for_sampler("a", ttl_seconds=3.0),
        "ttl_seconds=3.0",
    ),
    (
        "overwrite",
        lambda c: c.save_state("a", overwrite="no"),
        "overwrite='no': give True or False",
    ),
    ("metadata", lambda c: c.save_state("a", user_metadata={"a": 1}), "user_metadata"),
    ("no path", lambda c: c.load_state("model.pt"), "tinker://"),
    (
        "missing checkpoint",
        lambda c: c.load_state("tinker://x/weights/y"),
        "there is no checkpoint",
    ),
    ("a path outside", lambda c: c.load_state("tinker://../weights/y"), r"slash|\.\./weights"),
    (
        "missing sampler",
        lambda c: c.create_sampling_client("tinker://x/sampler_weights/y"),
        "there is no checkpoint",
    ),
    ("forward of nothing", lambda c: c.forward([], "cross_entropy"), "data is empty"),
    (
        "forward of too much",
        lambda c: c.forward([datum(2049)], "cross_entropy"),
        "2049 tokens.*2048",
    ),
]


@pytest.mark.parametrize(
    ("call", "message"), [pytest.param(c, m, id=n) for n, c, m in BAD_TRAINING]
)
def test_invalid_training_input_is_rejected_at_once(training_client, call, message):
    before = logprobs(training_client)
    training_client.forward_backward([datum()], "cross_entropy").result(WAIT)
    with pytest.raises(ValueError, match=message):
        call(training_client)
    assert training_client.optim_step(STEP).result(WAIT).metrics["adam_step"] == 1
    assert logprobs(training_client) != before


BAD_SAMPLING: list[tuple[str, Any, str]] = [
    ("empty prompt", lambda c: sample(c, ModelInput.empty()), "prompt is empty"),
    ("prompt of another kind", lambda c: sample(c, [1, 2]), "prompt is a list.*ModelInput"),
    (
        "vocabulary",
        lambda c: sample(c, ModelInput.from_ints([5, VOCAB_SIZE])),
        f"{VOCAB_SIZE}.*vocabulary",
    ),
    ("no samples", lambda c: sample(c, n=0), "^num_samples=0"),
    (
        "many samples",
        lambda c: sample(c, n=4097),
        "^num_samples=4097: give.*1 to 4096; split more samples",
    ),
    ("samples without end", lambda c: sample(c, n=10**20), "^num_samples has more than 64 bits"),
    (
        "a large answer",
        lambda c: sample(c, n=4096, params=SamplingParams(), topk_sample_logprobs=10),
        "response could have 702 MiB, and the limit is 512; lower num_samples",
    ),
    (
        "many alternatives",
        lambda c: sample(c, topk_sample_logprobs=10**30),
        "topk_sample_logprobs has more than 64 bits",
    ),
    ("half a sample", lambda c: sample(c, n=0.5), "num_samples"),
    ("params of another kind", lambda c: sample(c, params={"max_tokens": 3}), "sampling_params"),
    ("no room", lambda c: sample(c, params=SamplingParams(max_tokens=2047)), "3 tokens.*2047"),
    ("long prompt", lambda c: sample(c, ModelInput.from_ints([1] * 2049)), "2048.*2049 tokens"),
    (
        "full prompt",
        lambda c: sample(c, ModelInput.from_ints([1] * 2048)),
        "maximum context length is 2048 tokens. The prompt has as many",
    ),
    (
        "full prompt, any length",
        lambda c: sample(c, ModelInput.from_ints([1] * 2048), params=SamplingParams()),
        "maximum context length is 2048 tokens. The prompt has as many",
    ),
    (
        "stop token",
        lambda c: sample(c, params=SamplingParams(max_tokens=2, stop=[VOCAB_SIZE])),
        "stop.*vocabulary",
    ),
    ("top-k", lambda c: sample(c, topk_prompt_logprobs=-1), "^topk_prompt_logprobs=-1"),
    (
        "a word for a flag",
        lambda c: sample(c, include_prompt_logprobs="no"),
        "prompt_logprobs='no': give True or False",
    ),
    (
        "top-k beyond",
        lambda c: sample(c, topk_sample_logprobs=VOCAB_SIZE + 1),
        "topk_sample_logprobs",
    ),
    ("last n", lambda c: sample(c, prompt_logprobs_last_n=0), "prompt_logprobs_last_n=0"),
    (
        "targets' shape",
        lambda c: sample(c, target_prompt_logprobs=TensorData([[1]], "int64")),
        "target_prompt_logprobs",
    ),
    (
        "targets of another kind",
        lambda c: sample(c, target_prompt_logprobs=np.zeros((2, 1), np.int64)),
        "target_prompt_logprobs is a ndarray",
    ),
    (
        "top-k of another kind",
        lambda c: sample(c, topk_sample_logprobs=5.0),
        "topk_sample_logprobs=5.0",
    ),
    ("scored prompt", lambda c: c.compute_logprobs(ModelInput.empty()), "prompt is empty"),
]


@pytest.mark.parametrize(
    ("call", "message"), [pytest.param(c, m, id=n) for n, c, m in BAD_SAMPLING]
)
def test_invalid_sampling_input_is_rejected_at_once(embedded_client, call, message):
    client = embedded_client.create_sampling_client(base_model="tiny")
    with pytest.raises(UserError, match=message):
        call(client)
    assert len(sample(client).result(WAIT).sequences) == 1


BAD_SERVICE: list[tuple[str, Any, type[Exception], str]] = [
    (
        "unknown model",
        lambda c: c.create_lora_training_client("no/such-model"),
        UnknownModelError,
        "no/such-model",
    ),
    (
        "unknown sampler",
        lambda c: c.create_sampling_client(base_model="nothing"),
        UnknownModelError,
        "nothing",
    ),
    ("no model", lambda c: c.create_lora_training_client(""), ValueError, "name"),
    ("rank", lambda c: c.create_lora_training_client("tiny", rank=0), ValueError, "rank=0"),
    (
        "large rank",
        lambda c: c.create_lora_training_client("tiny", rank=257),
        ValueError,
        "rank=257",
    ),
    (
        "nothing to train",
        lambda c: c.create_lora_training_client(
            "tiny", train_mlp=False, train_attn=False, train_unembed=False
        ),
        ValueError,
        "nothing would be trained",
    ),
    (
        "metadata",
        lambda c: c.create_lora_training_client("tiny", user_metadata={"a": 1}),
        ValueError,
        "user_metadata",
    ),
    ("neither", lambda c: c.create_sampling_client(), ValueError, "model_path.*base_model"),
    (
        "a name for a path",
        lambda c: c.create_sampling_client("tiny"),
        ValueError,
        "base_model='tiny'",
    ),
    (
        "a name of another kind",
        lambda c: c.create_lora_training_client(object()),
        ValueError,
        "is a object; give",
    ),
    (
        "metadata of a list",
        lambda c: c.create_lora_training_client("tiny", user_metadata=["a"]),
        UserError,
        "user_metadata",
    ),
    ("path", lambda c: c.create_training_client_from_state("runs/x"), ValueError, "tinker://"),
    (
        "no path",
        lambda c: c.create_training_client_from_state(None),
        ValueError,
        "checkpoint path None",
    ),
    ("tokenizer", lambda c: c._session.tokenizer("nothing"), UnknownModelError, "nothing"),
    (
        "a run that can be none",
        lambda c: c.create_rest_client().list_checkpoints("a/b"),
        UserError,
        "training_run_id='a/b'",
    ),
    (
        "missing",
        lambda c: c.create_training_client_from_state("tinker://x/weights/y"),
        CheckpointError,
        "no checkpoint",
    ),
    (
        "missing sampler",
        lambda c: c.create_sampling_client("tinker://x/sampler_weights/y"),
        CheckpointError,
        "no checkpoint",
    ),
    (
        "outside",
        lambda c: c.create_sampling_client("tinker://../weights/y"),
        CheckpointError,
        r"slash|\.\./weights",
    ),
]


@pytest.mark.parametrize(
    ("call", "kind", "message"), [pytest.param(c, k, m, id=n) for n, c, k, m in BAD_SERVICE]
)
def test_invalid_names_are_rejected_at_once(embedded_client, monkeypatch, call, kind, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(kind, match=message):
        call(embedded_client)
    assert embedded_client._session.service.preparation.training_models == {}


# A server says the same, of a call that it has seen.


@pytest.mark.parametrize(
    ("call", "message"), [pytest.param(c, m, id=n) for n, c, m in BAD_TRAINING]
)
def test_a_server_rejects_invalid_training_input(
    training_client, remote_training_client, call, message
):
    with pytest.raises(ValueError, match=message) as far:
        outcome(call(remote_training_client))
    assert type(far.value) is refusal(call, training_client)


@pytest.mark.parametrize(
    ("call", "message"), [pytest.param(c, m, id=n) for n, c, m in BAD_SAMPLING]
)
def test_a_server_rejects_invalid_sampling_input(remote_sampling_client, call, message):
    with pytest.raises(UserError, match=message):
        outcome(call(remote_sampling_client))


@pytest.mark.parametrize(
    ("call", "kind", "message"), [pytest.param(c, k, m, id=n) for n, c, k, m in BAD_SERVICE]
)
def test_a_server_rejects_invalid_names(
    shared_remote_client, embedded_client, monkeypatch, call, kind, message
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(kind, match=message) as far:
        call(shared_remote_client)
    assert type(far.value) is refusal(call, embedded_client)


def refusal(call: Any, client: Any) -> type[Exception]:
    with pytest.raises(ValueError) as error:
        outcome(call(client))
    return type(error.value)


def outcome(given: Any) -> Any:
    return given.result(WAIT) if isinstance(given, Pending) else given


@pytest.fixture(scope="module")
def shared_remote_client(server_url) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=server_url) as client:
        yield client


@pytest.fixture(scope="module")
def remote_training_client(shared_remote_client) -> TrainingClient:
    return shared_remote_client.create_lora_training_client("tiny", rank=4, seed=1)


@pytest.fixture(scope="module")
def remote_sampling_client(shared_remote_client) -> SamplingClient:
    return shared_remote_client.create_sampling_client(base_model="tiny")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "http://localhost:8000", "dtype": "float32"}, "base_url.*dtype"),
        ({"base_url": "localhost:8000"}, "base_url.*http://"),
        ({"base_url": "http://user:pw@localhost:8000"}, "base_url.*api_key"),
        ({"base_url": "http://localhost:99999"}, "port"),
        ({"base_url": "http://localhost:8000", "api_key": "two words"}, "api_key"),
        ({"api_key": "tml-x"}, "api_key is given without base_url"),
        ({"project_id": "p"}, "project_id"),
        ({"user_metadata": "http://localhost:8000"}, "user_metadata.*base_url"),
        ({"models": "a/directory"}, "models is str"),
        ({"dtype": "float16"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
    ],
)
def test_unsupported_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        ServiceClient(**options)


def test_a_damaged_base_model_is_rejected_by_name(tmp_path):
    directory = tiny_model(tmp_path / "m")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with (
        ServiceClient(models={"m": str(directory)}, data_dir=tmp_path) as client,
        pytest.raises(planish.DamagedFileError, match="model.safetensors"),
    ):
        client.create_lora_training_client("m")


def test_positive_logprobs_are_taken_where_no_advantage_uses_them(training_client):
    one = datum(logprobs=[9.0, 1e-4] + [0.0] * 4, advantages=[0.0, 1.0] + [0.0] * 4)
    output = backward(training_client, one, loss_fn="ppo").result()
    assert output.metrics["ratio:max"] > 0


@pytest.mark.parametrize(
    ("client", "method", "place"),
    [
        ("training_client", "sample", "save_weights_and_get_sampling_client"),
        ("training_client", "compute_logprobs_async", "save_weights_and_get_sampling_client"),
        ("remote_sampling_client", "forward_backward", "create_lora_training_client"),
        ("shared_remote_client", "sample", "create_sampling_client"),
    ],
)
def test_a_method_of_another_client_says_which(request, client, method, place):
    client = request.getfixturevalue(client)
    assert not hasattr(client, method)
    with pytest.raises(planish.UnsupportedError, match=f"{method} is not offered: .*{place}"):
        getattr(client, method)
