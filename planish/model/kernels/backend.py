"""The interface between the model and the kernels that compute it.

`choose_backend` (choose.py) makes one `Backend` per base model. Decoder, head, trainer and sampler
ask it for every operation, and never look at the device or the dtype themselves. There are three
backends: torch (the reference implementation, for any device), C++ (CPUs) and Triton (GPUs). The
compiled backends inherit from the torch backend. So they compute with torch what their kernels do
not support, such as weights with an odd number of inputs, or a family of kernels that failed its
self-test.

Letters in shapes:
- Decoder: T tokens of a batch (its rows), D hidden size, H attention heads (Hq query heads, Hkv KV
  heads), E size of a head, I hidden size of the MLP.
- LM head: R rows (hidden states) whose logits are computed, V vocabulary size, P pairs of a row and
  a token, N rows that a token is sampled from.
- LoRA: r rank, n linears that read the same input (3 for q, k and v).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from planish.model.experts import TokenExpertPairs
    from planish.model.kernels.cpp.matmul import CppPackedAdapter, CppPackedModule
    from planish.model.kernels.reference.backend import TorchBackend, TorchHeadAdapters

Backend: TypeAlias = "TorchBackend"
"""The type of every backend. `TorchBackend` documents the operations."""


class Attend(Protocol):
    """The attention function of one forward pass.

    RoPE is already applied to q and k. The function itself scales the scores by E ** -0.5. In a
    layer with a window of W positions, a row attends to its own position and to the W - 1 before
    it.
    """

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, /
    ) -> Tensor:
        """Return the attention output [T, Hq, E].

        `q`: [T, Hq, E]. `k`, `v`: [T, Hkv, E]. `sinks`: float32 [Hq], only for models with
        attention sinks. The sink of a head is a score that takes part in the softmax of each row,
        but has no value: it only makes the other weights smaller.
        """
        ...


ExactLogits = tuple[Tensor, Tensor]
"""Logits that were recomputed in float32: tokens int64 [R, k] and their values, float32 [R, k].

They replace the rounded logits of the same tokens.
"""

MIN_WEIGHT = 1e-20
"""`Backend.sample` may round a token's weight to 0 if it is smaller than this.

The weight is the token's probability divided by the largest probability in the vocabulary, in
float32.
"""
LORA_COLUMNS = 16
"""The number of columns of the head's LoRA hidden states is padded to a multiple of this."""


def padded_lora_columns(columns: int) -> int:
    """Return `columns` rounded up to a multiple of LORA_COLUMNS."""
    return columns + -columns % LORA_COLUMNS


HeadAdapterRange = tuple[int, int, "LoraMatrices"]
"""An adapter of the LM head, and the rows that it applies to: (start, stop, matrices).

The rows are start .. stop - 1. The matrices are A [r, D] and a single B [V, r].
"""


PackedAdapter: TypeAlias = "CppPackedAdapter"
"""All LoRA matrices of one version of an adapter, packed for a kernel.

Only the C++ kernels have a packed form of them.
"""
PackedMatrices: TypeAlias = "CppPackedModule"
"""The LoRA matrices of one target module within a `PackedAdapter`."""


@dataclass(frozen=True)
class LoraMatrices:
    """The LoRA matrices of n linears that read the same input (one target module).

    `a`: the concatenated A [n * r, in]. `b_matrices`: one B [out, r] per linear. Stacks of adapters
    and the matrices of all experts of a layer have one more dimension in front.
    """

    a: Tensor
    b_matrices: tuple[Tensor, ...]
    packed: PackedMatrices | None = None
    """The same matrices packed for the backend's kernel, or None if torch computes them."""

    @property
    def rank(self) -> int:
        """The rank r."""
        return self.a.shape[-2] // len(self.b_matrices)

    def expert(self, index: int) -> LoraMatrices:
        """Return the matrices of expert `index`. Only a target module of experts supports this."""
        packed = None if self.packed is None else self.packed.expert(index)
        return LoraMatrices(self.a[index], tuple(b[index] for b in self.b_matrices), packed)


class AdapterBatch(Protocol):
    """The adapters of the rows of one batch, for passes without gradients."""

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int], layer: int, module: str) -> None:
        """Add the LoRA outputs of one target module to `out`, in place.

        `x`: input [T, in]. `out`: [T, sum(sizes)]. `module`: a field of LayerLora ("attn_in").
        """
        ...

    def add_expert_(
        self, x: Tensor, out: Tensor, pairs: TokenExpertPairs, layer: int, module: str
    ) -> None:
        """Add the LoRA outputs of a layer's experts to `out`, in place.

        `x`, `out`: input [P, in] and output [P, out] of `pairs`, which are sorted by expert.
        `module`: "mlp_in" or "mlp_out".
        """
        ...


HeadAdapters: TypeAlias = "TorchHeadAdapters"
"""The head adapters of the rows of one batch, applied to given hidden states [R, D]."""


ForwardPass = Callable[[Tensor, Tensor, Attend, AdapterBatch], Tensor]
"""(tokens [T], positions [T], attention, adapters) -> last hidden states [T, D]."""
