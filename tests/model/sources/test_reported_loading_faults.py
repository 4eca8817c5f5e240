"""Faults of loading models that were reported in other projects: what happens here.

The models are tiny random ones, with the files and fields of the reports.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from planish.errors import DamagedFileError, UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.kernels.choose import choose_backend
from planish.model.loading import load_decoder
from planish.testing import save_weights, tiny_model, tiny_transformers_model
from planish.testing_vision import tiny_vision_model

SINGLE = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(path: Path, dtype: torch.dtype = torch.float32) -> BaseDecoder:
    config = ModelConfig.from_directory(path)
    backend = choose_backend(config, dtype, torch.device("cpu"), deterministic=False)
    return load_decoder(path, backend)


def change_config(path: Path, text: dict[str, Any] | None = None, **fields: Any) -> None:
    """Set fields of config.json and of its text_config. None removes a field."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    parts = ((config, fields), (config.get("text_config", {}), text or {}))
    for part, changes in parts:
        part.update(changes)
        for name in [name for name, value in changes.items() if value is None]:
            del part[name]
    file.write_text(json.dumps(config))


def made(path: Path, family: str, **options: Any) -> Path:
    """Write a tiny model of a family with an own decoder, or by the code of transformers."""
    make = tiny_transformers_model if family in ("glm4", "minimax_m2", "afmoe") else tiny_model
    return make(path, family, **options)


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
@pytest.mark.parametrize(
    ("outer", "inner", "is_tied"), [(None, True, True), (True, False, True), (False, True, False)]
)
def test_the_outer_config_decides_whether_the_head_is_tied(
    tmp_path, model_type, outer, inner, is_tied
):
    """Ministral 3 has the field in text_config only (transformers 43429)."""
    tiny_vision_model(tmp_path, model_type)
    change_config(tmp_path, {"tie_word_embeddings": inner}, tie_word_embeddings=outer)
    assert ModelConfig.from_directory(tmp_path).tied_head == is_tied
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings == is_tied
    weights = load_file(tmp_path / SINGLE)
    save_weights(tmp_path, {n: w for n, w in weights.items() if not n.endswith(HEAD)})
    if is_tied:
        load(tmp_path)
    else:
        with pytest.raises(DamagedFileError, match="missing: lm_head.weight"):
            load(tmp_path)


@pytest.mark.parametrize(("family", "option"), [("llama", "tied"), ("glm4", "tie_word_embeddings")])
def test_a_tied_embedding_may_have_the_name_of_the_head(tmp_path, family, option):
    """As in files of programs that store a shared tensor once (transformers 38870)."""
    made(tmp_path, family, **{option: True})
    weights = load_file(tmp_path / SINGLE)
    embedding = weights.pop(EMBEDDING)
    save_weights(tmp_path, weights | {HEAD: embedding})
    decoder = load(tmp_path)
    hidden = torch.eye(64)
    logits = decoder.backend.base_logits(hidden, decoder.head)
    torch.testing.assert_close(logits, embedding.t())


@pytest.mark.parametrize("family", ["minimax_m2", "afmoe"])
def test_biases_of_routers_keep_their_precision(tmp_path, family):
    """bfloat16 has few values near 7, so other experts would be chosen (SGLang 31213)."""
    made(tmp_path, family, dtype="bfloat16")
    weights = load_file(tmp_path / SINGLE)
    [*names] = [name for name in weights if name.endswith(("correction_bias", "expert_bias"))]
    bias = 7 + 0.25 * torch.arange(4) / 64
    save_weights(tmp_path, weights | {name: bias.clone() for name in names})
    model: Any = load(tmp_path, torch.bfloat16)
    tensors = dict(model._model.named_parameters()) | dict(model._model.named_buffers())
    found = [x for name, x in tensors.items() if name.endswith(("correction_bias", "expert_bias"))]
    assert len(found) == len(names) > 0
    assert all(tensor.equal(bias) for tensor in found)


@pytest.mark.parametrize("family", ["mistral", "glm4"])
def test_the_index_decides_which_files_are_read(tmp_path, family):
    """Beside the model there may be the weights of another format (vLLM 4989 and 40765, SGLang
    33671, mlx-swift-lm 408), and shards may have any names (unsloth-zoo 900).
    """
    made(tmp_path, family)
    save_file(
        {"layers.0.attention.wk.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors"
    )
    weights = load_file(tmp_path / SINGLE)
    (tmp_path / SINGLE).unlink()
    files = ["model.safetensors-00001-of-00002.safetensors", "layers-0.safetensors"]
    weight_map = {name: files[number % 2] for number, name in enumerate(sorted(weights))}
    for file in files:
        part = {name: weight for name, weight in weights.items() if weight_map[name] == file}
        save_file(part, tmp_path / file, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    load(tmp_path)
    (tmp_path / files[1]).unlink()  # an unfinished download (SGLang 32279)
    with pytest.raises(
        DamagedFileError, match=r"layers-0.safetensors is missing, but .*index.json"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("quantization_config", {}, "quantization_config is empty.*remove the field"),
        ("head_dim", "wide", r"head_dim.*expected.*int"),
    ],
)
def test_a_field_that_transformers_cannot_read_is_named(tmp_path, field, value, problem):
    made(tmp_path, "glm4")
    change_config(tmp_path, **{field: value})
    with pytest.raises(UnsupportedError, match=problem):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_head_size_of_null_is_that_of_the_other_sizes(tmp_path, family):
    """vLLM 18443, transformers 40159."""
    made(tmp_path, family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head_dim": None}))
    assert ModelConfig.from_directory(tmp_path).head_dim == 16
