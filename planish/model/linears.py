"""The linears of a decoder layer: their names in a checkpoint and their shapes."""

from planish.model.config import ModelConfig

FUSED_MODULES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The linears of a decoder layer, grouped by the input that they read, in the field order of
`LayerLora`. `fused_modules` returns those of a model.
"""
_JOINED_MODULES = (
    ("self_attn.qkv_proj",),
    ("self_attn.o_proj",),
    ("mlp.gate_up_proj",),
    ("mlp.down_proj",),
)


def fused_modules(model: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Return the linears of a decoder layer by the names in the checkpoint, grouped by the input
    that they read, in the field order of `LayerLora`.
    """
    return _JOINED_MODULES if model.fused_projections else FUSED_MODULES


def linear_shape(model: ModelConfig, name: str) -> tuple[int, int]:
    """Return the shape (out, in) of the linear `name` of a layer, such as "self_attn.q_proj"."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "q_proj": (queries, model.hidden_size),
        "k_proj": (keys, model.hidden_size),
        "v_proj": (keys, model.hidden_size),
        "qkv_proj": (queries + 2 * keys, model.hidden_size),
        "o_proj": (model.hidden_size, queries),
        "gate_proj": (model.intermediate_size, model.hidden_size),
        "up_proj": (model.intermediate_size, model.hidden_size),
        "gate_up_proj": (2 * model.intermediate_size, model.hidden_size),
        "down_proj": (model.hidden_size, model.intermediate_size),
    }[name.split(".")[1]]
