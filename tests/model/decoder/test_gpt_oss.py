"""The weights and the config of gpt-oss: mxfp4, and what is rejected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import load_on
from safetensors.torch import load_file
from test_decoder import CPU, YARN_SCALING, logits_of, random_tokens
from test_experts import trained
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from planish.errors import DamagedFileError, UnsupportedError, UserError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.weight_sizes import mxfp4_bytes, weight_bytes
from planish.model.kernels.cpp import ops
from planish.model.layers.quantization import Mxfp4Weight, check_quantizable
from planish.model.sequences.prefix_tree import pack
from planish.model.sources.weights import load_weights
from planish.testing import save_weights, tiny_model
from planish.testing_quantized import use_mxfp4

OF_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""The fields of config.json of gpt-oss-20b that planish reads."""


def config_of(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_directory(directory)


def change_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def mxfp4_and_dequantized(tmp_path: Path, **options: Any) -> tuple[Path, Path]:
    """Write a random model twice: with experts in mxfp4, and with the same experts in bf16."""
    options |= {"dtype": "bfloat16", "tied": False}
    quantized = use_mxfp4(tiny_model(tmp_path / "packed", "gpt_oss", **options))
    dequantized = tiny_model(tmp_path / "wide", "gpt_oss", **options)
    tensors = load_file(quantized / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        weight = name.removesuffix("_blocks")
        blocks, scales = tensors.pop(name), tensors.pop(f"{weight}_scales")
        tensors[weight] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_weights(dequantized, tensors)
    return quantized, dequantized


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantized_mxfp4_equals_transformers(dtype):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 6, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(2, 250, (3, 40, 6), generator=generator).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    for expert in range(3):
        weight = Mxfp4Weight(blocks[expert].flatten(1), scales[expert])
        assert weight.shape == (40, 192)
        assert torch.equal(weight.dequantize(dtype), expected[expert].t())


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_checkpoints_equal_their_dequantized_weights(tmp_path, dtype, kernels, monkeypatch):
    if kernels == "torch":
        monkeypatch.setattr(ops, "load_library", lambda: None)
    quantized, dequantized = mxfp4_and_dequantized(tmp_path, experts_per_token=3)
    found = []
    for path in (quantized, dequantized):
        decoder = load_on(path, dtype, CPU)
        weights = trained(decoder)
        logits = logits_of(decoder, random_tokens(decoder, 60), weights)
        logits.logsumexp(-1).sum().backward()
        found.append((logits, weights.collect_grad()))
    # torch adds in another order: in oneDNN's packed weights, which only the dequantized model has,
    # in transposed ones, and in the backward pass of float32 weights.
    most = 0.02 if dtype == torch.bfloat16 else 1e-5
    for number, (ours, reference) in enumerate(zip(*found, strict=True)):
        if decoder.backend.uses_compiled_kernels and (dtype == torch.bfloat16 or number == 0):
            assert torch.equal(ours, reference)
        assert (ours - reference).norm() <= most * reference.norm()
    assert ModelConfig.from_directory(quantized).fingerprint() == decoder.config.fingerprint()


def test_logits_of_an_mxfp4_checkpoint_equal_transformers(tmp_path):
    quantized, dequantized = mxfp4_and_dequantized(tmp_path)
    decoder = load_on(quantized, torch.float32, CPU)
    tokens = random_tokens(decoder, 100)
    theirs = AutoModelForCausalLM.from_pretrained(dequantized, dtype=torch.float32)(tokens[None])
    assert (logits_of(decoder, tokens) - theirs.logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_transformers_on_long_inputs_with_sinks_of_any_size(tmp_path, dtype):
    """Windows of 24 positions, YaRN without rounding, and sinks that take all or nothing."""
    scaling = YARN_SCALING | {"truncate": False}
    path = tiny_model(tmp_path, "gpt_oss", layers=2, rope_scaling=scaling)
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        sinks = torch.tensor([30.0, 2.0, -2.0, -30.0])
        tensors[f"model.layers.{layer}.self_attn.sinks"] = sinks
    save_weights(path, tensors)
    decoder = load_on(path, dtype, CPU)
    tokens = random_tokens(decoder, 300)
    (quantized,) = pack([tokens.numpy()], len(tokens))
    hidden = decoder.forward(
        tokens, torch.arange(300), decoder.backend.tree_attention(quantized), None
    )
    ours = hidden.float() @ decoder.head.weight.float().t()
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens[None])
    difference = (ours - theirs.logits[0]).abs()
    if dtype == torch.float32:
        assert difference.max() < 1e-4
    else:
        assert difference.median() < 0.05


def test_config_of_gpt_oss_20b(tmp_path):
    config = config_of(tmp_path, OF_20B)
    assert config.windows == (128, None) * 12
    assert config.max_context == 131072
    assert (config.num_experts, config.experts_per_token, config.expert_size) == (32, 4, 2880)
    assert (config.swiglu_alpha, config.swiglu_limit) == (1.702, 7.0)
    # 4.25 bits per weight of an expert: 24 layers of 32 experts with 3 * 2880 * 2880 weights.
    assert mxfp4_bytes(config) == 24 * 32 * 3 * 2880 * 2880 * 17 // 32
    assert weight_bytes(config, 2) == 13_761_264_768  # the total_size in the published index
    short = {
        key: value for key, value in OF_20B.items() if key not in ("layer_types", "rope_scaling")
    }
    assert config_of(tmp_path / "short", short) == config


def test_what_gpt_oss_does_not_support_is_an_error(tmp_path):
    for field, value, message in (
        ("attention_bias", False, "attention_bias is false"),
        ("hidden_act", "gelu", "only silu"),
        ("quantization_config", {"quant_method": "fp8"}, "quant_method 'fp8'"),
        ("hidden_size", 2896, "multiple of 32"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            config_of(tmp_path, OF_20B | {field: value})
    config = config_of(tmp_path, OF_20B)
    with pytest.raises(UserError, match="quantized with mxfp4 already; omit quantize"):
        check_quantizable(config, "int8")
    check_quantizable(config, None)


def test_mxfp4_weights_that_do_not_fit_the_config_are_an_error(tmp_path):
    quantized, dequantized = mxfp4_and_dequantized(tmp_path, layers=1)
    change_config(dequantized, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(DamagedFileError, match=r"missing: .*experts\.0\.gate_up_proj\.blocks"):
        load_weights(dequantized, ModelConfig.from_directory(dequantized))
    path = quantized / "model.safetensors"
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_weights(quantized, load_file(path) | {name: torch.zeros(6, 64, 1)})
    with pytest.raises(UnsupportedError, match="mxfp4 needs U8"):
        load_weights(quantized, ModelConfig.from_directory(quantized))
