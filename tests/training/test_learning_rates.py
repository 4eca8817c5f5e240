"""The formula returns the published values, and raises an error for models that it does not
cover.
"""

import json

import pytest

from planish.errors import UserError
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.testing import tiny_model
from planish.training.learning_rates import get_lora_lr_over_full_finetune_lr, get_lr

PUBLISHED = {
    "meta-llama/Llama-3.2-1B": 4.908e-4,
    "meta-llama/Llama-3.1-8B-Instruct": 2.856e-4,
    "meta-llama/Llama-3.3-70B-Instruct": 1.662e-4,
    "Qwen/Qwen3-8B": 4.730e-4,
    "Qwen/Qwen3-8B-Base": 4.730e-4,
    "Qwen/Qwen3-4B-Instruct-2507": 4.905e-4,
    "Qwen/Qwen3-32B": 4.649e-4,
    "Qwen/Qwen3-30B-A3B": 4.991e-4,
    "Qwen/Qwen3.5-4B": 4.905e-4,
    "Qwen/Qwen3.5-9B-Base": 4.730e-4,
    "Qwen/Qwen3.6-35B-A3B": 4.991e-4,
    "Qwen/Qwen3.8-27B": 4.649e-4,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_values(name):
    assert get_lr(name) == pytest.approx(PUBLISHED[name], rel=2e-4)
    assert get_lr(name) / get_lr(name, is_lora=False) == pytest.approx(
        get_lora_lr_over_full_finetune_lr(name)
    )


def test_the_embedded_model_has_a_rate():
    assert get_lr(DEFAULT_MODEL) == pytest.approx(1.322e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("family", "exponent"),
    [
        ("llama", 0.781),
        ("qwen2", 0.0775),
        ("qwen3", 0.0775),
        ("qwen3_5", 0.0775),
        ("qwen3_5_moe", 0.0775),
    ],
)
def test_a_local_directory_is_read(tmp_path, family, exponent):
    model = tiny_model(tmp_path / family, family, hidden_size=32)
    assert get_lr(str(model)) == pytest.approx(5e-4 * (2000 / 32) ** exponent)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_multimodal_directory_is_read(tmp_path, family):
    text = {"model_type": f"{family}_text", "hidden_size": 1024}
    config = {"model_type": family, "hidden_size": 8, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert get_lr(str(tmp_path)) == pytest.approx(5e-4 * (2000 / 1024) ** 0.0775)


@pytest.mark.parametrize(
    "name",
    [
        "google/gemma-3-4b",
        "Qwen/Qwen3-8B-Coder",
        "meta-llama/Llama-3.2-11B",
        "mine",
        "openai/gpt-oss-20b",
    ],
)
def test_an_unknown_model_is_an_error_that_says_what_to_give(name):
    with pytest.raises(UserError, match=f"model_name={name}.*learning_rate="):
        get_lr(name)


def test_an_unknown_directory_too(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "hidden_size": 8}')
    with pytest.raises(UserError, match="'gemma3'"):
        get_lr(str(tmp_path))


@pytest.mark.parametrize("text", [None, []])
def test_a_multimodal_directory_without_a_text_config_is_an_error(tmp_path, text):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text})
    )
    with pytest.raises(UserError, match="text_config.*learning_rate="):
        get_lr(str(tmp_path))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-FP8", "RedHatAI/Qwen3-8B-FP8-dynamic"])
def test_an_fp8_checkpoint_has_the_rate_of_its_model(name):
    assert get_lr(name) == get_lr("Qwen/Qwen3-8B")
