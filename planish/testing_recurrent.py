"""The options of tiny random models with recurrent states (see `tiny_transformers_model`)."""

from typing import Any

_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}
RECURRENT_OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_groups": 2, **_MAMBA},
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_n_groups": 2,
        "ssm_in_multiplier": 1.5,
        "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7],
        "lm_head_multiplier": 0.5,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "shared_intermediate_size": 48,
        **_MAMBA,
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "lfm3": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24},
    "nemotron_h": {
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "mlp",
            "linear_attention",
        ],
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 48,
    },
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "qwen3_5_text": {"full_attention_interval": 2},
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 24,
        "chunk_size": 16,
    },
}
"""The options by model_type. Chunks are short, so that sequences have several of them."""
