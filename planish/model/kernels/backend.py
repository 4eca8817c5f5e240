"""What decoder, head, trainer and sampler call: all operations of one base model on one device."""

from __future__ import annotations

from typing import Protocol

import torch

from planish.model.config import ModelConfig
from planish.model.kernels.interface import (
    Activations,
    Attention,
    DecodePasses,
    Head,
    LogSumExp,
    Lora,
    Matmuls,
    Norms,
    QkNormRope,
    Recurrences,
    Rope,
    Sampling,
)
from planish.model.kernels.row_tiling import RowTiling
from planish.model.kv_cache import KVSpec


class Backend(
    Matmuls,
    Lora,
    Norms,
    Rope,
    QkNormRope,
    Activations,
    Attention,
    Recurrences,
    DecodePasses,
    Head,
    LogSumExp,
    Sampling,
    Protocol,
):
    """The operations of one base model on one device, in one dtype (see interface.py).

    `choose_backend` (choose.py) makes one for each base model.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    """The dtype of weights and matmuls."""
    tiling: RowTiling | None
    """The row counts that make torch's matmuls batch-invariant. None: these matmuls may depend on
    the batch.
    """
    families: frozenset[str]
    """The families of compiled kernels in use."""
    logits_are_exact: bool
    """Whether the sampler may return the logits of `base_logits` as they are.

    This is the case on a GPU without batch invariance, where logits are computed in float32.
    Otherwise the sampler recomputes the logit of each sampled token with `token_logits`.
    """
    uses_main_memory: bool
    """Whether tensors are in main memory, which is the case on a CPU.

    The operating system provides a page of main memory only when the page is first used. So on a
    CPU the KV slot of a sample grows with the sample, and a sample that ends early uses little
    memory. By default, each memory limit has a fixed maximum on a CPU. On a GPU the limits are
    shares of the free memory.
    """
    workspace_bytes: int
    """The memory of a decoding step in addition to its activations and logits."""

    @property
    def name(self) -> str:
        """The kernels, such as "C++ kernels (AVX512_BF16)" or "torch"."""
        ...

    @property
    def torch_families(self) -> frozenset[str]:
        """The families of compiled kernels that torch replaces for this model."""
        ...

    @property
    def uses_compiled_kernels(self) -> bool:
        """Whether C++ kernels compute all matmuls and the attention.

        These kernels are batch-invariant: they add in the same order for every batch.
        """
        ...

    @property
    def supports_graph_runner(self) -> bool:
        """Whether the sampler can use the runner of cuda_graph_runner.py with these kernels."""
        ...

    @property
    def kv_spec(self) -> KVSpec:
        """The shape, dtype and device of the keys and values of one position."""
        ...
