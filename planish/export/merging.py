"""Merge an adapter into a base model, as a Hugging Face directory.

The sum W + scaling * B A is computed in float32 and rounded once, to the dtype of the files.
Weights are streamed from file to file. Whatever the size of the model, memory holds only one shard
and a block of rows of one matrix. Tensors keep their names and order.

If the base model ties head and embedding, an adapter on the head changes only the head. So the
merged model gets an lm_head of its own, and its config.json unties the two.
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

from planish.errors import NonFiniteError, StorageError
from planish.export.lora_update import HEAD, LoraUpdate, Matrices
from planish.files import set_default_mode
from planish.model.config import ModelConfig, read_json, text_fields
from planish.model.quantization import Fp8Weight, Mxfp4Weight
from planish.model.weights import INDEX_FILE, SINGLE_FILE, load_weights, scale_name

SHARD_BYTES = 4 << 30
"""The default maximum size of a file."""
_BLOCK_NUMBERS = 1 << 24
_EMBEDDING = "model.embed_tokens.weight"
_HEAD_WEIGHT = f"{HEAD}.weight"
Stored = Mxfp4Weight | Fp8Weight
"""A weight that the checkpoint stores with codes and scales."""


@dataclass
class Rounding:
    """How much of the trained update was lost by rounding to the dtype of the files."""

    squared_update: float = 0.0
    squared_error: float = 0.0

    @property
    def share(self) -> float:
        """The norm of the rounding errors divided by the norm of the update, over all weights that
        the adapter changes.
        """
        return math.sqrt(self.squared_error / self.squared_update) if self.squared_update else 0.0


@dataclass(frozen=True)
class Source:
    """A tensor of the base model with the update to add to it."""

    name: str
    weight: Tensor | Stored
    """The tensor of the base model, memory-mapped."""
    matrices: Matrices | None
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The size of the merged tensor in bytes."""
        return math.prod(self.weight.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class JointSource:
    """The tensors of all experts of a layer that one tensor of the file contains (gpt-oss)."""

    name: str
    parts: Sequence[Source]
    """The tensors of the experts. The file has matrices transposed: [experts, in, out]."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the merged tensor."""
        return self.parts[0].dtype

    @property
    def size(self) -> int:
        """The size of the merged tensor in bytes."""
        return sum(part.size for part in self.parts)


def _dequantizable(
    weights: Mapping[str, Tensor], config: ModelConfig
) -> dict[str, Tensor | Stored]:
    """Return the weights, with one entry for the two tensors of each weight in mxfp4 or fp8."""
    found: dict[str, Tensor | Stored] = {}
    scales = {scale_name(name) for name in weights}
    for name, weight in weights.items():
        linear, _, part = name.rpartition(".")
        if part == "blocks":
            found[f"{linear}.weight"] = Mxfp4Weight(weight.flatten(1), weights[f"{linear}.scales"])
        elif weight.dtype == torch.float8_e4m3fn and config.fp8 is not None:
            found[name] = Fp8Weight.from_stored(weight, weights[scale_name(name)], config.fp8.block)
        elif part != "scales" and name not in scales:
            found[name] = weight
    return found


def _dtype(weight: Tensor | Stored) -> torch.dtype:
    return torch.bfloat16 if isinstance(weight, Stored) else weight.dtype


def _joint(sources: Sequence[Source]) -> list[Source | JointSource]:
    """Return the tensors of a file of gpt-oss, which has one tensor for all experts of a layer."""
    found: list[Source | JointSource] = []
    parts: dict[str, list[Source]] = {}
    for source in sources:
        layer, separator, part = source.name.rpartition(".experts.")
        if not separator:
            found.append(source)
            continue
        linear, _, kind = part.split(".", 1)[1].rpartition(".")
        name = f"{layer}.experts.{linear}" + ("_bias" if kind == "bias" else "")
        if name not in parts:
            parts[name] = []
            found.append(JointSource(name, parts[name]))
        parts[name].append(source)
    return found


def _merged(source: Source | JointSource, scaling: float, rounding: Rounding) -> Tensor:
    """Return one tensor of the merged model's files."""
    if isinstance(source, Source):
        return merged(source, scaling, rounding)
    tensors = [merged(part, scaling, rounding) for part in source.parts]
    return torch.stack([x.t() if x.dim() == 2 else x for x in tensors])


def write_merged(
    base: Path,
    config: ModelConfig,
    update: LoraUpdate,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Rounding:
    """Write weights, their index and config.json into `out`, and return the rounding error.

    If `dtype` is None, each tensor keeps its dtype.
    """
    weights = load_weights(base, config)
    if config.tied_head and update.trains_head:
        weights[_HEAD_WEIGHT] = weights[_EMBEDDING]
    matrices = update.by_weight(config)
    single = [
        Source(name, weight, matrices.get(name.removesuffix(".weight")), dtype or _dtype(weight))
        for name, weight in _dequantizable(weights, config).items()
    ]
    sources = _joint(single) if config.expert_biases else single
    rounding = Rounding()
    shards = _shards(sources, shard_bytes)
    files = dict(zip(_file_names(len(shards)), shards, strict=True))
    for file, shard in files.items():
        save_tensors(
            {source.name: _merged(source, update.scaling, rounding) for source in shard}, out / file
        )
    if len(files) > 1:
        write_json(out / INDEX_FILE, _index(files))
    write_json(out / "config.json", _config(base, config, update, sources))
    return rounding


def merged(source: Source, scaling: float, rounding: Rounding) -> Tensor:
    """Return one tensor of the merged model; NonFiniteError if it overflows float16."""
    weight = source.weight
    if isinstance(weight, Stored):
        # Unless the files are float32, planish trained with the bf16 weights.
        weight = weight.dequantize(torch.promote_types(source.dtype, torch.bfloat16))
    if source.matrices is None:
        out = weight.to(source.dtype)
    else:
        out = torch.empty(weight.shape, dtype=source.dtype)
        rows = max(1, _BLOCK_NUMBERS // weight.shape[1])
        for start in range(0, weight.shape[0], rows):
            part = slice(start, start + rows)
            change = (source.matrices.b[part] * scaling) @ source.matrices.a
            exact = weight[part].float() + change
            out[part] = exact.to(source.dtype)
            rounding.squared_update += float(change.double().square().sum())
            rounding.squared_error += float((out[part].float() - exact).double().square().sum())
    if source.dtype is torch.float16 and not out.isfinite().all():
        raise NonFiniteError(f"{source.name} does not fit float16; export as bfloat16 or float32")
    return out


def _shards(
    sources: Sequence[Source | JointSource], shard_bytes: int
) -> list[list[Source | JointSource]]:
    """Split the tensors, in order, into shards that are as full as possible.

    A tensor larger than `shard_bytes` has a shard to itself.
    """
    shards: list[list[Source | JointSource]] = []
    filled = 0
    for source in sources:
        if not shards or filled + source.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(source)
        filled += source.size
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(files: Mapping[str, Sequence[Source | JointSource]]) -> dict[str, Any]:
    return {
        "metadata": {
            "total_size": sum(source.size for shard in files.values() for source in shard)
        },
        "weight_map": {source.name: file for file, shard in files.items() for source in shard},
    }


def _config(
    base: Path, config: ModelConfig, update: LoraUpdate, sources: Sequence[Source | JointSource]
) -> dict[str, Any]:
    """Return the base model's config.json with the fields that a merge changes.

    A multimodal base model becomes its text model. A checkpoint in mxfp4 or fp8 becomes one in
    bf16.
    """
    fields = text_fields(read_json(base / "config.json"))
    fields.pop("_name_or_path", None)
    fields.pop("quantization_config", None)
    dtypes = {source.dtype for source in sources}
    dtype_name = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None
    for key in ("dtype", "torch_dtype"):
        if dtype_name and (key in fields or key == "dtype"):
            fields[key] = dtype_name
    if config.tied_head and update.trains_head:
        fields["tie_word_embeddings"] = False
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
