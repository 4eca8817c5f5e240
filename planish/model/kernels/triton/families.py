"""The families of Triton kernels, and the heads for which they are compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch

from planish.errors import UserError
from planish.model.architecture.config import ModelConfig

FAMILIES = (
    "norms",
    "rope",
    "swiglu",
    "log_sum_exp",
    "sampling",
    "attention",
    "tree attention",
    "lora",
    "quantized",
    "experts",
    "graphs",
)
"""The families of kernels. The kernels of a family are tested, and replaced by torch, together.

"attention" is the sampler's attention (prefill and decode). "tree attention" is the trainer's
attention over prefix trees. "quantized" is the matmuls with quantized weights, and the kernels that
dequantize these weights; the matmuls with quantized experts are among them. "experts" is the other
operations of a mixture of experts, for all experts of a layer at once. "graphs" is the sampler's
decoding step captured as a CUDA graph.
"""

_OF_HEADS = ("attention", "tree attention", "lora", "graphs")
"""The families that need a supported head size: the attention kernels, and the families that are
used only together with them.
"""
_OF_GRAPH_RUNNER = ("lora", "graphs")
"""The families that only the runner of cuda_graph_runner.py uses."""


def supported_families(
    config: ModelConfig, *, is_quantized: bool = True, has_experts: bool = True
) -> tuple[str, ...]:
    """Return the families that this model uses. torch computes the others.

    `is_quantized`: whether base weights are quantized. `has_experts`: whether the model has experts.
    """
    excluded: tuple[str, ...] = ()
    has_head_size = config.head_dim % 16 == 0 and config.head_dim <= 256
    if not has_head_size or config.score_cap:
        excluded = _OF_HEADS
    elif config.hf is not None:
        # A CUDA graph cannot contain modelling code that waits for the GPU.
        excluded = ("attention", "lora", "graphs")
    elif config.delta_net is not None or config.num_experts:
        # The runner with CUDA graphs does not support recurrent states. It does not support experts
        # either, because the number of rows of each expert is known only when the layer runs.
        excluded = _OF_GRAPH_RUNNER
    if config.hf is not None:
        excluded += ("norms", "rope", "swiglu")
    if not is_quantized:
        excluded += ("quantized",)
    if not has_experts:
        excluded += ("experts",)
    return tuple(family for family in FAMILIES if family not in excluded)


@dataclass(frozen=True)
class HeadShape:
    """The attention heads for which kernels are compiled."""

    size: int
    group: int
    """The number of query heads per key head."""
    dtype: torch.dtype


def wants_graphs() -> bool:
    """Return whether PLANISH_GRAPHS allows CUDA graphs for decoding steps. It does by default.

    Raises UserError for an unknown value.
    """
    found = os.environ.get("PLANISH_GRAPHS", "1")
    if found not in ("0", "1"):
        raise UserError(f"PLANISH_GRAPHS={found!r}: give 0 or 1 (the default)")
    return found == "1"


@cache
def has_triton() -> bool:
    """Return whether Triton is installed. On Linux it comes with torch for CUDA."""
    try:
        import_module("triton")
    except ImportError:
        return False
    return True
