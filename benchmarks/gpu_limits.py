"""The measured limits of a GPU and the minimum work of a workload: the two sides of every share
that gpu.py reports.

Measured: the speed of torch's matmuls of large bf16 matrices of random numbers (zeros are faster),
both squares and the model's own layers, and the memory bandwidth. Minimum work: useful work only,
and tokens that sequences share count once.

* `training_flops`: forward and backward of a LoRA on frozen weights (see `training_flops` of
  planish/doctor/gpu/roofline.py, which defines what counts).
* `decode_bytes` of one step: every parameter of the layers' linear modules and of the head, and the
  keys and values of every distinct position that is attended to. A matmul of few rows takes less
  time than reading its weights, so memory bandwidth is the limit.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from limits import (
    BANDWIDTH_BYTES,
    DEVICE,
    RANK,
    Limit,
    RowCounts,
    measure_read_bandwidth,
)
from peers.serving import fastest_dtype

from planish.doctor.gpu import roofline
from planish.doctor.gpu.machine_limits import SMALL_SQUARE_SIZE, SQUARE_SIZE, square_rate
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.linears import distinct_fused_modules, linear_shape

BYTES_PER_ELEMENT = 2
"""Bytes of a weight, a key or a value in bf16."""
MEASURED_LAYERS = 4
LAYER_ROWS, SMALL_LAYER_ROWS = 4096, 64
SMALL_BANDWIDTH_BYTES = 1 << 24


@dataclass(frozen=True)
class MachineLimits:
    product_rate: float
    """FLOP/s of large square matmuls."""
    layer_rate: float
    """FLOP/s of the model's own matmuls, one layer after the other, with the rows of a
    micro-batch.
    """
    bandwidth: float
    """Memory bandwidth for reading, in bytes per second."""


@torch.inference_mode()
def measure_limits(config: ModelConfig, small: bool) -> MachineLimits:
    size, rows = (SMALL_SQUARE_SIZE, SMALL_LAYER_ROWS) if small else (SQUARE_SIZE, LAYER_ROWS)
    square_flops = square_rate(DEVICE, fastest_dtype(), size)
    small_config = dataclasses.replace(config, num_layers=min(config.num_layers, MEASURED_LAYERS))
    layer_flops = (
        2
        * layer_num_parameters(small_config)
        * small_config.num_layers
        * rows
        / Limit(small_config).layers_seconds(rows)
    )
    bandwidth = measure_read_bandwidth(SMALL_BANDWIDTH_BYTES if small else BANDWIDTH_BYTES)
    if DEVICE.type == "cuda":
        gc.collect()  # a Limit has reference cycles, which keep its weights alive
        torch.cuda.empty_cache()
    return MachineLimits(square_flops, layer_flops, bandwidth)


def layer_num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of one layer's linear modules."""
    return sum(out * fan_in for out, fan_in in _linears(config))


def training_flops(config: ModelConfig, round_spec: Mapping[str, Any], rank: int = RANK) -> float:
    """Return the FLOPs of one forward_backward on the round (see the module's docstring)."""
    counts = RowCounts.of(round_spec)
    rows = counts.prompt_rows + counts.answer_rows
    pairs = num_attention_pairs(round_spec)
    return roofline.training_flops(config, rows, counts.scored_rows, pairs, rank)


def num_attention_pairs(round_spec: Mapping[str, Any]) -> int:
    """Return the number of pairs of a distinct query token and a key token, including itself."""
    prompts, shared = round_spec["prompts"], round_spec["shared_tokens"]
    num_answer_inputs = round_spec["new_tokens"] - 1
    pairs = _num_pairs(0, shared)
    for prompt in prompts:
        end = len(prompt)
        pairs += _num_pairs(shared, end) + round_spec["samples"] * _num_pairs(
            end, end + num_answer_inputs
        )
    return pairs


def _num_pairs(first: int, stop: int) -> int:
    """Return the number of pairs for the tokens at positions first .. stop - 1 of one sequence."""
    return (stop * (stop + 1) - first * (first + 1)) // 2


def decode_bytes(config: ModelConfig, round_spec: Mapping[str, Any], sampled: float) -> float:
    """Return the bytes of the step after `sampled` tokens of each sample."""
    prompts, shared = round_spec["prompts"], round_spec["shared_tokens"]
    positions = shared + sum(
        len(prompt) - shared + round_spec["samples"] * sampled for prompt in prompts
    )
    kv_elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim * positions
    weights = (
        config.num_layers * layer_num_parameters(config) + config.vocab_size * config.hidden_size
    )
    return BYTES_PER_ELEMENT * (weights + kv_elements)


def _linears(config: ModelConfig) -> list[tuple[int, int]]:
    """Return (out, in) of the linear modules of one layer."""
    return [linear_shape(config, name) for site in distinct_fused_modules(config) for name in site]
