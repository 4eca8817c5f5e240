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
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MANIFEST_FILE,
    Manifest,
    check_file,
    read_manifest,
)
from planish.errors import CheckpointError, DamagedFileError, UnsupportedError
from planish.model.config import ModelConfig, read_json
from planish.model.lora import PEFT_EXPERT_NAMES, split_expert_matrices
from planish.model.weights import expected_shapes, text_model_name

HEAD = "lm_head"
"""The name of the output head."""
PEFT_PREFIX = "base_model.model."
_HEAD_ALIASES = ("model.unembed_tokens", "unembed_tokens", "model.lm_head")
"""Names of the output head in adapters that other programs saved."""
_TENSOR_NAME = re.compile(
    rf"(?:{re.escape(PEFT_PREFIX)})?(?P<linear>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight"
)
_PLAIN_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
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
class LoraMatrices:
    """The matrices of one linear layer: A [rank, in] and B [out, rank], float32."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class LoraUpdate:
    """The content of an adapter directory."""

    config: Mapping[str, Any]
    """The content of adapter_config.json."""
    matrices_by_linear: Mapping[str, LoraMatrices]
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

    def matrices_by_weight(self, config: ModelConfig) -> Mapping[str, LoraMatrices]:
        """Return the matrices by the name of a weight of the base model without ".weight":
        `matrices_by_linear`, with separate matrices for each expert.
        """
        result: dict[str, LoraMatrices] = {}
        for linear, matrices in self.matrices_by_linear.items():
            name = _expert_projection(linear)
            if name is None:
                result[linear] = matrices
                continue
            num_experts = matrices.a.shape[0] // self.rank
            stacked = split_expert_matrices(matrices.a, matrices.b, num_experts)
            for expert, (a, b) in enumerate(zip(*stacked, strict=True)):
                is_split = name == "gate_up_proj" and not config.expert_biases
                projections = ("gate_proj", "up_proj") if is_split else (name,)
                prefix = f"{linear.removesuffix('.base_layer')}.{expert}"
                for projection, projection_b in zip(
                    projections, b.chunk(len(projections)), strict=True
                ):
                    result[f"{prefix}.{projection}"] = LoraMatrices(a, projection_b)
        return result

    @property
    def trains_head(self) -> bool:
        """Whether the adapter changes the output head."""
        return HEAD in self.matrices_by_linear

    def check_fits(self, config: ModelConfig, model_name: str) -> None:
        """Raise CheckpointError unless the model has every linear layer of the adapter, in the same
        shape.
        """
        # A linear in mxfp4 has the shape of its dequantized weight.
        dequantized_shapes = expected_shapes(replace(config, mxfp4_experts=False))
        shapes = {**dequantized_shapes, f"{HEAD}.weight": (config.vocab_size, config.hidden_size)}
        for linear, matrices in self.matrices_by_weight(config).items():
            shape = (matrices.b.shape[0], matrices.a.shape[1])
            if shapes.get(f"{linear}.weight") != shape:
                raise CheckpointError(
                    f"the adapter changes {linear} of the shape {shape}, but {model_name} has the "
                    f"shape {shapes.get(f'{linear}.weight')}; give the base model that the adapter "
                    "was trained on"
                )


def read_adapter(directory: Path) -> LoraUpdate:
    """Read the adapter in `directory`.

    Raise CheckpointError if there is none. Raise DamagedFileError if a file is damaged. Raise
    UnsupportedError if it is not a plain LoRA adapter.
    """
    for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"{directory} has no {name}, so it is not an adapter; give a checkpoint or a PEFT "
                "directory"
            )
    manifest = read_manifest(directory) if (directory / MANIFEST_FILE).is_file() else None
    if manifest is not None:
        for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
            check_file(directory / name, manifest.files.get(name))
    config_path = directory / ADAPTER_CONFIG_FILE
    config = read_json(config_path)
    check_plain_lora(config, config_path)
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise UnsupportedError(
                f"{config_path}: {name} is {config[name]!r}; planish exports adapters with one "
                "rank and one alpha"
            )
    matrices_by_linear = read_matrices(directory)
    _check_ranks(matrices_by_linear, config["r"], directory / ADAPTER_FILE)
    return LoraUpdate(config, matrices_by_linear, manifest)


def read_matrices(
    directory: Path, is_ignored: Callable[[str, Tensor], bool] = lambda name, tensor: False
) -> dict[str, LoraMatrices]:
    """Return the matrices of an adapter in float32 by the name of the linear layer.

    `is_ignored` decides from its name and value whether a tensor that is no LoRA matrix is left
    out; any other such tensor raises UnsupportedError. Raise DamagedFileError if the file cannot be
    read or a matrix is missing.
    """
    adapter_path = directory / ADAPTER_FILE
    try:
        tensors = load_file(adapter_path)
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(
            f"{adapter_path} cannot be read ({error}); get the adapter again"
        ) from error
    tensors_by_linear: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is not None:
            linear = text_model_name(match["linear"])
            linear = HEAD if linear in _HEAD_ALIASES else linear
            tensors_by_linear.setdefault(linear, {})[match["matrix"]] = tensor.to(torch.float32)
        elif not is_ignored(name, tensor):
            raise UnsupportedError(
                f"{adapter_path} contains {name}, which planish does not support; give a plain "
                f"LoRA adapter"
            )
    for linear, pair in tensors_by_linear.items():
        if len(pair) < 2 or any(matrix.dim() != 2 for matrix in pair.values()):
            raise DamagedFileError(
                f"{adapter_path}: {linear} lacks lora_A or lora_B; download the adapter again"
            )
        ranks = (pair["A"].shape[0], pair["B"].shape[1])
        if ranks[0] != ranks[1]:
            raise DamagedFileError(
                f"{adapter_path}: lora_A and lora_B of {linear} have the ranks {ranks[0]} and "
                f"{ranks[1]}, which must be equal; download the adapter again"
            )
    if not tensors_by_linear:
        raise DamagedFileError(f"{adapter_path} has no matrices; download the adapter again")
    return {
        linear: LoraMatrices(pair["A"], pair["B"]) for linear, pair in tensors_by_linear.items()
    }


def check_plain_lora(config: Mapping[str, Any], config_path: Path) -> None:
    """Raise an error unless an adapter is plain LoRA, possibly with a rank or alpha per linear.

    `config_path`: the path of the adapter_config.json with the content `config`. Raises
    UnsupportedError for another kind of adapter, and DamagedFileError if the rank or alpha is not a
    positive number.
    """
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{config_path}: peft_type is {config.get('peft_type')!r}; planish takes LORA"
        )
    for name, (plain_values, reason) in _PLAIN_VALUES.items():
        if name in config and config[name] not in plain_values:
            raise UnsupportedError(f"{config_path}: {name} is {config[name]!r}, and {reason}")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise DamagedFileError(
                f"{config_path}: {name} is {value!r}, not a positive number; get the adapter again"
            )


def _check_ranks(
    matrices_by_linear: Mapping[str, LoraMatrices], rank: int, adapter_path: Path
) -> None:
    """Raise an error unless each linear has the rank of adapter_config.json."""
    for linear, matrices in matrices_by_linear.items():
        file_rank, is_expert = matrices.a.shape[0], _expert_projection(linear) is not None
        if file_rank % rank if is_expert else file_rank != rank:
            raise DamagedFileError(
                f"{adapter_path}: {linear} lacks a matrix of rank {rank}, lora_A or lora_B; "
                "download the adapter again"
            )
        # If PEFT adapts only one of the two parameters, its name does not tell which of them.
        outer_name = linear.removesuffix(".base_layer")
        other_name = outer_name if outer_name != linear else f"{linear}.base_layer"
        if is_expert and other_name not in matrices_by_linear:
            raise UnsupportedError(
                f"{adapter_path} has matrices of {linear} and not of {other_name}; adapt both "
                "gate_up_proj and down_proj of the experts"
            )


def _expert_projection(linear: str) -> str | None:
    """Return gate_up_proj or down_proj for PEFT's name of the experts' matrices, else None."""
    for layout_name, file_name in PEFT_EXPERT_NAMES.items():
        if linear.endswith(f".{file_name}"):
            return layout_name.rsplit(".", 1)[1]
    return None
