"""Quantized base weights: sampler and trainer agree, and checkpoints name their scheme."""

import json
import logging
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import CONFIG, CPU, load_on
from test_sampler_equals_trainer import gap, trained_adapter
from variants import slow_after

from planish.engine.checkpoints.files import MANIFEST_FILE
from planish.engine.engine import Engine
from planish.engine.memory import DeviceMemory
from planish.engine.settings import EngineSettings
from planish.engine.training.trainer import Trainer
from planish.engine.training.trainer_settings import TrainerSettings
from planish.errors import CheckpointError, UserError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.weight_sizes import SCHEMES, linear_bytes, quantized_shapes
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.choose import reference_backend
from planish.model.kernels.cpp import ops
from planish.model.kernels.reference.probe import cancelling_inputs
from planish.model.layers.layer_weights import Experts
from planish.model.layers.quantization import QuantizedWeight, quantize
from planish.model.sources.weights import load_weights
from planish.service import (
    CreateModel,
    CreateSampler,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    PublishSampler,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.testing import CONFIGS, tiny_model
from planish.testing_quantized import use_fp8, use_mxfp4
from planish.types import (
    AdamParams,
    CheckpointPath,
    Datum,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

LORA = LoraConfig(rank=4, seed=1)
WAIT = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", intermediate=128)


@pytest.fixture
def engines(model, tmp_path):
    """Return a function that creates engines which share a data directory."""
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        given = {"dtype": "float32", "device": "cpu", **settings}
        made.append(Engine({"base": str(model)}, tmp_path / "data", EngineSettings(**given)))
        return made[-1]

    yield make
    for engine in made:
        engine.close(finish=False)


@pytest.fixture(params=["C++", "torch"])
def _kernels(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(ops, "load_library", lambda: None)


def datum(weight: float = 1.0) -> Datum:
    tokens = [i * 7 % 256 for i in range(9)]
    return Datum(
        ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [weight] * 8}
    )


def request(sampler_id: str, prompt: bytes = b"a prompt", n: int = 2) -> Sample:
    params = SamplingParams(max_tokens=12, stop=[], seed=3)
    return Sample(sampler_id, ModelInput.from_ints(list(prompt)), n, params)


def train(engine: Engine, model_id: str, steps: int = 2) -> None:
    for _ in range(steps):
        engine.submit(ForwardBackward(model_id, [datum()], "cross_entropy"))
        engine.submit(OptimStep(model_id, AdamParams(learning_rate=1e-2))).result(WAIT)


def sampled(future: Future[SampleResponse]) -> list[tuple[list[int], list[float]]]:
    return [(one.tokens, one.logprobs) for one in future.result(WAIT).sequences]


def loss(engine: Engine, model_id: str) -> float:
    operation = ForwardBackward(model_id, [datum()], "cross_entropy", forward_only=True)
    return engine.submit(operation).result(WAIT).metrics["loss:sum"]


def check_gap(decoder: Decoder) -> None:
    """Sampled and trained logprobs have the same bits with the C++ kernels, and are close with
    torch's.
    """
    found = np.abs(gap(decoder, 1.0))
    if decoder.backend.uses_compiled_kernels:
        assert found.max() == 0
    elif decoder.backend.dtype == torch.float32:
        assert found.max() < 3e-5
    else:
        assert np.mean(found**2) / 2 < 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_and_trained_logprobs_agree(tmp_path, family, scheme, dtype):
    """The prompts share prefixes, and the trainer packs them into one tree. Experts are quantized,
    and routers are not.
    """
    tiny_model(tmp_path, family, intermediate=128, expert_size=64)
    decoder = load_on(tmp_path, dtype, CPU, quantize=scheme)
    check_gap(decoder)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sizes_without_a_quantized_kernel_are_batch_invariant(tmp_path, dtype, caplog):
    """The kernels for int8 support no inputs that are not a multiple of 32."""
    tiny_model(tmp_path, "qwen3_moe", intermediate=128, expert_size=48)
    with caplog.at_level(logging.INFO):
        decoder = load_on(tmp_path, dtype, CPU, quantize="int8")
    if not decoder.backend.uses_compiled_kernels:
        pytest.skip("torch computes the matmuls here, and dequantizes the weights for each")
    check_gap(decoder)
    assert any("int8 weights whose outputs are not" in line for line in caplog.messages)
    mlp, weights = decoder.layers[0].mlp, load_weights(tmp_path, decoder.config)
    assert isinstance(mlp, Experts)
    linear = mlp.down[0]
    assert linear.is_batch_invariant
    weight = quantize(weights["model.layers.0.mlp.experts.0.down_proj.weight"], "int8")
    reference = decoder.backend.pack([weight.dequantize(dtype)])
    x, grad = (torch.randn(40, size).to(dtype) for size in (48, 64))
    assert torch.equal(linear.matmul(x), reference.matmul(x))
    assert torch.equal(linear.matmul(x[3:4]), linear.matmul(x)[3:4])
    assert torch.equal(linear.matmul_backward(grad), reference.matmul_backward(grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_multiplies_quantized_weights_as_it_does_others(dtype):
    """The probe for batch invariance runs the kernel of weights that are not quantized."""
    backend = reference_backend(CONFIG, dtype, CPU)
    x, weight = cancelling_inputs(80, 33, 70)
    weights, x = [quantize(weight, "int8")], x.to(dtype)
    quantized = backend.pack_quantized(weights, (None,))
    whole = backend.pack([weights[0].dequantize(dtype)])
    for rows in (1, 3, 16, 33, 80):
        assert torch.equal(quantized.matmul(x[:rows]), whole.matmul(x[:rows])), rows


@pytest.mark.slow
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_and_trained_logprobs_agree_with_mxfp4_experts(tmp_path, dtype):
    use_mxfp4(tiny_model(tmp_path, "gpt_oss", expert_size=64, dtype="bfloat16"))
    decoder = load_on(tmp_path, dtype, CPU)
    check_gap(decoder)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.bfloat16]))
def test_sampled_and_trained_logprobs_agree_with_an_fp8_checkpoint(tmp_path, dtype):
    path = tiny_model(tmp_path, "qwen3", dtype="bfloat16")
    use_fp8(path, FP8, (32, 32), "weight_scale_inv")
    check_gap(load_on(tmp_path, dtype, CPU))


def test_an_adapter_of_fp8_weights_needs_them_or_the_name_of_other_weights(tmp_path):
    dequantized = tiny_model(tmp_path / "wide", "qwen3", dtype="bfloat16")
    quantized = tiny_model(tmp_path / "packed", "qwen3", dtype="bfloat16")
    use_fp8(quantized, FP8, (32, 32), "weight_scale_inv")
    settings = EngineSettings(dtype="float32", device="cpu")
    models = {"packed": str(quantized), "wide": str(dequantized)}
    with closing(Engine(models, tmp_path / "data", settings)) as engine:
        engine.submit(CreateModel("a", "packed", LORA))
        train(engine, "a")
        path = engine.submit(SaveWeights("a", "x")).result(WAIT).path
        engine.submit(CreateModel("b", from_path=path)).result(WAIT)
        assert loss(engine, "b") == loss(engine, "a")
        engine.submit(CreateModel("c", "wide", LORA)).result(WAIT)
        with pytest.raises(CheckpointError, match="weights differ from those .*own base model"):
            engine.submit(LoadWeights("c", path))
        engine.submit(CreateModel("d", "wide", from_path=path)).result(WAIT)
        assert loss(engine, "d") != loss(engine, "a")


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_model_is_the_model_of_its_dequantized_weights(model, scheme):
    """Logprobs and gradients have the same bits.

    In float32, the backward pass of weights that are not quantized uses torch.
    """
    config = ModelConfig.from_directory(model)
    quantized = load_on(model, torch.bfloat16, CPU, quantize=scheme)
    weights = load_weights(model, config)
    for name in quantized_shapes(config):
        weights[name] = quantize(weights[name], scheme).dequantize(torch.bfloat16)
    dequantized = Decoder(weights, quantized.backend)
    original = Decoder(load_weights(model, config), quantized.backend)
    found = []
    for decoder in (quantized, dequantized, original):
        adapter = trained_adapter(decoder)
        work = Trainer(decoder, TrainerSettings()).forward_backward(
            adapter, [datum(), datum(0.5)], "cross_entropy", {}
        )
        outputs = None
        while outputs is None:
            try:
                next(work)
            except StopIteration as end:
                outputs = end.value.loss_fn_outputs
        logprobs = np.concatenate([out["logprobs"].to_numpy() for out in outputs])
        assert adapter.grad is not None
        found.append((logprobs, adapter.grad.clone()))
    assert np.array_equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].any()
    assert not np.array_equal(found[0][0], found[2][0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_samples_of_several_adapters_do_not_depend_on_each_other(engines, scheme):
    engine = engines(quantize=scheme)
    for i, model_id in enumerate(("a", "b")):
        engine.submit(CreateModel(model_id, "base", replace(LORA, seed=i)))
        train(engine, model_id, 1 + i)
        engine.submit(PublishSampler(model_id, f"s-{model_id}")).result(WAIT)
    engine.submit(CreateSampler("s-base", "base")).result(WAIT)
    samplers = ("s-a", "s-b", "s-base")
    together = [engine.submit(request(sampler)) for sampler in samplers]
    found = [sampled(future) for future in together]
    assert found == [sampled(engine.submit(request(sampler))) for sampler in samplers]
    assert found[0] != found[1] != found[2]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpoints_name_their_scheme_and_need_it(engines, tmp_path, scheme):
    engine = engines(quantize=scheme)
    engine.submit(CreateModel("a", "base", LORA))
    train(engine, "a")
    path = engine.submit(SaveWeights("a", "x")).result(WAIT).path
    manifest = json.loads((tmp_path / "data" / "a" / "weights" / "x" / MANIFEST_FILE).read_text())
    assert manifest["quantize"] == scheme
    expected = loss(engine, "a")
    again = engines(quantize=scheme)
    again.submit(CreateModel("b", from_path=path, with_optimizer=True)).result(WAIT)
    assert loss(again, "b") == expected
    for other in (None, next(name for name in SCHEMES if name != scheme)):
        engine = engines(quantize=other)
        with pytest.raises(CheckpointError, match=f"quantized with {scheme}.*quantize='{scheme}'"):
            engine.submit(CreateModel("c", from_path=path))
        with pytest.raises(CheckpointError, match="base_model='base' to use"):
            engine.submit(CreateSampler("s", model_path=path))
        engine.submit(CreateModel("d", "base", LORA)).result(WAIT)
        with pytest.raises(CheckpointError, match=f"quantized with {scheme}"):
            engine.submit(LoadWeights("d", path))
        engine.submit(CreateModel("e", "base", from_path=path)).result(WAIT)  # asked for by name
        assert loss(engine, "e") != expected


def test_copies_of_checkpoints_name_the_scheme(engines, tmp_path):
    engine = engines(quantize="int8")
    engine.submit(CreateModel("a", "base", LORA))
    copies = {
        "tinker://b/weights/z": SaveWeights("a", "x"),
        "tinker://b/sampler_weights/z": SaveWeightsForSampler("a", "y"),
    }
    for copy, save in copies.items():
        engine.administration.copy_checkpoint(engine.submit(save).result(WAIT).path, copy)
        assert engine._store.manifest(CheckpointPath.parse(copy)).quantize == "int8"
        with pytest.raises(CheckpointError, match="quantized with int8.*quantize='int8'"):
            engines().submit(CreateSampler("s", model_path=copy))


def test_a_checkpoint_of_unquantized_weights_is_rejected_by_name(engines, tmp_path):
    engine = engines()
    engine.submit(CreateModel("a", "base", LORA))
    path = engine.submit(SaveWeights("a", "x")).result(WAIT).path
    manifest = json.loads((tmp_path / "data" / "a" / "weights" / "x" / MANIFEST_FILE).read_text())
    assert manifest["quantize"] is None
    with pytest.raises(CheckpointError, match="without quantization.*quantize=None"):
        engines(quantize="int8").submit(CreateModel("b", from_path=path))


def test_invalid_schemes_are_rejected_before_anything_is_loaded(tmp_path):
    with pytest.raises(UserError, match=r"quantize='int4': give 'int8', 'nf4', or None"):
        EngineSettings(quantize="int4")
    narrow = tiny_model(tmp_path / "narrow", intermediate=96)
    engine = Engine({"base": str(narrow)}, tmp_path, EngineSettings(quantize="nf4"))
    with pytest.raises(UserError, match="96 inputs"):
        engine.submit(CreateModel("a", "base", LORA))
    engine.close()


def test_the_memory_budget_has_one_copy_of_the_quantized_weights(model):
    config = ModelConfig.from_directory(model)

    def weights(scheme: str | None) -> int:
        settings = EngineSettings(dtype="bfloat16", device="cpu", quantize=scheme)
        return DeviceMemory(settings).claim(model).weight_bytes

    whole = sum(fan_out * fan_in for fan_out, fan_in in quantized_shapes(config).values())
    kept = weights(None) - 3 * 2 * whole
    for scheme in SCHEMES:
        found = weights(scheme) - kept
        assert found >= linear_bytes(config, scheme)
        if ops.load_library() is not None:
            assert found == linear_bytes(config, scheme)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_the_named_weights_of_each_family_are_quantized(tmp_path, family, monkeypatch):
    tiny_model(tmp_path, family)
    quantized = []

    def noted(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
        quantized.append(tuple(weight.shape))
        return quantize(weight, scheme)

    monkeypatch.setattr("planish.model.decoder.decoder.quantize", noted)
    load_on(tmp_path, torch.float32, CPU, quantize="int8")
    named = quantized_shapes(ModelConfig.from_directory(tmp_path))
    assert sorted(quantized) == sorted(named.values())


def test_the_fingerprint_of_the_weights_has_the_scheme(engines):
    plain, quantized = engines(), engines(quantize="int8")
    assert (
        quantized.administration.weights_fingerprint("base")
        == plain.administration.weights_fingerprint("base") + " int8"
    )
