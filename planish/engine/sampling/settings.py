"""The memory and batch limits of a sampler."""

from dataclasses import dataclass

from planish.engine.sampling.prompt_scores import MAX_SCORED_ROWS
from planish.model.kernels.interface.backend import Backend
from planish.model.layers.recurrence import sampling_bytes_per_row, sampling_workspace_bytes


@dataclass(frozen=True)
class SamplerSettings:
    """The memory and batch limits of one sampler.

    The defaults here suit a CPU. memory.py has the defaults for a GPU and for little memory.
    """

    kv_cache_bytes: int = 4 << 30
    """The maximum bytes that running requests may reserve for keys and values. The KV
    pools may allocate one eighth more for freed slots (see `max_pool_bytes`).
    """
    prefix_cache_bytes: int = 1 << 30
    """The maximum bytes of the prefix cache, in addition to `kv_cache_bytes`."""
    max_batch: int = 256
    """The maximum number of samples that run at the same time."""
    max_prefill_tokens_per_step: int = 2048
    """The maximum number of prompt tokens that one step prefills."""

    def workspace_bytes(self, backend: Backend) -> int:
        """Estimate the workspace of one step, in bytes.

        The workspace has the activations of prompts, the attention scores, and the logits that
        tokens are sampled from. It does not include the KV cache.
        """
        config = backend.config
        # There are three float32 logits tensors: the logits of the step, the copy that tokens are
        # sampled from, and the logits of the prompts' last positions.
        logits_bytes = 3 * 4 * config.vocab_size * max(self.max_batch, MAX_SCORED_ROWS)
        return (
            logits_bytes
            + backend.workspace_bytes
            + self.max_prefill_tokens_per_step * _bytes_per_token(backend)
            + sampling_workspace_bytes(
                config, backend.dtype, self.max_batch, self.max_prefill_tokens_per_step
            )
        )


def _bytes_per_token(backend: Backend) -> int:
    """Return the bytes that one layer needs in a prefill, per token."""
    config = backend.config
    if config.hf is not None:
        num_values, other_bytes = config.hf.workspace
        return other_bytes + backend.dtype.itemsize * num_values
    query_size, kv_size = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    mlp_size = 3 * config.intermediate_size
    if config.num_experts:
        # Each token is computed by several experts, so the experts' inputs and outputs have one
        # row per pair of a token and one of its experts.
        experts_size = 3 * config.experts_per_token * (config.expert_size + config.hidden_size)
        if config.has_shared_expert:
            mlp_size += experts_size
        else:
            mlp_size = max(mlp_size if config.dense_layers else 0, experts_size)
    values_per_token = 4 * config.hidden_size + 3 * query_size + 4 * kv_size + mlp_size
    # Float32 values are the residual stream, and copies that norms need outside of the fused
    # kernels.
    num_float32_values = (2 + config.output_norms) * config.hidden_size
    num_float32_values += (query_size + kv_size) * config.joint_qk_norm
    return max(
        4 * num_float32_values + backend.dtype.itemsize * values_per_token,
        sampling_bytes_per_row(config, backend.dtype),
    )
