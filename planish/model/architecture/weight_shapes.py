"""The names and shapes of the weights of an architecture, as in a Hugging Face checkpoint."""

from collections.abc import Iterator

from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.decoder_fields import DeltaNetConfig
from planish.model.architecture.linears import fused_modules, linear_shape, num_experts_of

MXFP4_BLOCK_SIZE = 32
"""The number of inputs that share a scale in mxfp4."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the architecture by its name; matrices are (out, in).

    The names of a model of model/hf are those in transformers' modules.
    """
    if config.hf is not None:
        return dict(config.hf.weight_shapes)
    hidden_size = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden_size)
    }
    for layer in range(config.num_layers):
        shapes |= {
            f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config, layer)
        }
    shapes["model.norm.weight"] = (hidden_size,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden_size = config.hidden_size
    query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for group in fused_modules(config, layer):
        for name in () if num_experts_of(config, group) else group:
            shape = linear_shape(config, name)
            yield f"{name}.weight", shape
            if (config.qkv_bias and group[0] == "self_attn.q_proj") or (
                config.output_bias and name == "self_attn.o_proj"
            ):
                yield f"{name}.bias", shape[:1]
    if config.attention_sinks:
        yield "self_attn.sinks", (config.num_heads,)
    if config.delta_net is not None and layer in config.delta_net.layers:
        yield from _delta_net_shapes(config.delta_net, hidden_size)
    elif config.qk_norm:
        is_joint = config.joint_qk_norm
        yield "self_attn.q_norm.weight", (query_size if is_joint else config.head_dim,)
        yield "self_attn.k_norm.weight", (key_size if is_joint else config.head_dim,)
    if config.input_norms:
        yield "input_layernorm.weight", (hidden_size,)
        if config.output_norms:
            yield "pre_feedforward_layernorm.weight", (hidden_size,)
    # Checkpoints use this name for two different norms. In families with output norms, it is the
    # norm of the attention's output. In all other families, it is the norm of the MLP's input.
    yield "post_attention_layernorm.weight", (hidden_size,)
    if config.output_norms:
        yield "post_feedforward_layernorm.weight", (hidden_size,)
    if config.has_experts(layer) and config.expert_biases:
        yield from _biased_expert_shapes(config)
    elif config.has_experts(layer):
        expert_size = config.expert_size
        yield "mlp.gate.weight", (config.num_experts, hidden_size)
        if config.has_shared_expert:
            yield "mlp.shared_expert_gate.weight", (1, hidden_size)
        for expert in range(config.num_experts):
            yield f"mlp.experts.{expert}.gate_proj.weight", (expert_size, hidden_size)
            yield f"mlp.experts.{expert}.up_proj.weight", (expert_size, hidden_size)
            yield f"mlp.experts.{expert}.down_proj.weight", (hidden_size, expert_size)


def _biased_expert_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each weight of a mixture of experts with biases (gpt-oss).

    A matrix in mxfp4 has two tensors: the codes of each block of 32 inputs, and their scales.
    """
    yield "mlp.router.weight", (config.num_experts, config.hidden_size)
    yield "mlp.router.bias", (config.num_experts,)
    for expert in range(config.num_experts):
        for linear in ("gate_up_proj", "down_proj"):
            fan_out, fan_in = linear_shape(config, f"mlp.experts.{linear}")
            name = f"mlp.experts.{expert}.{linear}"
            if config.mxfp4_experts:
                num_blocks = fan_in // MXFP4_BLOCK_SIZE
                yield f"{name}.blocks", (fan_out, num_blocks, MXFP4_BLOCK_SIZE // 2)
                yield f"{name}.scales", (fan_out, num_blocks)
            else:
                yield f"{name}.weight", (fan_out, fan_in)
            yield f"{name}.bias", (fan_out,)


def _delta_net_shapes(
    delta_net: DeltaNetConfig, hidden_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each weight of a gated delta net that adapters never train."""
    num_heads = delta_net.num_value_heads
    yield "linear_attn.in_proj_b.weight", (num_heads, hidden_size)
    yield "linear_attn.in_proj_a.weight", (num_heads, hidden_size)
    yield "linear_attn.conv1d.weight", (delta_net.channels, 1, delta_net.conv_width)
    yield "linear_attn.dt_bias", (num_heads,)
    yield "linear_attn.A_log", (num_heads,)
    yield "linear_attn.norm.weight", (delta_net.value_dim,)
