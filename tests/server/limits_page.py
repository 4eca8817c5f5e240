"""Write docs/operators/limits.md.

python tests/server/limits_page.py > docs/operators/limits.md
"""

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from request_limits import BODIES, JSON_LIMITS, PROTOBUF_LIMITS, Limit

from planish.engine.constraints import cache, refusals
from planish.engine.constraints.worker import ProcessLimits
from planish.images import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGE_SIDE, MAX_IMAGES
from planish.server import uploads
from planish.server.http import routes_uploads
from planish.server.messages import requests as messages_requests
from planish.server.openai import (
    adapter_requests,
    lora_adapters,
    protocol,
    requests,
    response_requests,
    streaming,
)
from planish.server.openai.models import MAX_CHARACTERS_PER_TOKEN, MAX_TOKENIZED_BYTES
from planish.server.openai.openapi import openapi
from planish.server.openai.requests import MAX_OPTION_BYTES
from planish.wire.fields import MAX_ID_CHARACTERS, MAX_STRING_CHARACTERS

_OPENING = """\
# Limits

How large may a request, its fields and a tenant's work be, and what happens beyond? A request that
exceeds a limit gets status 400 and a message that names the field and the remedy, unless the tables
say otherwise. A rejected request changes nothing, except that a training request uses up its
sequence number.

`python tests/server/limits_page.py > docs/operators/limits.md` generates this page from the
constants with which the server checks requests. Tests send each field at its limit and beyond it.
"""


def page() -> str:
    """Return docs/operators/limits.md as Markdown text."""
    lines = [
        _OPENING,
        "## Bodies\n",
        _table(("what", "limit", "beyond it"), BODIES),
        "",
        "## One tenant\n",
        _prose(
            "[The settings](server.md#memory-and-limits) limit a tenant's sessions, models, samplers, "
            "storage, queued requests and tokens per minute. A tenant may use half of the memory for "
            "bodies and half of the server's connections; a request beyond it gets status 503."
        ),
        "## Images\n",
        _IMAGES,
        _table(("what", "limit"), _image_rows()),
        "",
        "## Constraints\n",
        _prose(
            "Each constraint of a tenant is compiled in a process of its own, which also computes its "
            "masks. The kernel ends a process that exceeds a limit. Then the requests with this "
            "constraint fail, and the tenant cannot use it for "
            f"{refusals.REFUSAL_SECONDS / 60:g} minutes. On macOS only the limits of time hold. A "
            "restart of the server forgets such refusals."
        ),
        _table(("what", "limit", "beyond it"), _constraint_rows()),
        "",
        "## Streams\n",
        "A stream of `/v1` stops its samples and ends with an error event if the client reads too "
        "slowly, or",
        "if the engine samples faster than the server can send.\n",
        _table(("what", "limit"), _stream_rows()),
        "",
        "## Adapters\n",
        "Clients upload adapters, and the server's operator loads them from a directory. The server "
        "imports",
        "one adapter at a time. Each adapter is a checkpoint, which counts in its tenant's storage.\n",
        _table(("what", "limit", "beyond it"), _adapter_rows()),
        "",
        _MODEL_FILES,
        "## JSON requests below /api/v1\n",
        _prose(
            f"An id has at most {_ID_LIMIT}, and any other string at most {_STRING_LIMIT}, unless "
            "the tables say otherwise. They leave out these fields, fields that take one of a few "
            "values, and fields that are not read. `[]` stands for the items of a list, and `*` for "
            "the entries of an object. In `forward_backward`, `forward_input` is called "
            "`forward_backward_input`. `planish/draw` takes "
            f"{JSON_LIMITS['/planish/draw']['requests'].limit} in `requests`, each with the fields "
            "of `asample`. `forward_backward` in protobuf has the limits of its JSON form, and its "
            f"`seq_id` is {PROTOBUF_LIMITS['seq_id'].limit}."
        ),
        *_request_tables(_api_fields()),
        "## Requests of OpenAI and Anthropic clients\n",
        _prose(
            f"The JSON of one parameter has at most {MAX_OPTION_BYTES >> 10} KiB. The text of "
            "`messages`, `tools` and a prompt must fit the model's context. Its limit in characters is "
            "the context's number of tokens times the length of the longest token of the vocabulary, "
            f"which counts as at most {MAX_CHARACTERS_PER_TOKEN} characters. All prompts of a request "
            "together have the same limit, or 8,388,608 characters if that is more. The server "
            "tokenizes several bodies at once, with at most "
            f"{MAX_TOKENIZED_BYTES >> 20} MiB of text together; the others wait for their tenant's "
            "turn. An answer may need "
            f"{protocol.MAX_ANSWER_BYTES >> 20:,} MiB of memory, estimated from `n`, the maximum "
            "number of tokens and the logprobs per token. A request for more gets status 400. `GET "
            "/openapi.json` has all fields with their limits."
        ),
        "## Paths, queries and headers\n",
        _table(
            ("what", "limit", "beyond it"),
            (
                ("an id in a path", "an id that exists", "404"),
                ("`limit`, `offset`", "0 to 1,000; 0 to 2^53", "400"),
                ("`access_scope`", "`owned` or `accessible`", "400"),
                ("`project_id`", "absent", "400"),
                ("request line and headers", "64 KiB", "400, and the connection is closed"),
            ),
        ),
        "",
    ]
    return "\n".join(lines)


def _prose(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def _constraint_rows() -> list[tuple[str, str, str]]:
    limits = ProcessLimits()
    num_running = cache.NUM_COMPILE_THREADS + cache.NUM_MASK_THREADS
    total_bytes = num_running * limits.memory_bytes + cache.MAX_RESTING_BYTES
    return [
        (
            "memory of one process, in addition to the tokenizer that all share",
            f"{limits.memory_bytes >> 20} MiB, and {limits.memory_bytes_per_token >> 10} KiB for "
            "each token of its running samples",
            "the process ends",
        ),
        ("CPU time of a compilation", f"{limits.compile_seconds:g} s", "the process ends"),
        (
            "CPU time of the tokens of one constraint",
            f"{limits.step_seconds:g} s; each token adds {limits.seconds_per_token * 1000:g} ms, "
            f"up to {limits.step_seconds:g} s",
            "the process ends",
        ),
        (
            "wait of a request for the compilation",
            f"{cache.CHECK_TIMEOUT_SECONDS:g} s",
            "400; the compilation ends if no other request waits for it",
        ),
        (
            "compilations at a time",
            f"{cache.NUM_COMPILE_THREADS}, and {cache.MAX_COMPILE_JOBS_PER_OWNER} of one tenant",
            "they wait; tenants take turns",
        ),
        (
            "processes that compute masks at a time",
            f"{cache.NUM_MASK_THREADS}, and {cache.MAX_MASK_JOBS_PER_OWNER} of one tenant",
            "they wait; tenants take turns",
        ),
        (
            "compiled constraints without a running sample",
            f"{cache.MAX_GRAMMARS}, and {cache.MAX_GRAMMARS_PER_OWNER} of one tenant",
            "the least recently used end",
        ),
        (
            "memory of all processes that do not run at the moment",
            f"{cache.MAX_RESTING_BYTES >> 20} MiB, without that of the tokens",
            "unused ones end, then the largest of the tenant with the most",
        ),
        (
            "memory of all processes of a base model",
            f"{total_bytes >> 20:,} MiB, without that of the tokens",
            "this is the sum of the limits above",
        ),
    ]


def _stream_rows() -> list[tuple[str, str]]:
    return [
        (
            "tokens that wait for a client that reads nothing, in one stream",
            f"{streaming.STALL_BYTES >> 20} MiB, after {streaming.STALL_SECONDS:g} s",
        ),
        (
            "tokens that wait for a client that reads slowly, in one stream",
            f"{streaming.MAX_UNREAD_BYTES >> 20} MiB",
        ),
        (
            "tokens that wait for slow clients, in all streams of a tenant",
            f"{streaming.MAX_TENANT_UNREAD_BYTES >> 20} MiB",
        ),
        (
            "tokens that wait to be sent, in all streams of a tenant",
            f"{streaming.MAX_TENANT_UNSENT_BYTES >> 20} MiB; then the streams with the most end",
        ),
    ]


_MODEL_FILES = """\
## Model files

A model directory, an adapter or a checkpoint of somebody else is checked before any work is done
with it. Each of these is an error that names the file. Pickled weights are never loaded, and no
code of a model directory runs.

| input | limit |
| --- | --- |
| JSON files of settings | 16 MiB; indexes of weights 128 MiB, tokenizer.json 256 MiB; Python's limit of nested objects |
| integers and floats in config.json | below 2**31; up to 1e30 |
| `num_hidden_layers` | 1,024 |
| experts in all layers together | 262,144 |
| context length | 4,194,304 tokens |
| rank of an adapter | 256; 4,096 if it is merged |
| matrices of an adapter | the shapes in the file's header must be those of the base model's linears |
| keys of `rank_pattern` and `alpha_pattern` | 2,000 characters; 500 regular expressions, without look-around and back-references; 5 million comparisons |
| chat templates | 2 s of CPU time, 1 GiB of memory, 4 MiB of text ([renderers.md](../reference/renderers.md)) |
"""
_IMAGES = """\
An image is one chunk of a prompt or of a training sequence. The server decodes at most two images
at a time, and checks the size in the file's header before it decodes pixels. The largest image
takes 64 MiB.
"""


def _image_rows() -> list[tuple[str, str]]:
    return [
        ("images of a prompt or training sequence", f"{MAX_IMAGES}"),
        ("size of an image's file", f"{MAX_IMAGE_BYTES >> 20} MiB"),
        ("pixels of an image", f"{MAX_IMAGE_PIXELS:,}"),
        ("width and height of an image, in pixels", f"{MAX_IMAGE_SIDE:,}"),
        ("its longer side, divided by its shorter side", "200"),
        ("formats", "PNG without animation, JPEG; 8 bits per channel"),
        ("`expected_tokens`", "absent, or the number of the model's processor"),
    ]


def _adapter_rows() -> list[tuple[str, str, str]]:
    return [
        ("unfinished uploads of one tenant", f"{uploads.MAX_TENANT_UPLOADS}", "429"),
        (
            "time of an upload",
            f"{uploads.UPLOAD_SECONDS / 60:g} minutes",
            "404; its files are deleted",
        ),
        (
            f"size of {uploads.ADAPTER_FILE}",
            f"memory of an adapter of rank {uploads.LARGEST_LORA.rank} on all layers with its "
            "optimizer state",
            "400",
        ),
        ("size of each other file", f"{uploads.MAX_JSON_BYTES >> 20} MiB", "400"),
        ("wait for more bytes of a file", f"{routes_uploads.STALL_SECONDS:g} s", "503"),
        (
            "unanswered requests to load or unload an adapter",
            f"{lora_adapters.MAX_REQUESTS}",
            "429",
        ),
    ]


def _table(head: tuple[str, ...], rows: Any) -> str:
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        for row in (head, tuple("---" for _ in head), *rows)
    )


def _api_fields() -> dict[str, dict[str, str]]:
    """Return the limit of each field of the JSON requests under /api/v1, by request and field."""
    found: dict[str, dict[str, str]] = {}
    for path, limits in JSON_LIMITS.items():
        if path != "/planish/draw":
            found[path.removeprefix("/")] = {
                name.replace("forward_backward_input", "forward_input"): limit
                for name, limit in _limits_in_words(limits).items()
            }
    return found


def _limits_in_words(limits: Mapping[str, Limit]) -> dict[str, str]:
    return {name: limit.limit for name, limit in limits.items() if limit.limit}


_STRING_LIMIT = f"{MAX_STRING_CHARACTERS:,} characters"
_ID_LIMIT = f"{MAX_ID_CHARACTERS} letters, digits and `_ . : -`"

_CHOICE = re.compile(
    r"(`[^`]*`(, | )?(or )?)+|absent|empty|not read.*|true or false|(float32 or )?int64"
    rf"|{re.escape(_STRING_LIMIT)}|{re.escape(_ID_LIMIT)}"
)


def _request_tables(requests: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the tables of these requests. A limit that a field has in several requests is listed
    once, before the requests, and the second table has what differs. Fields are left out that take
    one of a few values, are not read, or have the usual limit of a string.
    """
    shared = _shared_limits(requests)
    own = {
        request: _rows_by_limit(
            {
                name: limit
                for name, limit in fields.items()
                if shared.get(name) != limit and (name in shared or not _CHOICE.fullmatch(limit))
            }
        )
        for request, fields in requests.items()
    }
    short = {request: rows for request, rows in own.items() if len(rows) <= _MAX_SHARED_ROWS}
    lines = [
        "Fields of several requests:\n",
        _grouped(shared),
        "",
        "Other fields, and limits that differ in one request:\n",
        _table(
            ("request", "fields", "limit"),
            [(f"`{request}`", *row) for request, rows in short.items() for row in rows],
        ),
        "",
    ]
    for request in sorted(own.keys() - short.keys()):
        lines += [f"### {request}\n", _table(("fields", "limit"), own[request]), ""]
    return lines


_MAX_SHARED_ROWS = 5
"""A request with more rows has a table of its own."""


def _shared_limits(requests: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the most common limit of each field that has one limit in several requests."""
    everywhere: dict[str, Counter[str]] = {}
    for fields in requests.values():
        for name, limit in fields.items():
            if name and not _CHOICE.fullmatch(limit):
                everywhere.setdefault(name, Counter())[limit] += 1
    most_common = {name: limits.most_common(1)[0] for name, limits in everywhere.items()}
    return {name: limit for name, (limit, count) in most_common.items() if count > 1}


def _rows_by_limit(fields: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (fields, limit) for each limit."""
    by_limit: dict[str, list[str]] = {}
    for name, limit in fields.items():
        by_limit.setdefault(limit, []).append(f"`{name}`" if name else "the body")
    return [(", ".join(names), limit) for limit, names in by_limit.items()]


def _grouped(fields: Mapping[str, str]) -> str:
    return _table(("fields", "limit"), _rows_by_limit(fields))


def openai_fields() -> dict[str, dict[str, str]]:
    """Return the limit of each field of the OpenAI-compatible requests, by path and field."""
    description = openapi(has_adapter_routes=True)
    schemas = description["components"]["schemas"]
    found: dict[str, dict[str, str]] = {}
    for path, methods in description["paths"].items():
        if "post" not in methods:
            continue
        content = methods["post"]["requestBody"]["content"]["application/json"]
        rows: dict[str, list[str]] = {}
        for field, limit in _schema_fields(content["schema"], schemas, ""):
            rows.setdefault(field, []).append(limit)
        found[path] = {field: ", or ".join(dict.fromkeys(said)) for field, said in rows.items()}
    return found


def _schema_fields(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], path: str
) -> Iterator[tuple[str, str]]:
    """Yield (field, limit) for each field of an object's schema, at any depth. A field with several
    alternatives is yielded once for each.
    """
    kind = schema["$ref"].rpartition("/")[2] if "$ref" in schema else ""
    target = schemas[kind] if kind else schema
    for name, one in target.get("properties", {}).items():
        where = f"{path}.{name}".lstrip(".")
        span = _integer_span(kind, name)
        for part in _parts(one):
            parameter = re.split(r"[.\[]", where)[0]
            limit = span if part.get("type") == "integer" else _part_limit(part, parameter)
            if limit:
                yield where, limit
            yield from _schema_fields(part, schemas, where)
            for item in _parts(part.get("items", {})):
                yield from _schema_fields(item, schemas, f"{where}[]")


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives of a schema. Nested `anyOf` and `oneOf` are flattened."""
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return [part for one in inner for part in _parts(one)] if inner else [schema]


def _integer_span(kind: str, name: str) -> str:
    """Return the range of an integer field. An integer field also accepts floats such as 3.0, and
    its JSON schema therefore lacks the bounds. So the bounds are read from the type.
    """
    modules = (requests, response_requests, adapter_requests, messages_requests)
    owner = next((getattr(one, kind) for one in modules if hasattr(one, kind)), None)
    field = owner.model_fields.get(name) if owner is not None else None
    if field is None:
        return ""
    bounds = list(_metadata([*field.metadata, field.annotation]))
    found = {
        key: getattr(bound, key)
        for bound in bounds
        for key in ("ge", "gt", "le", "lt")
        if hasattr(bound, key)
    }
    low = found.get("ge", found.get("gt", 0) + 1 if "gt" in found else None)
    high = found.get("le", found["lt"] - 1 if "lt" in found else None)
    return (
        f"{'' if low is None else f'{low:,} '}to {'the context' if high is None else f'{high:,}'}"
    )


def _metadata(values: Any) -> Iterator[Any]:
    """Yield the metadata of annotated types at any depth."""
    for value in values:
        for bound in (*getattr(value, "metadata", ()), *getattr(value, "__metadata__", ())):
            yield from _metadata([bound])
        yield from _metadata(get_args(value))
        yield value


def _part_limit(part: Mapping[str, Any], parameter: str) -> str:
    """Return the limit of one alternative of a field. The limit is empty for an object whose fields
    are listed.
    """
    if "enum" in part or "const" in part:
        values = part.get("enum", [part.get("const")])
        return " or ".join(f"`{_shown(value)}`" for value in values) or "absent"
    size = (
        "text that fits the context"
        if parameter in _TEXTS
        else f"{MAX_OPTION_BYTES >> 10} KiB of JSON"
    )
    match part.get("type"):
        case "boolean":
            return "true or false"
        case "number":
            return _span(part)
        case "array":
            count = part.get("maxItems")
            return size if count is None else f"{count:,} items (together {size})"
        case "string" if "maxLength" in part:
            return f"{part['maxLength']:,} characters"
        case "string" if part.get("pattern", "").startswith(_NAME_PATTERN):
            longest = int(part["pattern"].removeprefix(_NAME_PATTERN).rstrip("}$"))
            return f"{longest} letters, digits, `_` and `-`"
        case "string" | "object":
            return size
    return "not read" if not part else ""


_NAME_PATTERN = "^[a-zA-Z0-9_-]{1,"
"""The beginning of the pattern of a name; its greatest length follows."""
_TEXTS = ("messages", "tools", "prompt", "tokens", "input", "instructions", "system")


def _span(part: Mapping[str, Any]) -> str:
    low = part.get("minimum", part.get("exclusiveMinimum"))
    high = part.get("maximum", part.get("exclusiveMaximum"))
    begin = "" if low is None else f"{'above ' * ('exclusiveMinimum' in part)}{low:,} "
    return f"{begin}to {'the limit of float64' if high is None else f'{high:,}'}"


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.stdout.write(page())
