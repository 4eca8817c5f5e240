"""The settings of an adapter: its adapter_config.json in PEFT's format, checked.

Features beyond a plain LoRA update (DoRA, trained biases, whole modules) are rejected by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.engine.checkpoints.files import ADAPTER_CONFIG_FILE
from planish.errors import DamagedFileError, UnsupportedError
from planish.export.module_patterns import ModulePatterns
from planish.model.architecture.hf_config.json_fields import read_json

_OTHER_METHODS: Mapping[str, str] = {
    "use_dora": "DoRA scales the columns of the weight instead of adding to it",
    "use_qalora": "QALoRA pools the inputs",
    "use_bdlora": "the matrices would be block-diagonal",
    "kasa_config": "KaSA changes the base weights and scales each rank",
    "monteclora_config": "MonteCLoRA samples its matrices",
    "lora_bias": "biases are not trained here",
    "fan_in_fan_out": "the weights of planish's models are not transposed",
    "layer_replication": "the base model would have other layers",
    "alora_invocation_tokens": "the adapter would act on a part of the tokens only",
    "arrow_config": "several adapters would be mixed",
    "megatron_config": "Megatron's layers are split across devices",
}
"""Fields of adapter_config.json that a plain LoRA adapter leaves empty, and why any other value is
rejected.
"""

_USED_FIELDS = (
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save",
    "trainable_token_indices", "ensure_weight_tying", "init_lora_weights", "lora_dropout",
    "base_model_name_or_path", "target_modules", "target_parameters", "layers_to_transform",
    "exclude_modules", "bias",
)  # fmt: skip
_FIELDS_WITHOUT_EFFECT = (
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "layers_pattern", "megatron_core", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "velora_config", "qalora_group_size", "runtime_config",
)  # fmt: skip
"""Fields that choose modules, which the tensors show, or that only matter in training."""


@dataclass(frozen=True)
class AdapterConfig:
    """The content of adapter_config.json."""

    fields: Mapping[str, Any]
    path: Path
    """The path of the file, for messages."""
    rank_pattern: ModulePatterns
    alpha_pattern: ModulePatterns

    @classmethod
    def read(cls, directory: Path) -> AdapterConfig:
        """Read the adapter_config.json in `directory`.

        Raises UnsupportedError if the adapter is not plain LoRA, and DamagedFileError if the file
        is damaged, or the rank or alpha is not a positive number.
        """
        path = directory / ADAPTER_CONFIG_FILE
        fields = read_json(path)
        _check_plain_lora(fields, path)
        if not isinstance(name := fields.get("base_model_name_or_path"), str | None):
            raise DamagedFileError(
                f"{path}: base_model_name_or_path is {name!r}, not a string; get the adapter again"
            )
        patterns = {}
        for name, check in (("rank_pattern", _check_rank), ("alpha_pattern", _check_alpha)):
            patterns[name] = ModulePatterns(f"{path}: {name}", fields.get(name))
            for key, value in (fields.get(name) or {}).items():
                check(value, f"{path}: {name}[{key!r}]")
        return cls(fields, path, **patterns)

    @property
    def rank(self) -> int:
        """The rank of modules that `rank_pattern` does not name."""
        rank: int = self.fields["r"]
        return rank

    @property
    def alpha(self) -> float:
        """The alpha of modules that `alpha_pattern` does not name."""
        return float(self.fields["lora_alpha"])

    @property
    def scaling(self) -> float:
        """The scaling factor of modules that no pattern names."""
        return self._factor(self.alpha, self.rank)

    @property
    def base_model(self) -> str | None:
        """The name of the base model, or None."""
        name: str | None = self.fields.get("base_model_name_or_path")
        return name

    @property
    def unknown_fields(self) -> list[str]:
        """The names of fields with a value that planish does not know."""
        known = {*_USED_FIELDS, *_FIELDS_WITHOUT_EFFECT, *_OTHER_METHODS}
        return sorted(name for name, value in self.fields.items() if value and name not in known)

    @property
    def modules_to_save(self) -> list[str]:
        """The names of the modules that are trained whole."""
        return self.fields.get("modules_to_save") or []

    @property
    def trainable_token_indices(self) -> object:
        """The tokens whose embeddings are trained: a list, or lists by the module's name."""
        return self.fields.get("trainable_token_indices")

    def is_target(self, module: str) -> bool:
        """Return whether the settings name a module of every layer, such as "self_attn.q_proj"."""
        targets = self.fields.get("target_modules")
        chooses_layers = self.fields.get("layers_to_transform") is not None
        if not isinstance(targets, list) or chooses_layers or self.fields.get("exclude_modules"):
            return False
        return any(f".{module}".endswith(f".{name}") for name in targets)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module. `module`: its full name in the model that PEFT adapted."""
        rank: int = self.rank_pattern.value(module, self.rank)
        return rank

    def scaling_of(self, module: str) -> float:
        """Return the factor of B A for a module: alpha / rank, or alpha / sqrt(rank) with rsLoRA
        (Kalajdzievski 2023).
        """
        return self._factor(self.alpha_pattern.value(module, self.alpha), self.rank_of(module))

    def _factor(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.fields.get("use_rslora") else rank)


def _check_plain_lora(fields: Mapping[str, Any], path: Path) -> None:
    # The hosted service writes no peft_type.
    if fields.get("peft_type", "LORA") != "LORA":
        raise UnsupportedError(
            f"{path}: peft_type is {fields.get('peft_type')!r}; planish takes LORA"
        )
    if fields.get("bias") not in ("none", None):
        raise UnsupportedError(
            f"{path}: bias is {fields['bias']!r}, and biases are not trained here"
        )
    for name, reason in _OTHER_METHODS.items():
        if fields.get(name):
            raise UnsupportedError(f"{path}: {name} is {fields[name]!r}, and {reason}")
    modules = fields.get("modules_to_save") or []
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise DamagedFileError(f"{path}: modules_to_save is {modules!r}, not a list of names")
    if not isinstance(fields.get("use_rslora"), bool | None):
        raise DamagedFileError(f"{path}: use_rslora is {fields['use_rslora']!r}, not true or false")
    _check_rank(fields.get("r"), f"{path}: r")
    _check_alpha(fields.get("lora_alpha"), f"{path}: lora_alpha")


def _check_rank(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DamagedFileError(
            f"{name} is {value!r}, not a positive whole number; get the adapter again"
        )


def _check_alpha(value: object, name: str) -> None:
    # The comparison also excludes NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**64:
        raise DamagedFileError(f"{name} is {value!r}, not a positive number; get the adapter again")
