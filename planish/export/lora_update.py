"""Read an adapter from its files: the matrices A and B of each linear layer. Their matmul B A,
times a scaling factor, is added to the weight.

The directory has PEFT's layout, which planish's own checkpoints use too. If it has a planish.json,
the files are verified against the SHA-256 in it. `adapter_layouts` lists the names of modules that
are read. The file's header gives all names and shapes, so they are checked before any matrix is
read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from planish.engine.checkpoints.files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MANIFEST_FILE,
    Manifest,
    check_file,
    read_manifest,
)
from planish.errors import (
    CheckpointError,
    DamagedFileError,
    UnknownModelError,
    UnsupportedError,
    UserError,
)
from planish.export.adapter_config import AdapterConfig
from planish.export.adapter_layouts import (
    AdapterReader,
    LoraMatrices,
    StoredPair,
    is_head,
    is_hosted_name,
)
from planish.model.architecture.config import ModelConfig
from planish.model.sources.resolve import resolve_model

PEFT_PREFIX = "base_model.model."
MAX_MERGED_RANK = 4096
"""The maximum rank of an adapter that is merged into a base model."""
_MLX_FILE = "adapters.safetensors"
_PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt")
_TENSOR_NAME = re.compile(
    rf"(?:{re.escape(PEFT_PREFIX)})?(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight"
)
_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Names that torch.compile, FSDP and activation checkpointing put before those of a module."""
_OTHER_METHODS = {
    re.compile(r".*\.lora_magnitude_vector(\..*)?"): "a magnitude vector of DoRA",
    re.compile(r".*\.lora_[AB](\..*)?\.bias"): "the bias of a matrix",
    re.compile(r".*\.lora_[AB]\..+\.weight"): (
        "a matrix under the adapter's own name; save the adapter with PEFT's save_pretrained"
    ),
}
"""Why neither an adapter in planish nor a merge can represent a tensor, by its name."""
_MERGEABLE = re.compile(r"(?:.+\.)?(?:embed_tokens|lm_head|unembed_tokens|\w*norm)\..+")
"""The tensors that a merge adds to a base model beside the matrices, by their names."""
_LAYER = re.compile(r"(?:.+\.)?layers\.\d+\..+")
_DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of an open safetensors file."""

    handle: Any
    name: str
    path: Path

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, from the file's header."""
        return tuple(self.handle.get_slice(self.name).get_shape())

    def load_stored(self) -> Tensor:
        """Return the tensor as stored. Raises UnsupportedError unless it is a float."""
        dtype = self.handle.get_slice(self.name).get_dtype()
        if dtype not in _DTYPES:
            raise UnsupportedError(
                f"{self.path}: {self.name} is stored as {dtype}; planish reads {', '.join(_DTYPES)}"
            )
        tensor: Tensor = self.handle.get_tensor(self.name)
        return tensor

    def load(self) -> Tensor:
        """Return the tensor in float32. Raises UnsupportedError unless it is a float."""
        return self.load_stored().to(torch.float32)


@dataclass(frozen=True)
class LoraUpdate:
    """The content of an adapter directory."""

    config: AdapterConfig
    path: Path
    """The path of the tensors' file."""
    pairs: Mapping[str, StoredPair]
    """The matrices by the module's name in the file, without PEFT's prefix."""
    other_tensors: Mapping[str, StoredTensor]
    """All tensors that are no matrices A or B, by their names in the file."""
    manifest: Manifest | None
    """The content of planish.json; None for an adapter that planish did not save."""

    @property
    def base_model(self) -> str | None:
        """The name of the base model according to the files."""
        return self.manifest.base_model if self.manifest else self.config.base_model

    def base_name(self, given: str | None) -> str:
        """Return the name of the base model: `given`, or else the name in the files. Raises
        UserError if both are missing.
        """
        name = given or self.base_model
        if not name:
            raise UserError(f"{self.config.path} names no base model; give --base-model NAME")
        return name

    def resolve_base(self, given: str | None, models: Mapping[str, str] | None) -> tuple[str, Path]:
        """Return name and directory of the base model. Raises the errors of `base_name` and
        `resolve_model`.
        """
        name = self.base_name(given)
        try:
            return name, resolve_model(name, models)
        except UnknownModelError as error:
            if given:
                raise
            raise UnknownModelError(
                f"{error}\n{self.config.path} names this base model. If it is elsewhere, give "
                "--base-model NAME or DIRECTORY"
            ) from error

    def reader(self, model: ModelConfig, max_rank: int) -> AdapterReader:
        """Return a reader of the matrices for a base model. Raises the errors of AdapterReader."""
        # After resize_token_embeddings, the file has the head with its rows of new tokens.
        heads = (
            tensor.shape[0]
            for name, tensor in self.other_tensors.items()
            if is_head(name.removeprefix(PEFT_PREFIX).removesuffix(".base_layer.weight"))
        )
        model = replace(model, vocab_size=next(heads, model.vocab_size))
        return AdapterReader(self.config, model, self.path, self.pairs, max_rank)

    def matrices_by_weight(self, model: ModelConfig) -> dict[str, LoraMatrices]:
        """Return the scaled matrices by the name of a weight of the base model without ".weight":
        those of `AdapterReader.read`, with separate matrices for each expert.
        """
        result: dict[str, LoraMatrices] = {}
        for linear, matrices in self.reader(model, MAX_MERGED_RANK).read().items():
            before, separator, name = linear.rpartition(".experts.")
            if not separator:
                result[linear] = matrices
                continue
            is_split = name == "gate_up_proj" and not model.expert_biases
            projections = ("gate_proj", "up_proj") if is_split else (name,)
            for expert, (a, b) in enumerate(zip(matrices.a, matrices.b, strict=True)):
                for projection, part in zip(projections, b.chunk(len(projections)), strict=True):
                    result[f"{before}.experts.{expert}.{projection}"] = LoraMatrices(a, part)
        return result

    @property
    def trains_head(self) -> bool:
        """Whether the adapter changes the output head."""
        return any(is_head(module) for module in self.pairs)

    def check_peft_layout(self) -> None:
        """Raise UnsupportedError unless the matrices can be written as they are for PEFT, with one
        rank and one alpha.
        """
        remedy = "import the adapter (`planish checkpoints import`) and export the checkpoint"
        for name in ("rank_pattern", "alpha_pattern"):
            if self.config.fields.get(name):
                raise UnsupportedError(
                    f"{self.config.path}: {name} is {self.config.fields[name]!r}; planish exports "
                    f"adapters with one rank and one alpha: {remedy}"
                )
        for module, pair in self.pairs.items():
            if is_hosted_name(module):
                raise UnsupportedError(
                    f"{self.path} has matrices of {module}, a name of the hosted service that PEFT "
                    f"does not know: {remedy}"
                )
            ranks = pair.a.shape[0], pair.b.shape[-1]
            if ranks[0] != ranks[1] or ranks[0] % self.config.rank:
                raise DamagedFileError(
                    f"{self.path}: {module} lacks a matrix of rank {self.config.rank}, lora_A or "
                    "lora_B; download the adapter again"
                )

    def check_only_lora(
        self, is_ignored: Callable[[str, StoredTensor], bool] = lambda name, tensor: False
    ) -> None:
        """Raise UnsupportedError if the adapter trains anything else than matrices A and B.

        `is_ignored` decides from name and tensor whether a tensor is left out.
        """
        trained = [
            name.removeprefix(PEFT_PREFIX)
            for name, tensor in self.other_tensors.items()
            if not is_ignored(name, tensor)
        ]
        for name in trained:
            if not _MERGEABLE.fullmatch(name):
                raise unmergeable_error(self.path, name)
        remedy = (
            "An adapter in planish has LoRA matrices only. Merge this one into a new base model: "
            f"`planish export {self.path.parent} NEW_MODEL --format merged`, and use NEW_MODEL as "
            "the base model"
        )
        for field in ("modules_to_save", "trainable_token_indices"):
            if self.config.fields.get(field):
                raise UnsupportedError(
                    f"{self.config.path}: {field} is {self.config.fields[field]!r}. {remedy}"
                )
        if trained:
            raise UnsupportedError(
                f"{self.path} contains {trained[0]}, which planish does not support in an adapter. "
                f"{remedy}"
            )


def unmergeable_error(path: Path, name: str) -> UnsupportedError:
    """Return the error for a trained tensor that cannot be merged into a base model either.

    `path`: the file of the adapter. `name`: the tensor's name in it.
    """
    name = name.removeprefix(PEFT_PREFIX)
    if _LAYER.fullmatch(name):
        return UnsupportedError(
            f"{path} contains {name}, a whole weight of a layer. planish merges LoRA matrices, "
            "embeddings, the head and norms only. Merge this adapter with PEFT (merge_and_unload, "
            "then save_pretrained), and use the result as the base model"
        )
    return UnsupportedError(
        f"{path} contains {name}, which is not a weight of a language model. planish has no heads of "
        "classifiers and reward models. To reward answers with this model, call it with transformers "
        "in a reward function, or train a preference model (recipe preference_model)"
    )


def read_adapter(directory: Path) -> LoraUpdate:
    """Read the adapter in `directory`: its settings, and the names and shapes of its matrices.

    Raises CheckpointError if there is none, DamagedFileError if a file is damaged, and
    UnsupportedError if it is not a plain LoRA adapter.
    """
    path = directory / ADAPTER_FILE
    if not (directory / ADAPTER_CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{directory} has no {ADAPTER_CONFIG_FILE}, so it is not an adapter; give a directory "
            "that PEFT or planish saved"
        )
    if not path.is_file():
        pickled = next((name for name in _PICKLE_FILES if (directory / name).exists()), None)
        if pickled:
            raise UnsupportedError(
                f"{directory / pickled} is a pickle, which could run code; save it again with "
                "save_pretrained(..., safe_serialization=True)"
            )
        if (directory / _MLX_FILE).exists():
            raise UnsupportedError(
                f"{directory / _MLX_FILE} is an adapter of mlx-lm, whose layout planish does not "
                "read; merge it with mlx_lm.fuse, and use the result as the base model"
            )
        raise CheckpointError(
            f"{directory} has no {ADAPTER_FILE}, so it is not an adapter; get the adapter again"
        )
    manifest = read_manifest(directory) if (directory / MANIFEST_FILE).is_file() else None
    if manifest is not None:
        for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
            check_file(directory / name, manifest.files.get(name))
    return LoraUpdate(AdapterConfig.read(directory), path, *_read_header(path), manifest)


def _read_header(path: Path) -> tuple[dict[str, StoredPair], dict[str, StoredTensor]]:
    """Return the pairs of matrices by module, and all other tensors by name."""
    try:
        handle = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it cannot be mapped
        raise DamagedFileError(f"{path} cannot be read ({error}); get the adapter again") from error
    matrices: dict[str, dict[str, StoredTensor]] = {}
    other_tensors: dict[str, StoredTensor] = {}
    names: list[str] = handle.keys()
    for name in names:
        tensor = StoredTensor(handle, name, path)
        plain_name = _WRAPPERS.sub("", name)
        match = _TENSOR_NAME.fullmatch(plain_name)
        if match is None:
            for pattern, reason in _OTHER_METHODS.items():
                if pattern.fullmatch(plain_name):
                    raise UnsupportedError(f"{path} contains {name}, {reason}")
            if plain_name in other_tensors:
                raise _same_tensor(other_tensors[plain_name], tensor)
            other_tensors[plain_name] = tensor
            continue
        pair = matrices.setdefault(match["module"], {})
        if match["matrix"] in pair:
            raise _same_tensor(pair[match["matrix"]], tensor)
        pair[match["matrix"]] = tensor
    for module, pair in matrices.items():
        if len(pair) < 2:
            raise DamagedFileError(
                f"{path}: {module} lacks lora_A or lora_B; download the adapter again"
            )
    if not matrices and not other_tensors:
        raise DamagedFileError(f"{path} has no tensors; download the adapter again")
    pairs = {module: StoredPair(pair["A"], pair["B"]) for module, pair in matrices.items()}
    return pairs, other_tensors


def _same_tensor(first: StoredTensor, second: StoredTensor) -> DamagedFileError:
    return DamagedFileError(
        f"{first.path} contains {first.name} and {second.name}, which are the same tensor; download "
        "the adapter again"
    )
