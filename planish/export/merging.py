"""Merge an adapter into a base model, as a Hugging Face directory.

The sum W + B A, where B contains the scaling factor, is computed in float32 and rounded once, to the dtype of the files.
Weights are streamed from file to file. Whatever the size of the model, memory holds only one shard
and a block of rows of one matrix. Tensors keep their names and order.

If the base model ties head and embedding, an adapter on the head changes only the head. So the
merged model gets an lm_head of its own, and its config.json unties the two. The same holds if the
adapter trains the embedding alone. `trained_weights` reads the weights that an adapter trains
beside its linears.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from planish.errors import NonFiniteError, StorageError, UnsupportedError
from planish.export.adapter_layouts import LoraMatrices
from planish.export.lora_update import LoraUpdate
from planish.export.trained_weights import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    check_tokenizer,
    read_trained_weights,
)
from planish.files import set_default_mode
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.families import text_fields
from planish.model.architecture.hf_config.json_fields import read_json
from planish.model.layers.quantization import Fp8Weight, Mxfp4Weight
from planish.model.sources.weights import INDEX_FILE, SINGLE_FILE, load_weights, scale_name

SHARD_BYTES = 4 << 30
"""The default maximum size of a file."""
_BLOCK_ELEMENTS = 1 << 24
QuantizedWeight = Mxfp4Weight | Fp8Weight
"""A weight that the checkpoint stores with codes and scales."""


@dataclass
class RoundingError:
    """How much of the trained update was lost by rounding to the dtype of the files."""

    squared_update: float = 0.0
    squared_error: float = 0.0

    @property
    def relative_error(self) -> float:
        """The norm of the rounding errors divided by the norm of the update, over all weights that
        the adapter changes.
        """
        return math.sqrt(self.squared_error / self.squared_update) if self.squared_update else 0.0


@dataclass(frozen=True)
class MergedTensor:
    """A tensor of the merged model: a tensor of the base model, and the update to add to it."""

    name: str
    base_weight: Tensor | QuantizedWeight
    """The tensor of the base model, memory-mapped."""
    matrices: LoraMatrices | None
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The size of the merged tensor in bytes."""
        return math.prod(self.base_weight.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StackedExperts:
    """The tensors of all experts of a layer that one tensor of the file contains (gpt-oss)."""

    name: str
    experts: Sequence[MergedTensor]
    """The tensors of the experts. The file has matrices transposed: [experts, in, out]."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the merged tensor."""
        return self.experts[0].dtype

    @property
    def size(self) -> int:
        """The size of the merged tensor in bytes."""
        return sum(expert.size for expert in self.experts)


def _join_codes_and_scales(
    weights: Mapping[str, Tensor], config: ModelConfig
) -> dict[str, Tensor | QuantizedWeight]:
    """Return the weights, with one entry for the two tensors of each weight in mxfp4 or fp8."""
    result: dict[str, Tensor | QuantizedWeight] = {}
    scale_names = {scale_name(name) for name in weights}
    for name, weight in weights.items():
        linear, _, kind = name.rpartition(".")
        if kind == "blocks":
            result[f"{linear}.weight"] = Mxfp4Weight(weight.flatten(1), weights[f"{linear}.scales"])
        elif weight.dtype == torch.float8_e4m3fn and config.fp8 is not None:
            result[name] = Fp8Weight.from_stored(
                weight, weights[scale_name(name)], config.fp8.block
            )
        elif kind != "scales" and name not in scale_names:
            result[name] = weight
    return result


def _default_output_dtype(
    weight: Tensor | QuantizedWeight, stored_dtype: torch.dtype | None
) -> torch.dtype:
    return torch.bfloat16 if isinstance(weight, QuantizedWeight) else stored_dtype or weight.dtype


def _stack_experts(tensors: Sequence[MergedTensor]) -> list[MergedTensor | StackedExperts]:
    """Return the tensors of a file of gpt-oss, which has one tensor for all experts of a layer."""
    result: list[MergedTensor | StackedExperts] = []
    experts_by_name: dict[str, list[MergedTensor]] = {}
    for tensor in tensors:
        layer, separator, expert_name = tensor.name.rpartition(".experts.")
        if not separator:
            result.append(tensor)
            continue
        linear, _, kind = expert_name.split(".", 1)[1].rpartition(".")
        name = f"{layer}.experts.{linear}" + ("_bias" if kind == "bias" else "")
        if name not in experts_by_name:
            experts_by_name[name] = []
            result.append(StackedExperts(name, experts_by_name[name]))
        experts_by_name[name].append(tensor)
    return result


def _compute_merged_tensor(
    tensor: MergedTensor | StackedExperts, rounding: RoundingError
) -> Tensor:
    """Return one tensor of the merged model's files."""
    if isinstance(tensor, MergedTensor):
        return merge(tensor, rounding)
    experts = [merge(expert, rounding) for expert in tensor.experts]
    return torch.stack([x.t() if x.dim() == 2 else x for x in experts])


def write_merged(
    base_directory: Path,
    config: ModelConfig,
    update: LoraUpdate,
    output_directory: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> RoundingError:
    """Write weights, their index and config.json into `output_directory`.

    Return the rounding error. If `dtype` is None, each tensor keeps its dtype.
    """
    weights = load_weights(base_directory, config)
    trained = read_trained_weights(update, config, weights)
    check_tokenizer(update, base_directory, trained.vocab_size or config.vocab_size)
    stored_dtypes = {name: weight.dtype for name, weight in weights.items()}
    weights |= trained.weights
    has_own_head = config.tied_head and (update.trains_head or trained.has_own_head)
    if has_own_head:
        weights.setdefault(HEAD_WEIGHT, weights[EMBEDDING_WEIGHT])
        stored_dtypes[HEAD_WEIGHT] = stored_dtypes[EMBEDDING_WEIGHT]
    matrices_by_weight = update.matrices_by_weight(config)
    missing = [name for name in matrices_by_weight if f"{name}.weight" not in weights]
    if config.hf is not None:
        transposed = any(linear.is_transposed for layer in config.hf.layers for linear in layer)
        if missing or transposed:
            problem = (
                f"have no {missing[0]}.weight, because transformers renames or joins their tensors"
                if missing
                else "have transposed weights"
            )
            raise UnsupportedError(
                f"the files of {base_directory} {problem}; export the adapter with --format peft, "
                "and merge it with PEFT"
            )
    separate_tensors = [
        MergedTensor(
            name,
            weight,
            matrices_by_weight.get(name.removesuffix(".weight")),
            dtype or _default_output_dtype(weight, stored_dtypes.get(name)),
        )
        for name, weight in _join_codes_and_scales(weights, config).items()
    ]
    tensors = _stack_experts(separate_tensors) if config.expert_biases else separate_tensors
    rounding = RoundingError()
    shards = _split_into_shards(tensors, shard_bytes)
    shard_of_file = dict(zip(_file_names(len(shards)), shards, strict=True))
    for file, shard in shard_of_file.items():
        save_tensors(
            {tensor.name: _compute_merged_tensor(tensor, rounding) for tensor in shard},
            output_directory / file,
        )
    if len(shard_of_file) > 1:
        write_json(output_directory / INDEX_FILE, _weight_index(shard_of_file))
    write_json(
        output_directory / "config.json",
        _merged_config(base_directory, has_own_head, trained.vocab_size, tensors),
    )
    return rounding


def merge(tensor: MergedTensor, rounding: RoundingError) -> Tensor:
    """Return one tensor of the merged model. Raise NonFiniteError if it overflows float16."""
    base_weight = tensor.base_weight
    if isinstance(base_weight, QuantizedWeight):
        # Unless the files are float32, planish trained with the bf16 weights.
        base_weight = base_weight.dequantize(torch.promote_types(tensor.dtype, torch.bfloat16))
    if tensor.matrices is None:
        result = base_weight.to(tensor.dtype)
    else:
        result = torch.empty(base_weight.shape, dtype=tensor.dtype)
        block_rows = max(1, _BLOCK_ELEMENTS // base_weight.shape[1])
        for start in range(0, base_weight.shape[0], block_rows):
            block = slice(start, start + block_rows)
            delta = tensor.matrices.b[block] @ tensor.matrices.a
            unrounded = base_weight[block].float() + delta
            result[block] = unrounded.to(tensor.dtype)
            rounding.squared_update += float(delta.double().square().sum())
            rounding.squared_error += float(
                (result[block].float() - unrounded).double().square().sum()
            )
    if tensor.dtype is torch.float16 and not result.isfinite().all():
        raise NonFiniteError(f"{tensor.name} does not fit float16; export as bfloat16 or float32")
    return result


def _split_into_shards(
    tensors: Sequence[MergedTensor | StackedExperts], shard_bytes: int
) -> list[list[MergedTensor | StackedExperts]]:
    """Split the tensors, in order, into shards that are as full as possible.

    A tensor larger than `shard_bytes` has a shard to itself.
    """
    shards: list[list[MergedTensor | StackedExperts]] = []
    shard_size = 0
    for tensor in tensors:
        if not shards or shard_size + tensor.size > shard_bytes:
            shards.append([])
            shard_size = 0
        shards[-1].append(tensor)
        shard_size += tensor.size
    return shards


def _file_names(num_shards: int) -> list[str]:
    if num_shards == 1:
        return [SINGLE_FILE]
    return [
        f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)
    ]


def _weight_index(
    shard_of_file: Mapping[str, Sequence[MergedTensor | StackedExperts]],
) -> dict[str, Any]:
    return {
        "metadata": {
            "total_size": sum(tensor.size for shard in shard_of_file.values() for tensor in shard)
        },
        "weight_map": {
            tensor.name: file for file, shard in shard_of_file.items() for tensor in shard
        },
    }


def _merged_config(
    base_directory: Path,
    has_own_head: bool,
    vocab_size: int | None,
    tensors: Sequence[MergedTensor | StackedExperts],
) -> dict[str, Any]:
    """Return the base model's config.json with the fields that a merge changes.

    A multimodal base model becomes its text model. A checkpoint in mxfp4 or fp8 becomes one in
    bf16.
    """
    fields = text_fields(read_json(base_directory / "config.json"))
    fields.pop("_name_or_path", None)
    fields.pop("quantization_config", None)
    dtypes = {tensor.dtype for tensor in tensors}
    dtype_name = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None
    for key in ("dtype", "torch_dtype"):
        if dtype_name and (key in fields or key == "dtype"):
            fields[key] = dtype_name
    if has_own_head:
        fields["tie_word_embeddings"] = False
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    return fields


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raise StorageError if it cannot be written."""
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
        set_default_mode(path)
    except SafetensorError as error:  # safetensors raises this for an OSError
        raise StorageError(f"{path.name} could not be written ({error}); free space") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
