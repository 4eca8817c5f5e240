"""The forward pass of a decoding step through all layers, as one call of the C++ kernels.

A step has about three hundred operations, such as matmuls and norms. For few rows, most operations
take microseconds. If Python called each operation and allocated its result, a step would take twice
as long. The pass calls the same kernels as decoder/decoder.py does, so its results are
bit-identical.

Shapes: T rows, D hidden, V vocabulary, E head_dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import cast

import numpy as np
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.matmul import CppAdapterBatch, CppPackedWeight
from planish.model.kernels.cpp.ops import AttentionPlan, StoringAttention
from planish.model.kernels.cpp.quantized_matmul import CppQuantizedWeight
from planish.model.kernels.interface.parts import AdapterBatch, Attend, DecoderWeights, ForwardPass
from planish.model.layers.layer_weights import DenseMLP, Layer

CppLinearWeight = CppPackedWeight | CppQuantizedWeight
"""The packed weights of a linear. In a pass, either all or none of them are quantized."""


@dataclass(frozen=True)
class DecodeLayer:
    """The frozen weights of one decoder layer, with float32 norms and packed linears.

    A field is None if the model has no such norm or bias.
    """

    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    attn_output_norm: Tensor | None
    mlp_output_norm: Tensor | None
    cos: Tensor
    """float32 [max_context, E/2], as is `sin`."""
    sin: Tensor
    window: int
    """The number of positions that a row attends to; 0 for all."""
    qkv: CppLinearWeight
    qkv_bias: Tensor | None
    o: CppLinearWeight
    o_bias: Tensor | None
    gate_up: CppLinearWeight
    gate_up_bias: Tensor | None
    down: CppLinearWeight
    down_bias: Tensor | None


_NATIVE_FIELDS = {
    "activation",
    "output_norms",
    "norm_offset",
    "embedding_scale",
    "query_scalar",
    "windows",
    "local_rope",
    "layers_without_rope",
    "output_bias",
    "fp8",
    "vision",
}
"""The fields of ModelConfig that the native pass supports, besides those without a default. If a
model has another value than the default in any other field, `Decoder.forward` computes its layers.
"""

_Layer = np.dtype([(field.name, np.int64) for field in fields(DecodeLayer)])


class _Pass(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("layers", "rows", "hidden", "inner", "gelu", "quantized")
        ),
        *((name, ctypes.c_float) for name in ("eps", "embedding_scale")),
        *(
            (name, ctypes.c_void_p)
            for name in ("layer", "final_norm", "embedding", "tokens", "positions")
        ),
        ("attention", ops.Attention),
        *((name, ctypes.c_int64) for name in ("blocks", "layer_ranges", "entries")),
        ("adapters", ctypes.c_void_p),
        ("n_adapters", ctypes.c_int64),
    )


@dataclass(frozen=True, eq=False)
class DecodePass:
    """The forward pass of a model whose linears are all packed as panels."""

    layers: Sequence[DecodeLayer]
    embedding: Tensor
    """[V, D], in the dtype of the matmuls."""
    final_norm: Tensor
    eps: float
    heads: tuple[int, int]
    """The number of query heads and of key heads."""
    intermediate_size: int
    """The MLP's intermediate size."""
    uses_gelu: bool = False
    """Whether the MLP's activation is GELU instead of SiLU."""
    embedding_scale: float = 1.0
    """The factor of the embeddings."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        adapters: CppAdapterBatch | None,
    ) -> Tensor:
        """Return the hidden states after the final norm: [T, D].

        `tokens`, `positions`: int64 [T]. Each row's new key and value are stored at the end of the
        row's own range in `plan`.
        """
        out = self.embedding.new_empty(len(tokens), self.embedding.shape[1])
        arguments = _Pass(
            layers=len(self.layers),
            rows=len(tokens),
            hidden=out.shape[1],
            inner=self.intermediate_size,
            gelu=self.uses_gelu,
            quantized=isinstance(self.layers[0].qkv, CppQuantizedWeight),
            eps=self.eps,
            embedding_scale=self.embedding_scale,
            layer=self._table.ctypes.data,
            final_norm=self.final_norm.data_ptr(),
            embedding=self.embedding.data_ptr(),
            tokens=tokens.data_ptr(),
            positions=positions.data_ptr(),
            attention=plan.arguments(self.heads, 2 * self.layers[0].cos.shape[1], 0),
            blocks=len(plan.blocks),
            layer_ranges=plan.ranges.shape[1],
            entries=len(plan.rows),
            adapters=adapters.table.ctypes.data if adapters is not None else None,
            n_adapters=adapters.table.shape[1] if adapters is not None else 0,
        )
        ops.call("decode", out.dtype, ctypes.byref(arguments), out)
        return out

    @cached_property
    def _table(self) -> np.ndarray:
        table = np.zeros(len(self.layers), _Layer)
        for row, layer in zip(table, self.layers, strict=True):
            for field in fields(layer):
                row[field.name] = _address(getattr(layer, field.name))
        return table


def _address(x: Tensor | CppLinearWeight | int | None) -> int:
    if isinstance(x, int):
        return x
    if isinstance(x, CppLinearWeight):
        assert x.address is not None
        return x.address
    return 0 if x is None else x.data_ptr()


class CppDecodePasses:
    """Forward passes of decoding steps as one native call (see `DecodePasses`).

    They need the kernels for attention and for the adapters of all linears of the layers.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def decode_pass(self, decoder: DecoderWeights) -> ForwardPass | None:
        """Return a forward pass that runs all layers in one native call.

        Return None if the kernels do not support all weights, all adapters and the attention, or if
        the model needs steps that only `Decoder.forward` implements.
        """
        config = self._config
        changed = {
            field.name
            for field in fields(config)
            if field.default is not MISSING and getattr(config, field.name) != field.default
        }
        if not changed <= _NATIVE_FIELDS or config.activation == "clamped_swiglu":
            return None
        layers = [
            _decode_layer(layer, config.window(index)) for index, layer in enumerate(decoder.layers)
        ]
        packed_layers = [layer for layer in layers if layer is not None]
        if len(packed_layers) < len(layers):
            return None
        decode_pass = DecodePass(
            layers=packed_layers,
            embedding=decoder.embedding,
            final_norm=decoder.final_norm,
            eps=config.rms_norm_eps,
            heads=(config.num_heads, config.num_kv_heads),
            intermediate_size=config.intermediate_size,
            uses_gelu=config.activation == "gelu_tanh",
            embedding_scale=decoder.embedding_scale,
        )

        def run(tokens: Tensor, positions: Tensor, attend: Attend, batch: AdapterBatch) -> Tensor:
            assert isinstance(attend, StoringAttention)
            adapters = batch if isinstance(batch, CppAdapterBatch) else None
            return decode_pass.forward(tokens, positions, attend.plan, adapters)

        return run


def _decode_layer(layer: Layer, window: int | None) -> DecodeLayer | None:
    """Return the layer for the native forward pass, or None if a weight of it is not packed."""
    mlp = cast("DenseMLP", layer.mlp)
    weights: list[CppPackedWeight | CppQuantizedWeight | Tensor | None] = []
    for linear in (layer.qkv, layer.o, mlp.gate_up, mlp.down):
        packed = linear.packed
        if not isinstance(packed, CppPackedWeight | CppQuantizedWeight) or packed.address is None:
            return None
        weights += [packed, linear.bias]
    # The native pass needs all weights of a layer in one form, either quantized or not.
    if len({type(weights[i]) for i in range(0, len(weights), 2)}) > 1:
        return None
    norms = (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    output_norms = (layer.attn_output_norm, layer.mlp_output_norm)
    rope = (layer.rope.cos, layer.rope.sin)
    return DecodeLayer(*norms, *output_norms, *rope, window or 0, *weights)  # type: ignore[arg-type]
