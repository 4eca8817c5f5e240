import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import load_on
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
)

from planish.errors import DamagedFileError, UnknownModelError, UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.weight_shapes import expected_shapes
from planish.model.sequences.prefix_tree import pack
from planish.model.sources.weights import load_weights
from planish.testing import randomize, save_weights, tiny_model


def load(directory):
    return load_weights(directory, ModelConfig.from_directory(directory))


def rewrite(directory, change):
    """Save the weights of `directory` again after `change` has edited the dictionary of tensors."""
    tensors = {
        name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()
    }
    change(tensors)
    save_weights(directory, tensors)
    return directory


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_weight_names_and_values_equal_transformers(tmp_path, family, tied):
    weights = load(tiny_model(tmp_path, family, tied=tied, dtype="bfloat16"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    if tied:
        del theirs["lm_head.weight"]
    assert weights.keys() == theirs.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, theirs[name]), name


def test_sharded_weights_equal_unsharded_weights(tmp_path):
    single = load(tiny_model(tmp_path / "single", "qwen3", tied=False))
    sharded = load(tiny_model(tmp_path / "sharded", "qwen3", tied=False, shards=4))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 4
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_tensor_is_memory_mapped_from_its_file(tmp_path):
    weights = load(tiny_model(tmp_path, shards=2))
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            regions.append((start, end, Path(line.split(maxsplit=5)[5]).parent))
    for name, tensor in weights.items():
        assert any(
            start <= tensor.data_ptr()
            and tensor.data_ptr() + tensor.nbytes <= end
            and folder == tmp_path.resolve()
            for start, end, folder in regions
        ), f"{name} was copied"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_weights_allocates_no_private_memory(tmp_path):
    def anonymous_bytes():
        status = Path("/proc/self/status").read_text()
        return (
            next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
            * 1024
        )

    tiny_model(tmp_path, vocab_size=131072, hidden_size=128)
    before = anonymous_bytes()
    weights = load(tmp_path)
    assert all(torch.isfinite(tensor.sum()) for tensor in weights.values())  # reads every page
    stored = sum(tensor.nbytes for tensor in weights.values())
    assert stored > 60e6
    assert anonymous_bytes() - before < stored / 4


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.norm.weight"] = torch.ones(65)

    with pytest.raises(DamagedFileError) as caught:
        load(rewrite(tiny_model(tmp_path), change))
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.norm.weight is (65,), not (64,)" in message


def test_many_wrong_tensors_are_counted(tmp_path):
    directory = tiny_model(tmp_path, "qwen3", layers=2)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**fields, "num_hidden_layers": 9, "layer_types": None})
    )
    with pytest.raises(DamagedFileError, match=r"missing: model\.layers\.2\..* and 72 more"):
        load(directory)


def test_a_stored_tied_head_must_equal_the_embedding(tmp_path):
    directory = tiny_model(tmp_path)
    rewrite(
        directory,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    assert "lm_head.weight" not in load(directory)
    rewrite(directory, lambda tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(UnsupportedError, match="tie_word_embeddings"):
        load(directory)


def test_old_rotary_buffers_are_ignored(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    directory = rewrite(tiny_model(tmp_path), lambda tensors: tensors.update({name: torch.ones(8)}))
    assert load(directory).keys() == expected_shapes(ModelConfig.from_directory(directory)).keys()


@pytest.mark.parametrize("kept", [0, 4, 200, 20000])
def test_truncated_weight_files_are_rejected(tmp_path, kept):
    file = tiny_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DamagedFileError, match=r"model\.safetensors"):
        load(tmp_path)


def test_an_altered_weight_file_header_is_rejected(tmp_path):
    file = tiny_model(tmp_path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[0] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"model\.safetensors"):
        load(tmp_path)


def test_pickled_weights_are_rejected_with_a_remedy(tmp_path):
    directory = tiny_model(tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="convert them to safetensors"):
        load(directory)


def test_missing_weights_and_shards_are_rejected(tmp_path):
    directory = tiny_model(tmp_path, shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DamagedFileError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(directory)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(UnknownModelError, match="no weights"):
        load(directory)


def test_a_single_file_beside_an_index_is_reported(tmp_path, caplog):
    """Both can be there if a model was saved twice into one directory."""
    directory = tiny_model(tmp_path, shards=2)
    load_weights(directory, ModelConfig.from_directory(directory))
    assert caplog.messages == []
    tiny_model(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other/model.safetensors", directory)
    load_weights(directory, ModelConfig.from_directory(directory))
    assert caplog.messages == [
        f"{directory}: model.safetensors is read, as in transformers, and not the files that "
        "model.safetensors.index.json names; remove one of the two"
    ]


@pytest.mark.parametrize(
    "weight_map", [None, {}, {"model.norm.weight": "../outside.safetensors"}, {"a": 3}]
)
def test_an_invalid_weight_index_is_rejected(tmp_path, weight_map):
    directory = tiny_model(tmp_path, shards=2)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DamagedFileError, match=r"index\.json"):
        load(directory)


def test_integer_weights_are_rejected(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"

    def quantize(tensors):
        tensors[name] = tensors[name].to(torch.int8)

    with pytest.raises(UnsupportedError, match=f"{name} .*I8"):
        load(rewrite(tiny_model(tmp_path), quantize))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_multimodal_checkpoint_is_loaded(tmp_path, caplog, prefix):
    plain = tiny_model(tmp_path / "text", "gemma3")
    tensors = load_file(plain / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    both = tmp_path / "both"
    both.mkdir()
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": text["eos_token_id"],
        "text_config": text,
        "vision_config": {"hidden_size": 8, "image_size": 64, "patch_size": 4},
    }
    (both / "config.json").write_text(json.dumps(config))
    renamed = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
    renamed["vision_tower.vision_model.post_layernorm.weight"] = torch.zeros(8)
    save_weights(both, renamed)
    config = ModelConfig.from_directory(both)
    assert config.vision is not None
    assert replace(config, vision=None) == ModelConfig.from_directory(plain)
    with caplog.at_level("INFO"):
        found = load_weights(both, ModelConfig.from_directory(both))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert "skipped 1 tensors" in caplog.text


@pytest.mark.parametrize(
    ("text_type", "saved_as"), [("mistral", MistralConfig), ("ministral3", Ministral3Config)]
)
def test_the_text_model_of_mistral3_gives_the_logits_of_transformers(tmp_path, text_type, saved_as):
    """transformers writes the checkpoint, with a vision tower."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    text = saved_as(
        vocab_size=80,
        num_key_value_heads=1,
        sliding_window=None,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=2,
        **sizes,
    )
    vision = PixtralVisionConfig(image_size=28, patch_size=14, **sizes)
    outer = Mistral3Config(vision_config=vision, text_config=text, tie_word_embeddings=False)
    outer.architectures = ["Mistral3ForConditionalGeneration"]
    model: Any = Mistral3ForConditionalGeneration(outer)
    randomize(model, 0)
    model.save_pretrained(tmp_path)
    decoder = load_on(tmp_path, torch.float32, torch.device("cpu"))
    tokens = torch.randint(0, 80, (50,), generator=torch.Generator().manual_seed(0))
    (packed,) = pack([tokens.numpy()], 100)
    attend = decoder.backend.tree_attention(packed)
    hidden = decoder.forward(tokens, torch.arange(50), attend, None)
    assert decoder.config.family == text_type
    theirs = model(input_ids=tokens[None]).logits[0]
    assert (hidden @ decoder.head.weight.t() - theirs).abs().max() < 1e-4
