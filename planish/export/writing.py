"""Write a checkpoint into a directory that other programs can load."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from planish.engine.checkpoints.files import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from planish.errors import CheckpointError, UserError
from planish.export.adapter_layouts import HEAD, is_head
from planish.export.atomic_directory import atomic_directory, check_replaceable
from planish.export.lora_update import MAX_MERGED_RANK, PEFT_PREFIX, LoraUpdate, read_adapter
from planish.export.merging import (
    SHARD_BYTES,
    RoundingError,
    save_tensors,
    write_json,
    write_merged,
)
from planish.export.model_card import README, ExportBase, Format, model_card
from planish.export.origin import Origin
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.families import is_multimodal
from planish.model.architecture.hf_config.json_fields import read_json
from planish.model.architecture.inspection.vision import is_vision_type
from planish.model.sources.listing import list_models
from planish.model.sources.resolve import HUB_FILES, TOKENIZER_FILES, resolve_model
from planish.model.sources.weights import text_model_name, weights_fingerprint

MARKER_FILE = "planish_export.json"
"""The file that identifies an export and describes its origin."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The supported dtypes by name."""
FORMATS: tuple[Format, ...] = ("peft", "merged")
"""The supported formats."""
_EXCLUDED_FILES = (
    "config.json", "hf_quant_config.json", "model*.safetensors", "model.safetensors.index.json", README,
)  # fmt: skip


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export."""

    format: Format = "peft"
    dtype: str | None = None
    """One of DTYPES. By default an adapter is float32, as in training, and the tensors of a merged
    model keep the dtypes of the base model.
    """
    base_model: str | None = None
    """A base model to use instead of the one that the checkpoint names; same architecture."""
    overwrite: bool = False
    """Whether to replace an existing export."""
    shard_bytes: int = SHARD_BYTES
    """The maximum size of a file of a merged model, which also bounds the memory in use."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"format={self.format!r}: give {' or '.join(FORMATS)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(
                f"dtype={self.dtype!r}: give one of {', '.join(DTYPES)}, or leave it out"
            )
        if self.shard_bytes < 1:
            raise UserError(f"shard_bytes={self.shard_bytes}: give a number of bytes above 0")


@dataclass(frozen=True)
class ExportResult:
    """The result of an export."""

    directory: Path
    base: ExportBase
    rounding: RoundingError
    """The rounding error of a merged model."""


def check_target(target: Path, options: ExportOptions) -> None:
    """Raise UserError if `target` cannot be written. Call it before slow work such as a
    download.
    """
    check_replaceable(target, marker=MARKER_FILE, overwrite=options.overwrite)


def write_export(
    origin: Origin, target: Path, options: ExportOptions, models: Mapping[str, str] | None = None
) -> ExportResult:
    """Write an export to `target`, completely or not at all.

    `models` maps names of base models to directories, as in ServiceClient.
    """
    check_target(target, options)
    update = read_adapter(origin.directory)
    if options.format == "peft":
        update.check_only_lora()
        update.check_peft_layout()
    base = _resolve_base(update, options, models)
    with atomic_directory(target, marker=MARKER_FILE, overwrite=options.overwrite) as partial:
        if options.format == "peft":
            rounding, dtype = RoundingError(), options.dtype or "float32"
            _write_adapter(update, base, partial, DTYPES[dtype])
        else:
            rounding = _write_merged_model(update, base, partial, options)
            dtype = options.dtype or "the base's own dtype"
        (partial / README).write_text(
            model_card(options.format, base, update, origin, dtype, rounding), encoding="utf-8"
        )
        write_json(partial / MARKER_FILE, _marker_content(origin, update, base, options, rounding))
    return ExportResult(target, base, rounding)


def _resolve_base(
    update: LoraUpdate, options: ExportOptions, models: Mapping[str, str] | None
) -> ExportBase:
    """Return the base model. Raise CheckpointError if the checkpoint was trained on another one.

    With `options.base_model`, only the architecture has to be the same.
    """
    # A merge needs the weights. An adapter is checked against them only if they are on this
    # machine.
    if options.format == "merged":
        name, directory = update.resolve_base(options.base_model, models)
    else:
        name = update.base_name(options.base_model)
        directory = _local_directory(name, models)
    if directory is None:
        return ExportBase(name, None)
    config = ModelConfig.from_directory(directory)
    update.reader(config, MAX_MERGED_RANK)  # checks that the adapter fits the model
    manifest = update.manifest
    if manifest is None:
        return ExportBase(name, directory)
    if config.fingerprint() != manifest.architecture:
        raise CheckpointError(
            f"the checkpoint was trained on another architecture than that of {name} at "
            f"{directory}; set PLANISH_MODELS to the directory of its own base model"
        )
    is_training_base = weights_fingerprint(directory) == manifest.weights
    if not is_training_base and options.base_model is None:
        raise CheckpointError(
            f"the checkpoint was trained on other weights than those of {name} at {directory}; set "
            "PLANISH_MODELS to the directory of its own weights, or give base_model to use these"
        )
    return ExportBase(name, directory, is_training_base)


def _local_directory(name: str, models: Mapping[str, str] | None) -> Path | None:
    """Return the directory of a base model if it is on this machine; None otherwise."""
    local_names = {entry.name for entry in list_models(models) if entry.is_local}
    return (
        resolve_model(name, models)
        if name in local_names or Path(name).expanduser().exists()
        else None
    )


def _write_adapter(
    update: LoraUpdate, base: ExportBase, directory: Path, dtype: torch.dtype
) -> None:
    config: dict[str, Any] = {**update.config.fields, "base_model_name_or_path": base.hub_name}
    model_prefix = "model."
    fields = {} if base.directory is None else read_json(base.directory / "config.json")
    # The adapter of transformers' multimodal model has its names, and excludes the towers.
    has_towers = is_vision_type(fields.get("model_type")) or bool(config.get("exclude_modules"))
    if is_multimodal(fields):
        model_prefix = "model.language_model."
        modules = config["target_modules"]
        # An export has a pattern already, and an adapter of experts alone has an empty list.
        if modules and isinstance(modules, list):
            # The pattern excludes the vision tower, whose modules have the same names.
            config["target_modules"] = rf".*language_model.*\.({'|'.join(modules)})"
    tensors = {}
    for module, pair in update.pairs.items():
        name = HEAD if is_head(module) else module if has_towers else text_model_name(module)
        if name.startswith("model.") and not has_towers:
            name = model_prefix + name.removeprefix("model.")
        tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = pair.a.load().to(dtype)
        tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = pair.b.load().to(dtype)
    save_tensors(tensors, directory / ADAPTER_FILE)
    write_json(directory / ADAPTER_CONFIG_FILE, config)


def _write_merged_model(
    update: LoraUpdate, base: ExportBase, directory: Path, options: ExportOptions
) -> RoundingError:
    assert base.directory is not None
    dtype = DTYPES[options.dtype] if options.dtype else None
    config = ModelConfig.from_directory(base.directory)
    rounding = write_merged(
        base.directory, config, update, directory, dtype=dtype, shard_bytes=options.shard_bytes
    )
    # An adapter with new tokens or another chat template has a tokenizer of its own.
    has_tokenizer = any(update.path.parent.glob("tokenizer*"))
    for pattern in HUB_FILES:
        if pattern not in _EXCLUDED_FILES:
            is_of_tokenizer = has_tokenizer and pattern in TOKENIZER_FILES
            source = update.path.parent if is_of_tokenizer else base.directory
            for file in source.glob(pattern):
                (directory / file.name).write_bytes(file.read_bytes())
    return rounding


def _marker_content(
    origin: Origin,
    update: LoraUpdate,
    base: ExportBase,
    options: ExportOptions,
    rounding: RoundingError,
) -> Mapping[str, Any]:
    manifest = update.manifest
    return {
        "format": options.format,
        "dtype": options.dtype,
        "checkpoint": origin.name,
        "base_model": base.name if base.is_on_hub else Path(base.name).name,
        "base_weights": manifest.weights if manifest else None,
        "base_quantization": manifest.quantize if manifest else None,
        "lora": asdict(manifest.lora) if manifest else None,
        "step": manifest.step if manifest else None,
        "rounding": rounding.relative_error if options.format == "merged" else None,
        "exported": datetime.now(UTC).isoformat(),
    }
