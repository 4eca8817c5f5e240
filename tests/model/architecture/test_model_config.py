import dataclasses
import json
import math
from collections import Counter

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from planish.errors import DamagedFileError, UnknownModelError, UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
    YarnRopeScaling,
)
from planish.model.layers.rope import inverse_frequencies
from planish.testing import EOS_TOKEN_ID, tiny_model
from planish.testing_vision import tiny_vision_model

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}

QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


OLMO3_7B = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}

PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 199999,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0 + i for i in range(48)],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}

MISTRAL_NEMO = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}


def write(directory, fields, **changes):
    content = {key: value for key, value in {**fields, **changes}.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def test_a_llama_config_of_older_transformers_is_read(tmp_path):
    assert ModelConfig.from_directory(write(tmp_path, LLAMA_32_1B)) == ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, Llama3RopeScaling(32.0, 1.0, 4.0, 8192)),
        max_context=131072,
        tied_head=True,
        qk_norm=False,
        qkv_bias=False,
        eos_token_ids=(128001, 128008, 128009),
    )


def test_rope_parameters_of_transformers_5_give_the_same_config(tmp_path):
    old = ModelConfig.from_directory(write(tmp_path, LLAMA_32_1B))
    parameters = {**LLAMA3_SCALING, "rope_theta": 500000.0}
    new = write(
        tmp_path,
        LLAMA_32_1B,
        rope_scaling="absent",
        rope_theta="absent",
        rope_parameters=parameters,
    )
    assert ModelConfig.from_directory(new) == old


def test_a_qwen2_config_has_biases_and_ignores_the_unused_window(tmp_path):
    config = ModelConfig.from_directory(write(tmp_path, QWEN25_05B))
    assert (config.family, config.qkv_bias, config.qk_norm, config.head_dim) == (
        "qwen2",
        True,
        False,
        64,
    )
    assert config.rope == RopeConfig(1000000.0)


def test_a_qwen3_config_has_query_and_key_norms(tmp_path):
    config = ModelConfig.from_directory(write(tmp_path, QWEN3_06B))
    assert (config.family, config.qkv_bias, config.qk_norm, config.head_dim) == (
        "qwen3",
        False,
        True,
        128,
    )


def test_a_mistral_config_has_its_own_head_dim(tmp_path):
    config = ModelConfig.from_directory(write(tmp_path, MISTRAL_NEMO))
    assert (config.family, config.qkv_bias, config.qk_norm, config.tied_head) == (
        "mistral",
        False,
        False,
        False,
    )
    assert (config.num_kv_heads, config.head_dim, config.rope) == (8, 128, RopeConfig(1000000.0))


def test_a_sliding_window_as_long_as_the_context_is_accepted(tmp_path):
    within = write(tmp_path, MISTRAL_NEMO, sliding_window=4096, max_position_embeddings=4096)
    assert ModelConfig.from_directory(within).max_context == 4096


def test_linear_rope_scaling_is_read_from_the_older_key(tmp_path):
    directory = write(tmp_path, QWEN3_06B, rope_scaling={"type": "linear", "factor": 4})
    assert ModelConfig.from_directory(directory).rope.scaling == LinearRopeScaling(4.0)


def test_yarn_added_to_a_qwen_config_extends_the_context(tmp_path):
    added = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    config = ModelConfig.from_directory(write(tmp_path, QWEN25_05B, rope_scaling=added))
    assert config.max_context == 131072
    assert config.rope == RopeConfig(
        1000000.0,
        YarnRopeScaling(4.0, 32768, 32.0, 1.0, True, attention_factor=0.1 * math.log(4) + 1),
    )


YARN_SCALING = {"rope_type": "yarn", "factor": 4.0}
LLAMA3_BANDS = {
    key: value for key, value in LLAMA3_SCALING.items() if not key.startswith("original")
}
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("fields", "changes", "original_context"),
    [
        (LLAMA_32_1B, {"rope_scaling": LLAMA3_BANDS}, 131072),
        (LLAMA_32_1B, {"rope_scaling": LLAMA3_BANDS, ORIGINAL: 4096}, 4096),
        (LLAMA_32_1B, {ORIGINAL: 4096}, 4096),
        (QWEN25_05B, {"rope_scaling": YARN_SCALING}, 32768),
        (QWEN25_05B, {"rope_scaling": YARN_SCALING, ORIGINAL: 16384}, 16384),
        (QWEN25_05B, {"rope_scaling": YARN_SCALING | {ORIGINAL: 32768}, ORIGINAL: 8192}, 8192),
        (QWEN25_05B, {"rope_scaling": YARN_SCALING | {"factor": None, ORIGINAL: 4096}}, 4096),
        (
            QWEN25_05B,
            {"rope_scaling": YARN_SCALING | {"mscale": 0, "mscale_all_dim": 1.0, "beta_fast": 0}},
            32768,
        ),
        (PHI4_MINI, {}, 4096),
        (
            PHI4_MINI,
            {ORIGINAL: "absent", "rope_scaling": PHI4_MINI["rope_scaling"] | {ORIGINAL: 2048}},
            4096,
        ),
    ],
)
def test_rope_scaling_has_the_values_of_transformers(tmp_path, fields, changes, original_context):
    directory = write(tmp_path, fields, **changes)
    theirs, config = AutoConfig.from_pretrained(directory), ModelConfig.from_directory(directory)
    parameters, scaling = theirs.rope_parameters, config.rope.scaling
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs)
    ours = inverse_frequencies(config.rope, config.rotary_dims or config.head_dim)
    assert torch.equal(ours, frequencies)
    assert getattr(scaling, "attention_factor", 1.0) == factor
    assert parameters[ORIGINAL] == original_context
    assert getattr(scaling, ORIGINAL, original_context) == original_context
    if isinstance(scaling, LongRopeScaling):
        assert config.max_context == original_context


def test_rope_settings_of_layer_types_ignore_the_original_context_outside_them(tmp_path):
    directory = tiny_model(tmp_path, "olmo3", rope_scaling=YARN_SCALING)
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    del fields["rope_parameters"]["full_attention"][ORIGINAL]
    path.write_text(json.dumps(fields | {ORIGINAL: 64}))
    theirs, config = AutoConfig.from_pretrained(directory), ModelConfig.from_directory(directory)
    frequencies, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs, layer_type="full_attention")
    assert torch.equal(inverse_frequencies(config.rope, config.head_dim), frequencies)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_5"])
def test_configs_written_by_transformers_are_read(tmp_path, family):
    config = ModelConfig.from_directory(
        tiny_model(tmp_path, family, head_dim=24, layers=3, kv_heads=1)
    )
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert config.family == family
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (3, 1, 24)
    assert (config.num_heads, config.hidden_size) == (
        theirs.num_attention_heads,
        theirs.hidden_size,
    )
    assert config.rope == RopeConfig(theirs.rope_parameters["rope_theta"])
    assert config.eos_token_ids == (EOS_TOKEN_ID,)


def test_generation_config_takes_precedence_for_end_of_sequence(tmp_path):
    directory = write(tmp_path, QWEN3_06B)
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [151645, 151643, 151645]})
    )
    assert ModelConfig.from_directory(directory).eos_token_ids == (151645, 151643)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_vl"])
def test_end_of_sequence_tokens_of_the_text_model_count(tmp_path, model_type):
    """As in transformers, if neither generation_config.json nor the outer config names any."""
    directory = tiny_vision_model(tmp_path, model_type)
    (directory / "generation_config.json").unlink()
    fields = json.loads((directory / "config.json").read_text())
    fields["text_config"]["eos_token_id"] = [257, 256]
    for outer, expected in ((None, (257, 256)), (255, (255,))):
        fields["eos_token_id"] = outer
        (directory / "config.json").write_text(json.dumps(fields))
        assert ModelConfig.from_directory(directory).eos_token_ids == expected


def test_a_model_without_end_of_sequence_tokens_has_none(tmp_path):
    directory = write(tmp_path, QWEN3_06B, eos_token_id=None)
    (directory / "generation_config.json").write_text("{}")
    assert ModelConfig.from_directory(directory).eos_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "changes", "named"),
    [
        (LLAMA_32_1B, {"attention_bias": True}, "attention_bias"),
        (LLAMA_32_1B, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA_32_1B, {"pretraining_tp": 2}, "pretraining_tp"),
        (LLAMA_32_1B, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA_32_1B, {"quantization_config": {"quant_method": "gptq"}}, "'gptq'.*quantize='int8'"),
        (
            LLAMA_32_1B,
            {"architectures": ["LlamaForCausalLM"], "model_type": "mixtral"},
            "LlamaForCausalLM.*'mixtral'.*no causal language model",
        ),
        (MISTRAL_NEMO, {"model_type": "llama"}, "MistralForCausalLM"),
        (
            LLAMA_32_1B,
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification",
        ),
        (LLAMA_32_1B, {"rope_interleaved": True}, "rope_interleaved"),
        (LLAMA_32_1B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA_32_1B, {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA_32_1B, {"use_sliding_window": True}, "use_sliding_window"),
        (LLAMA_32_1B, {"rope_scaling": {"type": "proportional"}}, "proportional"),
        (PHI4_MINI, {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            {},
            "no decoder of its own.*BertForMaskedLM.*no causal language model",
        ),
        ({"model_type": "mamba"}, {}, "linear_attention.*recurrent state"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "qwen2"}},
            {},
            "'qwen2'; inside mistral3, planish supports mistral, ministral3",
        ),
        (LLAMA_32_1B, {"num_key_value_heads": 5}, "num_key_value_heads"),
        (LLAMA_32_1B, {"head_dim": 63}, "head_dim"),
        (QWEN3_06B, {"attention_bias": True}, "attention_bias"),
        ({"model_type": "unheard"}, {}, "has no model_type 'unheard'"),
        (
            {"model_type": "glm4", "num_hidden_layers": 10**9},
            {},
            "num_hidden_layers.*1,000,000,000",
        ),
        ({"model_type": "glm4", "num_hidden_layers": "x"}, {}, "'glm4'.*num_hidden_layers"),
        (
            {"architectures": ["X", "Y"]},
            {},
            "is X, Y .*supports.*Phi3ForCausalLM.*Mistral3ForConditionalGeneration",
        ),
        (
            QWEN3_06B,
            {"rope_scaling": "absent", "rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "layers",
        ),
    ],
)
def test_unsupported_config_fields_are_rejected_by_name(tmp_path, fields, changes, named):
    with pytest.raises(UnsupportedError, match=named):
        ModelConfig.from_directory(write(tmp_path, fields, **changes))


@pytest.mark.parametrize(
    ("fields", "changes", "windows"),
    [
        (MISTRAL_NEMO, {"sliding_window": 4096}, {4096: 40}),
        (MISTRAL_NEMO, {"sliding_window": "absent"}, {4096: 40}),
        (MISTRAL_NEMO, {"sliding_window": 4096, "max_position_embeddings": 4096}, {}),
        (MISTRAL_NEMO, {"sliding_window": None}, {}),
        (QWEN25_05B, {"use_sliding_window": True, "max_window_layers": 12}, {}),
        (
            QWEN25_05B,
            {"use_sliding_window": True, "max_window_layers": 12, "sliding_window": 100},
            {None: 12, 100: 12},
        ),
        (
            QWEN25_05B,
            {
                "use_sliding_window": True,
                "sliding_window": 100,
                "layer_types": ["full_attention"] * 23 + ["sliding_attention"],
            },
            {None: 23, 100: 1},
        ),
        (QWEN25_05B, {"layer_types": ["sliding_attention"] * 24, "sliding_window": 100}, {}),
        (OLMO3_7B, {}, {None: 8, 4096: 24}),
        (PHI4_MINI, {}, {}),
        (PHI4_MINI, {"sliding_window": 2047}, {2047: 32}),
    ],
)
def test_attention_windows_follow_the_config(tmp_path, fields, changes, windows):
    config = ModelConfig.from_directory(write(tmp_path, fields, **changes))
    assert Counter(config.windows) == windows


def test_the_published_olmo3_scales_only_layers_without_a_window(tmp_path):
    config = ModelConfig.from_directory(write(tmp_path, OLMO3_7B))
    assert (config.window(0), config.window(3)) == (4096, None)
    assert config.rope_of(0) == RopeConfig(500000.0)
    rope = config.rope_of(3)
    assert rope is not None
    assert isinstance(rope.scaling, YarnRopeScaling)
    assert (rope.theta, rope.scaling.factor, config.max_context) == (500000.0, 8.0, 65536)


def test_longrope_ends_the_context_where_the_frequencies_change(tmp_path):
    config = ModelConfig.from_directory(write(tmp_path, PHI4_MINI))
    assert (config.max_context, config.rotary_dims, config.head_dim) == (4096, 96, 128)
    scaling = config.rope.scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.attention_factor == math.sqrt(1 + math.log(32) / math.log(4096))
    fixed = PHI4_MINI["rope_scaling"] | {"short_factor": [1.5] * 48, "long_factor": [1.5] * 48}
    longer = ModelConfig.from_directory(write(tmp_path, PHI4_MINI, rope_scaling=fixed))
    assert longer.max_context == 131072


def test_a_ministral3_without_rope_parameters_has_the_published_ones(tmp_path):
    fields = {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
    }
    config = ModelConfig.from_directory(write(tmp_path, fields))
    assert (config.query_scale_beta, config.query_scale_interval) == (0.1, 16384)
    scaling = config.rope.scaling
    assert isinstance(scaling, YarnRopeScaling)
    assert (scaling.factor, scaling.attention_factor) == (16.0, 1.0)
    assert (config.rope.theta, config.head_dim, config.max_context) == (1e6, 128, 262144)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": "absent"}, "vocab_size is missing"),
        ({"hidden_size": "2048"}, "hidden_size is '2048'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 8192,
                    "mscale": -1,
                }
            },
            "mscale is -1",
        ),
        ({"eos_token_id": 128256}, "outside the vocabulary"),
        ({"eos_token_id": "end"}, "eos_token_id .* is 'end'; it must be a token id"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries.*num_hidden_layers is 16"),
        (
            {"layer_types": ["full_attention"] * 15 + ["chunked_attention"]},
            "layer_types contains 'chunked_attention'; each entry must be 'sliding_attention' or",
        ),
    ],
)
def test_invalid_config_fields_are_named(tmp_path, changes, named):
    with pytest.raises(DamagedFileError, match=named):
        ModelConfig.from_directory(write(tmp_path, LLAMA_32_1B, **changes))


def test_a_missing_or_malformed_config_is_rejected(tmp_path):
    with pytest.raises(UnknownModelError, match=r"no config\.json"):
        ModelConfig.from_directory(tmp_path)
    for content in ("{", "[1]", ""):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(DamagedFileError, match=r"config\.json"):
            ModelConfig.from_directory(tmp_path)


def test_the_fingerprint_depends_only_on_the_architecture(tmp_path):
    config = ModelConfig.from_directory(write(tmp_path, LLAMA_32_1B))
    same = dataclasses.replace(config, eos_token_ids=(1,), max_context=4096)
    assert same.fingerprint() == config.fingerprint()
    others = [
        dataclasses.replace(config, num_layers=15),
        dataclasses.replace(config, tied_head=False),
        dataclasses.replace(config, rope=RopeConfig(500000.0)),
        dataclasses.replace(config, rope=RopeConfig(500000.0, LinearRopeScaling(32.0))),
    ]
    assert len({config.fingerprint(), *(other.fingerprint() for other in others)}) == 5
