"""Find out how a model's code in transformers uses attention, linears and experts.

The model is created without weights (on torch's meta device), and one forward pass records each
call of the attention. So a model that planish cannot run is refused before anything is loaded, and
the error names the reason. No code of the model's own repository runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from planish.errors import UnsupportedError
from planish.model.architecture.inspection.modules import (
    MAX_LAYERS,
    HFLinear,
    HFModules,
    Mamba2Config,
    ShortConvConfig,
    base_model_name,
    text_part_name,
)
from planish.model.architecture.inspection.probing import (
    AttentionCall,
    expert_linear_names,
    find_head_function,
    first_line,
    is_experts_module,
    is_linear,
    is_transposed,
    linear_shape,
    quiet,
    record_attention,
    without_kernel_packages,
)
from planish.model.architecture.inspection.recurrent_layers import (
    NO_ATTENTION,
    layer_of,
    mamba2_config,
    recurrent_modules,
    short_conv_config,
)
from planish.model.architecture.inspection.vision import (
    auto_class,
    is_vision_type,
    vision_modules,
)

IGNORED_FIELDS = frozenset(
    (
        *("_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id"),
        *("max_position_embeddings", "pad_token_id", "torch_dtype", "transformers_version"),
        *("use_cache", "attention_dropout", "initializer_range"),
    )
)
"""The fields of config.json that do not change logits."""
_NO_ADAPTER_NAMES = ("gate", "router", "shared_expert_gate", "shared_gate")
"""The names of linears that choose or weight experts. They have no adapter, as in Tinker."""
_NO_ADAPTER_PREFIXES = ("altup.", "laurel.", "per_layer_", "self_attn.compressor.")
"""The names of linears beside attention and MLP begin with these (Gemma 3n, Gemma 4)."""
_NO_LORA_IN_PEFT: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("falcon_h1", "mamba2", "nemotron_h"), ("out_proj",)
)
"""The linears that PEFT gives no adapter in these models, because a fused kernel of Mamba-2 reads
their weight itself.
"""
_LAYERS_WITHOUT_POSITIONS = ("mlp", "moe")
"""The layer types of Nemotron-H that combine no positions."""
_LAYER_COUNT_FIELDS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_CONTEXT_FIELDS = ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions")


@dataclass(frozen=True)
class HFModel:
    """What planish needs to know of a model whose layers transformers' code computes."""

    modules: HFModules
    attention: tuple[AttentionCall, ...]
    """The attention of each layer with attention, ascending."""
    short_conv: ShortConvConfig | None
    """The layers with a short convolution in the place of attention; None if there are none."""
    mamba2: Mamba2Config | None
    """The layers with a Mamba-2 state; None if there are none."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """The largest output of a linear of the MLPs. Memory estimates use it."""
    expert_size: int
    experts_per_token: int
    max_context: int
    tied_head: bool
    logit_cap: float | None
    """The limit of logits (see `ModelConfig.logit_cap`)."""

    @property
    def num_experts(self) -> int:
        """The number of experts of each mixture-of-experts layer; 0 without experts."""
        counts = (linear.num_experts for layer in self.modules.layers for linear in layer)
        return max(counts, default=0)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer; empty if no layer has one."""
        windows: list[int | None] = [None] * len(self.modules.layers)
        for layer, call in zip(self.modules.attention_layers, self.attention, strict=True):
            if call.window is not None and call.window < self.max_context:
                windows[layer] = call.window
        return tuple(windows) if any(windows) else ()


def inspect_model(directory: Path) -> HFModel:
    """Return the description of the model in `directory`, which has a config.json.

    Raises UnsupportedError with the reason if planish cannot run the model.
    """
    return _inspect(directory, (directory / "config.json").stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _inspect(directory: Path, _modified: int) -> HFModel:
    """Return the result of `inspect_model`, which is cached until config.json changes."""
    fields = json.loads((directory / "config.json").read_text())
    parts = [fields, *(fields.get(part) for part in ("text_config", "vision_config"))]
    for part, name in product(parts, (*_LAYER_COUNT_FIELDS, "depth")):
        # Before lists with one entry for each layer are made.
        count = part.get(name) if isinstance(part, dict) else None
        if isinstance(count, int) and count > MAX_LAYERS:
            raise UnsupportedError(f"{name} is {count:,}; planish supports {MAX_LAYERS:,}")
    config = hf_config(directory, fields)
    try:
        return inspect_config(config, _settings_digest(fields))
    except UnsupportedError:
        raise
    except Exception as error:  # Configs and modelling code raise many kinds of errors.
        raise UnsupportedError(f"its code or config is odd ({first_line(error)})") from error


def hf_config(directory: Path, fields: Mapping[str, Any]) -> Any:
    """Return transformers' config of the model. `fields`: the content of config.json.

    Raises UnsupportedError if transformers has no causal language model for it.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    model_type = fields.get("model_type")
    version = f"transformers {transformers.__version__}"
    if model_type not in CONFIG_MAPPING:
        remote = (
            "; its repository has code of its own (auto_map), which planish never runs"
            if fields.get("auto_map")
            else ""
        )
        raise UnsupportedError(f"{version} has no model_type {model_type!r}{remote}")
    if fields.get("quantization_config") == {}:
        raise UnsupportedError(
            "quantization_config is empty, which transformers cannot read; remove the field"
        )
    if fields.get("quantization_config"):
        raise UnsupportedError(
            "quantization_config is set, and planish reads quantized checkpoints only in families "
            "that it has a decoder for; use the unquantized checkpoint, with quantize='int8' or "
            "'nf4' if memory is short"
        )
    names = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if is_vision_type(model_type)
        else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    known = names.get(str(model_type), ())
    known_names = (known,) if isinstance(known, str) else tuple(known)
    listed = fields.get("architectures") or list(known_names)
    if not known_names or listed[0] not in known_names:
        raise UnsupportedError(
            f"the architecture {', '.join(map(str, listed)) or 'not named'} (model_type "
            f"{model_type!r}) is no causal language model in {version}"
        )
    try:
        return transformers.AutoConfig.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        # The classes of configs validate their fields with many kinds of errors.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UnsupportedError(f"{version} cannot read it: {reason}") from error


def inspect_config(config: Any, settings_digest: str) -> HFModel:
    """Return the description of the model with this config of transformers.

    Raises UnsupportedError with the reason if planish cannot run the model.
    """
    text_config = config.get_text_config(decoder=True)
    vision, is_multimodal = vision_modules(config), is_vision_type(config.model_type)
    if text_config is not config and not is_multimodal:
        raise UnsupportedError(
            f"{type(config).__name__} contains several models, and planish runs text models only"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("it has an encoder, and planish runs decoders only")
    with quiet():
        model = meta_model(config)
        layers_name = _layers_name(model, text_config.num_hidden_layers, is_multimodal)
        _check_tied_layers(model, layers_name)
        recurrent = recurrent_modules(text_config, model.get_submodule(layers_name))
        short_conv, mamba2 = short_conv_config(recurrent), mamba2_config(recurrent)
        max_context = _max_context(text_config)
        head_name = _head_name(model)
        head_shape = tuple(model.get_submodule(head_name).weight.shape)
        decoder_layers = list(model.get_submodule(layers_name).children())
        layer_linears = [list(_linears(layer, config.model_type)) for layer in decoder_layers]
        weight_shapes = tuple((n, tuple(w.shape)) for n, w in model.named_parameters())
        base_name = base_model_name(layers_name)
        base = model.get_submodule(text_part_name(layers_name, is_multimodal))
        recorder = record_attention(model, base, decoder_layers, max_context)
        calls = recorder.calls
        mixer_names = list(_names_in_layers(calls, layers_name))
        attention_layers = tuple(map(layer_of, mixer_names))
        _check_one_call_per_layer(attention_layers, text_config, set(map(layer_of, recurrent)))
        _check_attention(calls)
        head_function = find_head_function(model, base_name, head_shape[1])
    prefixes: list[tuple[str, ...]] = [() for _ in layer_linears]
    for name in (*mixer_names, *recurrent):
        prefixes[layer_of(name)] += (f"{name.partition('.')[2]}.",)
    layers = tuple(
        tuple(_without_router(linears, prefixes[layer]))
        for layer, linears in enumerate(layer_linears)
    )
    mlp = [linear for layer in layers for linear in layer if linear.is_mlp]
    expert_size = min((linear.fan_in for linear in mlp if linear.num_experts), default=0)
    return HFModel(
        modules=HFModules(
            architecture=type(model).__name__,
            layers_name=layers_name,
            head_name=head_name,
            layers=layers,
            attention_names=tuple(call.module_name for call in calls),
            kv_numbers=_kv_numbers(calls),
            attention_layers=attention_layers,
            weight_shapes=weight_shapes,
            stored=tuple(map(tuple, recorder.stored[:-1])),
            workspace=tuple(recorder.workspace),
            settings_digest=settings_digest,
            head_scale=head_function.scale,
            vision=vision,
            is_multimodal=is_multimodal,
        ),
        attention=tuple(calls),
        short_conv=short_conv,
        mamba2=mamba2,
        vocab_size=head_shape[0],
        hidden_size=head_shape[1],
        intermediate_size=max(
            (max(linear.fan_out, linear.fan_in) for linear in mlp if not linear.num_experts),
            default=head_shape[1],
        ),
        expert_size=expert_size,
        experts_per_token=_experts_per_token(text_config) if expert_size else 0,
        max_context=max_context,
        tied_head=bool(getattr(config, "tie_word_embeddings", False)),
        logit_cap=head_function.cap,
    )


def meta_model(config: Any) -> Any:
    """Return the model of a config without weights."""
    import torch

    try:
        with torch.device("meta"), without_kernel_packages():
            model = auto_class(is_vision_type(config.model_type)).from_config(
                config, attn_implementation="eager"
            )
    except Exception as error:  # Model classes raise many kinds of errors for odd configs.
        raise UnsupportedError(f"transformers cannot create it: {first_line(error)}") from error
    return model.eval().requires_grad_(False)


def _check_tied_layers(model: Any, layers_name: str) -> None:
    """Raise UnsupportedError if layers share weights, as in Zamba2."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, source in tied.items():
        if name.startswith(f"{layers_name}."):
            raise UnsupportedError(
                f"its layers share weights ({name} is {source}), and planish needs linears of each "
                "layer's own"
            )


def _max_context(config: Any) -> int:
    """Return the maximum length of a sequence.

    With longrope, the frequencies change when the longest sequence of a batch exceeds the original
    context. So that context is the maximum. In a model that attends within chunks of positions
    (Llama 4), the maximum is one chunk.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    originals = [
        parameters.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict)))
        if parameters.get("rope_type") == "longrope"
    ]
    for name in _CONTEXT_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            limits = [*originals, getattr(config, "attention_chunk_size", None)]
            return min([value, *filter(None, limits)])
    raise UnsupportedError(
        "its config.json names no maximum context; set max_position_embeddings to it"
    )


def _layers_name(model: Any, num_layers: int, is_multimodal: bool) -> str:
    """Return the name of the list of decoder layers. It is not in a vision tower."""
    from torch import nn

    for name, module in model.named_modules():
        is_layers = isinstance(module, nn.ModuleList) and len(module) == num_layers
        if is_layers and (not is_multimodal or ".language_model." in name):
            return str(name)
    raise UnsupportedError(f"it has no list of {num_layers} layers (num_hidden_layers)")


def _names_in_layers(calls: Sequence[AttentionCall], layers_name: str) -> Iterator[str]:
    """Yield the name of the module of each call within the list of layers."""
    for call in calls:
        name = call.module_name.removeprefix(f"{layers_name}.")
        if name == call.module_name:
            raise UnsupportedError(f"{name} calls attention outside of its layers")
        yield name


def _check_one_call_per_layer(
    attention_layers: Sequence[int], config: Any, recurrent_layers: set[int]
) -> None:
    """Raise UnsupportedError if a layer calls attention twice, or has neither attention nor a
    recurrent state.
    """
    if not attention_layers and recurrent_layers:
        raise UnsupportedError(NO_ATTENTION)
    if not attention_layers:
        raise UnsupportedError(
            "its code does not call attention through transformers' AttentionInterface, so planish "
            "cannot replace it"
        )
    layer_types = getattr(config, "layer_types", None) or ()
    without = {i for i, kind in enumerate(layer_types) if kind in _LAYERS_WITHOUT_POSITIONS}
    expected = [
        layer
        for layer in range(config.num_hidden_layers)
        if layer in attention_layers or layer not in recurrent_layers | without
    ]
    if list(attention_layers) != expected:
        raise UnsupportedError(
            f"its {len(expected)} layers call attention {len(attention_layers)} times, and planish "
            "needs one call in each layer"
        )


def _head_name(model: Any) -> str:
    """Return the name of the output head. Raise UnsupportedError unless it is one linear."""
    from torch import nn

    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name is None or not isinstance(head, nn.Linear):
        raise UnsupportedError("its output head is not one linear")
    return str(name)


def _without_router(
    linears: Sequence[HFLinear], mixer_prefixes: tuple[str, ...]
) -> Iterator[HFLinear]:
    """Yield the linears of a layer except its router, which has one output for each expert.

    `mixer_prefixes`: the beginnings of the names of linears that belong to attention or to a
    recurrent state.
    """
    num_experts = max((linear.num_experts for linear in linears), default=0)
    for linear in linears:
        is_mlp = not linear.name.startswith(mixer_prefixes)
        if not is_mlp or linear.num_experts or linear.fan_out != num_experts:
            yield replace(linear, is_mlp=is_mlp)


def _has_adapter(name: str, model_type: str) -> bool:
    """Return whether an adapter may train the linear of this name in a layer."""
    excluded = (*_NO_ADAPTER_NAMES, *_NO_LORA_IN_PEFT.get(model_type, ()))
    return not name.startswith(_NO_ADAPTER_PREFIXES) and name.rpartition(".")[2] not in excluded


def _linears(layer: Any, model_type: str) -> Iterator[HFLinear]:
    """Yield the linears of a layer that adapters can train, and perhaps its router."""
    for name, module in layer.named_modules():
        if is_linear(module) and _has_adapter(name, model_type):
            fan_out, fan_in = linear_shape(module)
            yield HFLinear(name, fan_out, fan_in, True, is_transposed=is_transposed(module))
        elif is_experts_module(module):
            for linear in expert_linear_names(module):
                num_experts, *shape = getattr(module, linear).shape
                fan_out, fan_in = reversed(shape) if module.is_transposed else shape
                yield HFLinear(f"{name}.{linear}", fan_out, fan_in, True, num_experts)


def _check_attention(calls: list[AttentionCall]) -> None:
    """Raise UnsupportedError if the layers differ in a way that planish's attention lacks."""
    if len({call.softcap for call in calls}) > 1:
        raise UnsupportedError("its layers have different caps of attention scores")
    num_kv_heads = max(call.num_kv_heads for call in calls)
    for call in calls:
        if num_kv_heads % call.num_kv_heads or call.num_heads % num_kv_heads:
            raise UnsupportedError(
                f"{call.module_name} has {call.num_heads} query heads and {call.num_kv_heads} "
                f"key-value heads, and another layer has {num_kv_heads} key-value heads; planish "
                "needs multiples"
            )


def _kv_numbers(calls: Sequence[AttentionCall]) -> tuple[int, ...]:
    """Return the number of the keys and values of each call (see `HFModules.kv_numbers`).

    Raises UnsupportedError if a layer reads those of another layer through another window.
    """
    numbers: list[int] = []
    for call in calls:
        source = call.kv_source
        if source is not None and call.window != calls[source].window:
            raise UnsupportedError(
                f"{call.module_name} reads the keys and values of {calls[source].module_name}, and "
                "the two have different attention windows"
            )
        numbers.append(max(numbers, default=-1) + 1 if source is None else numbers[source])
    return tuple(numbers)


def _experts_per_token(config: Any) -> int:
    for name in ("num_experts_per_tok", "moe_topk", "top_k", "moe_k"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 1


def _settings_digest(fields: Mapping[str, Any]) -> str:
    relevant = {key: value for key, value in fields.items() if key not in IGNORED_FIELDS}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]
