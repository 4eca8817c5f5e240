"""Adapters of models by transformers' code: PEFT computes the same, and they are imported again."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft_adapters import FLOAT32, imported_logprobs, loaded, model_logprobs
from trained_adapters import train_adapter
from transformers import AutoModelForImageTextToText

from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import UnsupportedError
from planish.export import weights
from planish.export.importing import import_adapter
from planish.testing import tiny_transformers_model
from planish.testing_vision import tiny_vision_model

MAMBA = ["nemotron_h", "falcon_h1", "bamba", "granitemoehybrid"]
pytestmark = [
    pytest.mark.slow,
    # PEFT says so when it saves the base model's head or embedding beside their adapters.
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    # PEFT says that it transposes the matrices of Conv1D.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),
]


@pytest.mark.parametrize(
    "family", ["glm4", "mixtral", "gpt2", "deepseek_v3", "lfm2", "gemma4", *MAMBA]
)
def test_an_exported_adapter_gives_peft_the_same_logprobs_and_is_imported(tmp_path, family):
    base = tiny_transformers_model(tmp_path / "base", family, tie_word_embeddings=False)
    made = train_adapter(tmp_path / "data", base, True, True, True, "sampler_weights")
    assert np.abs(np.subtract(made.logprobs, made.base_logprobs)).max() > 0.1
    out = weights.build_lora_adapter(
        base_model=str(base), adapter_path=made.files, output_path=tmp_path / "peft"
    )
    peft = PeftModel.from_pretrained(loaded(base), out)
    np.testing.assert_allclose(model_logprobs(peft), made.logprobs, atol=FLOAT32)
    store = CheckpointStore(tmp_path / "imported")
    found = import_adapter(tmp_path / "peft", store, base_model=str(base))
    imported = imported_logprobs(base, tmp_path / "imported", found)
    np.testing.assert_allclose(imported, made.logprobs, atol=FLOAT32)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma4"])
def test_an_adapter_of_a_model_with_images_is_exported_and_imported(tmp_path, family):
    """The vision tower of Qwen2.5-VL has linears with the names of the text model's."""
    base = tiny_vision_model(tmp_path / "base", family)
    made = train_adapter(tmp_path / "data", base, True, True, True, "sampler_weights")
    assert np.abs(np.subtract(made.logprobs, made.base_logprobs)).max() > 0.1
    out = weights.build_lora_adapter(
        base_model=str(base), adapter_path=made.files, output_path=tmp_path / "peft"
    )
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    peft = PeftModel.from_pretrained(model, out)
    adapted = [name for name, _ in peft.named_parameters() if "lora" in name]
    assert not any("visual" in name or "vision" in name for name in adapted)
    np.testing.assert_allclose(model_logprobs(peft), made.logprobs, atol=FLOAT32)
    store = CheckpointStore(tmp_path / "imported")
    found = import_adapter(tmp_path / "peft", store, base_model=str(base))
    imported = imported_logprobs(base, tmp_path / "imported", found)
    np.testing.assert_allclose(imported, made.logprobs, atol=FLOAT32)


@pytest.mark.parametrize("family", ["glm4", "lfm2", "gemma4", "bamba", "falcon_h1"])
def test_a_merged_model_has_the_adapters_logprobs(tmp_path, family):
    base = tiny_transformers_model(tmp_path / "base", family, tie_word_embeddings=False)
    made = train_adapter(tmp_path / "data", base, True, True, True, "sampler_weights")
    out = weights.build_hf_model(
        base_model=str(base), adapter_path=made.files, output_path=tmp_path / "out"
    )
    np.testing.assert_allclose(model_logprobs(loaded(out)), made.logprobs, atol=FLOAT32)


@pytest.mark.parametrize(
    ("family", "reason"), [("mixtral", "renames or joins"), ("gpt2", "transposed weights")]
)
def test_a_merge_that_the_files_do_not_allow_is_refused(tmp_path, family, reason):
    base = tiny_transformers_model(tmp_path / "base", family, tie_word_embeddings=False)
    made = train_adapter(tmp_path / "data", base, True, True, False, "sampler_weights")
    with pytest.raises(UnsupportedError, match=reason):
        weights.build_hf_model(
            base_model=str(base), adapter_path=made.files, output_path=tmp_path / "out"
        )
