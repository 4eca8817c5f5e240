"""Times that a model should take on a GPU, computed on paper.

The inputs are the bytes and FLOPs of the model, the speeds of the GPU, and the launches that
tools/gpu_counts.py counted on a pretended GPU (counts.json). Nothing here is measured, and the
shares of the peak speeds below are assumptions: a computed time may be wrong by a quarter.

Work that is counted: matmuls with base weights, attention, adapters, logits, launches, and the host.
Bytes and FLOPs of norms, RoPE and activations count only as launches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from planish.doctor.gpu.cards import Card
from planish.errors import UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.linears import fused_modules, linear_shape, num_experts_of
from planish.model.kernels.triton.families import supported_families
from planish.model.layers.recurrence import state_bytes

BANDWIDTH_SHARE = 0.8
"""The share of the memory bandwidth that kernels reach."""
MATMUL_SHARE, ATTENTION_SHARE = 0.72, 0.4
"""The shares of the matmul rate that large matmuls and the attention of training reach."""
NODE_SECONDS = 2e-6
"""The additional time of each kernel of a CUDA graph, in which the GPU idles or starts programs."""
LAUNCH_SECONDS = 5e-6
"""The host's time to launch a kernel without a CUDA graph."""
HOST_STEP_SECONDS, HOST_ROW_SECONDS = 0.6e-3, 3.3e-6
"""The host's time for a decoding step, and for each of its rows."""
DECODE_LOGIT_PASSES, TRAIN_LOGIT_PASSES = 11, 10
"""How often logits pass through the memory: float32 ones in decoding, and those of training in the
model's dtype.
"""
RANK = 32
"""The default rank of adapters."""


@dataclass(frozen=True)
class Work:
    """The linears of a model."""

    linear_weights: float
    """The weights of all layers' linears that a pass reads."""
    token_weights: float
    """The weights that one token is multiplied with; less if the model has experts."""
    adapter_weights: float
    """The weights of an adapter of rank 1 on these linears."""
    token_adapter_weights: float
    """The same, for the experts of one token."""
    head_weights: float
    head_adapter_weights: float
    """The weights of an adapter of rank 1 on the head."""


@dataclass(frozen=True)
class Estimate:
    """A computed time, with its parts in seconds."""

    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())


@cache
def recorded_counts() -> Any:
    """Return the counts of tools/gpu_counts.py."""
    return json.loads(Path(__file__).with_name("counts.json").read_text(encoding="utf-8"))


def launches(config: ModelConfig, scheme: str | None, kind: str) -> float:
    """Return the launches of a decoding step or a micro-batch. `kind`: "decode" or "train".

    `scheme`: the quantization of the base weights, or None. Raises UnsupportedError if the family
    has no counts, because the code of transformers computes its layers.
    """
    families = recorded_counts()["launches"]
    if config.hf is not None or config.family not in families:
        raise UnsupportedError(
            f"no launches are counted for the family {config.family!r}, so no times are computed; "
            f"the counted families are {', '.join(families)}"
        )
    count = families[config.family][scheme or "bf16"][kind]
    return float(config.num_layers * count["layer"] + count["fixed"])


def bytes_per_weight(scheme: str | None, rows: int) -> float:
    """Return the bytes that a forward matmul of `rows` rows moves for each base weight."""
    counts = recorded_counts()["bytes"][scheme or "bf16"]
    forward = [name for name in counts if name.startswith("forward")]
    counted = {int(name.split()[1]): counts[name] for name in forward}
    fitting = [size for size in counted if size <= rows] or [min(counted)]
    return float(counted[max(fitting)])


def work_of(config: ModelConfig, rows: int) -> Work:
    """Return the linears that a pass of `rows` tokens reads."""
    read = token = adapter = token_adapter = 0.0
    for count, per_token, fan_out, fan_in in _linears(config):
        hit = count * (1 - (1 - per_token / count) ** rows)
        read += hit * fan_out * fan_in
        token += per_token * fan_out * fan_in
        adapter += hit * (fan_out + fan_in)
        token_adapter += per_token * (fan_out + fan_in)
    head_weights = config.vocab_size * config.hidden_size
    head_adapter = config.vocab_size + config.hidden_size
    return Work(read, token, adapter, token_adapter, head_weights, head_adapter)


def _linears(config: ModelConfig) -> Iterator[tuple[int, int, int, int]]:
    """Yield (experts, experts of a token, out, in) of all linears; 1 and 1 without experts."""
    for layer in range(config.num_layers):
        for names in fused_modules(config, layer):
            count = num_experts_of(config, names) or 1
            for name in names:
                per_token = config.experts_per_token if count > 1 else 1
                yield count, per_token, *linear_shape(config, name, layer)


def decode_estimate(
    config: ModelConfig, card: Card, rows: int, context: int, scheme: str | None = None
) -> Estimate:
    """Return the time of a decoding step of `rows` samples with `context` positions each.

    All samples use one adapter of the default rank and modules, and share no prompt.
    """
    work, itemsize = work_of(config, rows), card.dtype.itemsize
    bandwidth = card.bandwidth * BANDWIDTH_SHARE
    scale = itemsize / 2 if scheme is None else 1.0
    weight_bytes = work.linear_weights * bytes_per_weight(scheme, rows) * scale
    weight_bytes += work.head_weights * itemsize
    flops = 2.0 * rows * (work.token_weights + work.head_weights)
    matmuls = max(weight_bytes / bandwidth, flops / (card.matmul_rate * MATMUL_SHARE))
    attention = rows * attended_bytes(config, context, card.dtype) / bandwidth
    adapter_weights = work.adapter_weights + work.head_adapter_weights
    adapters = RANK * adapter_weights * itemsize / bandwidth
    logits = DECODE_LOGIT_PASSES * 4.0 * rows * config.vocab_size / bandwidth
    count = launches(config, scheme, "decode")
    parts = {"matmuls": matmuls, "attention": attention, "adapters": adapters, "logits": logits}
    host = HOST_STEP_SECONDS + rows * HOST_ROW_SECONDS
    if "graphs" in supported_families(config):
        parts["launches"] = count * NODE_SECONDS
        # The host prepares the next step while the GPU computes this one.
        host = max(0.0, host - sum(parts.values()))
    else:
        parts["launches"] = max(0.0, count * LAUNCH_SECONDS - sum(parts.values()))
    parts["host"] = host
    return Estimate(parts)


def attended_bytes(config: ModelConfig, context: int, dtype: torch.dtype) -> float:
    """Return the bytes of keys, values and recurrent states that one row of a step reads."""
    positions = sum(
        min(context, config.window(layer) or context) for layer in config.attention_layers
    )
    kv_bytes = 2.0 * config.num_kv_heads * config.head_dim * positions * dtype.itemsize
    return kv_bytes + 2 * state_bytes(config, dtype)


def training_flops(
    config: ModelConfig, rows: float, scored_rows: float, pairs: float, rank: int = RANK
) -> float:
    """Return the FLOPs of forward and backward passes of a LoRA on frozen weights.

    `rows`: distinct input tokens. `scored_rows`: distinct rows with a target. `pairs`: pairs of a
    query and a key that it attends to. A multiplication with its addition is 2 FLOPs. Linears: the
    forward matmul and the gradient of the input. LoRA: also the gradients of A and B. Attention:
    two matmuls forward and four backward. Norms, RoPE, softmax, optimizer and recomputation do not
    count.
    """
    return sum(_training_parts(config, rows, scored_rows, pairs, rank))


def _training_parts(
    config: ModelConfig, rows: float, scored_rows: float, pairs: float, rank: int
) -> tuple[float, float]:
    """Return the FLOPs of the matmuls and of the attention."""
    work = work_of(config, 1)
    matmuls = 4 * work.token_weights * rows + 4 * work.head_weights * scored_rows
    adapter_weights = work.token_adapter_weights * rows + work.head_adapter_weights * scored_rows
    matmuls += 6 * rank * adapter_weights
    heads = len(config.attention_layers) * config.num_heads * config.head_dim
    return matmuls, 12 * heads * pairs


def training_estimate(
    config: ModelConfig,
    card: Card,
    tokens: int,
    length: int,
    micro_batch_tokens: int,
    scheme: str | None = None,
    *,
    recompute: bool = False,
) -> Estimate:
    """Return the time of forward_backward on `tokens` tokens in sequences of `length`.

    Every token has a target, and the sequences share nothing. A longer sequence than
    `micro_batch_tokens` is a micro-batch of its own.
    """
    pairs = tokens * (length + 1) / 2
    matmul_flops, attention_flops = _training_parts(config, tokens, tokens, pairs, RANK)
    work = work_of(config, max(length, micro_batch_tokens))
    passes = 1.0
    if recompute:
        matmul_flops += 2 * work_of(config, 1).token_weights * tokens
        attention_flops *= 4 / 3
        passes = 2.0
    per_batch = max(1, micro_batch_tokens // length)
    batches = -(-(tokens // length) // per_batch)
    bandwidth = card.bandwidth * BANDWIDTH_SHARE
    counts = recorded_counts()["bytes"][scheme or "bf16"]
    moved = passes * bytes_per_weight(scheme, micro_batch_tokens) + counts["backward"]
    parts = {
        "matmuls": matmul_flops / (card.matmul_rate * MATMUL_SHARE),
        "attention": attention_flops / (card.matmul_rate * ATTENTION_SHARE),
        "logits": TRAIN_LOGIT_PASSES
        * float(card.dtype.itemsize * tokens * config.vocab_size)
        / bandwidth,
    }
    if scheme is not None:
        parts["dequantization"] = batches * work.linear_weights * moved / bandwidth
    count = batches * launches(config, scheme, "train")
    parts["launches"] = max(0.0, count * LAUNCH_SECONDS - sum(parts.values()))
    return Estimate(parts)
