"""The families of Triton kernels, and the heads for which they are compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch

from planish.errors import UserError

FAMILIES = (
    "norms",
    "rope",
    "swiglu",
    "log_sum_exp",
    "sampling",
    "attention",
    "tree attention",
    "lora",
    "graphs",
)
"""The families of kernels. The kernels of a family are tested, and replaced by torch, together.

"attention" is the sampler's attention (prefill and decode). "tree attention" is the trainer's
attention over prefix trees. "graphs" is the sampler's decoding step captured as a CUDA graph.
"""


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
