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

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from planish.engine.checkpoints.files import MANIFEST_FILE, read_manifest
from planish.engine.checkpoints.store import AdapterSnapshot, CheckpointStore, SaveRequest
from planish.errors import DamagedFileError, UnsupportedError, UserError
from planish.export.adapter_config import AdapterConfig
from planish.export.adapter_layouts import LoraMatrices
from planish.export.lora_update import PEFT_PREFIX, StoredTensor, read_adapter
from planish.export.writing import MARKER_FILE
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.json_fields import read_json
from planish.model.architecture.linears import head_name, is_mlp, num_experts_of, trainable_linears
from planish.model.architecture.weight_sizes import SCHEMES
from planish.model.layers.lora import LoraLayout
from planish.model.layers.quantization import check_quantizable
from planish.model.sources.quantized_names import unquantized_remedy
from planish.model.sources.weights import load_weights, weights_fingerprint
from planish.types import CheckpointPath, CheckpointType, LoraConfig

MAX_RANK = 256
"""The maximum rank of an adapter."""
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


def import_adapter(
    directory: Path,
    store: CheckpointStore,
    *,
    base_model: str | None = None,
    quantize: str | None = None,
    models: Mapping[str, str] | None = None,
    run_id: str | None = None,
    name: str = "imported",
    checkpoint_type: CheckpointType = "training",
    source: str | None = None,
    overwrite: bool = False,
) -> ImportedAdapter:
    """Save the adapter in `directory` as the checkpoint NAME of the run RUN_ID in `store`. By
    default it is a training checkpoint, tinker://RUN_ID/weights/NAME.

    `base_model` is the model that the adapter was trained on; by default the one that
    adapter_config.json names. `quantize` is the scheme with which the weights of that model were
    quantized, by default the one that planish.json or planish_export.json names; without these
    files, none. `run_id` is by default derived from the directory's name. The metadata of the
    checkpoint name `source`, by default the directory.

    Raise CheckpointError if the adapter does not fit the base model. Raise UnsupportedError if it
    is not plain LoRA. Raise DamagedFileError if a file is damaged.
    """
    update = read_adapter(directory)
    _check_init(update.config)
    quantization = _base_quantization(directory, quantize)
    base_model, base_directory = update.resolve_base(base_model, models)
    model_config = _read_config(base_directory, base_model)
    check_quantizable(model_config, quantization)
    update.check_only_lora(
        partial(_is_copy_of_base, base_directory=base_directory, model=model_config)
    )
    if not update.pairs:
        raise DamagedFileError(f"{update.path} has no matrices; download the adapter again")
    reader = update.reader(model_config, MAX_RANK)
    layout = LoraLayout(model_config, _lora_config(reader.ranks, model_config))
    linears = reader.read(unit=layout.scaling)
    master_weights = _master_weights(layout, linears)
    state = {
        "master": master_weights,
        "exp_avg": torch.zeros_like(master_weights),
        "exp_avg_sq": torch.zeros_like(master_weights),
        "step": torch.tensor(0),
    }
    run_id = run_id or f"imported-{re.sub(r'[^A-Za-z0-9_.-]+', '-', directory.resolve().name)}"
    path = CheckpointPath(run_id, checkpoint_type, name)
    metadata = {"imported": source or directory.resolve().name}
    saved_adapter = AdapterSnapshot(
        state,
        layout,
        base_model,
        model_config.fingerprint(),
        weights_fingerprint(base_directory),
        quantization,
    )
    store.save(SaveRequest(path, overwrite=overwrite, user_metadata=metadata), saved_adapter)
    notes = _notes(update.config, layout, reader.ranks, model_config)
    if not any(matrices.b.any() for matrices in linears.values()):
        notes += (f"all matrices lora_B of {update.path} are 0, so it changes nothing",)
    return ImportedAdapter(path, base_model, layout.lora_config, quantization, len(linears), notes)


def _read_config(directory: Path, base_model: str) -> ModelConfig:
    try:
        return ModelConfig.from_directory(directory)
    except UnsupportedError as error:
        remedy = unquantized_remedy(base_model)
        if remedy is None:
            raise
        raise UnsupportedError(f"{remedy}. {error}") from error


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


def _check_init(config: AdapterConfig) -> None:
    init = config.fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise UnsupportedError(
            f"{config.path}: init_lora_weights is {init!r}, which changes the base weights; "
            "convert it with save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )


def _is_copy_of_base(
    name: str, tensor: StoredTensor, base_directory: Path, model: ModelConfig
) -> bool:
    """Return whether a tensor is a weight of the base model that PEFT saved too.

    PEFT does this for a head or an embedding with an adapter.
    """
    weight_name = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
    if weight_name not in ("lm_head.weight", "model.embed_tokens.weight"):
        return False
    weights = load_weights(base_directory, model)
    base_weight = weights.get(weight_name, weights["model.embed_tokens.weight"])
    return base_weight.shape == tensor.shape and torch.equal(base_weight.float(), tensor.load())


def _lora_config(ranks: Mapping[str, int], model: ModelConfig) -> LoraConfig:
    """Return the settings of the layout that contains linears of these ranks."""
    linears = trainable_linears(model)
    of_mlp = {is_mlp(model, *linears[name]) for name in ranks if name in linears}
    return LoraConfig(
        rank=max(ranks.values()),
        train_attn=False in of_mlp,
        train_mlp=True in of_mlp,
        train_unembed=head_name(model) in ranks,
    )


def _master_weights(layout: LoraLayout, linears: Mapping[str, LoraMatrices]) -> Tensor:
    """Return the adapter as one flat float32 vector in the order of `layout`."""
    master_weights = torch.zeros(layout.size)
    views = layout.views(master_weights)
    for entry in layout.entries:
        matrices = linears.get(entry.target)
        if matrices is None:
            continue
        rank, view = matrices.a.shape[-2], views[entry.name]
        if entry.is_b:
            view[..., :rank] = matrices.b
        else:
            view[..., :rank, :] = matrices.a
    return master_weights


def _notes(
    config: AdapterConfig, layout: LoraLayout, ranks: Mapping[str, int], model: ModelConfig
) -> tuple[str, ...]:
    notes = []
    targets = {entry.target for entry in layout.entries}
    if targets - ranks.keys():
        notes.append(
            f"{len(targets - ranks.keys())} linears have no matrices in the adapter; training "
            "leaves them unchanged"
        )
    missing = [
        linear
        for linear, (_, name) in trainable_linears(model).items()
        if config.is_target(name) and not num_experts_of(model, (name,)) and linear not in ranks
    ]
    if missing:
        notes.append(
            f"{len(missing)} linears are target_modules of {config.path} without matrices, such as "
            f"{missing[0]}: the file may be incomplete"
        )
    different_ranks = sorted(set(ranks.values()))
    if len(different_ranks) > 1:
        notes.append(
            f"ranks {', '.join(map(str, different_ranks))} are kept; the matrices are padded with "
            "zeros"
        )
    notes += [
        f"{pattern.name} has {len(pattern.unused_keys)} keys that decide for no module of the "
        f"adapter, such as {pattern.unused_keys[0]!r}"
        for pattern in (config.rank_pattern, config.alpha_pattern)
        if pattern.unused_keys
    ]
    if config.unknown_fields:
        notes.append(
            f"{config.path} has {len(config.unknown_fields)} fields that planish does not know and "
            f"does not use: {', '.join(config.unknown_fields)}"
        )
    if config.fields.get("lora_dropout"):
        notes.append(f"lora_dropout={config.fields['lora_dropout']} is not applied in training")
    return tuple(notes)
