import json
import math
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    neighbours_from_halves,
    write_gguf,
    write_llama2_tokenizer,
    write_sentencepiece,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from planish.errors import DamagedFileError, StorageError, UnknownModelError, UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.rope_config import LinearRopeScaling
from planish.model.sources.gguf import convert_gguf
from planish.model.sources.gguf_file import read_gguf
from planish.model.sources.gguf_tokenizer import _pre_tokenizer, build_tokenizer
from planish.model.sources.resolve import conversion_directory
from planish.testing import EOS_TOKEN_ID, SPECIAL_TOKENS, WORD_TOKENS, save_weights, tiny_model
from planish.tokenizer import load_tokenizer

TEXTS = [
    "",
    "The capital of France is Paris.",
    "def f(x):\n\treturn x ** 2  # squared\n\n\n",
    "12 + 30 = 42, 3.14159 and 1e-12",
    "naïve café, 日本語, Ελληνικά, 👩‍🚀🏽, e\u0301 and \u00e9",
    "  leading, trailing  \r\n",
    "".join(map(chr, range(0x20, 0x3000, 11))),
]


def logits(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(3, 90)[None]).logits[0]


def test_quantized_experts_are_converted_one_by_one(tmp_path):
    original = tiny_model(tmp_path / "hf", "qwen3_moe", dtype="bfloat16")
    file = write_gguf(tmp_path / "m.gguf", original, quantized=("experts",))
    converted = load_file(convert_gguf(file, tmp_path / "out") / "model.safetensors")
    for name, weight in load_file(original / "model.safetensors").items():
        if ".experts." in name:
            error = (converted[name].float() - weight.float()).norm() / weight.float().norm()
            assert 0 < error < 0.01, name
        else:
            assert torch.equal(converted[name], weight), name


@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False), ("qwen3_moe", False)],
)
def test_a_converted_gguf_model_equals_the_original(tmp_path, family, tied):
    original = tiny_model(tmp_path / "hf", family, tied=tied, head_dim=24, dtype="bfloat16")
    converted = convert_gguf(write_gguf(tmp_path / "m.gguf", original), tmp_path / "out")
    before, after = ModelConfig.from_directory(original), ModelConfig.from_directory(converted)
    assert before == after
    assert {tensor.dtype for tensor in load_file(converted / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert torch.equal(logits(original), logits(converted))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def write_llama3_table(writer):
    """Write the table as llama.cpp's converter does, for head_dim 128 and theta 500000."""
    factors = []
    for frequency in 1.0 / (5e5 ** (np.arange(0, 128, 2) / 128)):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1.0) / 3.0
            factors.append(1 / ((1 - smooth) / 32.0 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def write_yarn(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def write_yarn_with_log_multiplier(writer):
    write_yarn(writer)
    writer.add_rope_scaling_yarn_log_mul(1.0)


def write_yarn_with_attention_factor(writer):
    write_yarn(writer)
    writer.add_rope_scaling_attn_factors(1.25)


def write_longrope(writer):
    writer.add_rope_scaling_orig_ctx_len(256)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(8) / math.log(256)))
    for name in ("short", "long"):
        table = np.array(LONGROPE[f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", table)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 4.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.75,
}


@pytest.mark.parametrize(
    ("family", "options", "changes", "extra"),
    [
        ("llama", {"rope_scaling": LLAMA3, "head_dim": 128}, {}, write_llama3_table),
        ("llama", {"rope_scaling": YARN}, {}, write_yarn),
        ("smollm3", {"layers": 4}, {"no_rope_layers": [1, 1, 1, 0]}, None),
        (
            "ministral3",
            {"tied": False, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
            {},
            write_yarn_with_log_multiplier,
        ),
        (
            "olmo3",
            {
                "layers": 4,
                "rope_scaling": YARN | {"attention_factor": 1.25, "rope_theta": 5e5},
                "local_theta": 5e5,
            },
            {},
            write_yarn_with_attention_factor,
        ),
        ("phi3", {"rope_scaling": {"partial_rotary_factor": 0.5}}, {}, None),
        ("phi3", {"rope_scaling": LONGROPE}, {}, write_longrope),
    ],
)
def test_converted_families_and_rope_scalings_equal_the_original(
    tmp_path, family, options, changes, extra
):
    original = tiny_model(tmp_path / "hf", family, dtype="bfloat16", **options)
    content = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(content | changes))
    path = write_gguf(tmp_path / "m.gguf", original, extra=extra or (lambda writer: None))
    converted = convert_gguf(path, tmp_path / "out")
    assert ModelConfig.from_directory(original) == ModelConfig.from_directory(converted)
    assert torch.equal(logits(original), logits(converted))


def test_a_mistral3_file_without_query_scales_is_a_mistral(tmp_path):
    original = tiny_model(tmp_path / "hf", "ministral3", dtype="bfloat16")
    path = write_gguf(
        tmp_path / "m.gguf", original, extra=lambda writer: writer.add_attn_temperature_scale(0.0)
    )
    config = ModelConfig.from_directory(convert_gguf(path, tmp_path / "out"))
    assert (config.family, config.windows) == ("mistral", ())


def test_the_words_of_each_pre_tokenizer():
    """The expected words follow from the regular expressions in the models' tokenizer.json."""

    def words(pre, text):
        found = _pre_tokenizer(pre).pre_tokenize_str(text)
        return [word.replace("\u0120", " ") for word, _ in found]

    text = "HelloWorld ABCdef I'll 2024 a//\n"
    split = ["Hello", "World", " ABCdef", " I", "'ll", " ", "2", "0", "2", "4", " a", "//\u010a"]
    assert words("tekken", text) == split
    joined = ["Hello", "World", " ABCdef", " I'll", " ", "202", "4", " a", "//\u010a"]
    assert words("gpt-4o", text) == joined
    assert words("dbrx", text) == words("llama-bpe", text) == words("smaug-bpe", text)
    assert words("dbrx", text)[:2] == ["HelloWorld", " ABCdef"]


def test_a_converted_gemma3_equals_the_original(tmp_path, monkeypatch):
    original = tiny_model(
        tmp_path / "hf", "gemma3", layers=7, dtype="bfloat16", local_theta=10000.0, query_scalar=16
    )
    content = json.loads((original / "config.json").read_text())
    content["layer_types"] = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    (original / "config.json").write_text(json.dumps(content))
    converted = convert_gguf(write_gguf(tmp_path / "m.gguf", original), tmp_path / "out")
    assert ModelConfig.from_directory(original) == ModelConfig.from_directory(converted)
    before, after = (load_file(path / "model.safetensors") for path in (original, converted))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(original), logits(converted))


def test_a_sentencepiece_vocabulary_merges_by_score(tmp_path):
    tokenizer = build_tokenizer(read_gguf(write_sentencepiece(tmp_path / "m.gguf")))

    def pieces(text):
        return tokenizer.encode(text).tokens

    assert pieces("abc") == ["<bos>", "ab", "c"]
    assert pieces("bc ab a") == ["<bos>", "bc", "\u2581ab", "\u2581a"]
    assert pieces("a  b\n\nc") == ["<bos>", "a", "  ", "b", "\n\n", "c"]
    assert pieces("\u00e9") == ["<bos>", "<0xC3>", "<0xA9>"]
    assert pieces("1<end_of_turn>2") == ["<bos>", "1", "<end_of_turn>", "2"]
    for text in ("abc ab  c\n\na", "\u00e9 \u6f22 \U0001f916 12", "  a ", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids[1:]) == text


@pytest.mark.parametrize("token", ["<end_of_turn>", "<eos>"])
def test_special_tokens_that_a_converter_marked_as_normal_text_are_named(tmp_path, token):
    """Without them, a chat would have the tokens of their letters."""
    template = "{{ bos_token }}{{ messages[0].content }}<end_of_turn>\n<start_of_turn>"
    path = write_sentencepiece(tmp_path / "m.gguf", template)
    assert build_tokenizer(read_gguf(path)).encode("<end_of_turn>").tokens[1:] == ["<end_of_turn>"]
    path = write_sentencepiece(tmp_path / "n.gguf", template, normal=[token])
    with pytest.raises(UnsupportedError, match=f"n.gguf marks the special token {token} as normal"):
        build_tokenizer(read_gguf(path))


def test_the_tokenizers_of_llama_2_and_mistral_equal_sentencepiece(tmp_path):
    """sentencepiece 0.2 trained the pieces with Llama 2's options, and encoded the texts."""
    recorded = json.loads(Path(__file__).with_name("sentencepiece_bpe.json").read_text())
    path = write_llama2_tokenizer(tmp_path / "m.gguf", recorded["pieces"])
    tokenizer = build_tokenizer(read_gguf(path))
    for text, ids in recorded["recorded"]:
        encoding = tokenizer.encode(text)
        assert encoding.ids == [1, *ids], text
        if not text.startswith("\u2581"):
            assert tokenizer.decode(encoding.ids) == text
    # As in llama.cpp, a text after a special token begins with a space, too.
    word = tokenizer.encode("the", add_special_tokens=False).ids
    assert tokenizer.encode("the</s>the<unk>", add_special_tokens=False).ids == [*word, 2, *word, 0]
    without = write_llama2_tokenizer(
        tmp_path / "n.gguf", recorded["pieces"], add_space_prefix=False
    )
    assert build_tokenizer(read_gguf(without)).encode("the").tokens[1:] == ["th", "e"]


def test_the_gguf_row_order_changes_the_logits(tmp_path):
    """A control for the test above: rows left in GGUF's order change the logits."""
    original = tiny_model(tmp_path / "hf", dtype="bfloat16")
    scrambled = tiny_model(tmp_path / "scrambled", dtype="bfloat16")
    tensors = load_file(scrambled / "model.safetensors")
    for name, heads in (("q_proj", 4), ("k_proj", 2)):
        key = f"model.layers.0.self_attn.{name}.weight"
        tensors[key] = torch.from_numpy(
            neighbours_from_halves(tensors[key].float().numpy(), heads)
        ).bfloat16()
    save_weights(scrambled, {name: tensor.clone() for name, tensor in tensors.items()})
    assert (logits(original) - logits(scrambled)).abs().max() > 0.1


@pytest.mark.parametrize(("kind", "steps"), [("Q8_0", 255), ("Q4_1", 15)])
def test_quantized_tensors_are_dequantized(tmp_path, kind, steps):
    original = tiny_model(tmp_path / "hf", dtype="bfloat16")
    quantized = ("_proj.weight", "embed_tokens.weight")
    path = write_gguf(
        tmp_path / "m.gguf", original, quantized=quantized, kind=gguf.GGMLQuantizationType[kind]
    )
    converted = load_file(convert_gguf(path, tmp_path / "out") / "model.safetensors")
    for name, values in load_file(original / "model.safetensors").items():
        gap = (converted[name].float() - values.float()).abs().max()
        if name.endswith(quantized):
            # The error is half a quantization step of the widest block, plus rounding to bfloat16.
            assert 0 < gap < 2 * values.abs().max() * (0.55 / steps + 2**-8), name
        else:
            assert gap == 0, name


def test_the_smollm_tokenizer_keeps_text_and_splits_digits(tmp_path):
    directory = convert_gguf(
        write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf")), tmp_path / "out"
    )
    tokenizer = load_tokenizer(directory)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("12") == [ord("1"), ord("2")]
    assert tokenizer.encode("<|im_start|>") == [256 + SPECIAL_TOKENS.index("<|im_start|>")]
    assert tokenizer.encode("<think>") == [256 + len(SPECIAL_TOKENS)]
    assert (
        tokenizer.decode(tokenizer.encode("<think>a<|im_end|>"), skip_special_tokens=True)
        == "<think>a"
    )
    assert "[PAD271]" not in tokenizer.get_vocab()
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 2048
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"


def test_pre_tokenizers_differ_in_digits_and_normalization(tmp_path):
    original = tiny_model(tmp_path / "hf")
    tokens = {}
    for pre in ("smollm", "qwen2", "deepseek-r1-qwen", "llama-bpe", "gpt-2"):
        directory = convert_gguf(
            write_gguf(tmp_path / f"{pre}.gguf", original, pre=pre), tmp_path / pre
        )
        tokenizer = load_tokenizer(directory)
        tokens[pre] = tokenizer.encode("9 12")
        assert tokenizer.decode(tokens[pre]) == "9 12"
        assert tokenizer.decode(tokenizer.encode("e\u0301")) == (
            "\u00e9" if pre in ("qwen2", "deepseek-r1-qwen") else "e\u0301"
        )
    apart, whole = [57, 32, 49, 50], [57, 32, 256 + len(SPECIAL_TOKENS) + len(WORD_TOKENS)]
    split_names = ("smollm", "qwen2", "deepseek-r1-qwen")
    assert tokens == dict.fromkeys(split_names, apart) | {"llama-bpe": whole, "gpt-2": whole}


@pytest.mark.slow
def test_the_command_in_the_error_gives_a_file_its_pre_tokenizer(tmp_path):
    path = write_gguf(tmp_path / "old.gguf", tiny_model(tmp_path / "hf"), pre=None)
    with pytest.raises(UnsupportedError, match="gguf-new-metadata --pre-tokenizer NAME old.gguf"):
        convert_gguf(path, tmp_path / "out")
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--pre-tokenizer", "smollm"]
    named = tmp_path / "named.gguf"
    subprocess.run([*command, str(path), str(named)], check=True, capture_output=True)
    assert load_tokenizer(convert_gguf(named, tmp_path / "out")).encode("12") == [49, 50]


def test_a_split_file_equals_the_whole_one(tmp_path):
    original = tiny_model(tmp_path / "hf", tied=False, dtype="bfloat16")
    whole = convert_gguf(write_gguf(tmp_path / "m.gguf", original), tmp_path / "whole")
    write_gguf(tmp_path / "s.gguf", original, split_max_tensors=8)
    parts = sorted(tmp_path.glob("s-*.gguf"))
    assert [part.name for part in parts] == [f"s-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        directory = convert_gguf(part, tmp_path / part.stem)
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            assert (directory / name).read_bytes() == (whole / name).read_bytes()
    assert {conversion_directory(part) for part in parts} == {conversion_directory(parts[0])}
    before = conversion_directory(parts[0])
    os.utime(parts[2], ns=(1, 1))
    assert conversion_directory(parts[0]) != before


def test_missing_and_mixed_parts_of_a_split_file_are_named(tmp_path):
    original = tiny_model(tmp_path / "hf", tied=False, dtype="bfloat16")
    write_gguf(tmp_path / "s.gguf", original, split_max_tensors=8)
    parts = sorted(tmp_path.glob("s-*.gguf"))
    content = [part.read_bytes() for part in parts]
    parts[1].unlink()
    with pytest.raises(DamagedFileError, match=r"s-00002-of-00003\.gguf is missing"):
        convert_gguf(parts[0], tmp_path / "out")
    parts[1].write_bytes(content[2])
    with pytest.raises(DamagedFileError, match=r"00002-of-00003\.gguf says that it is part 2 "):
        convert_gguf(parts[0], tmp_path / "out")
    renamed = tmp_path / "model.gguf"
    renamed.write_bytes(content[0])
    with pytest.raises(
        DamagedFileError, match="one of 3 parts .* names again: NAME-00001-of-00003"
    ):
        convert_gguf(renamed, tmp_path / "out")
    shorter = tiny_model(tmp_path / "short", tied=False, layers=1, dtype="bfloat16")
    write_gguf(tmp_path / "t.gguf", shorter, split_max_tensors=4)
    others = sorted(tmp_path.glob("t-*.gguf"))
    assert len(others) == len(parts)
    parts[1].write_bytes(others[1].read_bytes())
    with pytest.raises(DamagedFileError, match="hold .* tensors instead of"):
        convert_gguf(parts[0], tmp_path / "out")


def test_conversion_leaves_an_existing_directory_unchanged(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf"))
    directory = convert_gguf(path, tmp_path / "out")
    marked = directory / "config.json"
    marked.write_text(json.dumps({**json.loads(marked.read_text()), "mark": 1}))
    assert json.loads((convert_gguf(path, directory) / "config.json").read_text())["mark"] == 1


def test_conversion_keeps_linear_rope_scaling(tmp_path):
    def extra(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    directory = convert_gguf(
        write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf"), extra=extra), tmp_path / "o"
    )
    assert ModelConfig.from_directory(directory).rope.scaling == LinearRopeScaling(4.0)


def test_the_end_of_turn_token_is_an_end_of_sequence_token(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_model(tmp_path / "hf"),
        extra=lambda writer: writer.add_eot_token_id(263),
    )
    assert ModelConfig.from_directory(convert_gguf(path, tmp_path / "out")).eos_token_ids == (
        EOS_TOKEN_ID,
        263,
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm'"),
        ({"tokenizer": "bert"}, "'bert' tokenizer"),
        (
            {"pre": None},
            "does not name its pre-tokenizer.*gguf-new-metadata --pre-tokenizer NAME m",
        ),
        (
            {"pre": "default"},
            "does not name its pre-tokenizer.* NAME is one of smollm, gpt-2, qwen",
        ),
        ({"extra": lambda writer: writer.add_expert_count(8)}, "mixture of experts"),
        ({"extra": lambda writer: writer.add_rope_dimension_count(8)}, "part of each head"),
        (
            {"extra": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)},
            "'longrope'",
        ),
        (
            {
                "extra": lambda writer: writer.add_tensor(
                    "rope_freqs.weight", np.arange(1, 9, dtype=np.float32)
                )
            },
            "is not Llama 3's",
        ),
        ({"without": ("model.embed_tokens.weight",)}, "token_embd"),
        (
            {"extra": lambda writer: writer.add_tensor("blk.0.table", np.ones(8, np.int32))},
            "blk.0.table quantized as I32",
        ),
    ],
)
def test_an_unsupported_gguf_is_rejected_and_leaves_no_files(tmp_path, options, named):
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf"), **options)
    with pytest.raises(UnsupportedError, match=named):
        convert_gguf(path, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "m.gguf"]


def test_an_unsupported_gguf_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="'gemma'"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_a_damaged_gguf_is_rejected_and_leaves_no_files(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_model(tmp_path / "hf"),
        without=("model.layers.1.mlp.up_proj.weight",),
    )
    with pytest.raises(DamagedFileError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(path, tmp_path / "out")
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[: len(content) // 2], b"GGML" + content[4:]):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"m\.gguf"):
            convert_gguf(path, tmp_path / "out")
    with pytest.raises(UnknownModelError, match="no GGUF file"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "m.gguf"]


def test_an_unexpected_tensor_without_a_dot_is_named(tmp_path):
    def stray(writer):
        writer.add_tensor("stray", np.ones(8, np.float32))

    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf"), extra=stray)
    with pytest.raises(DamagedFileError, match="stray"):
        convert_gguf(path, tmp_path / "out")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_conversion_on_a_full_disk_leaves_no_directory(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf"))

    def write_to_a_full_disk(tensors, target, metadata):
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"weights")

    monkeypatch.setattr("safetensors.torch.save_file", write_to_a_full_disk)
    with pytest.raises(StorageError, match="No space left"):
        convert_gguf(path, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "m.gguf"]
