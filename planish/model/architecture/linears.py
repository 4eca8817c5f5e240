"""The linears of a decoder layer: their names in a checkpoint and their shapes."""

from planish.model.architecture.config import ModelConfig

FUSED_MODULES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The linears of an ordinary layer: with attention, a dense MLP and separate projections.

Linears that read the same input form a group. The groups are in the order of `TARGET_NAMES`
(layers/lora.py). The other kinds of layers have other groups (see `fused_modules`).
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
    """Return the checkpoint names of a decoder layer's linears, in the order of `target_modules`.

    Linears that read the same input form a group. A model of our own decoder has the same number of
    groups in each layer: six with shared experts, else four. In other models (model/hf), each
    linear is a group of its own.
    """
    if model.hf is not None:
        return tuple((linear.name,) for linear in model.hf.layers[layer])
    groups = _JOINED_MODULES if model.fused_projections else FUSED_MODULES
    if model.has_experts(layer):
        groups = _EXPERT_MODULES
        if model.has_shared_expert:
            groups += _SHARED_EXPERT_MODULES
    if model.delta_net is not None and layer in model.delta_net.layers:
        groups = _DELTA_NET_MODULES + groups[2:]
    return groups


def target_modules(model: ModelConfig, layer: int) -> tuple[tuple[str, ...], ...]:
    """Return the groups of `fused_modules`, of the same number in each layer.

    In a model of model/hf, the groups are those of all layers, and a layer may lack some of them.
    """
    if model.hf is not None:
        return tuple((name,) for name in model.hf.linear_names)
    return fused_modules(model, layer)


def layer_name(model: ModelConfig, layer: int) -> str:
    """Return the name of a decoder layer, such as "model.layers.0"."""
    layers = "model.layers" if model.hf is None else model.hf.layers_name
    return f"{layers}.{layer}"


def head_name(model: ModelConfig) -> str:
    """Return the name of the output head, such as "lm_head"."""
    return "lm_head" if model.hf is None else model.hf.head_name


def trainable_linears(model: ModelConfig) -> dict[str, tuple[int, str]]:
    """Return the layer of each linear that adapters can train, and its name within that layer.

    The keys are the linears' full names, such as "model.layers.0.self_attn.q_proj".
    """
    return {
        f"{layer_name(model, layer)}.{name}": (layer, name)
        for layer in range(model.num_layers)
        for names in fused_modules(model, layer)
        for name in names
    }


def is_mlp(model: ModelConfig, layer: int, name: str) -> bool:
    """Return whether a linear of a layer belongs to its MLP, else to its attention."""
    if model.hf is not None:
        return model.hf.linear(layer, name).is_mlp
    return name.startswith("mlp")


def distinct_fused_modules(model: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Return the different groups of linears of all layers (see `fused_modules`)."""
    layers = range(model.num_layers)
    return tuple(dict.fromkeys(names for layer in layers for names in fused_modules(model, layer)))


def distinct_group_shapes(model: ModelConfig) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the shapes (out, in) of the linears of each different group of all layers."""
    shapes = (
        tuple(linear_shape(model, name, layer) for name in names)
        for layer in range(model.num_layers)
        for names in fused_modules(model, layer)
    )
    return tuple(dict.fromkeys(shapes))


def num_experts_of(model: ModelConfig, names: tuple[str, ...]) -> int:
    """Return the number of experts if the group `names` belongs to the experts, else 0."""
    if model.hf is not None:
        return model.hf.num_experts_by_name[names[0]]
    return model.num_experts if names[0].startswith("mlp.experts.") else 0


def linear_shape(model: ModelConfig, name: str, layer: int = 0) -> tuple[int, int]:
    """Return the shape (out, in) of the linear `name` of a layer, such as "self_attn.q_proj".

    For the linears of all experts, such as "mlp.experts.gate_up_proj", the shape is that of one
    expert. `layer`: only in models of model/hf, the layers may have different shapes.
    """
    if model.hf is not None:
        linear = model.hf.linear(layer, name)
        return linear.fan_out, linear.fan_in
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
