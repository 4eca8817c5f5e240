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
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from planish.model.config import ModelConfig
from planish.model.kernels.cpp.cpu_products import (
    AdapterPanels,
    PanelSite,
    adapts,
    adapts_forward,
    panel_size,
)
from planish.types import LoraConfig

LAYER_SITES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The linears of a decoder layer, grouped by the input that they read, in the field order of
`LayerLora`.
"""


@dataclass(frozen=True)
class Entry:
    """The name, shape and position of one matrix of the flat vector."""

    name: str
    """Target module and matrix: "model.layers.0.self_attn.q_proj.lora_A"."""
    target: str
    """Name of the linear that the matrix adapts: "model.layers.0.self_attn.q_proj"."""
    shape: tuple[int, int]
    """(rank, in) for A, (out, rank) for B."""
    offset: int
    """Index of the matrix's first number in the flat vector."""

    @property
    def size(self) -> int:
        """The number of elements of the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def is_b(self) -> bool:
        """Whether the matrix is a B; it is an A otherwise."""
        return self.name.endswith("lora_B")


@dataclass(frozen=True)
class Site:
    """The LoRA matrices of n linears that read the same input.

    `a`: the joint A [n * rank, in]. `bs`: one B [out, rank] per linear.
    """

    a: Tensor
    bs: tuple[Tensor, ...]
    panels: PanelSite | None = None
    """The same matrices packed for the native CPU kernel, or None if it does not support them."""

    def backward_(
        self, grad: Tensor, x: Tensor, low: Tensor, grad_x: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the backward pass; return the gradients of A and of the Bs.

        `grad`: gradient of the output [T, sum(sizes)]. `x`: input of the forward pass [T, in].
        `low`: LoRA hidden states of the forward pass, x @ A.T [T, n * rank]. `grad_x`: [T, in], to
        which the gradient of the input is added in place.
        """
        if self.panels is not None and self.panels.goes_back:
            grad_low = self.panels.backward_(grad, grad_x, sizes)
            return self.panels.gradients(x, low, grad, grad_low, sizes)
        parts = grad.split(list(sizes), 1)
        grad_low = torch.cat([part @ b for part, b in zip(parts, self.bs, strict=True)], 1)
        grad_x.addmm_(grad_low, self.a)
        grad_bs = [
            part.t() @ own for part, own in zip(parts, low.chunk(len(self.bs), 1), strict=True)
        ]
        return grad_low.t() @ x, grad_bs


@dataclass(frozen=True)
class LayerLora:
    """The LoRA matrices of one decoder layer by target module.

    A field is None if the adapter does not train that module.
    """

    attn_in: Site | None
    attn_out: Site | None
    mlp_in: Site | None
    mlp_out: Site | None


SITES = tuple(site.name for site in fields(LayerLora))


class LoraLayout:
    """The matrices of an adapter and their positions in the flat vector."""

    ALPHA = 32

    def __init__(self, model: ModelConfig, lora: LoraConfig) -> None:
        self.model = model
        self.lora = lora
        self.scaling = self.ALPHA / lora.rank
        self.entries: list[Entry] = []
        self.sites: list[tuple[Entry, ...]] = []
        """The entries of each site, the As before the Bs.

        The trained sites of each layer come first (at most four per layer), then the head.
        """
        for layer in range(model.num_layers):
            for site in LAYER_SITES:
                if (lora.train_attn and site[0].startswith("self_attn")) or (
                    lora.train_mlp and site[0].startswith("mlp")
                ):
                    self._add_site(
                        [
                            (f"model.layers.{layer}.{name}", *linear_shape(model, name))
                            for name in site
                        ]
                    )
        if lora.train_unembed:
            self._add_site([("lm_head", model.vocab_size, model.hidden_size)])
        self.size = sum(entry.size for entry in self.entries)

    def _add_site(self, linears: list[tuple[str, int, int]]) -> None:
        rank = self.lora.rank
        parts = [(f"{target}.lora_A", target, (rank, fan_in)) for target, _, fan_in in linears]
        parts += [(f"{target}.lora_B", target, (fan_out, rank)) for target, fan_out, _ in linears]
        site = []
        for name, target, shape in parts:
            offset = self.entries[-1].offset + self.entries[-1].size if self.entries else 0
            site.append(Entry(name, target, shape, offset))
            self.entries.append(site[-1])
        self.sites.append(tuple(site))

    def panel_sizes(self, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
        """Return the number of elements of the packed copies: (forward, backward).

        The native CPU kernel stores these copies of the matrices in addition. The numbers are 0 if
        torch computes the matmuls.
        """
        serves_layers = adapts_in_panels(self.model, dtype, device)
        forth = back = 0
        for site in self.sites:
            rows, fan_in = sum(entry.shape[0] for entry in site if not entry.is_b), site[0].shape[1]
            linears = [entry.shape for entry in site if entry.is_b]
            shapes = [(fan_out, fan_in) for fan_out, _ in linears]
            if (serves_layers or site[0].target == "lm_head") and adapts_forward(
                shapes, dtype, device
            ):
                forth += panel_size(rows, fan_in) + sum(panel_size(*shape) for shape in linears)
                if adapts(shapes, dtype, device):
                    back += panel_size(fan_in, rows) + sum(
                        panel_size(rank, fan_out) for fan_out, rank in linears
                    )
        return forth, back

    def init(self, seed: int | None) -> Tensor:
        """Return a fresh master vector, float32 [size] on the CPU.

        A is uniform as in `kaiming_uniform_(a=sqrt(5))`, with bound 1 / sqrt(in). B is zero, so a
        fresh adapter does not change the model. `seed` None: use a random seed.
        """
        generator = torch.Generator(device="cpu")
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        flat = torch.zeros(self.size)
        for entry in self.entries:
            if not entry.is_b:
                bound = 1 / math.sqrt(entry.shape[1])
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
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool = False,
    ) -> None:
        self.layout = layout
        flat = master.detach().to(device=device, dtype=dtype, copy=True)
        self.leaves: list[Tensor] = []
        self._spans: list[tuple[int, int, bool]] = []
        found = {
            entries[0].target: self._matrices(flat, entries, requires_grad)
            for entries in layout.sites
        }
        layers = range(layout.model.num_layers)
        targets = [f"model.layers.{layer}.{site[0]}" for layer in layers for site in LAYER_SITES]
        matrices = [found.get(target) for target in targets]
        # Use the native kernel for all sites of all adapters or for none. Otherwise the kernel of
        # one adapter would depend on the other adapters in the batch, and results would not be
        # batch-invariant.
        self.panels = AdapterPanels(matrices, serves=adapts_in_panels(layout.model, dtype, device))
        """The packed matrices of the sites of all layers, ordered by layer."""
        sites = _sites(matrices, self.panels)
        head = [found.get("lm_head")]
        self._head_panels = AdapterPanels(head)
        (self.head,) = _sites(head, self._head_panels)
        n = len(LAYER_SITES)
        self.layers = [LayerLora(*sites[n * layer : n * (layer + 1)]) for layer in layers]

    def _matrices(
        self, flat: Tensor, entries: tuple[Entry, ...], requires_grad: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the joint A and the Bs of one site as leaves."""
        a_entries = [e for e in entries if not e.is_b]
        rows = sum(e.shape[0] for e in a_entries)
        a = self._leaf(
            flat, a_entries[0].offset, (rows, a_entries[0].shape[1]), False, requires_grad
        )
        bs = (self._leaf(flat, e.offset, e.shape, True, requires_grad) for e in entries if e.is_b)
        return a, tuple(bs)

    def _leaf(
        self, flat: Tensor, offset: int, shape: tuple[int, int], is_b: bool, requires_grad: bool
    ) -> Tensor:
        size = shape[0] * shape[1]
        leaf = flat[offset : offset + size].view(shape)
        if is_b:
            leaf.mul_(self.layout.scaling)
        leaf = leaf.detach().requires_grad_(requires_grad)
        # Some kernels accumulate the gradient in float32; do not round it to the leaf's dtype.
        leaf.grad_dtype = torch.float32
        self.leaves.append(leaf)
        self._spans.append((offset, size, is_b))
        return leaf

    def end_training(self) -> None:
        """Free the packed copies that only the backward pass needs.

        Samplers can still use this version afterwards.
        """
        for panels in (self.panels, self._head_panels):
            panels.forget_turned()

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
        scaled = [flat[offset : offset + size] for offset, size, is_b in self._spans if is_b]
        torch._foreach_mul_(scaled, self.layout.scaling)  # pyright: ignore[reportPrivateImportUsage]
        for leaf in self.leaves:
            leaf.grad = None
        return flat


def _sites(
    matrices: Sequence[tuple[Tensor, tuple[Tensor, ...]] | None], panels: AdapterPanels
) -> list[Site | None]:
    return [
        None if own is None else Site(*own, panels.site(index))
        for index, own in enumerate(matrices)
    ]


class LoraStack:
    """Adapters of one shape, stacked so that one batched matmul applies all of them.

    For each site of k linears, A is [n, k * rank, in] and each B is [n, out, rank].
    """

    def __init__(self, members: Sequence[LoraWeights]) -> None:
        self.members = tuple(members)
        self.layers = [
            LayerLora(
                *(
                    _stacked([getattr(layer, site.name) for layer in layers])
                    for site in fields(LayerLora)
                )
            )
            for layers in zip(*(weights.layers for weights in members), strict=True)
        ]


def _stacked(sites: Sequence[Site | None]) -> Site | None:
    found = [site for site in sites if site is not None]
    if not found:
        return None
    return Site(
        torch.stack([site.a for site in found]),
        tuple(torch.stack(bs) for bs in zip(*(site.bs for site in found), strict=True)),
    )


@dataclass(frozen=True)
class AdapterRows:
    """The adapter that rows start .. stop - 1 of a batch use; None is the base model alone."""

    start: int
    stop: int
    weights: LoraWeights | None


@dataclass(frozen=True)
class StackRows:
    """The stack of adapters that rows start .. stop - 1 of a batch use.

    The rows are divided equally among the adapters, in the order of the stack.
    """

    start: int
    stop: int
    weights: LoraStack


def adapts_in_panels(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the native CPU kernel supports adapters of the layers' linears, forward and
    backward.
    """
    return adapts(
        [linear_shape(model, name) for site in LAYER_SITES for name in site], dtype, device
    )


def head_adapts_in_panels(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the native CPU kernel supports adapters of the head in the forward pass."""
    return adapts_forward([(model.vocab_size, model.hidden_size)], dtype, device)


def linear_shape(model: ModelConfig, name: str) -> tuple[int, int]:
    """Return the shape (out, in) of the linear `name` of a layer, such as "self_attn.q_proj"."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "q_proj": (queries, model.hidden_size),
        "k_proj": (keys, model.hidden_size),
        "v_proj": (keys, model.hidden_size),
        "o_proj": (model.hidden_size, queries),
        "gate_proj": (model.intermediate_size, model.hidden_size),
        "up_proj": (model.intermediate_size, model.hidden_size),
        "down_proj": (model.hidden_size, model.intermediate_size),
    }[name.split(".")[1]]
