"""Read an adapter from its files: the matrices A and B of each linear layer. Their matmul B A,
times a scaling factor, is added to the weight.

The directory has PEFT's layout, which planish's own checkpoints use too. If it has a planish.json,
the files are verified against the SHA-256 in it. Features beyond a plain LoRA update (DoRA, trained
biases, whole modules) are rejected by name.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from planish.engine.checkpoints.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    MANIFEST,
    Manifest,
    check_file,
    read_manifest,
)
from planish.errors import CheckpointError, DamagedFileError, UnsupportedError
from planish.model.config import ModelConfig, read_json
from planish.model.lora import EXPERT_FILE_NAMES, expert_matrices
from planish.model.weights import expected_shapes, text_name

HEAD = "lm_head"
"""The name of the output head."""
PREFIX = "base_model.model."
_HEADS = ("model.unembed_tokens", "unembed_tokens", "model.lm_head")
"""Names of the output head in adapters that other programs saved."""
_TENSOR_NAME = re.compile(
    rf"(?:{re.escape(PREFIX)})?(?P<linear>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight"
)
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False, None), "DoRA scales the columns of the weight instead of adding to it"),
    "use_qalora": ((False, None), "QALoRA pools the inputs"),
    "bias": (("none", None), "biases are not trained here"),
    "modules_to_save": (([], None), "whole modules are not part of an adapter here"),
    "fan_in_fan_out": ((False, None), "the weights of planish's models are not transposed"),
    "trainable_token_indices": (([], {}, None), "embeddings are not trained here"),
    "layer_replication": (([], None), "the base model would have other layers"),
    "alora_invocation_tokens": (([], None), "the adapter would act on a part of the tokens only"),
    "arrow_config": ((None,), "several adapters would be mixed"),
    "megatron_config": ((None,), "Megatron's layers are split across devices"),
}
"""Fields of adapter_config.json: the values of a plain LoRA adapter, and why any other is
rejected.
"""


@dataclass(frozen=True)
class Matrices:
    """The matrices of one linear layer: A [rank, in] and B [out, rank], float32."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class LoraUpdate:
    """The content of an adapter directory."""

    config: Mapping[str, Any]
    """The content of adapter_config.json."""
    linears: Mapping[str, Matrices]
    """The matrices by the layer's name in the file, such as "model.layers.0.self_attn.q_proj" or
    "lm_head". The experts of a layer have one pair of matrices for gate and up, named
    "model.layers.0.mlp.experts.base_layer", and one for down, named "model.layers.0.mlp.experts".
    """
    manifest: Manifest | None
    """The content of planish.json; None for an adapter that planish did not save."""

    @property
    def rank(self) -> int:
        """The LoRA rank."""
        return int(self.config["r"])

    @property
    def alpha(self) -> float:
        """The LoRA alpha."""
        return float(self.config["lora_alpha"])

    @property
    def scaling(self) -> float:
        """alpha / rank; with rsLoRA alpha / sqrt(rank) (Kalajdzievski 2023)."""
        return self.alpha / (math.sqrt(self.rank) if self.config.get("use_rslora") else self.rank)

    @property
    def base_model(self) -> str | None:
        """The name of the base model according to the files."""
        if self.manifest:
            return self.manifest.base_model
        return self.config.get("base_model_name_or_path")

    def by_weight(self, model: ModelConfig) -> Mapping[str, Matrices]:
        """Return the matrices by the name of a weight of the base model without ".weight":
        `linears`, with separate matrices for each expert.
        """
        found: dict[str, Matrices] = {}
        for linear, matrices in self.linears.items():
            name = _expert_linear(linear)
            if name is None:
                found[linear] = matrices
                continue
            experts = matrices.a.shape[0] // self.rank
            stacked = expert_matrices(matrices.a, matrices.b, experts)
            for expert, (a, b) in enumerate(zip(*stacked, strict=True)):
                is_split = name == "gate_up_proj" and not model.expert_biases
                parts = ("gate_proj", "up_proj") if is_split else (name,)
                prefix = f"{linear.removesuffix('.base_layer')}.{expert}"
                for part, rows in zip(parts, b.chunk(len(parts)), strict=True):
                    found[f"{prefix}.{part}"] = Matrices(a, rows)
        return found

    @property
    def trains_head(self) -> bool:
        """Whether the adapter changes the output head."""
        return HEAD in self.linears

    def check_fits(self, model: ModelConfig, name: str) -> None:
        """Raise CheckpointError unless the model has every linear layer of the adapter, in the same
        shape.
        """
        # A linear in mxfp4 has the shape of its dequantized weight.
        dequantized_shapes = expected_shapes(replace(model, mxfp4_experts=False))
        shapes = {**dequantized_shapes, f"{HEAD}.weight": (model.vocab_size, model.hidden_size)}
        for linear, matrices in self.by_weight(model).items():
            found = (matrices.b.shape[0], matrices.a.shape[1])
            if shapes.get(f"{linear}.weight") != found:
                raise CheckpointError(
                    f"the adapter changes {linear} of the shape {found}, but {name} has the shape "
                    f"{shapes.get(f'{linear}.weight')}; give the base model that the adapter was "
                    "trained on"
                )


def read_update(directory: Path) -> LoraUpdate:
    """Read the adapter in `directory`.

    Raise CheckpointError if there is none; DamagedFileError if a file is damaged; UnsupportedError
    if it is not a plain LoRA adapter.
    """
    for name in (ADAPTER, ADAPTER_CONFIG):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"{directory} has no {name}, so it is not an adapter; give a checkpoint or a PEFT "
                "directory"
            )
    manifest = read_manifest(directory) if (directory / MANIFEST).is_file() else None
    if manifest is not None:
        for name in (ADAPTER, ADAPTER_CONFIG):
            check_file(directory / name, manifest.files.get(name))
    where = directory / ADAPTER_CONFIG
    config = read_json(where)
    check_plain(config, where)
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise UnsupportedError(
                f"{where}: {name} is {config[name]!r}; planish exports adapters with one rank and "
                "one alpha"
            )
    linears = read_matrices(directory)
    _check_ranks(linears, config["r"], directory / ADAPTER)
    return LoraUpdate(config, linears, manifest)


def read_matrices(
    directory: Path, is_ignored: Callable[[str, Tensor], bool] = lambda name, tensor: False
) -> dict[str, Matrices]:
    """Return the matrices of an adapter in float32 by the name of the linear layer.

    `is_ignored` decides from its name and value whether a tensor that is no LoRA matrix is left
    out; any other such tensor raises UnsupportedError. DamagedFileError if the file cannot be read
    or a matrix is missing.
    """
    where = directory / ADAPTER
    try:
        tensors = load_file(where)
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(
            f"{where} cannot be read ({error}); get the adapter again"
        ) from error
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        named = _TENSOR_NAME.fullmatch(name)
        if named is not None:
            linear = text_name(named["linear"])
            linear = HEAD if linear in _HEADS else linear
            found.setdefault(linear, {})[named["matrix"]] = tensor.to(torch.float32)
        elif not is_ignored(name, tensor):
            raise UnsupportedError(
                f"{where} contains {name}, which planish does not support; give a plain LoRA adapter"
            )
    for linear, parts in found.items():
        if len(parts) < 2 or any(part.dim() != 2 for part in parts.values()):
            raise DamagedFileError(
                f"{where}: {linear} lacks lora_A or lora_B; download the adapter again"
            )
        ranks = (parts["A"].shape[0], parts["B"].shape[1])
        if ranks[0] != ranks[1]:
            raise DamagedFileError(
                f"{where}: lora_A and lora_B of {linear} have the ranks {ranks[0]} and {ranks[1]}, "
                "which must be equal; download the adapter again"
            )
    if not found:
        raise DamagedFileError(f"{where} has no matrices; download the adapter again")
    return {linear: Matrices(parts["A"], parts["B"]) for linear, parts in found.items()}


def check_plain(config: Mapping[str, Any], where: Path) -> None:
    """Raise an error unless an adapter is plain LoRA, possibly with a rank or alpha per linear.

    `where`: the path of the adapter_config.json with the content `config`. Raises UnsupportedError
    for another kind of adapter, and DamagedFileError if the rank or alpha is not a positive number.
    """
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{where}: peft_type is {config.get('peft_type')!r}; planish takes LORA"
        )
    for name, (plain, reason) in _REFUSED.items():
        if name in config and config[name] not in plain:
            raise UnsupportedError(f"{where}: {name} is {config[name]!r}, and {reason}")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise DamagedFileError(
                f"{where}: {name} is {value!r}, not a positive number; get the adapter again"
            )


def _check_ranks(linears: Mapping[str, Matrices], rank: int, where: Path) -> None:
    """Raise an error unless each linear has the rank of adapter_config.json."""
    for linear, matrices in linears.items():
        found, is_expert = matrices.a.shape[0], _expert_linear(linear) is not None
        if found % rank if is_expert else found != rank:
            raise DamagedFileError(
                f"{where}: {linear} lacks a matrix of rank {rank}, lora_A or lora_B; download the "
                "adapter again"
            )
        # If PEFT adapts only one of the two parameters, its name does not tell which of them.
        short = linear.removesuffix(".base_layer")
        other = short if short != linear else f"{linear}.base_layer"
        if is_expert and other not in linears:
            raise UnsupportedError(
                f"{where} has matrices of {linear} and not of {other}; adapt both gate_up_proj and "
                "down_proj of the experts"
            )


def _expert_linear(linear: str) -> str | None:
    """Return gate_up_proj or down_proj for PEFT's name of the experts' matrices, else None."""
    for ours, theirs in EXPERT_FILE_NAMES.items():
        if linear.endswith(f".{theirs}"):
            return ours.rsplit(".", 1)[1]
    return None
