"""Weights that an adapter trains beside its linears: embeddings, single tokens, the head, norms.

planish's adapters contain matrices of linears only, so these weights can only be merged into a new
base model. They are stored in four forms:

    model.embed_tokens.weight                         the whole weight (`modules_to_save`)
    model.embed_tokens.token_adapter.trainable_tokens_delta
                                                      the rows of `trainable_token_indices`
    model.embed_tokens.lora_embedding_A, _B           a LoRA update of the embedding
    lm_head.base_layer.weight                         a copy of the base model's weight
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planish.errors import CheckpointError, DamagedFileError
from planish.export.adapter_layouts import HEAD, is_head
from planish.export.lora_update import (
    PEFT_PREFIX,
    LoraUpdate,
    StoredTensor,
    unmergeable_error,
)
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.json_fields import read_json
from planish.model.sources.weights import text_model_name
from planish.renderers.recommend import MAX_TOKENIZER_BYTES

EMBEDDING_WEIGHT = "model.embed_tokens.weight"
HEAD_WEIGHT = f"{HEAD}.weight"
_FORMS = re.compile(
    rf"(?:{re.escape(PEFT_PREFIX)})?(?P<module>.+?)(?:"
    r"\.token_adapter\.(?P<rows>trainable_tokens_delta)"
    r"|\.lora_embedding_(?P<matrix>[AB])"
    r"|\.(?P<copy>base_layer|original_module|token_adapter\.base_layer)\.weight"
    r"|(?:\.modules_to_save(?:\.default)?)?\.weight)"
)


@dataclass
class TrainedWeights:
    """The weights of the new base model that differ from those of the old one."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """The whole weights in float32, by their names in the base model."""
    has_own_head: bool = False
    """Whether the head differs from the embedding although the base model ties them."""

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens of the new embedding; None if the embedding is not trained."""
        embedding = self.weights.get(EMBEDDING_WEIGHT)
        return None if embedding is None else embedding.shape[0]


def read_trained_weights(
    update: LoraUpdate, config: ModelConfig, base_weights: Mapping[str, Tensor]
) -> TrainedWeights:
    """Return the weights that an adapter trains beside its linears.

    `base_weights`: the weights of the base model by name. Raises UnsupportedError for a tensor that
    is none of these weights, DamagedFileError if a tensor is missing, and CheckpointError if the
    shapes do not fit the base model.
    """
    reader = _Reader(update, config, base_weights)
    for name, tensor in update.other_tensors.items():
        reader.add(name, tensor)
    return reader.result()


class _Reader:
    def __init__(
        self, update: LoraUpdate, config: ModelConfig, base_weights: Mapping[str, Tensor]
    ) -> None:
        self._update = update
        self._config = config
        self._base_weights = base_weights
        self._whole: dict[str, StoredTensor] = {}
        self._copies: dict[str, StoredTensor] = {}
        self._rows: dict[str, StoredTensor] = {}
        self._matrices: dict[str, StoredTensor] = {}
        self._embedding_module = ""

    def add(self, name: str, tensor: StoredTensor) -> None:
        """Sort a tensor into one of the forms, and check its shape."""
        match = _FORMS.fullmatch(name)
        weight = None if match is None else self._weight_name(match["module"])
        if match is None or weight is None:
            raise unmergeable_error(self._update.path, name)
        if match["matrix"] and weight == EMBEDDING_WEIGHT:
            self._matrices[match["matrix"]] = tensor
            self._embedding_module = match["module"]
            return
        if match["rows"]:
            self._rows[weight] = tensor
            return
        kind = self._copies if match["copy"] else self._whole
        # PEFT writes a trained module of a base model with more tokens under two names.
        if weight in kind and not (
            kind[weight].shape == tensor.shape
            and torch.equal(kind[weight].load_stored(), tensor.load_stored())
        ):
            raise DamagedFileError(
                f"{self._update.path} contains {weight} twice, with different values; download the "
                "adapter again"
            )
        kind[weight] = tensor
        base = self._base(weight)
        first_fixed_dim = int(weight in (EMBEDDING_WEIGHT, HEAD_WEIGHT))
        if (
            len(tensor.shape) != base.dim()
            or tensor.shape[first_fixed_dim:] != base.shape[first_fixed_dim:]
        ):
            raise CheckpointError(
                f"{self._update.path}: {weight} has the shape {tensor.shape}, but that weight of "
                f"the base model has the shape {tuple(base.shape)}; give the base model that the "
                "adapter was trained on"
            )

    def result(self) -> TrainedWeights:
        """Return the new weights."""
        self._check_modules_to_save()
        self._check_copies()
        result = TrainedWeights({name: _finite(t, t.load()) for name, t in self._whole.items()})
        if self._matrices:
            self._add_to_embedding(result)
        for weight, indices in self._token_indices():
            self._replace_rows(result, weight, indices)
        self._tie(result)
        self._check_vocabulary(result)
        return result

    def _weight_name(self, module: str) -> str | None:
        """Return the name of an embedding, head or norm in the base model, else None."""
        weight = HEAD_WEIGHT if is_head(module) else f"{text_model_name(module)}.weight"
        is_norm = weight.endswith("norm.weight") and weight in self._base_weights
        return weight if is_norm or weight in (EMBEDDING_WEIGHT, HEAD_WEIGHT) else None

    def _base(self, weight: str) -> Tensor:
        return self._base_weights.get(weight, self._base_weights[EMBEDDING_WEIGHT])

    def _check_modules_to_save(self) -> None:
        for module in self._update.config.modules_to_save:
            if not any(f".{name}".endswith(f".{module}.weight") for name in self._whole):
                raise DamagedFileError(
                    f"{self._update.path} lacks the weights of {module}, which modules_to_save "
                    "names; download the adapter again"
                )

    def _check_copies(self) -> None:
        """Compare copies of the base model's weights with the base model.

        A copy with other rows than the base model is that of a base model with more tokens. It
        counts as trained, because the new base model has these tokens.
        """
        for weight, stored in self._copies.items():
            base = self._base(weight)
            is_tied = weight == HEAD_WEIGHT and self._config.tied_head
            if weight in self._whole or (is_tied and EMBEDDING_WEIGHT in self._rows):
                continue  # the rows of the embedding are also those of a tied head
            if stored.shape[0] != base.shape[0]:
                self._whole[weight] = stored
                continue
            copy = stored.load_stored()
            if not torch.equal(base.to(copy.dtype), copy):
                raise CheckpointError(
                    f"{self._update.path} has a copy of the base model's {weight} that differs "
                    "from the base model given; give the base model that the adapter was trained "
                    "on"
                )

    def _add_to_embedding(self, result: TrainedWeights) -> None:
        matrices, config = self._matrices, self._update.config
        rank = config.rank_of(self._embedding_module)
        embedding = result.weights.get(EMBEDDING_WEIGHT, self._base_weights[EMBEDDING_WEIGHT])
        shapes = {"A": (rank, embedding.shape[0]), "B": (embedding.shape[1], rank)}
        if {name: tensor.shape for name, tensor in matrices.items()} != shapes:
            raise CheckpointError(
                f"{self._update.path}: the matrices of the embedding do not have the shapes "
                f"{shapes['A']} and {shapes['B']}; give the base model that the adapter was "
                "trained on"
            )
        a, b = (_finite(matrices[name], matrices[name].load()) for name in "AB")
        scale = config.scaling_of(self._embedding_module)
        result.weights[EMBEDDING_WEIGHT] = embedding.float() + (b @ a).T * scale

    def _token_indices(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the name of each weight of which single rows are trained, and the rows."""
        given: Any = self._update.config.trainable_token_indices
        by_module = (
            given if isinstance(given, Mapping) else {"embed_tokens": given} if given else {}
        )
        for module, indices in by_module.items():
            weight = HEAD_WEIGHT if is_head(str(module)) else EMBEDDING_WEIGHT
            if self._config.tied_head and weight == HEAD_WEIGHT and EMBEDDING_WEIGHT in self._rows:
                continue  # PEFT stores the rows of a tied head with the embedding
            yield weight, indices

    def _replace_rows(self, result: TrainedWeights, weight: str, indices: list[int]) -> None:
        """Replace rows of a weight. Rows beyond its last one are those of new tokens."""
        stored, base = self._rows.get(weight), result.weights.get(weight, self._base(weight))
        is_valid = (
            isinstance(indices, list)
            and all(type(index) is int and index >= 0 for index in indices)
            and len(set(indices)) == len(indices)
        )
        if not is_valid:
            raise DamagedFileError(
                f"{self._update.config.path}: trainable_token_indices are not different tokens; "
                "download the adapter again"
            )
        if stored is None or stored.shape != (len(indices), base.shape[1]):
            raise DamagedFileError(
                f"{self._update.path}: the rows of trainable_token_indices are missing or do not "
                f"have the shape {(len(indices), base.shape[1])}; download the adapter again"
            )
        new_rows = [index for index in indices if index >= base.shape[0]]
        num_rows = max([base.shape[0] - 1, *new_rows]) + 1
        if num_rows - base.shape[0] != len(new_rows):
            raise _lacks_new_rows(
                self._update,
                f"has {len(new_rows)} rows of the {num_rows - base.shape[0]} tokens from "
                f"{base.shape[0]} to {num_rows - 1}",
            )
        rows = torch.cat([base.float(), base.new_zeros(len(new_rows), base.shape[1]).float()])
        result.weights[weight] = rows.index_copy_(
            0, torch.tensor(indices), _finite(stored, stored.load())
        )

    def _tie(self, result: TrainedWeights) -> None:
        """Decide whether head and embedding of a base model that ties them differ now."""
        if not self._config.tied_head:
            return
        embedding, head = (result.weights.get(name) for name in (EMBEDDING_WEIGHT, HEAD_WEIGHT))
        keeps_tie = self._rows or self._update.config.fields.get("ensure_weight_tying")
        # PEFT ties the matrices of a LoRA update by writing those of the head, too.
        has_own_update = bool(self._matrices) and self._update.trains_head
        if head is None and embedding is not None and (has_own_update or not keeps_tie):
            # In PEFT, the head keeps the base model's matrix.
            head = self._untrained_embedding()
        if embedding is None or head is None or torch.equal(embedding, head):
            result.has_own_head = embedding is None and head is not None
            if not result.has_own_head:
                result.weights.pop(HEAD_WEIGHT, None)
            return
        result.weights[HEAD_WEIGHT], result.has_own_head = head, True

    def _untrained_embedding(self) -> Tensor:
        """Return the embedding of the base model, with its rows of new tokens if the file has
        them.
        """
        copy = self._copies.get(EMBEDDING_WEIGHT)
        return self._base_weights[EMBEDDING_WEIGHT].float() if copy is None else copy.load()

    def _check_vocabulary(self, result: TrainedWeights) -> None:
        """Raise CheckpointError if head and embedding have different numbers of tokens."""
        num_tokens = result.vocab_size or self._config.vocab_size
        head = result.weights.get(HEAD_WEIGHT)
        if not self._config.tied_head or result.has_own_head:
            num_outputs = self._config.vocab_size if head is None else head.shape[0]
            if num_outputs != num_tokens:
                raise _lacks_new_rows(
                    self._update,
                    f"has an embedding of {num_tokens} tokens and a head of {num_outputs}",
                )


def check_tokenizer(update: LoraUpdate, base_directory: Path, num_tokens: int) -> None:
    """Raise CheckpointError if the tokenizer beside an adapter has new tokens without an embedding.

    `num_tokens`: the number of tokens of the new base model's embedding. Some tokenizers of base
    models have more tokens than the embedding, so only tokens that the base model's tokenizer lacks
    count.
    """
    num_known = _num_tokenizer_tokens(update.path.parent)
    if num_known > max(num_tokens, _num_tokenizer_tokens(base_directory)):
        raise _lacks_new_rows(
            update,
            f"has an embedding of {num_tokens} tokens, and the tokenizer beside it has {num_known}",
        )


def _num_tokenizer_tokens(directory: Path) -> int:
    """Return the largest token of the tokenizer.json in a directory plus 1; 0 without one."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return 0
    fields = read_json(path, MAX_TOKENIZER_BYTES)
    try:
        vocabulary = fields["model"]["vocab"]
        tokens = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in fields.get("added_tokens") or []]
        return max([-1, *tokens, *added]) + 1
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(
            f"{path} is no tokenizer ({error!r}); copy the tokenizer's files again"
        ) from error


def _lacks_new_rows(update: LoraUpdate, found: str) -> CheckpointError:
    return CheckpointError(
        f"{update.path} {found}. The file lacks rows that resize_token_embeddings initialized at "
        "random. Save the resized base model with save_pretrained and give it as the base model, or "
        "train embedding and head with modules_to_save"
    )


def _finite(stored: StoredTensor, tensor: Tensor) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise DamagedFileError(
            f"{stored.path}: {stored.name} contains NaN or infinity; give another adapter"
        )
    return tensor
