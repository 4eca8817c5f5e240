"""docs/operators/limits.md is what the code does: every field that a request may have is in the
table, and each limit holds at its edge and one beyond.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from full_requests import API, FullRequest, Ids, full_requests
from limits_page import openai_fields, page
from oversized_bodies import body_fields
from request_limits import JSON_LIMITS, PROTOBUF_LIMITS, Limit
from starlette.testclient import TestClient
from test_app import BASE, Caller, client_of

from planish.server.openai.openapi import openapi
from planish.testing import tiny_model
from planish.wire.fields import Fields
from planish.wire.messages import ForwardBackwardRequestMessage

KEY = "tml-alice-key"
_EXAMPLES = Ids(BASE, "s", "s:train:0", "s:sample:0", "tinker://s:train:0/weights/a", "r")
_FORMS = [one.name for one in full_requests(_EXAMPLES) if one.path.startswith(API)]
_JSON_FORMS = [
    one.name
    for one in full_requests(_EXAMPLES)
    if one.path.startswith(API) and isinstance(one.body, dict)
]


@dataclass
class Served:
    """A server, and the ids of a tenant."""

    client: TestClient
    ids: Ids

    def request(self, name: str) -> FullRequest:
        """Return the request with this name, with its next numbers."""
        return next(one for one in full_requests(self.ids) if one.name == name)

    def post(self, request: FullRequest, body: Any) -> tuple[int, str]:
        headers = {"x-api-key": KEY, "content-type": request.content_type}
        answer = self.client.request(
            request.method, request.path, content=json.dumps(body), headers=headers
        )
        return answer.status_code, answer.text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    with client_of(tmp_path_factory.mktemp("data"), model, {KEY: "alice"}) as client:
        caller = Caller(client, KEY)
        session = caller.session()
        trained = caller.model(session)
        save = {"model_id": trained, "seq_id": 1, "path": "a"}
        path = caller.result(caller.post("/save_weights", save))["path"]
        ids = Ids(BASE, session, trained, caller.sampler(session), path, "r", {trained: 1})
        yield Served(client, ids)


def limits_of(request: FullRequest) -> Mapping[str, Limit]:
    return JSON_LIMITS[(request.route or request.path).removeprefix(API)]


def limit_of(field: str, limits: Mapping[str, Limit]) -> Limit | None:
    """Return the limit of a field, or that of the value around it which covers it."""
    field = re.sub(r"(loss_fn_inputs)(\.\w+|\[\w+\])", r"\1.*", field)
    if field in limits:
        return limits[field]
    for name, limit in limits.items():
        if limit.covers_all_within and (not name or re.match(re.escape(name) + r"[.\[{]", field)):
            return limit
    return None


def test_the_page_is_current():
    written = (Path(__file__).parents[2] / "docs/operators/limits.md").read_text()
    assert written == page(), "run python tests/server/limits_page.py > docs/operators/limits.md"


@pytest.mark.parametrize("name", _JSON_FORMS)
def test_every_field_of_a_full_request_has_a_limit(name: str):
    request = next(one for one in full_requests(_EXAMPLES) if one.name == name)
    without = [
        place.path
        for place in body_fields(request.body)
        if not place.path.endswith("{}")
        and not place.path.endswith("[]")
        and limit_of(place.path, limits_of(request)) is None
    ]
    assert not without


@pytest.mark.parametrize("name", _JSON_FORMS)
def test_every_field_that_is_read_has_a_limit(
    served: Served, name: str, monkeypatch: pytest.MonkeyPatch
):
    """A new field is read by name, also where the request does not have it."""
    read: set[str] = set()

    class Names(set[str]):
        def __init__(self, where: str) -> None:
            super().__init__()
            self._where = where

        def add(self, name: str) -> None:
            self.update([name])

        def update(self, *names: Any) -> None:
            read.update(f"{self._where}.{name}".lstrip(".") for name in names[0])
            super().update(*names)

    created = Fields.__init__

    def recording(self: Fields, values: Mapping[str, Any], where: str = "") -> None:
        created(self, values, where)
        self._read_names = Names(re.sub(r"\[\d+\]", "[]", where))

    monkeypatch.setattr(Fields, "__init__", recording)
    request = served.request(name)
    served.post(request, request.body)
    limits = limits_of(request)
    prefix = "requests[]." if name == "planish/draw" else ""
    unknown = [
        field
        for field in sorted(read)
        if limit_of(field, limits) is None and limit_of(prefix + field, limits) is None
    ]
    assert not unknown
    assert read or name in ("client/dynamic_config", "telemetry")


def test_every_field_of_the_protobuf_request_has_a_limit():
    without: list[str] = []

    def walk(descriptor: Any, path: str) -> None:
        for field in descriptor.fields:
            where = f"{path}{field.name}"
            limit = limit_of(where, PROTOBUF_LIMITS)
            if limit is None:
                without.append(where)
            kind = field.message_type
            if kind is None or (limit is not None and limit.covers_all_within):
                continue
            if kind.GetOptions().map_entry:
                walk(kind.fields_by_name["value"].message_type, f"{where}.*.")
            else:
                walk(kind, f"{where}[]." if field.is_repeated else f"{where}.")

    walk(ForwardBackwardRequestMessage.DESCRIPTOR, "")
    assert without == ["data[].loss_fn_inputs.*"] or not without


def test_every_field_of_an_openai_request_has_a_limit():
    """Their limits come from the schemas of the types that check them."""
    description = openapi(has_adapter_routes=True)
    fields = openai_fields()
    assert len(fields) >= 2
    for path, named in fields.items():
        body = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        kind = body["schema"]["$ref"].rpartition("/")[2]
        listed = {re.split(r"[.\[]", name)[0] for name in named}
        assert listed == set(description["components"]["schemas"][kind]["properties"])


def _cases() -> Iterator[tuple[str, str]]:
    for name in _JSON_FORMS:
        request = next(one for one in full_requests(_EXAMPLES) if one.name == name)
        found = limits_of(request)
        for field, limit in found.items():
            if (limit.edges or limit.beyond) and _belongs(request, field):
                yield name, field


def _belongs(request: FullRequest, field: str) -> bool:
    """Return whether a form of an endpoint has the field; its other forms have other fields."""
    return (_setter(copy.deepcopy(request.body), field)) is not None


def _setter(body: Any, field: str) -> tuple[Any, str] | None:
    """Return the object that has the field, and its key."""
    *parents, last = field.replace("[]", ".[]").split(".")
    holder = body
    for step in parents:
        if step == "[]":
            holder = holder[0] if holder else None
        elif step == "*":
            holder = next(iter(holder.values()))
        else:
            holder = holder.get(step)
        if holder is None:
            return None
    if last == "[]" or not isinstance(holder, dict):
        return None
    optional = (
        "constraint",
        "stop_token_ids",
        "penalty",
        "min_tokens",
        "logit_bias",
        "allowed_token_ids",
        "_params",
    )
    return (holder, last) if last in holder or any(one in last for one in optional) else None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "field"), list(_cases()))
def test_a_field_at_its_limit_and_one_beyond(served: Served, name: str, field: str):
    limit = limits_of(served.request(name))[field]
    for value, is_beyond in [
        *((v, False) for v in limit.edges),
        *((v, True) for v in limit.beyond),
    ]:
        request = served.request(name)
        found = _setter(request.body, field)
        assert found is not None
        holder, key = found
        holder[key] = value
        if name == "planish/draw":
            continue  # each of its requests is answered in the stream, as /asample answers
        status, said = served.post(request, request.body)
        answer = orjson.dumps(limit.answer)[1:-1].decode()
        if is_beyond:
            assert status == 400, (value, status, said[:300])
            assert answer in said, (value, said[:300])
        else:
            assert status < 500
            assert not (status == 400 and answer in said), (value, said[:300])
