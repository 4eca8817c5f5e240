"""Tiny random models for tests, as Hugging Face model directories with a byte tokenizer.

`tiny_model` writes the directory with transformers' own classes, so a test can compare planish with
`AutoModelForCausalLM.from_pretrained(path)` as the reference implementation.

The same arguments give the same bytes. Token id b < 256 is the byte b, so encoding and decoding
preserve any text. The special tokens of the supported chat formats are single ids. Weights are
large enough that logits differ clearly. A test that needs sensible answers uses the default model
instead.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from planish.testing_recurrent import RECURRENT_OPTIONS
from planish.tokenizer import save_tokenizer

WINDOW = 24
"""The attention window of a tiny Gemma 3, OLMo 3 or gpt-oss in positions."""

DELTA_NETS: dict[str, int] = {
    "full_attention_interval": 2,  # a keyword that the configs' signatures do not list
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

CONFIGS = {
    "gemma3": partial(Gemma3TextConfig, sliding_window=WINDOW),
    # With the usual limit of 7, the activations of a tiny model would never be clamped.
    "gpt_oss": partial(GptOssConfig, sliding_window=WINDOW, swiglu_limit=1.5),
    "llama": LlamaConfig,
    "ministral3": Ministral3Config,
    "mistral": partial(MistralConfig, sliding_window=None),
    "olmo3": partial(Olmo3Config, sliding_window=WINDOW),
    "phi3": partial(Phi3Config, sliding_window=None),
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": partial(Qwen3MoeConfig, norm_topk_prob=True),
    "qwen3_5": partial(Qwen3_5TextConfig, **DELTA_NETS),
    "qwen3_5_moe": partial(Qwen3_5MoeTextConfig, **DELTA_NETS),
    "smollm3": partial(SmolLM3Config, no_rope_layer_interval=2),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
"""Control tokens of ChatML and of Llama 3, with the ids 256, 257, ...; decoding can skip them."""

WORD_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Tokens that are part of the text, as in the Qwen families, with the ids after SPECIAL_TOKENS."""

END_OF_TURN = "<|im_end|>"
EOS_TOKEN_ID = 256 + SPECIAL_TOKENS.index(END_OF_TURN)
NUM_TOKENS = 256 + len(SPECIAL_TOKENS) + len(WORD_TOKENS)
VOCAB_SIZE = 272
"""The default vocabulary size of a tiny model. As in real checkpoints, it is a little larger than
the tokenizer's.
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML without a default system message."""

WEIGHT_STD = 0.15


def byte_symbols() -> list[str]:
    """Return the character that byte-level BPE uses for each byte, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: chr(256 + rank) for rank, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer without merges: id b is the byte b, followed by
    SPECIAL_TOKENS and WORD_TOKENS.
    """
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in WORD_TOKENS]
    )
    return tokenizer


def save_byte_tokenizer(
    directory: str | Path, more_tokens: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE
) -> Path:
    """Write the byte tokenizer with a chat template into `directory`, for
    `transformers.AutoTokenizer`.

    `more_tokens`: control tokens with the next ids.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in more_tokens]
    )
    save_tokenizer(
        directory,
        tokenizer,
        chat_template=chat_template,
        max_length=2048,
        special_tokens={"eos_token": END_OF_TURN, "pad_token": "<|endoftext|>"},
    )
    return Path(directory)


def tiny_model(
    path: str | Path,
    family: str = "llama",
    *,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    tied: bool = True,
    seed: int = 0,
    dtype: str = "float32",
    rope_scaling: Mapping[str, Any] | None = None,
    max_context: int = 2048,
    shards: int = 1,
    local_theta: float = 500.0,
    query_scalar: int = 24,
    window: int | None = None,
    experts: int = 6,
    experts_per_token: int = 2,
    expert_size: int = 32,
    dense_layers: Sequence[int] = (),
    delta_net: Mapping[str, int] | None = None,
) -> Path:
    """Write a random model of `family`, a key of CONFIGS, as a Hugging Face directory and return
    its path.

    `heads`, `kv_heads`, `head_dim` and `max_context` are the sizes of config.json. With `tied`, the
    head has the weights of the embedding. `rope_scaling` takes the fields of Hugging Face's config,
    such as {"rope_type": "linear", "factor": 2.0}; `window` is the attention window of the layers
    that have one; `dtype` is "float32" or "bfloat16"; `shards` > 1 spreads the weights over that
    many files with an index. Only gemma3 and olmo3 have `local_theta`, the RoPE base of layers with
    a window, and only gemma3 has `query_scalar`. By default attention scores do not have the usual
    scale, so that a test notices a missing factor. qwen3_moe, qwen3_5_moe and gpt_oss have
    `experts`, of which the router chooses `experts_per_token`, each of hidden size `expert_size`.
    Only qwen3_moe has `dense_layers` without experts. The shared expert of qwen3_5_moe has hidden
    size `intermediate`. Each expert of qwen3_moe has tensors of its own, as on the hub. In the
    other families, all experts of a layer share tensors. Only qwen3_5 and qwen3_5_moe have
    `delta_net`: fields of the config of gated delta nets, which replace the default ones.
    """
    if family not in CONFIGS or dtype not in DTYPES:
        raise ValueError(
            f"family={family!r}, dtype={dtype!r}: give a family of {sorted(CONFIGS)} and a dtype "
            f"of {sorted(DTYPES)}"
        )
    if vocab_size < NUM_TOKENS:
        raise ValueError(
            f"vocab_size={vocab_size}: give at least {NUM_TOKENS}, the number of tokens of the "
            "byte tokenizer"
        )
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {} if window is None else {"sliding_window": window}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, **(rope_scaling or {})}
    if family == "ministral3":
        # A short interval, so that a test notices a missing scale of the queries.
        rope = {"llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 32} | rope
    if family in ("qwen3_5", "qwen3_5_moe"):
        rope = {"partial_rotary_factor": 0.25, **rope}
    if family == "phi3" and "original_max_position_embeddings" in rope:
        # transformers prefers the config's own field, which has a default, to the one in
        # rope_parameters.
        options["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if family in ("gemma3", "olmo3"):
        local = {"rope_type": "default", "rope_theta": local_theta}
        rope = {"full_attention": rope, "sliding_attention": local}
        kinds = ("sliding_attention", "full_attention")
        options["layer_types"] = [kinds[layer % 2] for layer in range(layers)]
    if family == "gemma3":
        options["query_pre_attn_scalar"] = query_scalar
    if family in ("qwen3_moe", "qwen3_5_moe"):
        options |= {
            "num_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": expert_size,
        }
    if family == "qwen3_moe":
        options["mlp_only_layers"] = list(dense_layers)
    if family == "gpt_oss":
        options |= {"num_local_experts": experts, "num_experts_per_tok": experts_per_token}
        intermediate = expert_size
    options |= delta_net or {}
    inner = "shared_expert_intermediate_size" if family == "qwen3_5_moe" else "intermediate_size"
    options[inner] = intermediate
    config = CONFIGS[family](
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_context,
        tie_word_embeddings=tied,
        rope_parameters=rope,
        **options,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=256,
        dtype=dtype,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    model.to(DTYPES[dtype])
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    GenerationConfig(eos_token_id=EOS_TOKEN_ID, pad_token_id=256).save_pretrained(directory)
    tensors = {
        part: tensor.contiguous()
        for name, whole in model.state_dict().items()
        for part, tensor in _hub_tensors(family, name, whole)
    }
    if tied:
        tensors.pop("lm_head.weight")
    save_weights(directory, tensors, shards)
    return save_byte_tokenizer(directory)


TINY_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "pad_token_id": 256,
    "bos_token_id": 256,
    "eos_token_id": EOS_TOKEN_ID,
    # mixtures of experts
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
"""The sizes of the models of `tiny_transformers_model`. A config takes those that it has."""


_GEMMA_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "sliding_window"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)
GEMMA4_TEXT: dict[str, Any] = {
    **{key: TINY_SIZES[key] for key in _GEMMA_SIZES},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "use_double_wide_mlp": True,
    "global_head_dim": 32,
}
"""The text config of a tiny Gemma 4 like E2B: two of four layers share their keys and values."""
TINY_OPTIONS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8, "n_ctx": 512},
    "deepseek_v4": {"head_dim": 64},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"head_dim": None, "alibi": False},
    "gemma4": {
        "text_config": GEMMA4_TEXT,
        "vision_config": {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    },
    "gemma4_text": GEMMA4_TEXT,
    "gemma4_unified": {
        "text_config": GEMMA4_TEXT
        | {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "vision_config": {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 16},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gptj": {"rotary_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
    **RECURRENT_OPTIONS,
}
"""The options of `tiny_transformers_model` for single kinds of models. None: not that of TINY_SIZES.
"""


def tiny_transformers_model(
    path: str | Path, model_type: str, *, seed: int = 0, dtype: str = "float32", **options: Any
) -> Path:
    """Write a random model of any causal language model of transformers, as a Hugging Face
    directory, and return its path.

    `model_type`: that of config.json, such as "glm4". `dtype`: that of the weights, such as
    "float32". `options`: fields of its config, which take the place of those of TINY_SIZES.
    """
    config = tiny_transformers_config(model_type, **options)
    config.dtype = dtype
    model: Any = AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    model.to(DTYPES[dtype])
    Path(path).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    GenerationConfig(eos_token_id=EOS_TOKEN_ID, pad_token_id=256).save_pretrained(path)
    return save_byte_tokenizer(path)


def tiny_transformers_config(model_type: str, **options: Any) -> Any:
    """Return the config of `tiny_transformers_model`."""
    defaults = AutoConfig.for_model(model_type)
    sizes = {key: value for key, value in TINY_SIZES.items() if has_field(defaults, key)}
    if "qk_rope_head_dim" in sizes:
        sizes["head_dim"] = sizes["qk_rope_head_dim"]  # the size of the rotated part
    sizes |= TINY_OPTIONS.get(model_type, {}) | options
    return AutoConfig.for_model(
        model_type, **{key: value for key, value in sizes.items() if value is not None}
    )


def has_field(config: Any, name: str) -> bool:
    """Return whether a config of transformers has the field `name`."""
    try:
        return hasattr(config, name)
    except Exception:  # Fields that differ between layers raise an error of their own.
        return True


def _hub_tensors(
    family: str, name: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor under the name, or the names, that it has in checkpoints on the hub. There
    each expert of Qwen3 has tensors of its own.
    """
    layer, separator, part = name.rpartition(".experts.")
    if not separator or family != "qwen3_moe":
        yield name, tensor
        return
    for expert, own in enumerate(tensor):
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for linear, weight in zip(names, own.chunk(len(names)), strict=True):
            yield f"{layer}.experts.{expert}.{linear}.weight", weight


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter with seeded normal noise: around 1 for norm scales, around -3 for the
    biases of time steps, so that states decay slowly, and around 0 for all others.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * WEIGHT_STD
            is_scale = name.endswith(("norm.weight", "layernorm.weight", "norm_f.weight"))
            # Gemma 3 and Qwen3.5 add 1 to the stored weights of norms, except in gated delta nets.
            adds_one = type(model).__name__.startswith(("Gemma3F", "Qwen3_5"))
            is_scale = is_scale and (not adds_one or "linear_attn" in name)
            if is_scale:
                noise += 1.0
            elif name.endswith(("mixer.dt_bias", "mamba.dt_bias")):
                noise -= 3.0
            parameter.copy_(noise)


def save_weights(
    directory: str | Path, tensors: Mapping[str, torch.Tensor], shards: int = 1
) -> None:
    """Write tensors of any shape as model.safetensors, or as `shards` files with
    model.safetensors.index.json.
    """
    directory = Path(directory)
    if not 1 <= shards <= len(tensors):
        raise ValueError(
            f"shards={shards}: give a number from 1 to {len(tensors)}, the number of tensors"
        )
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return
    files = {
        name: f"model-{rank % shards + 1:05d}-of-{shards:05d}.safetensors"
        for rank, name in enumerate(tensors)
    }
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    total_size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
