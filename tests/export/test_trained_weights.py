"""Adapters that train embeddings, tokens, heads or norms are merged into a new base model."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft_adapters import FLOAT32, MERGED, fill, loaded, model_logprobs
from safetensors.torch import load_file, save_file
from trained_adapters import TOKENS
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from planish import ModelInput, ServiceClient
from planish.commands.cli import main
from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import CheckpointError, DamagedFileError, UnsupportedError
from planish.export import weights
from planish.export.importing import import_adapter
from planish.testing import save_byte_tokenizer, tiny_model

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


def adapted(model: Any, **options: Any) -> Any:
    """Return a model with an adapter of random matrices and trained weights."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", **({"r": 4, "lora_alpha": 8, "target_modules": LINEARS} | options)
    )
    tuned = peft.get_peft_model(model, config)
    fill(tuned, MARKS)
    return tuned


def saved(base: Path, out: Path, model: Any = None, **options: Any) -> list[float]:
    tuned = adapted(model or loaded(base), **options)
    tuned.save_pretrained(str(out))
    return model_logprobs(tuned)


def planish_logprobs(model: str, data: Path, tokens: Sequence[int] = TOKENS) -> list[float]:
    with ServiceClient(models={model: model}, data_dir=data, dtype="float32") as client:
        sampler = client.create_sampling_client(base_model=model)
        _, *logprobs = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()
    return [logprob for logprob in logprobs if logprob is not None]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_new_base_model_computes_what_peft_computes(tmp_path, case, tied):
    base = tiny_model(tmp_path / "base", "llama", tied=tied)
    expected = saved(base, tmp_path / "adapter", **CASES[case])
    assert expected != pytest.approx(model_logprobs(loaded(base)), abs=0.1)
    merged = weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "new")
    assert model_logprobs(loaded(merged)) == pytest.approx(expected, abs=MERGED)
    assert planish_logprobs(merged, tmp_path / "data") == pytest.approx(expected, abs=FLOAT32)
    with pytest.raises(
        UnsupportedError, match=r"planish export .*adapter NEW_MODEL --format merged"
    ):
        import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"))
    with pytest.raises(UnsupportedError, match="NEW_MODEL --format merged"):
        weights.build_lora_adapter(adapter_path=tmp_path / "adapter", output_path=tmp_path / "peft")


@pytest.mark.filterwarnings("ignore:.*weights were not initialized:UserWarning")
def test_the_head_of_a_classifier_is_rejected_with_what_to_do_instead(tmp_path):
    """PEFT adds "classifier" and "score" to modules_to_save of every classifier."""
    base = tiny_model(tmp_path / "base", "llama")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=LINEARS)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    fields = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert fields["modules_to_save"] == ["classifier", "score"]
    message = r"adapter_model.safetensors contains score.weight, which is not .* reward function"
    with pytest.raises(UnsupportedError, match=message) as found:
        import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"))
    assert "--format merged" not in str(found.value)
    with pytest.raises(UnsupportedError, match=message):
        weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "new")


def test_a_whole_weight_of_a_layer_is_merged_with_peft(tmp_path):
    base = tiny_model(tmp_path / "base", "llama", tied=False)
    tuned = adapted(loaded(base), modules_to_save=["o_proj"])
    tuned.save_pretrained(str(tmp_path / "adapter"))
    expected = model_logprobs(tuned)
    message = r"contains model.layers.0.self_attn.o_proj.weight, .* PEFT \(merge_and_unload"
    with pytest.raises(UnsupportedError, match=message):
        import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"))
    with pytest.raises(UnsupportedError, match=message):
        weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "new")
    tuned.merge_and_unload().float().save_pretrained(tmp_path / "merged")
    save_byte_tokenizer(tmp_path / "merged")
    merged = str(tmp_path / "merged")
    assert planish_logprobs(merged, tmp_path / "data") == pytest.approx(expected, abs=FLOAT32)


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
    assert model_logprobs(loaded(tmp_path / "new")) == pytest.approx(expected, abs=MERGED)
    weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "bf16")
    stored = load_file(tmp_path / "bf16/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert stored["model.embed_tokens.weight"].shape[0] == 280


ROWS = [5, *range(272, 275)]
NEW_TOKENS: dict[str, tuple[bool, dict[str, Any]]] = {
    "the tied head has the same rows": (True, {"trainable_token_indices": ROWS}),
    "rows of the embedding and of the head": (
        False, {"trainable_token_indices": {"embed_tokens": ROWS, "lm_head": [7, 274, 272, 273]}},
    ),
    "a LoRA update of both": (
        False, {"target_modules": [*LINEARS, "embed_tokens", "lm_head"], "save_embedding_layers": True},
    ),
    "a LoRA update of the embedding": (
        True, {"target_modules": [*LINEARS, "embed_tokens"], "save_embedding_layers": True},
    ),
    "a LoRA update of both with its tie": (
        True,
        {"target_modules": [*LINEARS, "embed_tokens"], "save_embedding_layers": True}
        | {"ensure_weight_tying": True},
    ),
    "rows of a saved embedding": (
        False, {"trainable_token_indices": [5, 272, 274], "save_embedding_layers": True},
    ),
    "rows of a saved embedding with its tie": (
        True, {"trainable_token_indices": [5, 272, 274], "save_embedding_layers": True},
    ),
}  # fmt: skip


WITH_NEW_TOKENS = [72, 272, 101, 274, 5, 273]


def saved_after_resize(
    base: Path, out: Path, save_embedding_layers=False, **options: Any
) -> tuple[list[float], Any]:
    """Save an adapter of a base model with three more tokens.

    Return PEFT's logprobs of WITH_NEW_TOKENS and its merged model.
    """
    model = loaded(base)
    torch.manual_seed(0)
    model.resize_token_embeddings(275, mean_resizing=False)
    tuned = adapted(model, **options)
    tuned.save_pretrained(str(out), save_embedding_layers=save_embedding_layers)
    return model_logprobs(tuned, WITH_NEW_TOKENS), tuned.merge_and_unload()


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW_TOKENS)
def test_the_new_base_model_has_the_rows_of_new_tokens(tmp_path, name):
    """The matrices equal those of PEFT's `merge_and_unload`, which adds LoRA updates of tied
    matrices to both.
    """
    tied, options = NEW_TOKENS[name]
    base = tiny_model(tmp_path / "base", "llama", tied=tied)
    logprobs, expected = saved_after_resize(base, tmp_path / "adapter", **options)
    merged = weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "new")
    model = loaded(merged)
    assert model.config.vocab_size == 275
    if not tied or "trainable_token_indices" in options:
        torch.testing.assert_close(
            model.state_dict(), expected.float().state_dict(), rtol=0, atol=1e-6
        )
    assert model_logprobs(model, WITH_NEW_TOKENS) == pytest.approx(logprobs, abs=MERGED)
    found = planish_logprobs(merged, tmp_path / "data", WITH_NEW_TOKENS)
    assert found == pytest.approx(logprobs, abs=FLOAT32)


LACKING: dict[str, tuple[bool, dict[str, Any], str]] = {
    "the head of its own": (
        False, {"trainable_token_indices": ROWS}, "embedding of 275 tokens and a head of 272",
    ),
    "the embedding": (
        False, {"modules_to_save": ["lm_head"]}, "embedding of 272 tokens and a head of 275",
    ),
    "a token between": (
        True, {"trainable_token_indices": [272, 274]}, "2 rows of the 3 tokens from 272 to 274",
    ),
    "tokens of its tokenizer": (
        True, {"trainable_token_indices": [272, 273]}, "embedding of 274 tokens.*tokenizer.* has 275",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LACKING)
def test_an_adapter_without_all_rows_of_new_tokens_is_rejected(tmp_path, name):
    """The rows are random numbers that only the resized base model has, which can be given."""
    tied, options, told = LACKING[name]
    base = tiny_model(tmp_path / "base", "llama", tied=tied)
    _, expected = saved_after_resize(base, tmp_path / "adapter", **options)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([f"<new{number}>" for number in range(275 - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=f"{told}.* at random.*as the base model"):
        weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    model = loaded(base)
    torch.manual_seed(0)
    model.resize_token_embeddings(275, mean_resizing=False)
    model.save_pretrained(tmp_path / "resized")
    merged = weights.build_hf_model(
        base_model=str(tmp_path / "resized"),
        adapter_path=tmp_path / "adapter",
        output_path=tmp_path / "new",
    )
    torch.testing.assert_close(
        loaded(merged).state_dict(), expected.float().state_dict(), rtol=0, atol=1e-6
    )


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
    "tokens beyond the vocabulary": (
        "tokens", {"trainable_token_indices": [5, 6, 10**9]}, {}, CheckpointError, "1 rows of the",
    ),
    "a token twice": (
        "tokens", {"trainable_token_indices": [5, 6, 5]}, {}, DamagedFileError, "different tokens",
    ),
    "too few rows": (
        "tokens", {"trainable_token_indices": [5, 6]}, {}, DamagedFileError, "rows of trainable",
    ),
    "an odd list of tokens": (
        "tokens", {"trainable_token_indices": {"embed_tokens": "all"}}, {}, DamagedFileError, "different tokens",
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
