"""The linears of a decoder layer: their names in a checkpoint and their shapes."""

from planish.model.config import ModelConfig

FUSED_MODULES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The linears of an ordinary layer: with attention, a dense MLP and separate projections.

Linears that read the same input form a group. The groups are in the field order of `LayerLora`. The
other kinds of layers have other groups (see `fused_modules`).
"""
_JOINED_MODULES = (
    ("self_attn.qkv_proj",),
    ("self_attn.o_proj",),
    ("mlp.gate_up_proj",),
    ("mlp.down_proj",),
)
"""The linears of a layer with fused projections (Phi-3, Phi-4)."""
_EXPERT_MODULES = (
    *FUSED_MODULES[:2],
    ("mlp.experts.gate_up_proj",),
    ("mlp.experts.down_proj",),
)
"""The linears of a layer with a mixture of experts. The name "mlp.experts.down_proj", for instance,
stands for the down projections of all experts of the layer. Gate and up share one A, as in PEFT.
"""
_SHARED_EXPERT_MODULES = (
    ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    ("mlp.shared_expert.down_proj",),
)
"""The linears of the shared expert of a mixture of experts."""
_DELTA_NET_MODULES = (
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    ("linear_attn.out_proj",),
)
"""The linears of a gated delta net. As in Tinker, in_proj_a and in_proj_b have no adapter."""


def fused_modules(model: ModelConfig, layer: int) -> tuple[tuple[str, ...], ...]:
    """Return the checkpoint names of a decoder layer's linears, in the field order of `LayerLora`.

    Linears that read the same input form a group. A model has the same number of groups in each
    layer: six with shared experts, else four.
    """
    groups = _JOINED_MODULES if model.fused_projections else FUSED_MODULES
    if model.has_experts(layer):
        groups = _EXPERT_MODULES
        if model.has_shared_expert:
            groups += _SHARED_EXPERT_MODULES
    if model.delta_net is not None and layer in model.delta_net.layers:
        groups = _DELTA_NET_MODULES + groups[2:]
    return groups


def distinct_fused_modules(model: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Return the different groups of linears of all layers (see `fused_modules`)."""
    layers = range(model.num_layers)
    return tuple(dict.fromkeys(names for layer in layers for names in fused_modules(model, layer)))


def num_experts_of(model: ModelConfig, names: tuple[str, ...]) -> int:
    """Return the number of experts if the group `names` belongs to the experts, else 0."""
    return model.num_experts if names[0].startswith("mlp.experts.") else 0


def linear_shape(model: ModelConfig, name: str) -> tuple[int, int]:
    """Return the shape (out, in) of the linear `name` of a layer, such as "self_attn.q_proj".

    For "mlp.experts.gate_up_proj" and "mlp.experts.down_proj", the shape is that of one expert.
    """
    if name.startswith("mlp.experts."):
        is_down = name.endswith("down_proj")
        shape = (model.hidden_size, model.expert_size)
        return shape if is_down else (2 * model.expert_size, model.hidden_size)
    query_size, key_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if model.delta_net is not None and name.startswith("linear_attn."):
        value_size = model.delta_net.num_value_heads * model.delta_net.value_dim
        return {
            "in_proj_qkv": (model.delta_net.channels, model.hidden_size),
            "in_proj_z": (value_size, model.hidden_size),
            "out_proj": (model.hidden_size, value_size),
        }[name.split(".")[1]]
    return {
        "q_proj": (query_size * (2 if model.output_gate else 1), model.hidden_size),
        "k_proj": (key_size, model.hidden_size),
        "v_proj": (key_size, model.hidden_size),
        "qkv_proj": (query_size + 2 * key_size, model.hidden_size),
        "o_proj": (model.hidden_size, query_size),
        "gate_proj": (model.intermediate_size, model.hidden_size),
        "up_proj": (model.intermediate_size, model.hidden_size),
        "gate_up_proj": (2 * model.intermediate_size, model.hidden_size),
        "down_proj": (model.hidden_size, model.intermediate_size),
    }[name.split(".")[-1]]
