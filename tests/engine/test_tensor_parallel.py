"""An engine whose base model is divided between two real processes, against one process.

One pair of processes serves all tests of this file. The last test kills one of them.
"""

import argparse
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from planish import ServiceClient
from planish.client.sampling_client import SamplingClient
from planish.client.training_client import TrainingClient
from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.errors import EngineClosedError, NonFiniteError, UnsupportedError, UserError
from planish.model.decoder.decoder import Decoder
from planish.model.decoder.tensor_parallel.decoder import ShardedDecoder, weight_bytes
from planish.server.options import add_arguments, options_of
from planish.testing import tiny_model
from planish.types import AdamParams, CheckpointPath, Datum, ModelInput, SamplingParams, TensorData

pytestmark = pytest.mark.slow

STEP = AdamParams(learning_rate=1e-2)
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
SETTINGS = EngineSettings(device="cpu", dtype="float32", kv_cache_bytes=1 << 20, max_batch=8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    # Biases of q, k and v, and a head that shares the embedding.
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def make_engine(directory: Path, data_dir: Path, settings: EngineSettings) -> Engine:
    return Engine({"tiny": str(directory)}, data_dir, settings)


@pytest.fixture(scope="module")
def whole(directory, tmp_path_factory) -> Iterator[Engine]:
    engine = make_engine(directory, tmp_path_factory.mktemp("whole"), SETTINGS)
    yield engine
    engine.close(finish=False)


@pytest.fixture(scope="module")
def divided(directory, tmp_path_factory) -> Iterator[Engine]:
    settings = replace(SETTINGS, tensor_parallel=2)
    engine = make_engine(directory, tmp_path_factory.mktemp("divided"), settings)
    yield engine
    engine.close(finish=False)


def decoder_of(engine: Engine) -> ShardedDecoder:
    decoder = engine._base_models.get("tiny").decoder
    assert isinstance(decoder, ShardedDecoder)
    return decoder


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def datum(seed: int, length: int = 40) -> Datum:
    tokens = tokens_of(seed, length)
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})


def train(model: TrainingClient, seed: int) -> list[Any]:
    """Run one step on two datums with a common prefix; return logprobs, loss and gradient norm."""
    first = datum(seed)
    prefix = first.model_input.to_ints()[:20]
    second_tokens = prefix + tokens_of(seed + 100, 20)
    second = Datum(ModelInput.from_ints(second_tokens[:-1]), {"target_tokens": second_tokens[1:]})
    output = model.forward_backward([first, second], "cross_entropy").result()
    norm = model.optim_step(STEP).result().metrics["grad_norm"]
    logprobs = [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]
    return [*logprobs, output.metrics["loss:sum"], norm]


def sample(
    client: SamplingClient, seed: int, length: int = 70, max_tokens: int = 12
) -> tuple[Any, Any]:
    """Return the tokens and the logprobs of three samples."""
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop=[])
    prompt = ModelInput.from_ints(tokens_of(seed, length))
    response = client.sample(prompt, 3, params).result()
    tokens = [sequence.tokens for sequence in response.sequences]
    return tokens, [sequence.logprobs for sequence in response.sequences]


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **TOLERANCE)


def adapter_tensors(engine: Engine, path: str) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint's files by file and name."""
    files = engine._store.files(CheckpointPath.parse(path))
    return {
        f"{name} {key}": tensor
        for name, file in files.items()
        if name.endswith(".safetensors")
        for key, tensor in load_file(file).items()
    }


def test_training_sampling_and_checkpoints_equal_those_of_one_process(whole, divided):
    found: list[Any] = []
    for engine in (whole, divided):
        client = ServiceClient(service=engine)
        model = client.create_lora_training_client("tiny", rank=4, seed=1)
        numbers: list[Any] = []
        tokens: list[Any] = []
        for step in range(3):
            sampler = model.save_weights_and_get_sampling_client()
            new_tokens, logprobs = sample(sampler, step)
            tokens.append(new_tokens)
            numbers += [logprobs, *train(model, step)]
        path = model.save_state("state").result().path
        restored = client.create_training_client_from_state_with_optimizer(path)
        numbers += train(restored, 10)
        saved = restored.save_weights_for_sampler("final").result().path
        tensors = adapter_tensors(engine, path) | adapter_tensors(engine, saved)
        found.append((tokens, numbers, tensors))
    (whole_tokens, whole_numbers, whole_tensors), (tokens, numbers, tensors) = found
    assert tokens == whole_tokens
    assert_close(numbers, whole_numbers)
    assert tensors.keys() == whole_tensors.keys()
    assert any("lm_head" in name for name in tensors)
    for name, tensor in tensors.items():
        # A square has twice the relative error.
        factor = 3 if "exp_avg_sq" in name else 1
        np.testing.assert_allclose(
            tensor, whole_tensors[name], rtol=factor * 1e-5, atol=1e-5, err_msg=name
        )


def test_a_checkpoint_of_one_process_is_loaded_by_two(whole, divided, tmp_path):
    model = ServiceClient(service=whole).create_lora_training_client("tiny", rank=4, seed=3)
    train(model, 0)
    path = model.save_state("moved").result().path
    for name, file in whole._store.files(CheckpointPath.parse(path)).items():
        target = Path(divided._store.directory) / Path(file).relative_to(whole._store.directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        (target.parent / name).write_bytes(Path(file).read_bytes())
    client = ServiceClient(service=divided)
    restored = client.create_training_client_from_state_with_optimizer(path)
    assert_close(train(restored, 1), train(model, 1))


def test_adapters_of_other_shapes_share_batches(whole, divided):
    found: list[Any] = []
    for engine in (whole, divided):
        client = ServiceClient(service=engine)
        models = [
            client.create_lora_training_client("tiny", rank=8, seed=5, train_mlp=False),
            client.create_lora_training_client("tiny", rank=2, seed=6, train_unembed=False),
            client.create_lora_training_client(
                "tiny", rank=2, seed=7, train_attn=False, train_mlp=False
            ),
        ]
        numbers = [number for model in models for number in train(model, 0)]
        samplers = [model.save_weights_and_get_sampling_client() for model in models]
        samplers.append(client.create_sampling_client(base_model="tiny"))
        params = SamplingParams(max_tokens=20, seed=0, stop=[], top_p=0.9)
        prompt = ModelInput.from_ints(tokens_of(0, 30))
        futures = [sampler.sample(prompt, 4, params) for sampler in samplers]
        sequences = [sequence for future in futures for sequence in future.result().sequences]
        numbers += [sequence.logprobs for sequence in sequences]
        found.append(([sequence.tokens for sequence in sequences], numbers))
    assert found[0][0] == found[1][0]
    assert_close(found[0][1], found[1][1])


def test_sampled_logprobs_are_those_of_the_trainer(divided):
    client = ServiceClient(service=divided)
    model = client.create_lora_training_client("tiny", rank=4, seed=8)
    train(model, 0)
    tokens, logprobs = sample(model.save_weights_and_get_sampling_client(), 5)
    prompt = tokens_of(5, 70)
    data = [
        Datum(ModelInput.from_ints((prompt + own)[:-1]), {"target_tokens": [*prompt[1:], *own]})
        for own in tokens
    ]
    output = model.forward(data, "cross_entropy").result()
    trained = [row["logprobs"].to_numpy()[-12:] for row in output.loss_fn_outputs]
    np.testing.assert_allclose(trained, logprobs, rtol=0, atol=2e-6)


def test_cached_prefixes_and_preempted_samples_give_the_same_tokens(whole, divided):
    found: list[Any] = []
    for engine in (whole, divided):
        client = ServiceClient(service=engine)
        sampler = client.create_sampling_client(base_model="tiny")
        base = engine._base_models.get("tiny")
        for _ in range(6):  # The sampler then expects short samples, and admits more of them.
            sample(sampler, 0, 3, max_tokens=4)
        # Rank 0 of two has half of the heads, so its cache has space for twice the positions.
        base.sampler._scheduler.reservations.max_positions = 600
        before = base.sampler.num_preemptions
        params = SamplingParams(max_tokens=150, seed=2, stop=[])
        prompt = tokens_of(9, 140)
        prompts = [ModelInput.from_ints(prompt), ModelInput.from_ints(prompt[1:])]
        futures = [sampler.sample(prompt, 2, params) for prompt in prompts]
        sequences = [sequence for future in futures for sequence in future.result().sequences]
        assert base.sampler.num_preemptions > before
        longer = ModelInput.from_ints(prompt + sequences[0].tokens)
        response = sampler.sample(
            longer,
            2,
            replace(params, max_tokens=8),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
        ).result()
        assert response.prompt_cache_hit_tokens > 0
        sequences += response.sequences
        logprobs: list[Any] = [sequence.logprobs for sequence in sequences]
        prompt_logprobs = response.prompt_logprobs
        assert prompt_logprobs is not None
        logprobs.append(prompt_logprobs[1:])
        found.append(([sequence.tokens for sequence in sequences], logprobs))
    assert found[0][0] == found[1][0]
    assert_close(found[0][1], found[1][1])


def test_a_failed_operation_leaves_the_ranks_in_step(divided):
    client = ServiceClient(service=divided)
    model = client.create_lora_training_client("tiny", rank=4, seed=9)
    twin = client.create_lora_training_client("tiny", rank=4, seed=9)
    weights = TensorData.from_numpy(np.full(39, 3e38, np.float32))
    bad = replace(datum(0), loss_fn_inputs={**datum(0).loss_fn_inputs, "weights": weights})
    with pytest.raises(NonFiniteError):
        model.forward_backward([datum(1), bad], "cross_entropy").result()
    with pytest.raises(UserError):
        model.optim_step(STEP).result()
    assert_close(train(model, 2), train(twin, 2))


def test_each_rank_has_half_of_the_weights(whole, divided):
    decoder = whole._base_models.get("tiny").decoder
    assert isinstance(decoder, Decoder)
    size = weight_bytes(decoder)
    assert decoder_of(divided).weight_bytes == [size / 2, size / 2]


def test_unsupported_models_and_options_are_rejected_before_a_process_starts(directory, tmp_path):
    settings = replace(SETTINGS, tensor_parallel=4)
    engine = make_engine(directory, tmp_path, settings)
    with pytest.raises(UnsupportedError, match="tensor_parallel=4: num_key_value_heads is 2"):
        engine.load_base_model("tiny")
    engine.close()
    for value in (0, True, 1.0, "2"):
        with pytest.raises(UserError, match="tensor_parallel=.*whole number of at least 1"):
            replace(SETTINGS, tensor_parallel=value)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a replica has one device"):
        ServiceClient(tensor_parallel=2, replicas=2)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = options_of(parser.parse_args(["--tensor-parallel", "2"]))
    assert options.engine.tensor_parallel == 2


def test_the_death_of_a_rank_ends_the_engine_with_its_reason(divided):
    client = ServiceClient(service=divided)
    model = client.create_lora_training_client("tiny", rank=4, seed=1)
    group = decoder_of(divided)._group
    (pid,) = group.pids
    os.kill(pid, signal.SIGKILL)
    group._processes[0].wait(60)
    for _ in range(2):
        with pytest.raises(EngineClosedError, match=r"rank 1 was ended by SIGKILL.*start the prog"):
            model.forward_backward([datum(0)], "cross_entropy").result(60)
    assert not Path(f"/proc/{pid}").exists()
