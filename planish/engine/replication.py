"""The operations by which several engines share the work of one training model.

One engine, the home of the model, has its gradient and optimizer state. Other engines get versions
of its weights. A version is named by the hash of its content and never changes, so an engine cannot
sample from, or train on, other weights than those that an operation names.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from planish.engine.training.gradient_tree import TreeNode
from planish.engine.training.trainer import MicroBatchResult, PartialResult
from planish.service import Operation, Sample
from planish.types import Datum, ForwardBackwardOutput, LoraConfig


@dataclass(frozen=True, eq=False)
class AdapterVersion:
    """One version of an adapter, as it is sent between engines."""

    name: str
    """A hash of everything below, in hexadecimal digits."""
    base_model: str
    lora: LoraConfig
    dtype: str
    """The dtype of the base model's matmuls, such as "bfloat16"."""
    content: np.ndarray
    """uint8: the bytes of the adapter's flat vector in this dtype."""

    @classmethod
    def from_vector(
        cls, base_model: str, fingerprint: str, lora: LoraConfig, vector: Tensor
    ) -> AdapterVersion:
        """Name and pack a flat vector. `fingerprint` is that of the base model's weights."""
        content = vector.detach().cpu().contiguous().view(torch.uint8).numpy()
        dtype = str(vector.dtype).removeprefix("torch.")
        # The seed is not part of the content: it says how the first weights were made.
        shape = (lora.rank, lora.train_mlp, lora.train_attn, lora.train_unembed)
        digest = hashlib.sha256(repr((fingerprint, shape, dtype)).encode())
        digest.update(content.data)
        return cls(digest.hexdigest(), base_model, lora, dtype, content)

    def vector(self) -> Tensor:
        """Return the flat vector. It has memory of its own."""
        # A received array may be a view of shared memory that must not be written.
        return torch.from_numpy(np.array(self.content)).view(getattr(torch, self.dtype))


@dataclass(frozen=True, eq=False)
class SentPart:
    """A `PartialResult` as it is sent between engines."""

    num_micro_batches: int
    results: list[MicroBatchResult]
    nodes: dict[TreeNode, np.ndarray]

    @classmethod
    def pack(cls, part: PartialResult) -> SentPart:
        """Copy the gradients to main memory."""
        nodes = {node: grad.cpu().numpy() for node, grad in part.nodes.items()}
        return cls(part.num_micro_batches, part.results, nodes)

    def unpack(self, device: torch.device) -> PartialResult:
        """Copy the gradients to `device`."""
        nodes = {
            node: torch.from_numpy(np.array(grad)).to(device) for node, grad in self.nodes.items()
        }
        return PartialResult(self.num_micro_batches, self.results, nodes)


@dataclass(frozen=True, eq=False)
class ExportedWeights:
    """The weights of a training model at some point of its operations."""

    base_model: str
    fingerprint: str
    """The fingerprint of the base model's weights."""
    lora: LoraConfig
    vector: Tensor
    """The flat vector of the adapter, in the dtype of the base model."""

    def version(self) -> AdapterVersion:
        """Copy the weights to main memory, and name them. This takes a second per gigabyte."""
        return AdapterVersion.from_vector(self.base_model, self.fingerprint, self.lora, self.vector)


@dataclass(frozen=True)
class ExportWeights(Operation[ExportedWeights]):
    """Return the model's weights after all earlier operations of the model."""

    model_id: str


@dataclass(frozen=True)
class CreateVersionSampler(Operation[str]):
    """Create a sampler for a version that was given to `Preparation.add_version`."""

    sampler_id: str
    version: str


@dataclass(frozen=True)
class CompileConstraint(Operation[None]):
    """Compile the constraint of a sample, so that its submission need not wait for it."""

    sample: Sample
    base_model: str


@dataclass(frozen=True, eq=False)
class ComputePart(Operation[SentPart]):
    """Run some micro-batches of a `ForwardBackward`. No adapter changes.

    The weights are those of a training model of this engine, or those of a version.
    """

    data: Mapping[int, Datum]
    """The datums of these micro-batches, by their index in the call."""
    loss_fn: str
    micro_batches: Mapping[int, Sequence[int]]
    """The indices of the datums of each micro-batch, by its index in the call."""
    num_micro_batches: int
    """The number of micro-batches of the whole call."""
    loss_fn_config: Mapping[str, float] = field(default_factory=dict[str, float])
    forward_only: bool = False
    model_id: str | None = None
    version: str | None = None


@dataclass(frozen=True, eq=False)
class FinishParts(Operation[ForwardBackwardOutput]):
    """Finish a `ForwardBackward` from the parts that several engines computed: add the gradient to
    that of the model.
    """

    model_id: str
    loss_fn: str
    num_tokens: int
    parts: Sequence[SentPart]
    """The parts, in the order of their micro-batches."""
    forward_only: bool = False


@dataclass(frozen=True, eq=False)
class RejectNextStep(Operation[None]):
    """Make the next optimizer step of a model fail, because a `ForwardBackward` failed."""

    model_id: str
    error: BaseException
