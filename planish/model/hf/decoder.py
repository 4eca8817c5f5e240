"""A decoder whose layers transformers' modelling code computes.

It has the interface of decoder/decoder.py, so sampler and trainer use either. Attention, linears
and experts are planish's. Embedding, norms, RoPE and activations are transformers', in the dtype of
the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planish.errors import DamagedFileError
from planish.model.architecture.inspection.modules import HFModules
from planish.model.architecture.inspection.probing import (
    first_line,
    is_experts_module,
    is_linear,
    is_mamba2,
    is_short_conv,
    quiet,
    without_kernel_packages,
)
from planish.model.architecture.inspection.vision import auto_class
from planish.model.hf.forward_pass import ATTENTION, HFForwardPass, attention, current_pass
from planish.model.hf.frozen import freeze_experts, freeze_linear
from planish.model.hf.mamba2 import FrozenMamba2
from planish.model.hf.short_conv import FrozenShortConv
from planish.model.hf.vision_tower import image_registry
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.interface.parts import AdapterBatch, Attend
from planish.model.layers.lora import LoraWeights
from planish.model.layers.recurrence import Recurrence
from planish.model.sources.weights import weight_files
from planish.model.vision.image_tokens import ImageRegistry
from planish.model.vision.tower import VisionTower

_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
"""The names of biases that choose experts, which 16 bits would round to a few different values.
transformers rounds those of some models (MiniMax M2).
"""


class TransformersDecoder:
    """A frozen base model of transformers, for models that `Decoder` does not cover."""

    def __init__(self, directory: Path, backend: Backend, quantize: str | None = None) -> None:
        """Load the model in `directory`, whose config is `backend.config`.

        `quantize`: the scheme of the layers' linears (layers/quantization.py), or None. Raises
        DamagedFileError if the weights do not fit the model.
        """
        assert backend.config.hf is not None
        self.config, self.backend, self._modules = backend.config, backend, backend.config.hf
        model = load_model(directory, self._modules, backend.dtype)
        model.to(backend.device)
        head = model.get_submodule(self._modules.head_name)
        bias = None if head.bias is None else head.bias.detach()
        self.head = backend.pack([head.weight.detach()], [bias])
        names, numbers = self._modules.attention_names, self._modules.kv_numbers
        self._kv_numbers = {
            model.get_submodule(name): number for name, number in zip(names, numbers, strict=True)
        }
        layers = model.get_submodule(self._modules.layers_name)
        for index, layer in enumerate(layers.children()):
            _freeze_layer(layer, index, self._modules, backend, quantize)
            layer.forward = partial(_recomputable, layer.forward)  # type: ignore[method-assign]
        _replace_recurrent_modules(layers)
        model.config.pad_token_id = None  # Some models look for padding in each batch of tokens.
        self._model: nn.Module = model.get_submodule(self._modules.text_model_name)
        self.images: ImageRegistry | None = None
        self.vision: VisionTower | None = None
        vision = self._modules.vision
        if vision is not None:
            self.images = image_registry(directory, vision, self.config.vocab_size)
            self.vision = VisionTower(model.get_submodule(self._modules.base_name), self.images)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and matmuls."""
        return self.backend.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.backend.device

    def parameters(self) -> Iterator[Tensor]:
        """Return an iterator over the weights of transformers' modules."""
        return self._model.parameters()

    def decode_pass(self) -> None:
        """Return None: no kernel runs these layers in one call."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        adapters: LoraWeights | AdapterBatch | None,
        *,
        layers_per_checkpoint: int = 0,
        recurrence: Recurrence | None = None,
    ) -> Tensor:
        """Return the last hidden states: [T, D] in the model's dtype (see `Decoder.forward`).

        They are multiplied by the model's factor of logits. A checkpoint has one layer.
        """
        recompute = layers_per_checkpoint > 0
        run = HFForwardPass(self.backend, attend, adapters, self._kv_numbers, recurrence, recompute)
        inputs: dict[str, Any] = {"input_ids": tokens[None], "position_ids": positions[None]}
        if positions.dim() == 2:
            assert self.vision is not None
            assert self._modules.vision is not None
            embed: nn.Module = self._model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
            inputs = self.vision.inputs(tokens, embed)
            has_mrope = bool(self._modules.vision.mrope_section)
            inputs["position_ids"] = positions[:, None] if has_mrope else positions[:1]
        with run.running():
            output = self._model(**inputs, use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        scale = self._modules.head_scale
        return hidden if scale == 1 else hidden * scale


def load_model(directory: Path, modules: HFModules, dtype: torch.dtype) -> Any:
    """Return the model in `directory` with planish's attention, its weights memory-mapped.

    Towers keep torch's attention, and biases of routers keep float32. Raises UnsupportedError if
    the weights are pickled, and DamagedFileError if they do not fit the model.
    """
    import transformers

    weight_files(directory)
    transformers.AttentionInterface.register(ATTENTION, attention)
    with without_kernel_packages():
        model_class = getattr(transformers, modules.architecture)
    in_float32 = {*(model_class._keep_in_fp32_modules_strict or ()), *_ROUTER_BIASES}
    try:
        with (
            quiet(),
            without_kernel_packages(),
            patch.object(model_class, "_keep_in_fp32_modules_strict", in_float32),
        ):
            parts = {"": ATTENTION, "text_config": ATTENTION, "vision_config": "sdpa"}
            loaded: Any = auto_class(modules.is_multimodal).from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=parts if modules.is_multimodal else ATTENTION,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # The loader raises many kinds of errors.
        raise DamagedFileError(
            f"transformers cannot load the weights in {directory} ({first_line(error)}); download "
            "the model again"
        ) from error
    model, info = loaded
    problems = [
        f"{problem}: {', '.join(map(str, sorted(info[key], key=str)[:5]))}"
        for problem, key in (
            ("missing", "missing_keys"),
            ("unexpected", "unexpected_keys"),
            ("of the wrong shape", "mismatched_keys"),
            ("not converted", "error_msgs"),
        )
        if info.get(key)
    ]
    if problems:
        raise DamagedFileError(
            f"the weights in {directory} do not match its config.json; {'; '.join(problems)}. "
            "Download the weights and config.json of one model"
        )
    return model.eval().requires_grad_(False)


def _freeze_layer(
    layer: nn.Module, index: int, modules: HFModules, backend: Backend, scheme: str | None
) -> None:
    """Replace the linears and experts of a layer."""
    with_adapters = {linear.name for linear in modules.layers[index]}
    for parent_name, parent in list(layer.named_modules()):
        for child_name, child in list(parent.named_children()):
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            if is_linear(child):
                target = name if name in with_adapters else None
                setattr(parent, child_name, freeze_linear(child, backend, scheme, index, target))
            elif is_experts_module(child):
                setattr(parent, child_name, freeze_experts(child, backend, scheme, index, name))


def _replace_recurrent_modules(layers: nn.Module) -> None:
    """Replace the short convolutions and Mamba-2 mixers of all layers, whose linears are frozen."""
    for kind, replacement in ((is_short_conv, FrozenShortConv), (is_mamba2, FrozenMamba2)):
        found = [name for name, module in layers.named_modules() if kind(module)]
        for index, name in enumerate(found):
            layers.set_submodule(name, replacement(layers.get_submodule(name), index))


def _recomputable(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer. If the pass recomputes layers, only the layer's inputs are stored."""
    run = current_pass()
    if not run.recompute or not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def layer(*args: Any, **kwargs: Any) -> Any:
        # The backward pass calls this function again, outside of the pass.
        with run.running():
            return forward(*args, **kwargs)

    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
