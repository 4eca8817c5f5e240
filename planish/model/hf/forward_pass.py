"""What the modules of one forward pass share: the backend, the attention and the adapters.

Modelling code of transformers passes no such object through its layers. So it is in a context
variable, which each replaced module reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planish.model.decoder.operations import adapted_linear
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.interface.parts import AdapterBatch, Attend
from planish.model.layers.linear import PackedLinear
from planish.model.layers.lora import LoraMatrices, LoraWeights
from planish.model.layers.recurrence import Mamba2Inputs, Recurrence, ShortConvInputs

ATTENTION = "planish"
"""The name of planish's attention among those of transformers."""

_current: ContextVar[HFForwardPass] = ContextVar("hf_forward_pass")


@dataclass(frozen=True)
class HFForwardPass:
    """The inputs that all layers of one forward pass share."""

    backend: Backend
    attend: Attend
    adapters: LoraWeights | AdapterBatch | None
    kv_numbers: Mapping[nn.Module, int]
    """The number of the keys and values of each module that calls the attention (see
    `HFModules.kv_numbers`).
    """
    recurrence: Recurrence | None = None
    """The recurrence of the rows, for a model with recurrent states."""
    recompute: bool = False
    """Whether the backward pass recomputes the layers."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the pass that the modules of this thread read."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def linear(self, x: Tensor, linear: PackedLinear, layer: int, name: str | None) -> Tensor:
        """Return the outputs [T, out] of a linear with the adapter of each row. `x`: [T, in].

        `name`: the target module, a linear's name in its layer. None: it has no adapter.
        """
        adapters = None if name is None else self.adapters
        if adapters is None or isinstance(adapters, LoraWeights):
            lora = self.lora_of(layer, name)
            if lora is None and not torch.is_grad_enabled():
                return self.backend.matmul(x, linear)
            return adapted_linear(self.backend, x, linear, lora)
        out = self.backend.matmul(x, linear)
        assert name is not None
        adapters.add_(x, out, linear.sizes, layer, name)
        return out

    def recur(self, index: int, inputs: ShortConvInputs | Mamba2Inputs) -> Tensor:
        """Return the outputs of a layer's recurrence (see `Recurrence`).

        `index`: its number among the layers with a recurrent state.
        """
        assert self.recurrence is not None
        return self.recurrence(index, inputs)

    def lora_of(self, layer: int, name: str | None) -> LoraMatrices | None:
        """Return the matrices of a target module, if one adapter is used for all rows."""
        if name is None or not isinstance(self.adapters, LoraWeights):
            return None
        return self.adapters.layers[layer].matrices_of(name)


def current_pass() -> HFForwardPass:
    """Return the pass that this thread runs."""
    return _current.get()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return planish's attention of one layer: [1, T, Hq, value size] (transformers' interface).

    `query`: [1, Hq, T, head size]. `key`, `value`: [1, Hkv, T, head size]. `s_aux`: the sinks
    [Hq]. Windows are those of the config, which were read from the same code.
    """
    run, value_size = current_pass(), value.shape[-1]
    head_dim, num_kv_heads = run.backend.config.head_dim, run.backend.config.num_kv_heads
    # The kernels read heads side by side, and modelling code has them one after another.
    q, k, v = (_pad(x[0].transpose(0, 1), head_dim).contiguous() for x in (query, key, value))
    if k.shape[1] < num_kv_heads:  # Other layers have more key-value heads.
        k, v = (x.repeat_interleave(num_kv_heads // x.shape[1], 1) for x in (k, v))
    # planish's attention scales scores by head_dim ** -0.5.
    factor = (query.shape[-1] ** -0.5 if scaling is None else scaling) * head_dim**0.5
    if abs(factor - 1) > 1e-6:
        q = q * factor
    sinks = () if s_aux is None else (s_aux.float(),)
    # A layer that shares keys and values stores them again, with the same bits.
    return run.attend(run.kv_numbers[module], q, k, v, *sinks)[None, ..., :value_size], None


def _pad(x: Tensor, size: int) -> Tensor:
    """Return x [T, H, E] with zeros behind each head, so that heads have `size` numbers."""
    missing = size - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x
