"""Adapters that train embeddings, tokens, heads or norms are merged into a new base model."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft_adapters import fill, loaded, model_logprobs
from safetensors.torch import load_file, save_file
from trained_adapters import TOKENS

from planish import ModelInput, ServiceClient
from planish.commands.cli import main
from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import CheckpointError, DamagedFileError, UnsupportedError
from planish.export import weights
from planish.export.importing import import_adapter
from planish.testing import save_byte_tokenizer, tiny_model

TOLERANCE = 1e-4
MARKS = ("lora_", "modules_to_save", "trainable_tokens_delta")
LINEARS = ["q_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "embedding and head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "norms": {"modules_to_save": ["input_layernorm"]},
    "tokens": {"trainable_token_indices": [5, 250, 72]},
    "tokens by name": {"trainable_token_indices": {"embed_tokens": [101, 7]}},
    "embedding with its tie": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "a LoRA update of the embedding with its tie": {
        "target_modules": [*LINEARS, "embed_tokens"], "ensure_weight_tying": True,
    },
    "tokens with their tie": {"trainable_token_indices": [5, 6], "ensure_weight_tying": True},
    "a LoRA update of the embedding": {"target_modules": [*LINEARS, "embed_tokens"]},
    "ranks and alphas": {
        "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 1},
    },
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding_layers`:UserWarning",
    "ignore:.*tie_word_embeddings.*:UserWarning",
    "ignore:You have requested `ensure_weight_tying`:UserWarning",
    "ignore:Model has `tie_word_embeddings:UserWarning",
)


def saved(base: Path, out: Path, model: Any = None, **options: Any) -> list[float]:
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", **({"r": 4, "lora_alpha": 8, "target_modules": LINEARS} | options)
    )
    tuned = peft.get_peft_model(model or loaded(base), config)
    fill(tuned, MARKS)
    tuned.save_pretrained(str(out))
    return model_logprobs(tuned)


def planish_logprobs(model: str, data: Path) -> list[float]:
    with ServiceClient(models={model: model}, data_dir=data, dtype="float32") as client:
        sampler = client.create_sampling_client(base_model=model)
        _, *logprobs = sampler.compute_logprobs(ModelInput.from_ints(TOKENS)).result()
    return [logprob for logprob in logprobs if logprob is not None]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_new_base_model_computes_what_peft_computes(tmp_path, case, tied):
    base = tiny_model(tmp_path / "base", "llama", tied=tied)
    expected = saved(base, tmp_path / "adapter", **CASES[case])
    assert expected != pytest.approx(model_logprobs(loaded(base)), abs=0.1)
    merged = weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "new")
    assert model_logprobs(loaded(merged)) == pytest.approx(expected, abs=TOLERANCE)
    assert planish_logprobs(merged, tmp_path / "data") == pytest.approx(expected, abs=TOLERANCE)
    with pytest.raises(
        UnsupportedError, match=r"planish export .*adapter NEW_MODEL --format merged"
    ):
        import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"))
    with pytest.raises(UnsupportedError, match="NEW_MODEL --format merged"):
        weights.build_lora_adapter(adapter_path=tmp_path / "adapter", output_path=tmp_path / "peft")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_enlarge_the_vocabulary(tmp_path, tied, capsys):
    """The offered command also takes the tokenizer that was saved beside the adapter."""
    base = tiny_model(tmp_path / "base", "llama", tied=tied, dtype="bfloat16")
    model = loaded(base)
    torch.manual_seed(0)
    model.resize_token_embeddings(280, mean_resizing=False)
    expected = saved(base, tmp_path / "adapter", model, modules_to_save=["embed_tokens", "lm_head"])
    save_byte_tokenizer(tmp_path / "adapter")
    (tmp_path / "adapter/chat_template.jinja").write_text("of the adapter")
    words = ["export", str(tmp_path / "adapter"), str(tmp_path / "new"), "--format", "merged"]
    assert main([*words, "--dtype", "float32"]) == 0
    config = json.loads((tmp_path / "new/config.json").read_text())
    assert config["vocab_size"] == 280
    assert (tmp_path / "new/chat_template.jinja").read_text() == "of the adapter"
    assert model_logprobs(loaded(tmp_path / "new")) == pytest.approx(expected, abs=TOLERANCE)
    weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "bf16")
    stored = load_file(tmp_path / "bf16/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert stored["model.embed_tokens.weight"].shape[0] == 280


def change(adapter: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    file = adapter / "adapter_model.safetensors"
    found = load_file(file) | tensors
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, file)


EMBEDDING = "base_model.model.model.embed_tokens"
DAMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "a missing weight": (
        "embedding", {}, {f"{EMBEDDING}.weight": None}, DamagedFileError, "lacks the weights",
    ),
    "another width": (
        "embedding", {}, {f"{EMBEDDING}.weight": torch.zeros(272, 32)}, CheckpointError, "shape",
    ),
    "an embedding without a head of its size": (
        "embedding", {}, {f"{EMBEDDING}.weight": torch.ones(300, 64)}, CheckpointError, "300 tokens",
    ),
    "NaN": (
        "embedding", {}, {f"{EMBEDDING}.weight": torch.full((272, 64), torch.nan)}, DamagedFileError, "NaN",
    ),
    "a token beyond the vocabulary": (
        "tokens", {"trainable_token_indices": [5, 6, 272]}, {}, UnsupportedError, "Resize the base",
    ),
    "a token twice": (
        "tokens", {"trainable_token_indices": [5, 6, 5]}, {}, UnsupportedError, "not tokens",
    ),
    "too few rows": (
        "tokens", {"trainable_token_indices": [5, 6]}, {}, DamagedFileError, "rows of trainable",
    ),
    "an odd list of tokens": (
        "tokens", {"trainable_token_indices": {"embed_tokens": "all"}}, {}, UnsupportedError, "not tokens",
    ),
    "an unknown weight": (
        "tokens", {}, {"base_model.model.model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64)},
        UnsupportedError, "merges LoRA matrices, embeddings",
    ),
    "another base model's copy": (
        "tokens", {}, {"base_model.model.lm_head.base_layer.weight": torch.zeros(272, 64)},
        CheckpointError, "differs from the base model given",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_weights_that_do_not_fit_are_rejected(tmp_path, name):
    case, config, tensors, error, told = DAMAGES[name]
    base = tiny_model(tmp_path / "base", "llama", tied=False)
    saved(base, tmp_path / "adapter", **CASES[case])
    change(tmp_path / "adapter", config, tensors)
    with warnings.catch_warnings(), pytest.raises(error, match=told):
        weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "new")
    assert not (tmp_path / "new").exists()
