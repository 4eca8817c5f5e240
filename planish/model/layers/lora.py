"""LoRA adapters (Hu et al. 2021): their layout in one flat vector, and the compute copy that
matmuls use.

An adapter is a single flat float32 vector, the master. Optimizer, gradient norm, snapshot and file
process the whole vector at once. The named matrices are views of the vector. Linears that read the
same input (q, k, v; gate, up) store their A matrices next to each other, so that one matmul
multiplies the input with all of them.

Matmuls run in the base model's dtype on a copy of the master, `LoraWeights`. The copy is immutable.
The trainer and any number of samplers share it, and an optimizer step creates a new one. The
scaling alpha / rank is multiplied into the B matrices of the copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.architecture.linears import (
    fused_modules,
    head_name,
    is_mlp,
    layer_name,
    linear_shape,
    num_experts_of,
    target_modules,
)
from planish.types import LoraConfig

PEFT_EXPERT_NAMES = {
    "experts.gate_up_proj": "experts.base_layer",
    "experts.up_proj": "experts.base_layer",
    "experts.down_proj": "experts",
}
"""PEFT's names of the experts' linears. PEFT wraps the experts of a layer twice: its inner wrapper
has the adapter of gate_up_proj, its outer one the adapter of down_proj.
"""


def split_expert_matrices(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Split PEFT's joint matrices of all experts; return A [experts, rank, in] and B [experts, out,
    rank].

    `a`: PEFT's A, [experts * rank, in]. `b`: PEFT's B, [out, rank * experts].
    """
    # The columns of B are ordered by rank first and by expert second.
    return a.unflatten(0, (num_experts, -1)), b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


@dataclass(frozen=True)
class MatrixSpec:
    """The name, shape and position of one matrix of the flat vector."""

    name: str
    """Target module and matrix: "model.layers.0.self_attn.q_proj.lora_A"."""
    target: str
    """Name of the linear that the matrix adapts: "model.layers.0.self_attn.q_proj"."""
    shape: tuple[int, ...]
    """(rank, in) for A, (out, rank) for B. For linears of experts, the number of experts comes
    first: (experts, rank, in) and (experts, out, rank).
    """
    offset: int
    """Index of the matrix's first number in the flat vector."""

    @property
    def size(self) -> int:
        """The number of elements of the matrix."""
        return math.prod(self.shape)

    @property
    def peft_name(self) -> str:
        """The name of the matrix in PEFT's files, without prefix and suffix."""
        suffix = self.name.removeprefix(self.target)
        for module, peft_module in PEFT_EXPERT_NAMES.items():
            if self.target.endswith(f".{module}"):
                return self.target.removesuffix(module) + peft_module + suffix
        return self.name

    @property
    def peft_shape(self) -> tuple[int, ...]:
        """The shape of the matrix in PEFT's files, where all matrices are two-dimensional."""
        if len(self.shape) == 2:
            return self.shape
        num_experts, rows, columns = self.shape
        return (rows, columns * num_experts) if self.is_b else (num_experts * rows, columns)

    def to_peft(self, matrix: Tensor) -> Tensor:
        """Return the matrix in the layout of PEFT's files, contiguous."""
        # In PEFT's files, the columns of B are ordered by rank first and by expert second.
        if len(self.shape) == 3 and self.is_b:
            matrix = matrix.permute(1, 2, 0)
        return matrix.reshape(self.peft_shape).contiguous()

    def from_peft(self, matrix: Tensor) -> Tensor:
        """Return a matrix of PEFT's files in the shape of this matrix."""
        if len(self.shape) == 3 and self.is_b:
            num_experts, rows, columns = self.shape
            return matrix.reshape(rows, columns, num_experts).permute(2, 0, 1)
        return matrix.reshape(self.shape)

    @property
    def is_b(self) -> bool:
        """Whether the matrix is a B; it is an A otherwise."""
        return self.name.endswith("lora_B")


LORA_COLUMNS = 16
"""The number of columns of the head's LoRA hidden states is padded to a multiple of this."""


def padded_lora_columns(columns: int) -> int:
    """Return `columns` rounded up to a multiple of LORA_COLUMNS."""
    return columns + -columns % LORA_COLUMNS


class PackedMatrices(Protocol):
    """The LoRA matrices of one target module, packed for a kernel (see `PackedAdapter`).

    Shapes: T rows, n linears that read the same input, r rank.
    """

    has_backward: bool
    """Whether the kernel supports `backward_` too."""

    def expert(self, index: int) -> PackedMatrices:
        """Return the matrices of one expert, if this is the target module of a layer's experts."""
        ...

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int]) -> Tensor:
        """Add the LoRA outputs for x [T, in] to `out` [T, sum(sizes)], in place.

        Return the LoRA hidden states [T, n * r].
        """
        ...

    def backward_(self, grad: Tensor, grad_x: Tensor | None, sizes: Sequence[int]) -> Tensor:
        """Add the gradient of the input to `grad_x` [T, in], given `grad` [T, sum(sizes)].

        Return the gradient of the LoRA hidden states [T, n * r]. With `grad_x` None, compute
        nothing else.
        """
        ...

    def gradients(
        self,
        x: Tensor,
        lora_hidden: Tensor,
        grad: Tensor,
        hidden_grad: Tensor,
        sizes: Sequence[int],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the gradients of A and of the Bs in float32, summed over all rows.

        `lora_hidden`, `hidden_grad`: the results of `add_` and `backward_` for this `x` and `grad`.
        """
        ...


class PackedAdapter(Protocol):
    """All LoRA matrices of one version of an adapter, packed for a kernel."""

    def target(self, index: int) -> PackedMatrices | None:
        """Return the matrices of target module `index`.

        Return None if the adapter does not train the module or the kernel does not support it.
        """
        ...

    def drop_backward(self) -> None:
        """Free the matrices for the backward pass. They are packed again if they are needed."""


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


HeadAdapterRange = tuple[int, int, LoraMatrices]
"""An adapter of the LM head, and the rows that it applies to: (start, stop, matrices).

The rows are start .. stop - 1. The matrices are A [r, D] and a single B [V, r].
"""


class AdapterPacker(Protocol):
    """The part of a backend that `LoraWeights` uses."""

    @property
    def device(self) -> torch.device:
        """The device of the compute copy."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the compute copy."""
        ...

    def pack_adapter(
        self, targets: Sequence[LoraMatrices | None], *, is_head: bool = False
    ) -> PackedAdapter | None:
        """Return the matrices packed for the backend's kernel (see the `Lora` of the kernels)."""
        ...


class LayerLora:
    """The LoRA matrices of one decoder layer by target module."""

    def __init__(self, modules: Mapping[str, LoraMatrices | None]) -> None:
        """`modules`: the matrices by the module's name in `target_names`. None: the adapter does
        not train the module.
        """
        self.modules = dict(modules)

    def matrices_of(self, module: str) -> LoraMatrices | None:
        """Return the matrices of a target module, or None if the adapter does not train it."""
        return self.modules[module]


_TARGET_NAMES = ("attn_in", "attn_out", "mlp_in", "mlp_out", "shared_in", "shared_out")
FUSED_MODULE_NAMES = _TARGET_NAMES[:4]
"""The names of the groups of `fused_modules` in a model without shared experts. "shared_in" and
"shared_out" are those of a shared expert.
"""


def fused_module_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of a layer's target modules, in the order of `target_modules`.

    In a model of model/hf, these are the names of the linears.
    """
    if model.hf is not None:
        return model.hf.linear_names
    return _TARGET_NAMES[: len(fused_modules(model, 0))]


class LoraLayout:
    """The matrices of an adapter and their positions in the flat vector."""

    ALPHA = 32
    """The numerator of the LoRA scaling alpha / rank."""

    def __init__(
        self, model_config: ModelConfig, lora_config: LoraConfig, *, has_head: bool = True
    ) -> None:
        """Lay out an adapter of a model.

        `lora_config`: the adapter's rank, and the linears that it trains. `has_head`: whether the
        layout contains the adapter of the head, if there is one.
        """
        self.model_config = model_config
        self.lora_config = lora_config
        self.scaling = self.ALPHA / lora_config.rank
        self.entries: list[MatrixSpec] = []
        self.target_modules: list[tuple[MatrixSpec, ...]] = []
        """The entries of each trained target module, the As before the Bs.

        A target module is a group of linears that read the same input. The modules of each layer
        come first, then the head.
        """
        for layer in range(model_config.num_layers):
            for module_names in fused_modules(model_config, layer):
                if (
                    lora_config.train_mlp
                    if is_mlp(model_config, layer, module_names[0])
                    else lora_config.train_attn
                ):
                    prefix = layer_name(model_config, layer)
                    self._add_target_module(
                        [
                            (f"{prefix}.{name}", *linear_shape(model_config, name, layer))
                            for name in module_names
                        ],
                        num_experts_of(model_config, module_names),
                    )
        if lora_config.train_unembed and has_head:
            self._add_target_module(
                [(head_name(model_config), model_config.vocab_size, model_config.hidden_size)]
            )
        self.size = sum(entry.size for entry in self.entries)

    def _add_target_module(self, linears: list[tuple[str, int, int]], num_experts: int = 0) -> None:
        rank, expert_dims = self.lora_config.rank, (num_experts,) if num_experts else ()
        matrices = [
            (f"{target}.lora_A", target, (*expert_dims, rank, fan_in))
            for target, _, fan_in in linears
        ]
        matrices += [
            (f"{target}.lora_B", target, (*expert_dims, fan_out, rank))
            for target, fan_out, _ in linears
        ]
        entries = []
        for name, target, shape in matrices:
            offset = self.entries[-1].offset + self.entries[-1].size if self.entries else 0
            entries.append(MatrixSpec(name, target, shape, offset))
            self.entries.append(entries[-1])
        self.target_modules.append(tuple(entries))

    def init(self, seed: int | None) -> Tensor:
        """Return a fresh master vector, float32 [size] on the CPU.

        A is uniform as in `kaiming_uniform_(a=sqrt(5))`, with bound 1 / sqrt(in). B is zero, so a
        fresh adapter does not change the model. If `seed` is None, a random seed is used.
        """
        generator = torch.Generator(device="cpu")
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        flat = torch.zeros(self.size)
        for entry in self.entries:
            if not entry.is_b:
                bound = 1 / math.sqrt(entry.shape[-1])
                flat[entry.offset : entry.offset + entry.size].uniform_(
                    -bound, bound, generator=generator
                )
        return flat

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the matrices of a flat vector by name, as views of its memory."""
        return {e.name: flat[e.offset : e.offset + e.size].view(e.shape) for e in self.entries}


class LoraWeights:
    """The immutable compute copy of one version of an adapter.

    With `requires_grad`, autograd accumulates gradients in `leaves`.
    """

    def __init__(
        self,
        layout: LoraLayout,
        master: Tensor,
        backend: AdapterPacker,
        requires_grad: bool = False,
    ) -> None:
        """`master`: the flat float32 vector of the adapter [layout.size]."""
        self.layout = layout
        flat = master.detach().to(device=backend.device, dtype=backend.dtype, copy=True)
        self.leaves: list[Tensor] = []
        self._leaf_ranges: list[tuple[int, int, bool]] = []
        matrices_by_target = {
            entries[0].target: self._matrices(flat, entries, requires_grad)
            for entries in layout.target_modules
        }
        layers = range(layout.model_config.num_layers)
        targets = [
            f"{layer_name(layout.model_config, layer)}.{names[0]}"
            for layer in layers
            for names in target_modules(layout.model_config, layer)
        ]
        matrices = [matrices_by_target.get(target) for target in targets]
        self.packed = backend.pack_adapter(matrices)
        """The matrices of all layers, packed for the backend's kernels. None if the backend
        computes LoRA with torch.
        """
        layer_matrices = _with_packed(matrices, self.packed)
        head = [matrices_by_target.get(head_name(layout.model_config))]
        self._packed_head = backend.pack_adapter(head, is_head=True)
        (self.head,) = _with_packed(head, self._packed_head)
        names = fused_module_names(layout.model_config)
        self.layers = [
            LayerLora(dict(zip(names, layer_matrices[len(names) * layer :], strict=False)))
            for layer in layers
        ]

    def _matrices(
        self, flat: Tensor, entries: tuple[MatrixSpec, ...], requires_grad: bool
    ) -> LoraMatrices:
        """Return the concatenated A and the Bs of one target module as leaves."""
        a_entries = [e for e in entries if not e.is_b]
        # The As of the linears are adjacent in the flat vector, so one leaf holds all of them.
        rows = sum(e.shape[-2] for e in a_entries)
        *front, _, fan_in = a_entries[0].shape
        shape = (*front, rows, fan_in)
        a = self._leaf(flat, a_entries[0].offset, shape, False, requires_grad)
        b_matrices = (
            self._leaf(flat, e.offset, e.shape, True, requires_grad) for e in entries if e.is_b
        )
        return LoraMatrices(a, tuple(b_matrices))

    def _leaf(
        self, flat: Tensor, offset: int, shape: tuple[int, ...], is_b: bool, requires_grad: bool
    ) -> Tensor:
        size = math.prod(shape)
        leaf = flat[offset : offset + size].view(shape)
        if is_b:
            leaf.mul_(self.layout.scaling)
        leaf = leaf.detach().requires_grad_(requires_grad)
        # Some kernels accumulate the gradient in float32; do not round it to the leaf's dtype.
        leaf.grad_dtype = torch.float32
        self.leaves.append(leaf)
        self._leaf_ranges.append((offset, size, is_b))
        return leaf

    def end_training(self) -> None:
        """Free the packed copies that only the backward pass needs.

        Samplers can still use this version afterwards.
        """
        for packed in (self.packed, self._packed_head):
            if packed is not None:
                packed.drop_backward()

    def collect_grad(self) -> Tensor:
        """Return the gradient with respect to the master, float32 [size], and clear the leaves'
        gradients.
        """
        grads = [
            torch.zeros(leaf.shape, device=leaf.device) if leaf.grad is None else leaf.grad
            for leaf in self.leaves
        ]
        # The leaves are in the order of the flat vector and cover it, so `cat` restores the layout.
        flat = torch.cat([grad.view(-1) for grad in grads])
        scaled = [flat[offset : offset + size] for offset, size, is_b in self._leaf_ranges if is_b]
        torch._foreach_mul_(scaled, self.layout.scaling)  # pyright: ignore[reportPrivateImportUsage]
        self._clear_leaves()
        return flat

    def drop_grad(self) -> None:
        """Clear the leaves' gradients, after an error."""
        self._clear_leaves()

    def _clear_leaves(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def _with_packed(
    matrices: Sequence[LoraMatrices | None], packed: PackedAdapter | None
) -> list[LoraMatrices | None]:
    if packed is None:
        return list(matrices)
    return [
        lora if lora is None else replace(lora, packed=packed.target(index))
        for index, lora in enumerate(matrices)
    ]


class LoraStack:
    """Adapters of one shape, stacked so that one batched matmul applies all of them.

    For each target module of k linears, A is [n, k * rank, in] and each B is [n, out, rank].
    """

    def __init__(self, adapters: Sequence[LoraWeights]) -> None:
        """Stack the adapters, which must have the same layout."""
        self.adapters = tuple(adapters)
        self.layers = [
            LayerLora(
                {
                    name: _stack_matrices([layer.matrices_of(name) for layer in layers])
                    for name in layers[0].modules
                }
            )
            for layers in zip(*(weights.layers for weights in adapters), strict=True)
        ]


def _stack_matrices(matrices: Sequence[LoraMatrices | None]) -> LoraMatrices | None:
    trained = [lora for lora in matrices if lora is not None]
    if not trained:
        return None
    return LoraMatrices(
        torch.stack([lora.a for lora in trained]),
        tuple(
            torch.stack(b_matrices)
            for b_matrices in zip(*(lora.b_matrices for lora in trained), strict=True)
        ),
    )


@dataclass(frozen=True)
class AdapterRange:
    """The adapter that rows start .. stop - 1 of a batch use. None: the base model alone."""

    start: int
    stop: int
    weights: LoraWeights | None


@dataclass(frozen=True)
class AdapterStackRange:
    """The stack of adapters that rows start .. stop - 1 of a batch use.

    The rows are divided equally among the adapters, in the order of the stack.
    """

    start: int
    stop: int
    weights: LoraStack
