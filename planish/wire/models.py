"""Requests that create, save and load models and samplers. All of them are JSON.

The id of a model is `{session}:train:{n}`, and the id of a sampler `{session}:sample:{n}`. Clients
compute these ids too, from the session and the number that they send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planish.errors import UnsupportedError, UserError
from planish.service import (
    CreateModel,
    CreateSampler,
    LoadWeights,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.types import GetInfoResponse, LoraConfig, ModelData
from planish.wire.fields import Fields
from planish.wire.training import head_from_json

LORA_SWITCHES = ("train_unembed", "train_mlp", "train_attn")


@dataclass(frozen=True)
class IdParts:
    """The session and the number in the id of a model or sampler. Models and samplers of a session
    are numbered separately, from 0.
    """

    session_id: str
    seq_id: int

    @property
    def model_id(self) -> str:
        """The id of the model with this number."""
        return f"{self.session_id}:train:{self.seq_id}"

    @property
    def sampler_id(self) -> str:
        """The id of the sampler with this number."""
        return f"{self.session_id}:sample:{self.seq_id}"


def parse_server_id(server_id: str) -> IdParts:
    """Return the session and number in the id of a model or a sampler."""
    session_id, _, number = server_id.split(":")
    return IdParts(session_id, int(number))


def session_id_of(model_id: str) -> str:
    """Return the session in the id of a model or a sampler."""
    return model_id.partition(":")[0]


def _id_parts_from_json(fields: Fields, number_field: str) -> IdParts:
    """Read the session and number of a model or a sampler. `number_field` is the number's field."""
    return IdParts(fields.identifier("session_id"), fields.integer(number_field, low=0))


def create_model_from_json(fields: Fields) -> CreateModel:
    """Read a request for a fresh model."""
    with fields:
        fields.skip("type")
        parts = _id_parts_from_json(fields, "model_seq_id")
        _check_optimizer(fields)
        lora = fields.optional(fields.object, "lora_config")
        return CreateModel(
            parts.model_id,
            fields.text("base_model"),
            LoraConfig() if lora is None else lora_from_json(lora),
            user_metadata=fields.optional(fields.strings, "user_metadata", {}),
        )


def create_model_to_json(operation: CreateModel) -> dict[str, Any]:
    """Write a create_model for a fresh model, or a load_weights for a model from a checkpoint."""
    parts = parse_server_id(operation.model_id)
    fields: dict[str, Any] = {
        "session_id": parts.session_id,
        "model_seq_id": parts.seq_id,
        "user_metadata": dict(operation.user_metadata),
    }
    if operation.base_model is not None:
        fields["base_model"] = operation.base_model
    if operation.from_path is not None:
        fields["path"], fields["optimizer"] = operation.from_path, operation.with_optimizer
        return {**fields, "type": "load_weights"}
    lora = {
        "rank": operation.lora.rank,
        **{name: getattr(operation.lora, name) for name in LORA_SWITCHES},
    }
    if operation.lora.seed is not None:
        lora["seed"] = operation.lora.seed
    fields["lora_config"], fields["optimizer_config"] = lora, {"type": "adamw"}
    return {**fields, "type": "create_model"}


def load_weights_from_json(fields: Fields) -> LoadWeights | CreateModel:
    """Read a load_weights. A body with `model_id` loads a checkpoint into an existing model. A body
    with `session_id` creates a model from a checkpoint.
    """
    with fields:
        fields.skip("type")
        reject_access_token(fields)
        _check_optimizer(fields)
        path = fields.text("path")
        with_optimizer = fields.optional(fields.boolean, "optimizer", False)
        if fields.has("model_id"):
            return LoadWeights(head_from_json(fields).model_id, path, with_optimizer)
        return CreateModel(
            _id_parts_from_json(fields, "model_seq_id").model_id,
            fields.optional(fields.text, "base_model"),
            from_path=path,
            with_optimizer=with_optimizer,
            user_metadata=fields.optional(fields.strings, "user_metadata", {}),
        )


def reject_access_token(fields: Fields, header: str | None = None) -> None:
    """Raise UnsupportedError if the body or the header has a token for reading another key's
    checkpoint.
    """
    if fields.optional(fields.text, "weights_access_token") or header:
        raise UnsupportedError(
            "weights_access_token: checkpoints of another key can be read once they are public; "
            "leave it out"
        )


def load_weights_to_json(operation: LoadWeights, seq_id: int) -> dict[str, Any]:
    """Write a request to load a checkpoint into an existing model."""
    return {
        "type": "load_weights",
        "model_id": operation.model_id,
        "seq_id": seq_id,
        "path": operation.path,
        "optimizer": operation.with_optimizer,
    }


def save_weights_from_json(fields: Fields) -> SaveWeights:
    """Read a save_weights."""
    with fields:
        head = head_from_json(fields)
        fields.skip("type")
        return SaveWeights(
            head.model_id,
            _checkpoint_name(fields, head.seq_id),
            fields.optional(fields.integer, "ttl_seconds"),
            fields.optional(fields.boolean, "overwrite", False),
            fields.optional(fields.strings, "user_metadata", {}),
        )


def save_weights_for_sampler_from_json(fields: Fields) -> SaveWeightsForSampler | PublishSampler:
    """Read a save_weights_for_sampler. A body with `sampling_session_seq_id` publishes a sampler.
    Any other body saves a checkpoint under the name in `path`.

    The protocol allows the weights of a sampler of kind "inflight" to change during training. In
    planish they do not change, so the kinds "inflight" and "snapshot" have the same meaning.
    `overwrite` is an addition of planish.
    """
    with fields:
        head = head_from_json(fields)
        fields.skip("type")
        kind = fields.optional(fields.text, "kind", "snapshot")
        if kind not in ("snapshot", "inflight"):
            raise UserError(f"kind={kind[:40]!r}: give 'snapshot' or 'inflight'")
        ttl = fields.optional(fields.integer, "ttl_seconds")
        metadata = fields.optional(fields.strings, "user_metadata", {})
        if not fields.has("sampling_session_seq_id"):
            overwrite = fields.optional(fields.boolean, "overwrite", False)
            return SaveWeightsForSampler(
                head.model_id, _checkpoint_name(fields, head.seq_id), ttl, overwrite, metadata
            )
        if fields.optional(fields.text, "path") is not None:
            raise UserError(
                "path and sampling_session_seq_id are both given; give path to save under a name, "
                "or sampling_session_seq_id to make a sampler"
            )
        number = fields.integer("sampling_session_seq_id", low=0)
        return PublishSampler(
            head.model_id, IdParts(session_id_of(head.model_id), number).sampler_id
        )


def save_to_json(operation: SaveWeights | SaveWeightsForSampler, seq_id: int) -> dict[str, Any]:
    """Write the body of save_weights or save_weights_for_sampler."""
    fields: dict[str, Any] = {
        "model_id": operation.model_id,
        "seq_id": seq_id,
        "path": operation.name,
        "overwrite": operation.overwrite,
        "user_metadata": dict(operation.user_metadata),
    }
    return (
        fields
        if operation.ttl_seconds is None
        else {**fields, "ttl_seconds": operation.ttl_seconds}
    )


def publish_to_json(operation: PublishSampler, seq_id: int) -> dict[str, Any]:
    """Write a request that publishes a sampler."""
    return {
        "type": "save_weights_for_sampler",
        "model_id": operation.model_id,
        "seq_id": seq_id,
        "kind": "snapshot",
        "sampling_session_seq_id": parse_server_id(operation.sampler_id).seq_id,
    }


def create_sampler_from_json(fields: Fields) -> CreateSampler:
    """Read a request for a sampler."""
    with fields:
        fields.skip("type")
        parts = _id_parts_from_json(fields, "sampling_session_seq_id")
        base_model = fields.optional(fields.text, "base_model")
        model_path = fields.optional(fields.text, "model_path")
        return CreateSampler(parts.sampler_id, base_model, model_path)


def create_sampler_to_json(operation: CreateSampler) -> dict[str, Any]:
    """Write a request for a sampler."""
    parts = parse_server_id(operation.sampler_id)
    fields = {"base_model": operation.base_model, "model_path": operation.model_path}
    return {
        "type": "create_sampling_session",
        "session_id": parts.session_id,
        "sampling_session_seq_id": parts.seq_id,
        **{name: value for name, value in fields.items() if value is not None},
    }


def model_info_to_json(info: GetInfoResponse, tokenizer_id: str | None) -> dict[str, Any]:
    """Write a model's information."""
    data = {"arch": info.model_data.arch, "model_name": info.model_name}
    return {
        "type": "get_info",
        "model_id": info.model_id,
        "model_name": info.model_name,
        "is_lora": info.is_lora,
        "lora_rank": info.lora_rank,
        "optimizer_config": {"type": "adamw"},
        "model_data": data if tokenizer_id is None else {**data, "tokenizer_id": tokenizer_id},
    }


def model_info_from_json(fields: Fields) -> GetInfoResponse:
    """Read a model's information."""
    data = fields.object("model_data")
    return GetInfoResponse(
        fields.text("model_id"),
        ModelData(
            data.text("arch"), data.text("model_name"), data.optional(data.text, "tokenizer_id")
        ),
        fields.boolean("is_lora"),
        fields.optional(fields.integer, "lora_rank"),
    )


def lora_from_json(fields: Fields) -> LoraConfig:
    """Read the configuration of an adapter."""
    with fields:
        rank = fields.integer("rank")
        seed = fields.optional(lambda name: fields.integer(name, high=2**64 - 1), "seed")
        switches = {name: fields.optional(fields.boolean, name, True) for name in LORA_SWITCHES}
    try:
        return LoraConfig(rank, seed, **switches)
    except UserError as error:
        raise UserError(f"lora_config: {error}") from None


def _check_optimizer(fields: Fields) -> None:
    config = fields.optional(fields.object, "optimizer_config")
    if config is None:
        return
    with config:
        kind = config.text("type")
        config.skip("version")
        if kind != "adamw":
            raise UnsupportedError(
                f"optimizer_config.type={kind[:40]!r} is not supported: AdamW is the only "
                "optimizer here, and the update rule of "
                "Dimuon is not public; leave optimizer_config out"
            )


def _checkpoint_name(fields: Fields, seq_id: int) -> str:
    """Read the name of a checkpoint. The default is the number of the request, so that a repeated
    request gets the same name.
    """
    return fields.optional(fields.text, "path", f"{seq_id:06d}")
