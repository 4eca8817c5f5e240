"""The files of one checkpoint directory.

    adapter_model.safetensors, adapter_config.json   the adapter in PEFT's format: PEFT and vLLM
        can load the directory directly
    optimizer.safetensors                            only in training checkpoints: exp_avg,
        exp_avg_sq, step
    planish.json                                     the manifest: base model, LoRA settings, and
        the size and SHA-256 of each other file

Master weights and moments are float32 and are restored bit for bit. The SHA-256 of a file is
compared before the file is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from planish.errors import CheckpointError, DamagedFileError, StorageError
from planish.files import set_default_mode, sync
from planish.model.architecture.inspection.vision import TOWERS
from planish.model.architecture.linears import is_mlp, num_experts_of, trainable_linears
from planish.types import LoraConfig

if TYPE_CHECKING:
    # Importing torch takes seconds, and commands that only list checkpoints do not need it.
    from torch import Tensor

    from planish.model.architecture.config import ModelConfig
    from planish.model.layers.lora import LoraLayout

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST_FILE = "planish.json"
MANIFEST_FORMAT = 1
MAX_MANIFEST_BYTES = 4 << 20
"""The size of the largest manifest that is read. A manifest has the metadata of the model and of
the checkpoint, at most MAX_METADATA characters each. As JSON they take at most 1.5 MiB together.
"""

_PEFT_PREFIX = "base_model.model."
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StoredFile:
    """The size in bytes and the SHA-256 (hex) of a saved file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of planish.json."""

    base_model: str
    """Name of the base model."""
    architecture: str
    """Fingerprint of the base model's architecture."""
    weights: str
    """Fingerprint of the base model's weights."""
    lora: LoraConfig
    step: int
    time: datetime
    expires_at: datetime | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, StoredFile] = field(default_factory=dict[str, StoredFile])
    quantize: str | None = None
    """The quantization scheme of the base weights; None if they were not quantized."""

    def to_json(self) -> str:
        """Return the manifest as the text of planish.json."""
        fields: dict[str, Any] = {"format": MANIFEST_FORMAT, **asdict(self)}
        fields["time"] = self.time.isoformat()
        fields["expires_at"] = self.expires_at.isoformat() if self.expires_at else None
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse the text of planish.json.

        Raises ValueError, KeyError or TypeError if the text is not a manifest of this format.
        """
        fields = json.loads(text)
        if (found := fields.pop("format")) != MANIFEST_FORMAT:
            raise ValueError(
                f"its format is {found!r}, and this planish reads format {MANIFEST_FORMAT}"
            )
        for name in ("base_model", "architecture", "weights"):
            if not isinstance(fields[name], str):
                raise TypeError(f"{name} is {fields[name]!r}, not a string")
        expires_at = fields.pop("expires_at")
        return cls(
            lora=LoraConfig(**fields.pop("lora")),
            time=datetime.fromisoformat(fields.pop("time")),
            expires_at=datetime.fromisoformat(expires_at) if expires_at else None,
            files={name: StoredFile(**file) for name, file in fields.pop("files").items()},
            **fields,
        )


def write_tensors(
    directory: Path,
    layout: LoraLayout,
    state: Mapping[str, Tensor],
    base_model: str,
    with_optimizer: bool,
) -> dict[str, StoredFile]:
    """Write and fsync all files except the manifest; return their sizes and SHA-256.

    `state`: the result of `Adapter.state()`. Raises StorageError if a tensor file cannot be
    written, and OSError for other disk errors.
    """
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    views = layout.views(state["master"].cpu())
    matrices = {
        f"{_PEFT_PREFIX}{entry.peft_name}.weight": entry.to_peft(views[entry.name])
        for entry in layout.entries
    }
    tensors_by_file = {ADAPTER_FILE: matrices}
    if with_optimizer:
        tensors_by_file[OPTIMIZER_FILE] = {name: state[name].cpu() for name in (*_MOMENTS, "step")}
    for name, content in tensors_by_file.items():
        try:
            save_file(content, directory / name, metadata={"format": "pt"})
            set_default_mode(directory / name)
        except SafetensorError as error:
            raise StorageError(f"cannot write {name} ({error})") from error
    (directory / ADAPTER_CONFIG_FILE).write_text(
        json.dumps(peft_config(layout, base_model), indent=2) + "\n"
    )
    names = (*tensors_by_file, ADAPTER_CONFIG_FILE)
    for name in names:
        sync(directory / name)
    return {name: _stored_file(directory / name) for name in names}


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write and fsync planish.json, which must be the last file of the checkpoint."""
    (directory / MANIFEST_FILE).write_text(manifest.to_json())
    sync(directory / MANIFEST_FILE)
    sync(directory)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest in `directory`. Raises DamagedFileError if it is missing or invalid."""
    path = directory / MANIFEST_FILE
    try:
        size = path.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"the file has {size:,} bytes, more than the limit {MAX_MANIFEST_BYTES:,}"
            )
        return Manifest.from_json(path.read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(
            f"{path} cannot be used ({error}); use another checkpoint"
        ) from error


def read_state(
    directory: Path, manifest: Manifest, layout: LoraLayout, with_optimizer: bool
) -> dict[str, Tensor]:
    """Return the state for `Adapter.load_state`.

    Raises DamagedFileError if a file is missing or differs from the saved one. Raises
    CheckpointError if the matrices do not match `layout`.
    """
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    names = [ADAPTER_FILE, ADAPTER_CONFIG_FILE, *([OPTIMIZER_FILE] if with_optimizer else [])]
    for name in names:
        check_file(directory / name, manifest.files.get(name))
    try:
        state = {"master": _flat_master(load_file(directory / ADAPTER_FILE), layout)}
        if with_optimizer:
            state |= load_file(directory / OPTIMIZER_FILE)
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(
            f"{directory} cannot be read ({error}); use another checkpoint"
        ) from error
    return state


def peft_config(layout: LoraLayout, base_model: str) -> dict[str, Any]:
    """Return the content of adapter_config.json in PEFT's format."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": layout.lora_config.rank,
        "lora_alpha": layout.ALPHA,
        **_peft_targets(layout),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _peft_targets(layout: LoraLayout) -> dict[str, Any]:
    """Return the fields of adapter_config.json that name the adapted linears.

    PEFT adapts the experts of a layer as 3-D parameters, listed in target_parameters. In a model
    with experts, PEFT would apply an MLP name in target_modules to the experts as well. So the MLP
    linears of dense layers are listed in target_parameters too.
    """
    targets = {entry.target for entry in layout.entries}
    if layout.model_config.hf is not None:
        return _peft_targets_of_linears(layout.model_config, targets)
    if not layout.model_config.num_experts:
        return {"target_modules": sorted({target.rsplit(".", 1)[-1] for target in targets})}
    mlp = {target.split(".", 3)[-1] for target in targets if ".mlp." in target}
    return {
        "target_modules": sorted(
            {target.rsplit(".", 1)[-1] for target in targets if ".mlp." not in target}
        ),
        "target_parameters": sorted(
            name if ".experts." in name else f"{name}.weight" for name in mlp
        ),
    }


def _peft_targets_of_linears(model: ModelConfig, targets: set[str]) -> dict[str, Any]:
    """Return the result of `_peft_targets` for a model of model/hf."""
    linears = trainable_linears(model)
    adapted = {linears[target] for target in targets if target in linears}
    names = {name for _, name in adapted}
    mlp = {name for layer, name in adapted if is_mlp(model, layer, name)}
    # A last part such as "c_proj" may be that of a linear without an adapter, too.
    others = {name.rsplit(".", 1)[-1] for _, name in set(linears.values()) - adapted}
    in_parameters: set[str] = mlp if model.num_experts else set()
    modules = {
        last if (last := name.rsplit(".", 1)[-1]) not in others else name
        for name in names - in_parameters
    }
    modules |= targets - linears.keys()
    experts = {name for name in in_parameters if num_experts_of(model, (name,))}
    parameters = experts | {f"{name}.weight" for name in in_parameters - experts}
    fields: dict[str, Any] = {"target_modules": sorted(modules)}
    if parameters:
        fields["target_parameters"] = sorted(parameters)
    if model.hf is not None and model.hf.is_multimodal:
        # Linears of the vision tower may have the names of the text model's.
        fields["exclude_modules"] = TOWERS
    return fields


def _flat_master(tensors: Mapping[str, Tensor], layout: LoraLayout) -> Tensor:
    entries = {f"{_PEFT_PREFIX}{entry.peft_name}.weight": entry for entry in layout.entries}
    if entries.keys() != tensors.keys() or any(
        tensors[name].shape != e.peft_shape for name, e in entries.items()
    ):
        raise CheckpointError(
            "the names or shapes of the checkpoint's matrices differ from those of this model; use "
            "the base model that the adapter was trained on"
        )
    import torch

    master = torch.empty(layout.size)
    for name, entry in entries.items():
        matrix = entry.from_peft(tensors[name])
        master[entry.offset : entry.offset + entry.size] = matrix.reshape(-1)
    return master


def _stored_file(path: Path) -> StoredFile:
    with open(path, "rb") as file:
        return StoredFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def check_file(path: Path, expected: StoredFile | None) -> None:
    """Raise DamagedFileError unless `path` has the size and the SHA-256 of `expected`."""
    if expected is None or not path.is_file():
        raise DamagedFileError(
            f"{path} is missing, so the checkpoint is damaged; use another checkpoint"
        )
    if path.stat().st_size != expected.size or _stored_file(path) != expected:
        raise DamagedFileError(
            f"{path} is not the file that was saved (its size or SHA-256 differs from "
            f"{MANIFEST_FILE}); use another checkpoint"
        )
