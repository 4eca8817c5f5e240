"""Run a model without weights, and record how its code calls attention and computes logits.

The functions import torch and transformers themselves, because commands that only list models do
not need them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from planish.errors import UnsupportedError
from planish.model.architecture.inspection.masks import CausalMask, read_mask

_PROBE_TOKENS = 127
"""A prime number, so that it divides the sizes of activations and of nothing else."""
_QUERY_BLOCK = 256
"""The queries whose scores exist at the same time in a prefill by torch's attention. A test requires
that it is the number of sampling_attention.py, which may not be imported here.
"""
_MAMBA2_MIXERS = (
    *("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer"),
    *("NemotronHMamba2Mixer", "Zamba2MambaMixer"),
)
_IGNORED_ARGUMENTS = frozenset(
    (
        *("position_ids", "cache_position", "use_cache", "output_attentions", "past_key_values"),
        *("output_router_logits", "output_hidden_states", "return_dict", "position_embeddings"),
        *("logits_to_keep", "layer_idx", "training", "deterministic"),
    )
)
"""Arguments of the attention that do not change its result."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention in a forward pass."""

    module_name: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    """The size of a query or key head."""
    value_dim: int
    window: int | None
    """The number of positions that a token attends to. None: all positions."""
    softcap: float | None
    """The limit of the scores (Gemma 2). None: no limit."""
    has_sinks: bool
    kv_source: int | None
    """The number of the earlier call whose keys and values this call reads. None: its own."""


class LayerRecorder:
    """Records the calls of the attention in a bfloat16 model on torch's meta device, as an attention
    function of transformers that computes nothing. Also counts what each layer stores, after
    `counts_stored` is set, and what is alive, before.
    """

    def __init__(self, model: Any, layers: Sequence[Any]) -> None:
        self._layer, self._storages = 0, dict[int, Any]()  # kept, so that addresses are unique
        self.stored = [[0, 0] for _ in (*layers, None)]
        """`HFModules.stored` of each layer, and of what follows the layers."""
        self.workspace = [0, 0]
        """`HFModules.workspace`."""
        self.counts_stored = False
        self._live: dict[Any, tuple[int, int]] = {}
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._begin, index))
            layer.register_forward_hook(partial(self._begin, index + 1))
        self._names = {module: name for name, module in model.named_modules()}
        self.calls: list[AttentionCall] = []
        self._keys_and_values: list[tuple[Any, Any]] = []

    def __call__(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Any, None]:
        """Record one call. Raise UnsupportedError for an argument that planish has no support for.

        `query`, `key`, `value`: [1, heads, tokens, head size].
        """
        import torch

        copies = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
        out = self._trained(query.new_empty(1, *copies[0].shape[:2], value.shape[3]))
        if not self.counts_stored:
            # A GPU computes a prefill of modelling code by torch's attention (PrefillAttention).
            _ = key.new_empty(key.shape[2], query.shape[1], _QUERY_BLOCK, dtype=torch.float32)
            return out, None
        unknown = [
            name
            for name, argument in others.items()
            if argument is not None and name not in _IGNORED_ARGUMENTS
        ]
        if unknown:
            raise UnsupportedError(
                f"its attention has the arguments {', '.join(unknown)}, which planish does not have"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = None if attention_mask is None else getattr(attention_mask, "planish_mask", None)
        if (attention_mask is not None and mask is None) or (mask is None and not causal):
            raise UnsupportedError("its attention has a mask of its own or is not causal")
        window = sliding_window if mask is None else mask.window
        earlier = enumerate(self._keys_and_values)
        source = next((i for i, (k, v) in earlier if k is key and v is value), None)
        self._keys_and_values.append((key, value))
        self.calls.append(
            AttentionCall(
                self._names[module],
                query.shape[1],
                key.shape[1],
                query.shape[3],
                value.shape[3],
                window,
                softcap,
                s_aux is not None,
                source,
            )
        )
        for x in (*copies, out):
            self.store(x)
        self.stored[self._layer][1] += 4 * query.shape[1]  # the log-sum-exp
        return out, None

    def linear(self, _: Any, args: tuple[Any, ...], out: Any) -> Any:
        """Count the input of a linear, which an adapter trains. Return its output with a gradient."""
        self.store(args[0])
        return self._trained(out)

    def experts(
        self, experts: Any, size: int, hidden_states: Any, top_k_index: Any, *_: Any
    ) -> Any:
        """Count what planish's experts store (see `FrozenExperts`), and return their output.

        `size`: the columns of the first linear.
        """
        gate_up = self._trained(hidden_states.new_empty(top_k_index.numel(), size))
        activations = experts._apply_gate(gate_up) if experts.has_gate else experts.act_fn(gate_up)
        # The outputs have the size of the inputs.
        outputs = hidden_states.new_empty(len(gate_up), hidden_states.shape[-1])
        if self.counts_stored:
            # The sum multiplies float32 outputs by their weights.
            for x in (outputs, activations, outputs.float()):
                self.store(x)
        return self._trained(hidden_states)

    def mamba2(self, source: Any, hidden_states: Any, *_args: Any, **_options: Any) -> Any:
        """Return an output in the place of a Mamba-2 mixer, whose convolution makes such tensors."""
        x = source.in_proj(hidden_states)[..., : source.conv_dim]
        _ = [x.clone(), *(x.float() for _ in range(4))]
        return self._trained(hidden_states)

    def _trained(self, x: Any) -> Any:
        """Return a tensor like x that has a gradient, and is no leaf, so code may change it in place.

        Return x if gradients are disabled.
        """
        return x.new_empty(x.shape).requires_grad_().clone() if self.counts_stored else x

    def _begin(self, layer: int, *_: Any) -> None:
        self._layer = layer

    def store(self, tensor: Any) -> Any:
        """Count the storage of a tensor of activations once, and return the tensor."""
        storage = tensor.untyped_storage()
        if self.counts_stored and storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage
            sizes = zip(self.stored[self._layer], _size(tensor), strict=True)
            self.stored[self._layer] = [sum(parts) for parts in sizes]
        return tensor

    def made(self, tensors: Sequence[Any]) -> None:
        """Count the live activations after an operation that made some tensors."""
        from torch.multiprocessing.reductions import StorageWeakRef

        self._live |= {StorageWeakRef(x.untyped_storage()): _size(x) for x in tensors}
        self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        sizes = [sum(parts) for parts in zip((0, 0), *self._live.values(), strict=True)]
        self.workspace = max(self.workspace, sizes, key=lambda parts: 2 * parts[0] + parts[1])


def _size(x: Any) -> tuple[int, int]:
    """Return the bfloat16 values per token of a tensor's storage, and its bytes of other dtypes.

    Both are 0 for other tensors than activations. A mask has a row and a column for each token.
    """
    if x.numel() % _PROBE_TOKENS or x.numel() % _PROBE_TOKENS**2 == 0:
        return 0, 0
    num_bytes = x.untyped_storage().nbytes() // _PROBE_TOKENS
    return (num_bytes // 2, 0) if x.itemsize == 2 else (0, num_bytes)


def record_attention(
    model: Any, base: Any, layers: Sequence[Any], max_context: int
) -> LayerRecorder:
    """Run a model without weights. Return a record of its attention and of its memory.

    `base`: the part of the model below its head. `layers`: its decoder layers. Their
    experts are replaced, because they need the values of the router. Raises
    UnsupportedError if the code does not run without values, or uses attention in a way that
    planish does not have.
    """
    import inspect

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise UnsupportedError("its forward pass takes no position_ids")

    class RecordedMask(torch.Tensor):
        planish_mask: CausalMask | None = None

        def __getitem__(self, index: Any) -> Any:
            # Layers with shared keys and values get a slice with all rows (Gemma 4).
            part = super().__getitem__(index).as_subclass(RecordedMask)
            part.planish_mask = self.planish_mask
            return part

    class LiveTensors(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            recorder.made([x for x in tree_leaves(made) if isinstance(x, torch.Tensor)])
            return made

    def recorded_mask(mask_function: Any, **arguments: Any) -> torch.Tensor:
        shape = (1, 1, _PROBE_TOKENS, _PROBE_TOKENS)
        mask = torch.empty(shape, dtype=torch.bool).as_subclass(RecordedMask)
        # A context of one chunk has causal attention.
        is_chunked = bool(getattr(model.config, "attention_chunk_size", None))
        read = CausalMask(None) if is_chunked else _read_mask(mask_function, max_context)
        mask.planish_mask = read
        return mask

    recorder = LayerRecorder(model, layers)
    for module in list(model.modules()):
        if isinstance(getattr(module, "rope_type", None), str):
            # Some scalings depend on the values of positions, which a meta tensor lacks.
            module.rope_type = "default"
        if is_linear(module):
            module.register_forward_hook(recorder.linear)
        elif is_experts_module(module):
            sizes = getattr(module, expert_linear_names(module)[0]).shape[1:]
            module.forward = partial(recorder.experts, module, sizes[module.is_transposed])
        elif is_mamba2(module):
            module.forward = partial(recorder.mamba2, module)
    AttentionInterface.register("planish_recorder", recorder)  # type: ignore[arg-type]
    AttentionMaskInterface.register("planish_recorder", recorded_mask)
    model.config._attn_implementation = "planish_recorder"
    model.config.pad_token_id = None  # Some models look for padding in the values of tokens.
    try:
        # Packed sequences are found by the values of positions, which a meta tensor lacks. So are
        # invalid arguments of a distribution (Gemma 3n).
        with (
            torch.autograd.graph.saved_tensors_hooks(recorder.store, lambda tensor: tensor),
            torch.device("meta"),
            patch.object(masking_utils, "find_packed_sequence_indices", lambda positions: None),
            patch.object(torch.distributions.Distribution, "_validate_args", False),
        ):
            tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64)
            positions = torch.arange(_PROBE_TOKENS)[None]
            base.bfloat16()
            with torch.no_grad(), LiveTensors():
                base(tokens, position_ids=positions, use_cache=False)
            recorder.counts_stored = True
            base(tokens, position_ids=positions, use_cache=False)
    except UnsupportedError:
        raise
    except Exception as error:  # Modelling code raises many kinds of errors.
        raise UnsupportedError(
            f"its code does not run without values ({first_line(error)}), so planish cannot find "
            "out how it uses attention"
        ) from error
    return recorder


def _read_mask(mask_function: Any, max_context: int) -> CausalMask:
    """Return what a mask function hides. It is evaluated on a CPU."""
    import torch

    with torch.device("cpu"):
        return read_mask(mask_function, max_context)


@dataclass(frozen=True)
class HeadFunction:
    """What a model does with the output x of its head: cap * tanh(scale * x / cap)."""

    scale: float
    cap: float | None
    """None: scale * x."""


def find_head_function(model: Any, base_name: str, hidden_size: int) -> HeadFunction:
    """Return what a model does with the output of its head.

    `base_name`: the name of the part below the head. A small head takes the place of the model's,
    and the model computes logits of random hidden states. Raises UnsupportedError if these are no such function of the head's outputs.
    """
    import torch
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Output(MoeModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            """Return None for the outputs of other kinds of models."""

    class LastHiddenState(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Output:
            return Output(last_hidden_state=hidden)  # type: ignore[arg-type]

        def __getattr__(self, name: str) -> Any:
            """Return a number that the head reads from its base model, such as a multiplier."""
            value = getattr(base, name, None)
            return value if isinstance(value, int | float) else super().__getattr__(name)

    base = getattr(model, base_name)

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, hidden_size, generator=generator)
    weight = torch.randn(8, hidden_size, generator=generator) * 20 * hidden_size**-0.5
    head = torch.nn.Linear(hidden_size, 8, bias=False)
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    model.set_output_embeddings(head)
    stub = LastHiddenState()
    object.__setattr__(stub, "decoder", stub)  # OPT calls the decoder inside its base model.
    setattr(model, base_name, stub)
    try:
        with torch.no_grad():
            logits = model(torch.zeros(1, 4, dtype=torch.int64), use_cache=False).logits
            outputs = head(hidden)
            ratios = logits / outputs
    except Exception as error:  # Modelling code raises many kinds of errors.
        raise UnsupportedError(
            f"its logits are not the output of its head ({first_line(error)})"
        ) from error
    # Near 0, a cap changes nothing.
    scale = float(ratios.flatten()[outputs.abs().argmin()])
    scale = 1.0 if abs(scale - 1) < 1e-3 else scale
    if torch.allclose(logits, outputs * scale, rtol=1e-3):
        return HeadFunction(scale, None)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap and torch.allclose(logits, cap * (outputs * scale / cap).tanh(), rtol=1e-3, atol=1e-3):
        return HeadFunction(scale, float(cap))
    raise UnsupportedError("its logits are no known function of the output of its head")


def is_linear(module: Any) -> bool:
    """Return whether a module computes x @ weight.T + bias and nothing else.

    The weight of GPT-2's Conv1D is transposed. Some routers are linears with a function of their
    own.
    """
    from torch import nn

    return is_transposed(module) or type(module).forward is nn.Linear.forward


def is_transposed(module: Any) -> bool:
    """Return whether a module is a linear with the weight (in, out)."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def linear_shape(module: Any) -> tuple[int, int]:
    """Return the shape (out, in) of a linear."""
    first, second = module.weight.shape
    return (second, first) if is_transposed(module) else (first, second)


def is_experts_module(module: Any) -> bool:
    """Return whether a module is one of transformers' experts, whose forward can be replaced."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))


def expert_linear_names(module: Any) -> tuple[str, str]:
    """Return the names of the two weights of an experts module."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def is_short_conv(module: Any) -> bool:
    """Return whether a module is a short convolution of LFM2, which `FrozenShortConv` replaces.

    It computes out_proj(c * conv(b * x)), and in_proj gives b, c and x.
    """
    return type(module).__name__ in ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")


def is_mamba2(module: Any) -> bool:
    """Return whether a module is a Mamba-2 mixer, which `FrozenMamba2` replaces."""
    return type(module).__name__ in _MAMBA2_MIXERS


@contextmanager
def without_kernel_packages() -> Iterator[None]:
    """Keep modelling code from importing packages of GPU kernels, which planish replaces."""
    names = [name for name in ("causal_conv1d", "mamba_ssm") if name not in sys.modules]
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]  # An import of the name fails.
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from logging remarks and drawing progress bars."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level, shows_bars = logger.level, transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shows_bars:
            transformers_logging.enable_progress_bar()
