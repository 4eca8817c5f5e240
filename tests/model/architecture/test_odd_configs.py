"""Every field of a model's settings with every kind of odd value loads, or ends in a clear error."""

import json
from pathlib import Path
from typing import Any

import pytest

from planish.errors import PlanishError
from planish.model.architecture.config import ModelConfig
from planish.renderers.recommend import recommended_renderer_name
from planish.renderers.registry import FORMATS
from planish.testing import CHAT_TEMPLATE, tiny_model

ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 10**9, 10**30, 10**400, 1e308, -1e308, float("inf"), float("nan"), 0.5,
    "", "x", "10", [], [1], ["x"], [None], [[]], [{}], {}, {"a": 1}, {"rope_type": "yarn"}, {"quant_method": []},
    {"quant_method": "fp8"}, {"quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"a": []}}, [1] * 5, "a" * 10_000,
]  # fmt: skip
OPTIONAL_FIELDS = (
    "quantization_config", "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window",
    "head_dim", "mlp_only_layers", "text_config", "architectures", "model_type", "num_key_value_heads",
    "partial_rotary_factor", "pretraining_tp", "num_local_experts", "no_rope_layers", "max_window_layers",
    "sliding_window_pattern", "original_max_position_embeddings", "full_attention_interval", "attn_output_gate",
    "eos_token_id", "rope_theta", "rope_local_base_freq", "hidden_activation", "decoder_sparse_step",
)  # fmt: skip
ROPE_FIELDS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "attention_factor", "long_factor", "short_factor", "partial_rotary_factor",
    "rope_theta", "rope_type", "truncate", "full_attention", "sliding_attention",
)  # fmt: skip
FAMILIES = (
    "llama", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_5", "phi3", "ministral3", "smollm3",
)  # fmt: skip


def check(directory: Path, config: dict[str, Any]) -> bool:
    """Return whether a config is rejected."""
    (directory / "config.json").write_text(json.dumps(config))
    message = None
    try:
        ModelConfig.from_directory(directory)
    except PlanishError as error:
        message = str(error)
    assert message is None or str(directory) in message
    return message is not None


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_odd_values_of_config_json(tmp_path, family):
    directory = tiny_model(tmp_path / "model", family)
    config = json.loads((directory / "config.json").read_text())
    rejected = [
        check(directory, {**config, field: value})
        for field in {**config, **dict.fromkeys(OPTIONAL_FIELDS)}
        for value in ODD_VALUES
    ]
    assert 0.1 < sum(rejected) / len(rejected) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "ministral3"])
def test_odd_values_of_rope(tmp_path, family):
    directory = tiny_model(tmp_path / "model", family)
    config = json.loads((directory / "config.json").read_text())
    settings = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings |= {"original_max_position_embeddings": 128, **(config["rope_parameters"] or {})}
    for rope_type in ("default", "linear", "yarn", "llama3", "longrope", "dynamic"):
        for field in {*settings, *ROPE_FIELDS}:
            for value in ODD_VALUES:
                rope = {**settings, "rope_type": rope_type, field: value}
                check(directory, {**config, "rope_parameters": rope})


TOKENIZER_FIELDS = (
    "chat_template", "bos_token", "eos_token", "added_tokens_decoder", "added_tokens", "tokenizer_class", "model_type",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json", "chat_template.json"])
def test_odd_values_of_the_tokenizers_files_when_a_renderer_is_found(tmp_path, file):
    directory = tiny_model(tmp_path / "model")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    path = directory / file
    before = json.loads(path.read_text()) if path.is_file() else {}
    for field in TOKENIZER_FIELDS:
        for value in ODD_VALUES:
            path.write_text(json.dumps({**before, field: value}))
            try:
                found = recommended_renderer_name(directory)
            except PlanishError as error:
                found = str(error)
            assert found in FORMATS or "renderer" in found or str(directory) in found
