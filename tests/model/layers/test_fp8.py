"""Checkpoints in fp8: the layouts of three tools, their dequantized weights, and what is
rejected.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import load_on
from safetensors.torch import load_file
from test_decoder import CPU, logits_of, random_tokens
from test_experts import trained
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from variants import slow_after

from planish.errors import DamagedFileError, UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.weight_sizes import linear_bytes, quantized_shapes, weight_bytes
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.choose import reference_backend
from planish.model.kernels.cpp import ops
from planish.model.kernels.reference.matmuls import TorchPacker
from planish.model.layers.linear import QuantizedLinear
from planish.model.layers.quantization import Fp8Weight
from planish.model.sources.weights import load_weights
from planish.testing import save_weights, tiny_model
from planish.testing_quantized import use_fp8

QWEN = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
}
"""The fields of Qwen3-8B-FP8 (blocks of 128 there)."""
MINISTRAL = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """Return the fields that llm-compressor writes."""
    fields = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    fields |= {"dynamic": False, "group_size": None, "block_structure": None, **weights}
    group = {"targets": ["Linear"], "weights": fields, "output_activations": None}
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


MODELOPT = {
    "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}}},
    "ignore": ["lm_head"],
    "quant_algo": "FP8",
    "quant_method": "modelopt",
}
CHANNELS = (1, 10**6)
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[int, int] | None, str]] = {
    "qwen": (QWEN, (32, 32), "weight_scale_inv"),
    "ragged": (QWEN | {"weight_block_size": [40, 48]}, (40, 48), "weight_scale_inv"),
    "ministral": (MINISTRAL, None, "weight_scale_inv"),
    "tensor": (compressed("tensor"), None, "weight_scale"),
    "channel": (compressed("channel"), CHANNELS, "weight_scale"),
    "block": (compressed("block", block_structure=[32, 32]), (32, 32), "weight_scale"),
    "modelopt": (MODELOPT, None, "weight_scale"),
    "modelopt channel": (
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        CHANNELS,
        "weight_scale",
    ),
}


def fp8_and_dequantized(
    tmp_path: Path, layout: str, family: str = "qwen3", **options: Any
) -> tuple[Path, Path]:
    """Write a random model twice: in fp8, and with the float32 weights of these codes."""
    options |= {"dtype": "bfloat16", "tied": False}
    quantized = use_fp8(tiny_model(tmp_path / "packed", family, **options), *LAYOUTS[layout])
    dequantized = tiny_model(tmp_path / "wide", family, **options)
    _, block, suffix = LAYOUTS[layout]
    tensors = load_file(quantized / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if not name.endswith("input_scale")}
    for name in [name for name, x in tensors.items() if x.dtype == torch.float8_e4m3fn]:
        scales = tensors.pop(name.removesuffix("weight") + suffix).float()
        codes = tensors[name].float()
        for axis, size in enumerate(block or codes.shape) if scales.ndim else ():
            scales = scales.repeat_interleave(size, axis).narrow(axis, 0, codes.shape[axis])
        tensors[name] = codes * scales
    save_weights(dequantized, tensors)
    return quantized, dequantized


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replace or remove tensors of a model."""
    found = load_file(path / "model.safetensors") | tensors
    save_weights(path, {name: x for name, x in found.items() if x is not None})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales", [(3, 5), (1, 1)])
def test_dequantized_weights_equal_transformers(dtype, scales):
    codes = torch.randn(96, 160).to(torch.float8_e4m3fn)
    grid = torch.rand(scales).bfloat16()
    weight = Fp8Weight.from_stored(codes, grid, (32, 32))
    theirs = Fp8Dequantize(None)._dequantize_one(codes, grid, dtype)
    assert torch.equal(weight.dequantize(dtype), theirs)
    assert weight.shape == (96, 160)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=pytest.mark.slow) if n.endswith("channel") else n for n in LAYOUTS],
)
def test_each_layout_has_the_logits_of_its_dequantized_weights(tmp_path, layout):
    """The reference is transformers in float32."""
    quantized, dequantized = fp8_and_dequantized(tmp_path, layout)
    decoder = load_on(quantized, torch.float32, CPU)
    tokens = random_tokens(decoder, 100)
    theirs = AutoModelForCausalLM.from_pretrained(dequantized, dtype=torch.float32)(tokens[None])
    assert (logits_of(decoder, tokens) - theirs.logits[0]).abs().max() < 1e-4
    assert ModelConfig.from_directory(dequantized).fingerprint() == decoder.config.fingerprint()


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", slow_after(2, ["qwen3", "qwen3_moe", "phi3"]))
def test_fp8_checkpoints_equal_their_dequantized_weights(
    tmp_path, dtype, family, kernels, monkeypatch
):
    if kernels == "torch":
        monkeypatch.setattr(ops, "load_library", lambda: None)
    quantized, dequantized = fp8_and_dequantized(tmp_path, "qwen", family)
    found = []
    for path in (quantized, dequantized):
        decoder = load_on(path, dtype, CPU)
        weights = trained(decoder)
        logits = logits_of(decoder, random_tokens(decoder, 60), weights)
        logits.logsumexp(-1).sum().backward()
        found.append((logits, weights.collect_grad()))
    for ours, reference in zip(*found, strict=True):
        assert torch.equal(ours, reference)


def test_kept_codes_equal_their_dequantized_weights(tmp_path, monkeypatch):
    """A backend for a GPU keeps the codes and dequantizes them for each matmul."""
    monkeypatch.setattr(TorchPacker, "packs_dequantized", lambda *_, **__: False)
    quantized, dequantized = fp8_and_dequantized(tmp_path, "ragged")
    found = []
    for path in (quantized, dequantized):
        config = ModelConfig.from_directory(path)
        backend = reference_backend(config, torch.float32, CPU)
        decoder = Decoder(load_weights(path, config), backend)
        weights = trained(decoder)
        logits = logits_of(decoder, random_tokens(decoder, 60), weights)
        logits.logsumexp(-1).sum().backward()
        found.append((logits, weights.collect_grad()))
        is_kept = isinstance(decoder.layers[0].qkv, QuantizedLinear)
        assert is_kept == (path == quantized)
    for ours, reference in zip(*found, strict=True):
        assert (ours - reference).norm() <= 1e-5 * reference.norm()


def test_only_the_mapped_codes_are_kept_beside_packed_weights(tmp_path, caplog):
    quantized, _ = fp8_and_dequantized(tmp_path, "qwen")
    with caplog.at_level(logging.INFO):
        decoder = load_on(quantized, torch.bfloat16, CPU)
    (line,) = [text for text in caplog.messages if "fp8" in text]
    assert "dequantized to bfloat16: 0.00 GB" in line
    for layer in decoder.layers:
        assert not layer.qkv._kept


def test_the_text_model_of_a_multimodal_fp8_checkpoint_is_loaded(tmp_path):
    """Ministral 3 is published in this form."""
    text, _ = fp8_and_dequantized(tmp_path, "ministral", "ministral3")
    expected = load_weights(text, ModelConfig.from_directory(text))
    fields = json.loads((text / "config.json").read_text())
    outer = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    outer |= {"quantization_config": fields.pop("quantization_config"), "text_config": fields}
    outer["tie_word_embeddings"] = fields["tie_word_embeddings"]
    (text / "config.json").write_text(json.dumps(outer))
    tensors = load_file(text / "model.safetensors")
    save_weights(text, {f"language_model.{name}": x for name, x in tensors.items()})
    config = ModelConfig.from_directory(text)
    assert config.fp8 is not None
    found = load_weights(text, config)
    assert found.keys() == expected.keys()
    assert all(torch.equal(x.float(), expected[name].float()) for name, x in found.items())


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_an_fp8_checkpoint_can_be_quantized(tmp_path, scheme):
    quantized, dequantized = fp8_and_dequantized(tmp_path, "qwen", intermediate=128)
    found = []
    for path in (quantized, dequantized):
        decoder = load_on(path, torch.float32, CPU, quantize=scheme)
        found.append(logits_of(decoder, random_tokens(decoder, 30)))
    assert torch.equal(*found)


def test_a_linear_that_is_not_in_fp8_is_loaded_beside_those_that_are(tmp_path):
    quantized, dequantized = fp8_and_dequantized(tmp_path, "qwen")
    name = "model.layers.0.self_attn.v_proj.weight"
    change(
        quantized,
        **{name: load_file(dequantized / "model.safetensors")[name], f"{name}_scale_inv": None},
    )
    logits = [
        logits_of(decoder, random_tokens(decoder, 30))
        for decoder in (load_on(path, torch.bfloat16, CPU) for path in (quantized, dequantized))
    ]
    assert torch.equal(*logits)


def test_the_size_formula_is_the_size_of_the_files(tmp_path):
    quantized, _ = fp8_and_dequantized(tmp_path, "qwen")
    config = ModelConfig.from_directory(quantized)
    tensors = load_file(quantized / "model.safetensors")
    names = quantized_shapes(config)
    assert linear_bytes(config, "fp8") == sum(
        tensors[name].nbytes + 4 * tensors[f"{name}_scale_inv"].numel() for name in names
    )
    rest = sum(
        x.nbytes
        for name, x in tensors.items()
        if name.removesuffix("_scale_inv") not in names and not name.endswith("input_scale")
    )
    assert weight_bytes(config, 2) == rest + linear_bytes(config, "fp8")


def test_older_files_of_modelopt_are_read(tmp_path):
    quantized, _ = fp8_and_dequantized(tmp_path, "modelopt")
    config = ModelConfig.from_directory(quantized)
    fields = json.loads((quantized / "config.json").read_text())
    del fields["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(fields))
    stored = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (quantized / "hf_quant_config.json").write_text(json.dumps(stored))
    assert ModelConfig.from_directory(quantized) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        (QWEN | {"fmt": "e5m2"}, "quant_method 'fp8' with fmt 'e5m2'"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "quant_method 'modelopt' with quant_algo 'NVFP4'"),
        (compressed("tensor", num_bits=4), "weights of type 'float', 4 bits"),
        (compressed("group"), "strategy 'group'"),
        (compressed("tensor") | {"format": "pack-quantized"}, "format 'pack-quantized'"),
    ],
)
def test_other_layouts_are_rejected_with_the_layout_and_a_remedy(tmp_path, fields, message):
    path = tiny_model(tmp_path)
    content = json.loads((path / "config.json").read_text()) | {"quantization_config": fields}
    (path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedError, match=message) as error:
        ModelConfig.from_directory(path)
    assert "Use such a checkpoint or the unquantized one" in str(error.value)


def test_scales_that_do_not_fit_are_an_error(tmp_path):
    path, _ = fp8_and_dequantized(tmp_path, "qwen")
    name = "model.layers.0.mlp.up_proj.weight"
    scale = f"{name}_scale_inv"
    config = ModelConfig.from_directory(path)
    right = load_file(path / "model.safetensors")
    for tensors, error, message in (
        ({scale: None}, DamagedFileError, "up_proj.weight .* is fp8 but has no scales"),
        ({name: right[name].float()}, DamagedFileError, "has scales but is not fp8"),
        ({scale: torch.ones(2, 7)}, UnsupportedError, r"shape \(2, 7\); planish reads .*\(3, 2\)"),
        ({scale: torch.ones(3, 2, dtype=torch.uint8)}, UnsupportedError, "are U8; planish reads"),
    ):
        save_weights(path, right)
        change(path, **tensors)
        with pytest.raises(error, match=message):
            load_weights(path, config)
