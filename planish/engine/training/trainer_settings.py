"""`TrainerSettings`: what bounds the memory of the trainer, and estimates of that memory."""

# Options may come from configuration files, so their types are checked.
# pyright: reportUnnecessaryIsInstance=false

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from operator import add

from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference.attention import SCORE_ENTRIES
from planish.model.layers.lora import fused_modules, padded_lora_columns
from planish.model.layers.recurrence import activation_bytes_per_row, backward_bytes


@dataclass(frozen=True)
class TrainerSettings:
    """Settings that bound the memory of the trainer's forward and backward passes."""

    micro_batch_tokens: int = 4096
    """Maximum number of tokens per micro-batch. A longer sequence runs alone, with activation
    checkpointing.
    """
    recompute: bool = False
    """Whether every micro-batch uses activation checkpointing: only the inputs of groups of layers
    are stored, and the backward pass recomputes the rest.
    """
    max_sequence_tokens: int | None = None
    """The longest sequence whose backward pass fits into memory, if nothing but weights and
    adapters takes memory beside it. None: the memory is unknown or shared, as on a CPU.
    """
    offload_above: int | None = None
    """Sequences of more tokens use activation checkpointing, and keep each layer's input in main
    memory instead of the GPU's. None: no sequence does.
    """

    def __post_init__(self) -> None:
        """Raise ValueError if `micro_batch_tokens` is not a whole number of at least 1."""
        value = self.micro_batch_tokens
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"micro_batch_tokens={value!r}: give a whole number of at least 1")

    def recomputes(self, num_tokens: int) -> bool:
        """Return whether a micro-batch of `num_tokens` tokens uses activation checkpointing."""
        return self.recompute or num_tokens > self.micro_batch_tokens or self.offloads(num_tokens)

    def offloads(self, num_tokens: int) -> bool:
        """Return whether a micro-batch of `num_tokens` keeps the layers' inputs in main memory."""
        return self.offload_above is not None and num_tokens > self.offload_above

    def activation_bytes(
        self, backend: Backend, num_tokens: int | None = None, rank: int = 32
    ) -> int:
        """Return the estimated peak of a micro-batch's forward and backward pass in bytes.

        It consists of the tensors stored for the backward pass, and of the temporary tensors of one
        layer or of the head. `num_tokens`: size of the micro-batch, by default
        `micro_batch_tokens`. `rank`: the LoRA rank.
        """
        config, itemsize = backend.config, backend.dtype.itemsize
        num_tokens = self.micro_batch_tokens if num_tokens is None else num_tokens
        logit_itemsize = backend.training_logits_dtype.itemsize
        layers = range(config.num_layers)
        layer_bytes = [num_tokens * size for size in self._bytes_by_layer(backend, rank)]
        temporary_bytes = [self._temporary_bytes(backend, num_tokens, rank, i) for i in layers]
        # The logits of one chunk of rows exist beside their gradient in the dtype of the matmuls.
        chunk_bytes = min(num_tokens, backend.head_rows) * config.vocab_size
        chunk_bytes *= logit_itemsize + itemsize
        group_size = self.layers_per_checkpoint(backend, num_tokens)
        if group_size:
            stored_bytes = 0
            if not self.offloads(num_tokens):
                num_groups = ceil(config.num_layers / group_size)
                stored_bytes = num_tokens * num_groups * input_bytes(backend)
            groups = [slice(first, first + group_size) for first in layers[::group_size]]
            peak_bytes = stored_bytes + max(
                sum(layer_bytes[group]) + max(temporary_bytes[group]) for group in groups
            )
        else:
            stored_bytes = sum(layer_bytes)
            chunk_bytes += num_tokens * logit_itemsize * config.vocab_size
            # The backward pass of a layer has freed the tensors of later layers.
            peak_bytes = max(map(add, accumulate(layer_bytes), temporary_bytes))
        return max(peak_bytes, stored_bytes + chunk_bytes)

    def _temporary_bytes(self, backend: Backend, num_tokens: int, rank: int, layer: int) -> int:
        """Return the bytes that the backward pass of a layer needs beside what is stored.

        `num_tokens`: the size of the micro-batch.
        """
        config, itemsize = backend.config, backend.dtype.itemsize
        layer_bytes, state_bytes, recurrence_bytes = (
            self._bytes_of_layer(backend, rank, layer),
            0,
            0,
        )
        if config.recurrence is not None and layer in config.recurrence.layers:
            is_alone = num_tokens > self.micro_batch_tokens
            state_bytes = backward_bytes(config, num_tokens, is_sequence=is_alone)
            recurrence_bytes = activation_bytes_per_row(config, backend.dtype)
        if config.hf is not None:
            # If scores have a limit, torch computes the backward pass of the attention
            # (`block_backward`): a weight, a slope and a gradient of each score in float32, a mask,
            # and the weight in the dtype of the matmuls.
            num_scores = min(config.num_heads * num_tokens**2, SCORE_ENTRIES)
            score_bytes = (3 * 4 + 1 + itemsize) * num_scores if config.score_cap else 0
            return max(num_tokens * layer_bytes // 3 + state_bytes, score_bytes)
        # The MLP and the attention need the gradients of about two fifths of what the layer stores,
        # or those of all pairs of a row and an expert.
        pair_bytes = itemsize * (3 * config.hidden_size + 4 * config.expert_size)
        if config.activation == "clamped_swiglu":
            # torch computes its gradient from six float32 tensors.
            pair_bytes = max(pair_bytes, (6 * 4 + 3 * itemsize) * config.expert_size)
        row_bytes = max(
            (layer_bytes - recurrence_bytes) * 2 // 5, config.experts_per_token * pair_bytes
        )
        # The backward pass of a recurrence has freed the tensors of the MLP.
        recurrence_bytes = recurrence_bytes // 2 - self._mlp_bytes(backend, rank, layer)
        return max(num_tokens * row_bytes, num_tokens * recurrence_bytes + state_bytes)

    def layers_per_checkpoint(self, backend: Backend, num_tokens: int) -> int:
        """Return how many layers share a checkpoint in a micro-batch of `num_tokens` tokens.

        Only the input of such a group is stored, and the backward pass recomputes the activations
        of all its layers at once. The size is the one that needs the least memory. 0: the
        micro-batch does not use activation checkpointing.
        """
        config = backend.config
        if not self.recomputes(num_tokens):
            return 0
        if config.hf is not None or self.offloads(num_tokens):
            return 1  # Offloaded inputs take no memory here, and modelling code runs by layer.
        layer_bytes = max(self._bytes_by_layer(backend, rank=32))

        def stored_bytes(size: int) -> int:
            return ceil(config.num_layers / size) * input_bytes(backend) + size * layer_bytes

        return min(range(1, config.num_layers + 1), key=stored_bytes)

    def _bytes_by_layer(self, backend: Backend, rank: int) -> list[int]:
        """Return the bytes per token that each layer stores for its backward pass."""
        return [self._bytes_of_layer(backend, rank, i) for i in range(backend.config.num_layers)]

    def _bytes_of_layer(self, backend: Backend, rank: int, layer: int) -> int:
        config, itemsize = backend.config, backend.dtype.itemsize
        is_recurrent = config.recurrence is not None and layer in config.recurrence.layers
        layer_bytes = activation_bytes_per_row(config, backend.dtype) if is_recurrent else 0
        if config.hf is not None:
            num_values, other_bytes = config.hf.stored[layer]
            num_values += padded_lora_columns(rank) * sum(
                config.experts_per_token if linear.num_experts else 1
                for linear in config.hf.layers[layer]
            )
            return layer_bytes + other_bytes + itemsize * num_values
        if not is_recurrent:
            layer_bytes = self._attention_bytes(backend)
        # The inputs of all norms are float32, and the outputs of the two input norms are not.
        num_norms = config.input_norms + config.output_norms
        norm_bytes = 2 * (4 * num_norms + itemsize) * config.hidden_size
        return layer_bytes + norm_bytes + self._mlp_bytes(backend, rank, layer)

    def _attention_bytes(self, backend: Backend) -> int:
        """Return the bytes per token that a layer stores for its attention and its norms."""
        config = backend.config
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        # The inputs of the norms and the log-sum-exp of the attention are float32.
        num_float32_values = config.num_heads + (query_size + kv_size) * config.qk_norm
        # The other tensors have the dtype of the matmuls: the output of the fused projection, of
        # which v is a view, q and k after RoPE, and the attention output. An output gate stores its
        # input and its product.
        num_model_dtype_values = 3 * (query_size + kv_size) + 2 * query_size * config.output_gate
        return 4 * num_float32_values + backend.dtype.itemsize * num_model_dtype_values

    def _mlp_bytes(self, backend: Backend, rank: int, layer: int) -> int:
        """Return the bytes per token that a layer stores for its MLP and all LoRA hidden states."""
        config, itemsize = backend.config, backend.dtype.itemsize
        lora_columns = [
            padded_lora_columns(len(names) * rank) for names in fused_modules(config, layer)
        ]
        if not config.has_experts(layer):
            return itemsize * (3 * config.intermediate_size + sum(lora_columns))
        # Each pair of a token and an expert stores gate, up and two LoRA hidden states. The router
        # stores its float32 input, its logits and its probabilities.
        num_values_per_pair = 2 * config.expert_size + sum(lora_columns[2:4])
        router_bytes = 4 * (config.hidden_size + 3 * config.num_experts)
        # A shared expert is a dense MLP. Its output is stored too, because the gate multiplies that
        # output.
        num_shared_expert_values = config.has_shared_expert * (
            3 * config.intermediate_size + config.hidden_size + sum(lora_columns[4:])
        )
        num_expert_values = config.experts_per_token * num_values_per_pair
        return (
            itemsize * (sum(lora_columns[:2]) + num_expert_values + num_shared_expert_values)
            + router_bytes
        )

    def reserved_bytes(self, backend: Backend, num_tokens: int | None = None) -> int:
        """Return the estimated bytes that forward and backward passes occupy, in use or cached.

        The estimate is `activation_bytes` plus 25% for fragmentation.
        """
        return self.activation_bytes(backend, num_tokens) * 5 // 4

    def longest_sequence(self, backend: Backend, num_bytes: float) -> int:
        """Return the tokens of the longest sequence whose passes occupy at most `num_bytes`.

        All shorter ones must fit, up to `offload_above` tokens.
        """
        fitting = self.offload_above or 0
        return fitting + bisect_right(
            range(fitting + 1, backend.config.max_context + 1),
            num_bytes,
            key=lambda num_tokens: self.reserved_bytes(backend, num_tokens),
        )


def input_bytes(backend: Backend) -> int:
    """Return the bytes per token of a layer's input, which activation checkpointing stores.

    The residual stream of planish's decoder is float32, and that of modelling code has the dtype of
    the model.
    """
    itemsize = 4 if backend.config.hf is None else backend.dtype.itemsize
    return itemsize * backend.config.hidden_size
