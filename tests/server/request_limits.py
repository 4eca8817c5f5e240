"""The limit of every field of every JSON and protobuf request.

`python tests/server/limits_page.py` prints these limits as docs/operators/limits.md. The
tables use the same constants as the decoders. One test finds all fields that the decoders read, and
fails for a field that is not listed here. For every field of the JSON requests, another test sends
values at the limit and values just beyond it. The limits of the OpenAI-compatible requests (/v1)
are not listed here: limits_page reads them from the types that check those requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planish.server.durable.checkpoints import EXTERNAL_PREFIX, MAX_RECIPIENTS
from planish.server.http.budgets import (
    MAX_SAMPLE_BODY,
    MAX_SMALL_BODY,
    MAX_TELEMETRY_BODY,
    MAX_TOTAL_BODIES,
    MAX_TRAINING_BODY,
    MIB,
)
from planish.server.http.routes_sampling import MAX_BATCH_REQUESTS
from planish.server.uploads import OPTIONAL_FILES, REQUIRED_FILES
from planish.service import MAX_METADATA, MAX_SAMPLES
from planish.types import (
    LONGEST_TTL_SECONDS,
    MAX_ALLOWED_TOKENS,
    MAX_CONSTRAINT_BYTES,
    MAX_CONSTRAINT_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from planish.wire.fields import (
    MAX_CONTAINER_ITEMS,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_ID_CHARACTERS,
    MAX_LIST_ITEMS,
    MAX_MAP_ENTRIES,
    MAX_STRING_CHARACTERS,
    MAX_VALUES,
)
from planish.wire.tensors import MAX_DATA_ITEMS, MAX_DENSE_ELEMENTS, MAX_DIMENSIONS, MAX_TOKENS
from planish.wire.training import MAX_FIELDS

MAX_INT64 = 2**63 - 1


@dataclass(frozen=True)
class Limit:
    """The limit of one field."""

    limit: str
    """The limit in words. It is empty for an object whose fields have their own entries."""
    answer: str = ""
    """A part of the error message for a value beyond the limit. The status is 400."""
    edges: Sequence[Any] = ()
    """Values at the limit, which are accepted."""
    beyond: Sequence[Any] = ()
    """Values just beyond the limit, which are rejected."""
    covers_all_within: bool = False
    """Whether this limit also applies to every field inside this one, so that none of them needs an
    entry of its own.
    """


OBJECT = Limit("")
FLAG = Limit("true or false", "give true or false", [True, False], [2, "true"])
NOT_READ = Limit("not read; part of the body", covers_all_within=True)


def text(max_characters: int = MAX_STRING_CHARACTERS) -> Limit:
    """Return the limit of a string with at most `max_characters` characters."""
    return Limit(
        f"{max_characters:,} characters",
        f"has {max_characters + 1:,} characters; give at most {max_characters:,}",
        ["x" * max_characters],
        ["x" * (max_characters + 1)],
    )


def items(max_items: int, item: Any, answer: str | None = None) -> Limit:
    """Return the limit of a list with at most `max_items` values. `item` is an example of a value."""
    answer = answer or f"has {max_items + 1:,} items; give at most {max_items:,}"
    return Limit(f"{max_items:,} items", answer, [[item] * max_items], [[item] * (max_items + 1)])


def whole(low: int, high: int, answer: str | None = None) -> Limit:
    """Return the limit of an integer from `low` to `high`, both included."""
    answer = answer or f"give a whole number from {low} to {high}"
    return Limit(f"{low:,} to {high:,}", answer, [low, high], [low - 1, high + 1, 0.5])


def number(low: float | None, high: float | None, answer: str, *beyond: float) -> Limit:
    """Return the limit of a number from `low` to `high`. None stands for the limit of float64. The
    values `beyond` are rejected.
    """
    span = " to ".join("the limit of float64" if end is None else f"{end:g}" for end in (low, high))
    edges = [end for end in (low, high) if end is not None]
    return Limit(span, answer, edges, beyond)


def one_of(*values: str, answer: str) -> Limit:
    """Return the limit of a string that must be one of `values`."""
    return Limit(" or ".join(f"`{value}`" for value in values), answer, values, ["other"])


IDENTIFIER = Limit(
    f"{MAX_ID_CHARACTERS} letters, digits and `_ . : -`",
    "is not an id: give up to 256 letters",
    ["x" * MAX_ID_CHARACTERS],
    ["x" * (MAX_ID_CHARACTERS + 1), "a/b"],
)


def name(max_characters: int = 200) -> Limit:
    """Return the limit of a checkpoint's name with at most `max_characters` characters."""
    return Limit(
        f"{max_characters} letters, digits and `_ . - :`",
        "give up to 200 letters, digits",
        ["x" * max_characters],
        ["x" * (max_characters + 1), "a/b"],
    )


NAME = name()
TTL = whole(1, LONGEST_TTL_SECONDS, "ttl_seconds=")
METADATA = Limit(
    f"{MAX_METADATA:,} characters of keys and values, {MAX_LIST_ITEMS:,} entries",
    "user_metadata has ",
    [{"k" * 1000: "v" * (MAX_METADATA - 1000)}, {f"{i}": "" for i in range(MAX_LIST_ITEMS)}],
    [{"k" * 1000: "v" * (MAX_METADATA - 999)}, {f"{i}": "" for i in range(MAX_LIST_ITEMS + 1)}],
    covers_all_within=True,
)
SEARCHED_METADATA = Limit(
    f"{MAX_LIST_ITEMS:,} strings",
    f"has {MAX_LIST_ITEMS + 1:,} entries; give at most {MAX_LIST_ITEMS:,}",
    [{f"{i}": "" for i in range(MAX_LIST_ITEMS)}],
    [{f"{i}": "" for i in range(MAX_LIST_ITEMS + 1)}],
    covers_all_within=True,
)
PROJECTS = Limit("`default`", "this server has no projects", [["default"]], [["other"], []])
SESSION_SPEC = Limit(
    f"{MAX_METADATA:,} characters together, {MAX_LIST_ITEMS:,} entries",
    " give at most ",
    [],
    [],
    covers_all_within=True,
)
COUNT = Limit("0 to the size of the vocabulary", "give a number from 0 to the vocabulary's")

_LARGE_LIST = Limit(f"{MAX_VALUES:,} values in the body")
_PARTS = Limit(f"{MAX_DATA_ITEMS:,} datums, chunks and tensors in the body")

_TYPE = {"type": NOT_READ}
_SEQ = {"seq_id": Limit("the next number of the model, from 1 to 2^62", "seq_id", [], [0, 2**63])}
_PLACE = {"model_id": IDENTIFIER, **_SEQ}
_NUMBER = whole(0, MAX_INT64)
_MODEL_NUMBER = {"session_id": IDENTIFIER, "model_seq_id": _NUMBER}
_OPTIMIZER = {
    "optimizer_config": OBJECT,
    "optimizer_config.type": one_of("adamw", answer="is not supported: AdamW is the only"),
    "optimizer_config.version": NOT_READ,
}
_SPEC = {"user_metadata": SESSION_SPEC, "display_name": text()}
_CHUNKS = {
    "": OBJECT,
    ".chunks": _PARTS,
    ".chunks[].type": Limit(
        "`encoded_text` or `image`", "is no known chunk", ["encoded_text"], ["other"]
    ),
    ".chunks[].tokens": Limit(f"{MAX_TOKENS:,} token ids in all chunks, and at most the context"),
    ".chunks[].tokens[]": Limit("the vocabulary"),
}
_DIMENSIONS = Limit(
    f"{MAX_DIMENSIONS} dimensions",
    f"has {MAX_DIMENSIONS + 1} dimensions; give at most {MAX_DIMENSIONS}",
    [],
    [[1] * (MAX_DIMENSIONS + 1)],
)
_INT64 = Limit("int64")
_TENSOR = {
    "": OBJECT,
    ".data": _LARGE_LIST,
    ".data[]": Limit("float32 or int64"),
    ".dtype": one_of("float32", "int64", answer="give 'float32' or 'int64'"),
    ".shape": _DIMENSIONS,
    ".shape[]": Limit(
        "their product is the number of values; for CSR tensors, at most 2^26 in the body"
    ),
    ".sparse_crow_indices": _LARGE_LIST,
    ".sparse_crow_indices[]": _INT64,
    ".sparse_col_indices": _LARGE_LIST,
    ".sparse_col_indices[]": _INT64,
}


def _under(path: str, table: Mapping[str, Limit]) -> dict[str, Limit]:
    return {f"{path}{field}": limit for field, limit in table.items()}


def _gradient(name: str) -> dict[str, Limit]:
    datum = f"{name}.data[]"
    options = Limit(
        f"{MAX_MAP_ENTRIES} numbers or strings",
        f"has {MAX_MAP_ENTRIES + 1} entries; give at most {MAX_MAP_ENTRIES}",
        [],
        [{f"k{i}": 1.0 for i in range(MAX_MAP_ENTRIES + 1)}],
        covers_all_within=True,
    )
    return {
        **_PLACE,
        name: OBJECT,
        f"{name}.data": _PARTS,
        datum: OBJECT,
        **_under(f"{datum}.model_input", _CHUNKS),
        f"{datum}.loss_fn_inputs": Limit(
            f"{MAX_MAP_ENTRIES} tensors",
            f"has {MAX_MAP_ENTRIES + 1} entries; give at most {MAX_MAP_ENTRIES}",
            [],
            [{f"k{i}": {} for i in range(MAX_MAP_ENTRIES + 1)}],
        ),
        **_under(f"{datum}.loss_fn_inputs.*", _TENSOR),
        f"{datum}.model_input_spans": NOT_READ,
        f"{datum}.loss_fn_input_spans": NOT_READ,
        f"{name}.loss_fn": text(),
        f"{name}.loss_fn_config": options,
    }


_STOP = Limit(
    f"{MAX_STOP_STRINGS} strings of {MAX_STOP_BYTES:,} bytes, or {MAX_STOP_TOKENS:,} token ids",
    "stop",
    [["x" * MAX_STOP_BYTES] * MAX_STOP_STRINGS, [1] * MAX_STOP_TOKENS],
    [["x"] * (MAX_STOP_STRINGS + 1), ["x" * (MAX_STOP_BYTES + 1)], [1] * (MAX_STOP_TOKENS + 1)],
    covers_all_within=True,
)
_PENALTY = number(-100, 100, "give a finite number at least -100 and at most 100", -101, 101)
_CONSTRAINT = {
    "sampling_params.constraint": OBJECT,
    "sampling_params.constraint.kind": one_of(
        "json_object", "json_schema", "regex", "choice", "lark", answer="constraint.kind='other'"
    ),
    "sampling_params.constraint.text": Limit(
        f"{MAX_CONSTRAINT_BYTES:,} bytes", "give at most 65", [], ["x" * (MAX_CONSTRAINT_BYTES + 1)]
    ),
    "sampling_params.constraint.choices": Limit(
        f"{MAX_CONSTRAINT_CHOICES:,} strings of {MAX_CONSTRAINT_BYTES:,} bytes together",
        covers_all_within=True,
    ),
}
_PARAMS = {
    "sampling_params": OBJECT,
    "sampling_params.max_tokens": Limit(
        "1 to the rest of the context", "max_tokens", [1], [0, MAX_INT64]
    ),
    "sampling_params.seed": whole(-(2**63), 2**64 - 1, "give a whole number from "),
    "sampling_params.stop": _STOP,
    "sampling_params.stop_token_ids": Limit(
        f"{MAX_STOP_TOKENS:,} token ids", "stop", [], [[1] * (MAX_STOP_TOKENS + 1)],
        covers_all_within=True,
    ),
    "sampling_params.temperature": Limit(
        "0, or 1e-30 to 1e30", "temperature", [0, 1e-30, 1e30], [-1, 1e-31, 1e31]
    ),
    "sampling_params.top_k": Limit("-1, or 1 to 2^63 - 1", "top_k", [-1, 1, MAX_INT64], [0, -2]),
    "sampling_params.top_p": Limit("above 0 to 1", "above 0 and at most 1", [1e-320, 1], [0, 1.1]),
    "sampling_params.min_p": number(0, 1, "at least 0 and at most 1", -0.1, 1.1),
    "sampling_params.min_tokens": Limit("0 to max_tokens", "min_tokens", [0], [-1, MAX_INT64]),
    "sampling_params.repetition_penalty": number(
        0.01, 100, "give a finite number at least 0.01 and at most 100", 0, 101
    ),
    "sampling_params.frequency_penalty": _PENALTY,
    "sampling_params.presence_penalty": _PENALTY,
    "sampling_params.logit_bias": Limit(
        f"{MAX_LOGIT_BIASES:,} token ids with numbers from -100 to 100", "logit_bias",
        [{}], [{str(token): 1 for token in range(MAX_LOGIT_BIASES + 1)}, {"1": 101}],
        covers_all_within=True,
    ),
    "sampling_params.allowed_token_ids": Limit(
        f"{MAX_ALLOWED_TOKENS:,} token ids", "allowed_token_ids", [],
        [[1] * (MAX_ALLOWED_TOKENS + 1)], covers_all_within=True,
    ),
    **_CONSTRAINT,
}  # fmt: skip
_SAMPLE = {
    **_TYPE,
    "sampling_session_id": IDENTIFIER,
    "seq_id": _NUMBER,
    **_under("prompt", _CHUNKS),
    "num_samples": whole(1, MAX_SAMPLES),
    **_PARAMS,
    "prompt_logprobs": FLAG,
    "topk_prompt_logprobs": COUNT,
    "topk_sample_logprobs": COUNT,
    "prompt_alt_tokens_k": COUNT,
    **_under("target_prompt_logprobs", _TENSOR),
    "prompt_logprobs_last_n": Limit("1 to 2^63 - 1", "prompt_logprobs_last_n", [], [0]),
    "record_stability_info": FLAG,
    "prompt_only": FLAG,
}
_ADAM = {
    **{
        f"adam_params.{name}": number(0, None, "give a finite number at least 0", -1)
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm")
    },
    **{
        f"adam_params.{name}": Limit(
            "0 to below 1", "give a finite number at least 0 and below 1", [0], [1, -1]
        )
        for name in ("beta1", "beta2")
    },
}
_NAMED_SAVE = {"path": NAME, "ttl_seconds": TTL, "overwrite": FLAG, "user_metadata": METADATA}
_LORA = {
    "lora_config": OBJECT,
    "lora_config.rank": whole(1, 256, "give a whole number from "),
    "lora_config.seed": whole(-(2**63), 2**64 - 1, "give a whole number from "),
    "lora_config.train_mlp": FLAG,
    "lora_config.train_attn": FLAG,
    "lora_config.train_unembed": FLAG,
}
_KIND = {"kind": one_of("snapshot", "inflight", answer="give 'snapshot' or 'inflight'")}

JSON_LIMITS: Mapping[str, Mapping[str, Limit]] = {
    "/client/config": {"sdk_version": text()},
    "/client/dynamic_config": {"": NOT_READ},
    "/create_session": {
        "tags": SESSION_SPEC, **_SPEC, "sdk_version": text(), "project_id": text(), **_TYPE,
    },
    "/session_heartbeat": {"session_id": IDENTIFIER, **_TYPE},
    "/sessions/{session_id}/finish": {
        "reason": OBJECT,
        "reason.type": one_of("success", "errored", "interrupted", answer="give one of success"),
        "detail": text(),
    },
    "/sessions/search": {
        "session_id": text(),
        "owner": OBJECT,
        "owner.type": one_of("own", "accessible", answer="sessions of other keys"),
        "project_ids": PROJECTS,
        "statuses": items(MAX_LIST_ITEMS, {"type": "active"}),
        "statuses[].type": one_of(
            "active", "client_finished", "cancelled", "failed", answer="is unknown"
        ),
        "statuses[].reasons": Limit("empty", "leave `reasons` out", [[]], [["x"]]),
        "limit": whole(1, 200),
        "cursor": OBJECT,
        "cursor.last_created_at": Limit("a time in ISO 8601"),
        "cursor.last_session_id": text(),
        "user_metadata": SEARCHED_METADATA,
        "display_name": text(),
    },
    "/telemetry": {"": NOT_READ},
    "/create_model": {
        **_TYPE, **_MODEL_NUMBER, "base_model": text(), **_OPTIMIZER, "user_metadata": METADATA,
        **_LORA,
    },
    "/get_info": {"model_id": IDENTIFIER, **_TYPE},
    "/forward_backward": _gradient("forward_backward_input"),
    "/forward": _gradient("forward_input"),
    "/optim_step": {
        **_TYPE, **_PLACE, "adam_params": OBJECT, **_ADAM,
        "optimizer_params": Limit("absent", "give adam_params", [], [{"type": "dimuon"}]),
    },
    "/save_weights": {**_TYPE, **_PLACE, **_NAMED_SAVE},
    "/save_weights_for_sampler": {
        **_TYPE, **_PLACE, **_NAMED_SAVE, **_KIND, "sampling_session_seq_id": _NUMBER,
    },
    "/save_weights_external": {
        **_TYPE, **_PLACE, "path": name(200 - len(EXTERNAL_PREFIX)), "ttl_seconds": TTL,
        "age_encryption_recipients": Limit(
            f"{MAX_RECIPIENTS} keys of 4,096 characters", f"give at most {MAX_RECIPIENTS}", [],
            [["age1"] * (MAX_RECIPIENTS + 1)], covers_all_within=True,
        ),
    },
    "/load_weights": {
        **_TYPE, **_PLACE, **_MODEL_NUMBER, **_OPTIMIZER, "path": text(), "optimizer": FLAG,
        "base_model": text(), "user_metadata": METADATA,
        "weights_access_token": Limit("absent", "leave it out", [], ["x"]),
    },
    "/unload_model": {"model_id": IDENTIFIER, **_TYPE},
    "/weights_info": {"tinker_path": text()},
    "/copy_weights": {
        "source_path": text(), "ttl_seconds": whole(1, LONGEST_TTL_SECONDS),
        "session_id": IDENTIFIER, "model_seq_id": _NUMBER, "destination_project_id": text(),
        "weights_access_token": Limit("absent", "leave it out", [], ["x"]),
    },
    "/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl": {
        "ttl_seconds": whole(1, LONGEST_TTL_SECONDS),
    },
    "/checkpoints/search": {
        "owner": OBJECT,
        "owner.type": one_of("own", "accessible", answer="checkpoints of other keys"),
        "project_ids": PROJECTS,
        "user_metadata": SEARCHED_METADATA,
        "checkpoint_type": one_of("training", "sampler", "external", answer="is unknown"),
        "base_models": items(MAX_LIST_ITEMS, "a"),
        "limit": whole(1, 200),
        "cursor": OBJECT,
        "cursor.last_created_at": Limit("a time in ISO 8601"),
        "cursor.last_checkpoint_uuid": text(),
    },
    "/external_weights_upload_start": {
        "base_model": text(), **_LORA, "destination_project_id": text(),
    },
    "/external_weights_upload_finish": {"upload_id": IDENTIFIER},
    "/planish/import_start": {
        "base_model": text(), "name": NAME, "quantize": text(), "source": text(),
        "files": Limit(
            f"{' and '.join(REQUIRED_FILES)}; if you like, {' and '.join(OPTIONAL_FILES)}", "give ",
            [list(REQUIRED_FILES), [*REQUIRED_FILES, *OPTIONAL_FILES]],
            [[], [*REQUIRED_FILES, "other"]],
        ),
    },
    "/planish/import_finish": {"upload_id": IDENTIFIER},
    "/create_sampling_session": {
        **_TYPE, "session_id": IDENTIFIER, "sampling_session_seq_id": _NUMBER,
        "base_model": text(), "model_path": text(),
    },
    "/asample": _SAMPLE,
    "/planish/draw": {
        "requests": items(MAX_BATCH_REQUESTS, {}, "entries; give 1 to"), **_under("requests[].", _SAMPLE),
    },
    "/planish/release": {"sampler_id": IDENTIFIER},
    "/retrieve_future": {"request_id": IDENTIFIER, "allow_metadata_only": NOT_READ},
    "/cancel_future": {"request_id": IDENTIFIER},
}  # fmt: skip
"""The limits of JSON requests, by the path of their route under /api/v1 and by field. `[]` stands
for the items of a list, and `*` for the entries of an object.
"""

_PROTO_TENSOR = {
    "": OBJECT,
    ".dense": Limit("the body"),
    ".dtype": Limit("1 to 4"),
    ".shape": _DIMENSIONS,
    ".sparse_csr": OBJECT,
    ".sparse_csr.values": Limit("the body"),
    ".sparse_csr.crow_indices": Limit("the body"),
    ".sparse_csr.col_indices": Limit("the body"),
}
PROTOBUF_LIMITS: Mapping[str, Limit] = {
    "model_id": IDENTIFIER,
    "seq_id": whole(1, 2**31 - 1, "seq_id"),
    "loss_fn": text(),
    "loss_fn_config": Limit(f"{MAX_MAP_ENTRIES} numbers", covers_all_within=True),
    "loss_fn_config_v2": Limit(f"{MAX_MAP_ENTRIES} numbers or strings", covers_all_within=True),
    "forward_only": FLAG,
    "data": _PARTS,
    "data[].model_input": _PARTS,
    "data[].model_input[].encoded_text": OBJECT,
    "data[].model_input[].encoded_text.tokens": Limit(
        f"{MAX_TOKENS:,} token ids in all chunks, and the context"
    ),
    "data[].model_input[].image": Limit("see Images", covers_all_within=True),
    "data[].model_input[].dmel": Limit("absent", covers_all_within=True),
    "data[].loss_fn_inputs": Limit(f"{MAX_MAP_ENTRIES} tensors"),
    **_under("data[].loss_fn_inputs.*", _PROTO_TENSOR),
    "data[].model_input_spans": NOT_READ,
    "data[].loss_fn_input_spans": NOT_READ,
}
"""The limits of the protobuf body of /forward_backward."""

BODIES: Sequence[tuple[str, str, str]] = (
    (
        "size of a training request",
        f"{MAX_TRAINING_BODY // MIB} MiB",
        "413: send less data in one call",
    ),
    ("size of a sampling or OpenAI request", f"{MAX_SAMPLE_BODY // MIB} MiB", "413"),
    ("size of telemetry", f"{MAX_TELEMETRY_BODY // MIB} MiB", "413"),
    ("size of any other request", f"{MAX_SMALL_BODY // MIB} MiB", "413"),
    ("size of all bodies at once", f"{MAX_TOTAL_BODIES // MIB} MiB; half of it for one key", "503"),
    ("objects and lists in a JSON body", f"{MAX_CONTAINERS:,}", "400"),
    (
        "entries of an object, items of a list that are not numbers",
        f"{MAX_CONTAINER_ITEMS:,}",
        "400",
    ),
    ("values in a JSON body, token ids in a training request", f"{MAX_VALUES:,}", "400"),
    ("nesting depth of objects and lists", f"{MAX_DEPTH}", "400"),
    ("fields of a protobuf body, its datums and tensors", f"{MAX_FIELDS:,}", "400"),
    ("datums, chunks and tensors in a training request", f"{MAX_DATA_ITEMS:,}", "400"),
    ("elements of all CSR tensors of a body, dense", f"{MAX_DENSE_ELEMENTS:,}", "400"),
    ("an unknown field", "null, false, 0, empty", "400: unknown fields are not ignored"),
)
"""The limits that apply to a whole body. Each entry has the limited quantity, the limit, and the
status of a request beyond the limit. A limit of size applies to the body as it was sent, and again
to the decompressed body.
"""
