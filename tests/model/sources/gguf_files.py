"""Write GGUF files in the layout of llama.cpp's converter, from a tiny model."""

import gguf
import numpy as np
from safetensors.torch import load_file

from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.json_fields import read_json
from planish.testing import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    WINDOW,
    WORD_TOKENS,
    byte_symbols,
)

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OTHER_FAMILIES = {
    "gemma3": GEMMA3_NAMES,
    "olmo3": GEMMA3_NAMES,
    "qwen3_moe": LAYER_NAMES | {"mlp.gate": "ffn_gate_inp"},
    "phi3": LAYER_NAMES | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
ARCHITECTURES = {"ministral3": "mistral3", "olmo3": "olmo2", "qwen3_moe": "qwen3moe"}
"""The architectures of llama.cpp that have another name than the family."""
OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
MERGED = "12"
"""A token that only a tokenizer which does not split digits uses."""


def gguf_name(name, family="llama"):
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    _, _, layer, *inner, kind = name.split(".")
    names = OTHER_FAMILIES.get(family, LAYER_NAMES)
    return f"blk.{layer}.{names['.'.join(inner)]}.{kind}"


def neighbours_from_halves(rows, heads):
    """Return the rows in the order of llama.cpp's converter: row i of a head's first half, then row
    i of its second half.
    """
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_tokens(writer, pre: str | None, kind="gpt2"):
    tokens = [*byte_symbols(), *SPECIAL_TOKENS, *WORD_TOKENS, MERGED, "[PAD271]"]
    types = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    types += [gguf.TokenType.USER_DEFINED] * len(WORD_TOKENS) + [
        gguf.TokenType.NORMAL,
        gguf.TokenType.UNUSED,
    ]
    assert len(tokens) == len(types) == VOCAB_SIZE
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(
    path,
    directory,
    pre: str | None = "smollm",
    tokenizer="gpt2",
    quantized=(),
    kind=gguf.GGMLQuantizationType.Q8_0,
    extra=lambda writer: None,
    without=(),
    split_max_tensors=0,
):
    """Write the tiny model of `directory` as a GGUF file. Tensors whose names end in one of
    `quantized` are quantized as `kind`. With `split_max_tensors`, the writer splits the file.
    """
    config = ModelConfig.from_directory(directory)
    writer = gguf.GGUFWriter(
        path, ARCHITECTURES.get(config.family, config.family), split_max_tensors=split_max_tensors
    )
    writer.add_context_length(read_json(directory / "config.json")["max_position_embeddings"])
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    if config.family != "phi3":
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if config.family in ("gemma3", "olmo3"):
        writer.add_sliding_window(WINDOW)
    if config.family == "olmo3":
        writer.add_sliding_window_pattern([window is not None for window in config.windows])
    if config.family == "phi3":
        writer.add_sliding_window(0)
        writer.add_rope_dimension_count(config.rotary_dims or config.head_dim)
    if config.family == "ministral3":
        writer.add_attn_temperature_scale(config.query_scale_beta or 0.0)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.experts_per_token)
        writer.add_expert_feed_forward_length(config.expert_size)
    extra(writer)
    write_tokens(writer, pre, tokenizer)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name in without:
            continue
        if ".experts." in name:
            _, _, layer, _, _, expert, part, _ = name.split(".")
            stack = stacks.setdefault(f"blk.{layer}.{EXPERT_NAMES[part]}.weight", {})
            stack[int(expert)] = tensor.float().numpy()
            continue
        values = tensor.float().numpy()
        if config.family in ("llama", "smollm3", "ministral3") and (
            "q_proj" in name or "k_proj" in name
        ):
            values = neighbours_from_halves(
                values, config.num_heads if "q_proj" in name else config.num_kv_heads
            )
        if config.family == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        stored = gguf_name(name, config.family)
        if quantized and name.endswith(quantized):
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    for stored, stack in stacks.items():
        values = np.stack([stack[expert] for expert in sorted(stack)])
        if quantized and "experts" in quantized:
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_sentencepiece(path, chat_template=None, normal=()):
    """Write a GGUF file of Gemma 3 with a SentencePiece vocabulary and no tensors but embeddings.

    `normal`: special tokens that the file marks as normal text.
    """
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"]
    runs = ["\n", "\n\n", "  "]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    # The best score is that of "ab"; so "abc" is "ab" and "c", and never "a" and "bc".
    merged = ["ab", "bc", "\u2581a", "\u2581ab"]
    letters = ["a", "b", "c", "\u2581", "1", "2"]
    kinds = gguf.TokenType
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(512)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    tokens = [*control, *runs, *byte_tokens, *merged, *letters]
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * (8 + 256) + [-float(rank) for rank in range(10)])
    control_types = [kinds.NORMAL if token in normal else kinds.CONTROL for token in control]
    writer.add_token_types(
        [*control_types, *[kinds.USER_DEFINED] * 3, *[kinds.BYTE] * 256, *[kinds.NORMAL] * 10]
    )
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama2_tokenizer(path, pieces, **flags):
    """Write a GGUF file with the tokenizer of a SentencePiece BPE model as Llama 2 has it: the
    tokens <unk>, <s>, </s>, 256 bytes, and `pieces` in the order of their scores.
    """
    kinds = gguf.TokenType
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(pieces))])
    special = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    writer.add_token_types([*special, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(pieces)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if "add_space_prefix" in flags:
        writer.add_add_space_prefix(flags["add_space_prefix"])
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
