"""Import adapters of other programs (PEFT, TRL, Unsloth, hosted services) as training checkpoints
with a fresh optimizer.

planish's adapters have one rank, the scaling factor 32 / rank, and matrices for all linear layers
of a group (attention, MLP, head). An imported adapter is rewritten so that each update B A keeps
its value: the scaling factor goes into B, a smaller rank is padded with zeros, and layers without
an adapter get A = B = 0. If A and B are both zero, so are their gradients. So training continues
with exactly the layers that were trained before. Adapters that are not plain LoRA are rejected by
name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planish.engine.checkpoints.files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MANIFEST_FILE,
    read_manifest,
)
from planish.engine.checkpoints.store import AdapterSnapshot, CheckpointStore, SaveRequest
from planish.errors import CheckpointError, DamagedFileError, UnsupportedError, UserError
from planish.export.lora_update import PEFT_PREFIX, LoraMatrices, check_plain_lora, read_matrices
from planish.export.writing import MARKER_FILE
from planish.model.config import ModelConfig, read_json
from planish.model.lora import PEFT_EXPERT_NAMES, LoraLayout, split_expert_matrices
from planish.model.quantization import check_quantizable
from planish.model.sources import resolve_model
from planish.model.weight_sizes import SCHEMES
from planish.model.weights import load_weights, weights_fingerprint
from planish.types import CheckpointPath, LoraConfig

MAX_RANK = 256
"""The maximum rank of an adapter."""
_PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt")
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "eva_residual", "lora_ga")
"""Values of init_lora_weights that also change the base weights."""


@dataclass(frozen=True)
class ImportedAdapter:
    """The result of an import."""

    path: CheckpointPath
    base_model: str
    lora: LoraConfig
    quantize: str | None
    """The quantization scheme of the base weights that the adapter was trained on, or None."""
    num_linears: int
    """The number of linear layers that the adapter changes."""
    notes: tuple[str, ...]
    """Sentences that tell the user what the import changed or ignored."""


@dataclass(frozen=True)
class _ScaledLoraMatrices:
    a: Tensor
    b: Tensor
    scaling: float


def import_adapter(
    directory: Path,
    store: CheckpointStore,
    *,
    base_model: str | None = None,
    quantize: str | None = None,
    models: Mapping[str, str] | None = None,
    run_id: str | None = None,
    name: str = "imported",
    overwrite: bool = False,
) -> ImportedAdapter:
    """Save the adapter in `directory` as the checkpoint tinker://RUN_ID/weights/NAME of `store`.

    `base_model` is the model that the adapter was trained on; by default the one that
    adapter_config.json names. `quantize` is the scheme with which the weights of that model were
    quantized, by default the one that planish.json or planish_export.json names; without these
    files, none. `run_id` is by default derived from the directory's name.

    Raise CheckpointError if the adapter does not fit the base model. Raise UnsupportedError if it
    is not plain LoRA. Raise DamagedFileError if a file is damaged.
    """
    config = _read_adapter_config(directory)
    base_model = base_model or config.get("base_model_name_or_path")
    if not base_model:
        raise UserError(
            f"{directory / ADAPTER_CONFIG_FILE} names no base model; give --base-model NAME"
        )
    quantization = _base_quantization(directory, quantize)
    base_directory = resolve_model(base_model, models)
    model_config = ModelConfig.from_directory(base_directory)
    check_quantizable(model_config, quantization)
    linears = {
        linear: _ScaledLoraMatrices(a, b, _lora_scaling(config, linear, a.shape[-2]))
        for linear, a, b in _matrices_by_target(
            _read_finite_matrices(directory, base_directory, model_config), model_config
        )
    }
    layout = LoraLayout(model_config, _lora_config(linears, directory))
    master_weights = _master_weights(layout, linears, base_model, directory)
    state = {
        "master": master_weights,
        "exp_avg": torch.zeros_like(master_weights),
        "exp_avg_sq": torch.zeros_like(master_weights),
        "step": torch.tensor(0),
    }
    run_id = run_id or f"imported-{re.sub(r'[^A-Za-z0-9_.-]+', '-', directory.resolve().name)}"
    path = CheckpointPath(run_id, "training", name)
    metadata = {"imported": directory.resolve().name}
    saved_adapter = AdapterSnapshot(
        state,
        layout,
        base_model,
        model_config.fingerprint(),
        weights_fingerprint(base_directory),
        quantization,
    )
    store.save(SaveRequest(path, overwrite=overwrite, user_metadata=metadata), saved_adapter)
    notes = _notes(config, layout, linears)
    return ImportedAdapter(path, base_model, layout.lora_config, quantization, len(linears), notes)


def _base_quantization(directory: Path, quantize: str | None) -> str | None:
    """Return the quantization scheme of the base weights that an adapter was trained on.

    `quantize`: the scheme that the user gave, or None.
    """
    if quantize not in (None, *SCHEMES):
        raise UserError(f"quantize={quantize!r}: give {' or '.join(map(repr, SCHEMES))}")
    recorded: str | None = None
    if (directory / MANIFEST_FILE).is_file():
        file_name, recorded = MANIFEST_FILE, read_manifest(directory).quantize
    elif (directory / MARKER_FILE).is_file():
        file_name = MARKER_FILE
        recorded = read_json(directory / MARKER_FILE).get("base_quantization")
    else:
        return quantize
    if recorded not in (None, *SCHEMES):
        raise UnsupportedError(
            f"{directory / file_name} names the quantization scheme {recorded!r}; this planish has "
            f"{', '.join(SCHEMES)}"
        )
    if quantize not in (None, recorded):
        raise UserError(
            f"quantize={quantize!r}: {directory / file_name} says that the adapter was trained on "
            f"base weights {f'quantized with {recorded}' if recorded else 'without quantization'}; "
            "leave quantize out"
        )
    return recorded


def _read_adapter_config(directory: Path) -> dict[str, Any]:
    config_path = directory / ADAPTER_CONFIG_FILE
    if not config_path.is_file():
        raise CheckpointError(
            f"{directory} has no {ADAPTER_CONFIG_FILE}, so it is not an adapter; give a directory "
            "that PEFT saved"
        )
    if not (directory / ADAPTER_FILE).is_file():
        pickled = next((name for name in _PICKLE_FILES if (directory / name).exists()), None)
        if pickled:
            raise UnsupportedError(
                f"{directory / pickled} is a pickle, which could run code; save it again with "
                "save_pretrained(..., safe_serialization=True)"
            )
        raise CheckpointError(f"{directory} has no {ADAPTER_FILE}; get the adapter again")
    config = read_json(config_path)
    check_plain_lora(config, config_path)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise UnsupportedError(
            f"{config_path}: init_lora_weights is {init!r}, which changes the base weights; "
            "convert it with save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    return config


def _read_finite_matrices(
    directory: Path, base_directory: Path, model: ModelConfig
) -> dict[str, LoraMatrices]:
    """Return the matrices by the name of the linear layer, without copies of base weights."""
    matrices_by_linear = read_matrices(
        directory, partial(_is_copy_of_base, base_directory=base_directory, model=model)
    )
    for linear, matrices in matrices_by_linear.items():
        if not (torch.isfinite(matrices.a).all() and torch.isfinite(matrices.b).all()):
            raise DamagedFileError(
                f"{directory / ADAPTER_FILE}: {linear} contains NaN or infinity; give another "
                "adapter"
            )
    return matrices_by_linear


def _matrices_by_target(
    matrices_by_linear: Mapping[str, LoraMatrices], model: ModelConfig
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each linear in a `LoraLayout`, with A and B.

    The matrices of a layer's experts get a first dimension for the expert.
    """
    for linear, pair in matrices_by_linear.items():
        a, b = pair.a, pair.b
        for layout_name, file_name in PEFT_EXPERT_NAMES.items():
            # PEFT adds ".base_layer" to the name of one of the two linears of the experts. The name
            # tells which of them it is only if both have matrices.
            possible_names = {linear, linear.removesuffix(".base_layer"), f"{linear}.base_layer"}
            if (
                linear.endswith(f".{file_name}")
                and model.num_experts
                and a.shape[0] % model.num_experts == 0
                and len(possible_names & matrices_by_linear.keys()) == 2
            ):
                prefix = linear.removesuffix(file_name)
                yield f"{prefix}{layout_name}", *split_expert_matrices(a, b, model.num_experts)
                break
        else:
            yield linear, a, b


def _is_copy_of_base(name: str, tensor: Tensor, base_directory: Path, model: ModelConfig) -> bool:
    """Return whether a tensor is a weight of the base model that PEFT saved too.

    PEFT does this for a head or an embedding with an adapter.
    """
    weight_name = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
    if weight_name not in ("lm_head.weight", "model.embed_tokens.weight"):
        return False
    weights = load_weights(base_directory, model)
    base_weight = weights.get(weight_name, weights["model.embed_tokens.weight"])
    return base_weight.shape == tensor.shape and torch.equal(base_weight.to(tensor.dtype), tensor)


def _lora_scaling(config: Mapping[str, Any], linear: str, rank: int) -> float:
    """Return the scaling factor of B A for one linear layer."""
    alpha = _pattern_value(config.get("alpha_pattern"), linear, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern_value(pattern: Mapping[str, float] | None, linear: str, default: float) -> float:
    """Return the value for a layer as PEFT looks it up: keys are regular expressions for the name's
    end.
    """
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", linear):
            return value
    return default


def _lora_config(linears: Mapping[str, _ScaledLoraMatrices], directory: Path) -> LoraConfig:
    rank = max(linear.a.shape[-2] for linear in linears.values())
    if rank > MAX_RANK:
        raise UnsupportedError(
            f"{directory}: rank {rank} is above {MAX_RANK}, the most that planish has"
        )
    return LoraConfig(
        rank=rank,
        train_attn=any(
            module in name for name in linears for module in (".self_attn.", ".linear_attn.")
        ),
        train_mlp=any(".mlp." in name for name in linears),
        train_unembed="lm_head" in linears,
    )


def _master_weights(
    layout: LoraLayout, linears: Mapping[str, _ScaledLoraMatrices], base_model: str, directory: Path
) -> Tensor:
    """Return the adapter as one flat float32 vector in the order of `layout`."""
    b_entries = {entry.target: entry for entry in layout.entries if entry.is_b}
    for name, linear in linears.items():
        b_entry = b_entries.get(name)
        if b_entry is None:
            raise UnsupportedError(
                f"{directory / ADAPTER_FILE} changes {name}, which has no adapter in planish; its "
                f"targets are the linears of attention and MLP and lm_head of {base_model}"
            )
        a_entry = next(e for e in layout.entries if e.target == name and not e.is_b)
        shape = (*linear.b.shape[:-1], linear.a.shape[-1])
        expected_shape = (*b_entry.shape[:-1], a_entry.shape[-1])
        if shape != expected_shape:
            raise CheckpointError(
                f"{directory / ADAPTER_FILE}: {name} has the shape {shape}, but that linear of "
                f"{base_model} has the shape {expected_shape}; give the base model that the "
                "adapter was trained on"
            )
    master_weights = torch.zeros(layout.size)
    views = layout.views(master_weights)
    for entry in layout.entries:
        linear = linears.get(entry.target)
        if linear is None:
            continue
        rank, view = linear.a.shape[-2], views[entry.name]
        if entry.is_b:
            view[..., :rank] = linear.b * (linear.scaling / layout.scaling)
        else:
            view[..., :rank, :] = linear.a
    return master_weights


def _notes(
    config: Mapping[str, Any], layout: LoraLayout, linears: Mapping[str, _ScaledLoraMatrices]
) -> tuple[str, ...]:
    notes = []
    targets = {entry.target for entry in layout.entries}
    if targets - linears.keys():
        notes.append(
            f"{len(targets - linears.keys())} linears have no matrices in the adapter; training "
            "leaves them unchanged"
        )
    ranks = sorted({linear.a.shape[-2] for linear in linears.values()})
    if len(ranks) > 1:
        notes.append(
            f"ranks {', '.join(map(str, ranks))} are kept; the matrices are padded with zeros"
        )
    if config.get("lora_dropout"):
        notes.append(f"lora_dropout={config['lora_dropout']} is not applied in training")
    return tuple(notes)
