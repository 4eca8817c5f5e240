"""The endpoints over HTTP, on a real server and engine with a tiny model, without a socket."""

from __future__ import annotations

import asyncio
import gzip
import io
import re
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import zstandard
from json_bodies import forward_backward_to_json
from starlette.requests import Request
from starlette.testclient import TestClient
from tinker.proto import tinker_public_pb2 as pb

from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.export.importing import import_adapter
from planish.server.http import budgets, context, routes_sampling, routes_uploads
from planish.server.http.app import create_app
from planish.server.results import Tenant, Unavailable
from planish.server.scheduling import ActiveTenants
from planish.server.server import Server
from planish.server.settings import HttpSettings
from planish.server.uploads import Uploads
from planish.service import ForwardBackward
from planish.testing import tiny_model
from planish.types import Datum, ModelInput
from planish.wire import pacing
from planish.wire.bodies import decompress_body
from planish.wire.client_frames import FrameReader
from planish.wire.sampling import sample_response_from_message
from planish.wire.training import (
    forward_backward_to_message,
    output_from_message,
)

BASE = "planish/tiny-model"
KEYS = {"tml-alice-key": "alice", "tml-bob-key": "bob"}
NO_HEADERS: Mapping[str, str] = {}
PROTOBUF = {"content-type": "application/x-protobuf", "accept": "application/x-protobuf"}


class Caller:
    """Sends the calls of one tenant. Paths are relative to /api/v1."""

    def __init__(self, client: TestClient, key: str) -> None:
        self.client, self.headers = client, {"x-api-key": key}

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        status: int = 200,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Any:
        content = orjson.dumps(body) if isinstance(body, dict) else body
        answer = self.client.request(
            method,
            f"/api/v1{path}",
            content=content,
            headers={**self.headers, **headers},
            follow_redirects=False,
        )
        assert answer.status_code == status, (answer.status_code, answer.text[:500])
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer

    def post(
        self, path: str, body: Any, status: int = 200, headers: Mapping[str, str] = NO_HEADERS
    ) -> Any:
        return self.call("POST", path, body, status, headers)

    def get(self, path: str, status: int = 200) -> Any:
        return self.call("GET", path, None, status)

    def session(self, **more: Any) -> str:
        body = {
            "tags": [],
            "user_metadata": {},
            "sdk_version": "0.38.0",
            "type": "create_session",
            **more,
        }
        return self.post("/create_session", body)["session_id"]

    def model(self, session: str | None = None, number: int = 0) -> str:
        body = {
            "session_id": session or self.session(),
            "model_seq_id": number,
            "base_model": BASE,
            "lora_config": {"rank": 4, "seed": 1},
        }
        accepted = self.post("/create_model", body)
        assert self.result(accepted)["model_id"] == accepted["model_id"]
        return accepted["model_id"]

    def sampler(self, session: str | None = None, number: int = 0, **more: Any) -> str:
        body = {
            "session_id": session or self.session(),
            "sampling_session_seq_id": number,
            "base_model": BASE,
            **more,
        }
        return self.post("/create_sampling_session", body)["sampling_session_id"]

    def result(
        self, accepted: Any, status: int = 200, headers: Mapping[str, str] = NO_HEADERS
    ) -> Any:
        body = {"request_id": accepted["request_id"], "allow_metadata_only": True}
        give_up = time.monotonic() + 60
        while True:
            answer = self.client.post(
                "/api/v1/retrieve_future",
                content=orjson.dumps(body),
                headers={**self.headers, **headers},
            )
            if answer.status_code != 408 or time.monotonic() > give_up:
                break
        assert answer.status_code == status, (answer.status_code, answer.text[:500])
        return answer.json() if "json" in answer.headers["content-type"] else answer.content

    def forward_backward(self, model: str, seq: int, status: int = 200, **more: Any) -> Any:
        return self.post(
            "/forward_backward",
            forward_backward_to_message(fb(model, **more), seq),
            status,
            PROTOBUF,
        )

    def optim_step(self, model: str, seq: int, status: int = 200, rate: float = 1e-2) -> Any:
        body = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate}}
        return self.post("/optim_step", body, status)

    def sample(self, sampler: str, seq: int, status: int = 200, **more: Any) -> Any:
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 4, "seed": 1},
        }
        return self.post("/asample", {**body, **more}, status)


def fb(
    model: str, tokens: tuple[int, ...] = (1, 2, 3), loss_fn: str = "cross_entropy", **inputs: Any
) -> ForwardBackward:
    targets = {"target_tokens": [2, 3, 4][: len(tokens)], **inputs}
    return ForwardBackward(model, [Datum(ModelInput.from_ints(tokens), targets)], loss_fn)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def client_of(
    data: Path,
    model: Path,
    keys: dict[str, str] | None,
    poll_seconds: float = 2.0,
    **settings: Any,
) -> TestClient:
    engine = Engine({BASE: str(model)}, data, EngineSettings(dtype="float32"))
    server, models = Server(engine, data, [BASE]), {BASE: model}
    app = create_app(
        server,
        HttpSettings(poll_seconds, models, keys, **settings),
        [
            *routes_sampling.PLANISH_ROUTES,
            *routes_uploads.routes(Uploads(server, models, import_adapter)),
        ],
    )
    return TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 1))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[TestClient]:
    with client_of(tmp_path_factory.mktemp("data"), model_directory, KEYS) as client:
        yield client


@pytest.fixture(scope="module")
def alice(client: TestClient) -> Caller:
    return Caller(client, "tml-alice-key")


@pytest.fixture(scope="module")
def bob(client: TestClient) -> Caller:
    return Caller(client, "tml-bob-key")


# Fair shares


def test_a_large_body_is_decoded_slowly_while_another_tenant_is_active(
    client: TestClient, alice: Caller, bob: Caller, monkeypatch: pytest.MonkeyPatch
):
    now, pauses = [0.0], []
    app: Any = client.app
    monkeypatch.setattr(
        app.state.http, "active_tenants", ActiveTenants(seconds=1.0, clock=lambda: now[0])
    )
    monkeypatch.setattr(
        pacing, "time", SimpleNamespace(thread_time=time.thread_time, sleep=pauses.append)
    )
    large = {"tags": ["a"] * 20_000}
    alice.post("/create_session", large, 400)
    assert not pauses
    bob.get("/sessions")
    alice.post("/create_session", large, 400)
    assert sum(pauses) > 0
    pauses.clear()
    now[0] = 2.0
    alice.post("/create_session", large, 400)
    assert not pauses


# Access


@pytest.mark.parametrize("path", ["/healthz", "/api/v1/healthz"])
def test_health_needs_no_key(client: TestClient, path: str):
    answer = client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "headers", [{}, {"x-api-key": ""}, {"x-api-key": "tml-other"}, {"x-api-key": "tml-alice-key "}]
)
def test_an_unknown_key_is_rejected(client: TestClient, headers: dict[str, str]):
    for method, path in (
        ("POST", "/client/config"),
        ("GET", "/sessions"),
        ("POST", "/retrieve_future"),
        ("GET", "/audit"),
    ):
        answer = client.request(method, f"/api/v1{path}", headers=headers, content=b"{}")
        known = headers.get("x-api-key", "").strip() in KEYS
        assert answer.status_code == (401 if not known else answer.status_code)
        assert "key" in answer.json().get("detail", "key")


def test_without_keys_requests_of_web_pages_are_rejected(tmp_path: Path, model_directory: Path):
    with client_of(tmp_path, model_directory, None) as client:
        assert client.post("/api/v1/client/config", content=b"{}").status_code == 200
        assert client.get("/api/v1/sessions", headers={"host": "localhost:8000"}).status_code == 200
        for headers in (
            {"origin": "https://example.com"},
            {"host": "example.com"},
            {"host": "example.com", "x-api-key": "k"},
            {"host": "@"},
        ):
            answer = client.post("/api/v1/create_session", content=b"{}", headers=headers)
            assert (answer.status_code, "web page" in answer.json()["detail"]) == (401, True)


def test_pages_of_allowed_origins_may_use_the_server(tmp_path: Path, model_directory: Path):
    page = "http://localhost:3000"
    with client_of(tmp_path, model_directory, None, allowed_origins=(page,)) as client:
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type, x-api-key, x-stainless-os",
        }
        for origin, is_allowed in ((page, True), ("http://localhost:3001", False)):
            headers = {"origin": origin}
            answer = client.options("/api/v1/create_session", headers={**headers, **preflight})
            assert answer.headers.get("access-control-allow-origin") == (
                origin if is_allowed else None
            )
            assert answer.status_code == (200 if is_allowed else 400)
            answer = client.post("/api/v1/create_session", content=b"{}", headers=headers)
            assert answer.status_code == (200 if is_allowed else 401)
            assert answer.headers.get("access-control-allow-origin") == (
                origin if is_allowed else None
            )
        rebound = client.get("/api/v1/sessions", headers={"origin": page, "host": "example.com"})
        assert rebound.status_code == 401


def test_a_repeated_session_request_makes_one_session(alice: Caller):
    body, key = {"tags": ["x"]}, {"x-idempotency-key": "session-key"}
    first = alice.post("/create_session", body, headers=key)
    assert alice.post("/create_session", body, headers=key) == first
    other = alice.post("/create_session", {"tags": ["y"]}, 422, headers=key)
    assert "X-Idempotency-Key" in other["detail"]


def test_objects_of_another_tenant_do_not_exist(alice: Caller, bob: Caller):
    model = alice.model()
    sampler, session = alice.sampler(), model.split(":")[0]
    accepted = alice.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "mine"})
    path = alice.result(accepted)["path"]
    bob.post("/get_info", {"model_id": model}, 404)
    bob.forward_backward(model, 2, 404)
    bob.optim_step(model, 2, 404)
    bob.sample(sampler, 0, 404)
    bob.get(f"/samplers/{sampler}", 404)
    bob.get(f"/sessions/{session}", 404)
    bob.post("/session_heartbeat", {"session_id": session}, 404)
    bob.post("/retrieve_future", {"request_id": accepted["request_id"]}, 404)
    bob.get(f"/training_runs/{model}", 404)
    for method, end in (
        ("DELETE", ""),
        ("POST", "/publish"),
        ("GET", "/archive"),
        ("GET", "/external_weights_urls"),
    ):
        bob.call(method, f"/training_runs/{model}/checkpoints/weights/mine{end}", None, 404)
    bob.call(
        "PUT", f"/training_runs/{model}/checkpoints/weights/mine/ttl", {"ttl_seconds": 3600}, 404
    )
    assert bob.get("/checkpoints")["checkpoints"] == []
    assert alice.get("/checkpoints")["checkpoints"][0]["tinker_path"] == path
    # A public checkpoint can be read and used, but not changed.
    alice.call("POST", f"/training_runs/{model}/checkpoints/weights/mine/publish", None, 204)
    assert bob.post("/weights_info", {"tinker_path": path})["lora_rank"] == 4
    bob.call("DELETE", f"/training_runs/{model}/checkpoints/weights/mine", None, 404)
    alice.forward_backward(model, 2)


# Unknown and unsupported endpoints


def test_an_unknown_endpoint_is_named(alice: Caller, client: TestClient):
    assert "/api/v1/nothing" in alice.get("/nothing", 404)["detail"]
    assert "does not support this method" in alice.get("/create_session", 405)["detail"]
    message = client.get("/elsewhere").json()["error"]["message"]  # as OpenAI's clients read it
    assert "/elsewhere" in message
    assert "start with /v1" in message


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/auth/token"),
        ("GET", "/auth/apikey/me"),
        ("POST", "/create_custom_loss"),
        ("POST", "/join_sampling_session"),
        ("POST", "/retrieve_futures"),
        ("PUT", "/sessions/s/project"),
        ("GET", "/audit"),
        ("GET", "/billing/usage/events"),
        ("GET", "/billing/usage/checkpoints/current"),
    ],
)
def test_unsupported_endpoints_are_rejected_with_a_reason(alice: Caller, method: str, path: str):
    assert alice.call(method, path, {}, 404)["detail"].startswith("not offered: ")


# Bodies


@pytest.mark.parametrize(
    ("encoding", "pack"), [("zstd", zstandard.compress), ("gzip", gzip.compress)]
)
def test_a_compressed_body_is_read(alice: Caller, encoding: str, pack: Any):
    model = alice.model()
    body = pack(forward_backward_to_message(fb(model), 1))
    accepted = alice.post(
        "/forward_backward", body, headers=PROTOBUF | {"content-encoding": encoding}
    )
    assert output_from_message(alice.result(accepted, headers=PROTOBUF)).metrics["loss:sum"] > 0


def test_compressed_bodies_are_opened_outside_the_event_loop(alice: Caller, monkeypatch):
    """2 KiB of zstd can be 64 MiB of text, which takes 90 ms to decompress."""
    in_loop: list[bool] = []

    def opened(*arguments: Any) -> bytes:
        in_loop.append(asyncio._get_running_loop() is not None)
        return decompress_body(*arguments)

    monkeypatch.setattr(context, "decompress_body", opened)
    body = zstandard.compress(b'{"session_id": "%b"}' % (b"s" * 100_000))
    alice.post("/session_heartbeat", body, 400, headers={"content-encoding": "zstd"})
    assert in_loop == [False]


def test_a_body_that_is_too_large_is_rejected(alice: Caller, client: TestClient):
    large = b" " * (budgets.MAX_SMALL_BODY + 1)
    assert "larger than" in alice.post("/create_session", large, 413)["detail"]
    assert (
        "larger than"
        in alice.post(
            "/create_session", zstandard.compress(large), 413, {"content-encoding": "zstd"}
        )["detail"]
    )
    assert client.app.state.http.body_budget.used == 0  # type: ignore[attr-defined]


def test_bodies_beyond_the_total_limit_are_rejected_with_retry_after(
    alice: Caller, client: TestClient, monkeypatch
):
    room = client.app.state.http.body_budget  # type: ignore[attr-defined]
    monkeypatch.setattr(room, "limit", 10)
    answer = alice.post("/session_heartbeat", {"session_id": "s" * 70_000}, 503)
    assert "fewer large requests" in answer["detail"]
    assert room.used == 0
    alice.post("/session_heartbeat", {"session_id": "s" * 40}, 404)  # small ones are always read


def test_too_little_memory_for_a_body_is_no_fault_of_the_client(alice: Caller, monkeypatch):
    """orjson reports it as an invalid text, which was answered with 400 and never sent again."""

    def failing(_: bytes) -> Any:
        message = "Not enough memory to allocate buffer for parsing"
        raise orjson.JSONDecodeError(message, "", 0)

    monkeypatch.setattr("planish.wire.fields.orjson.loads", failing)
    answer = alice.client.post(
        "/api/v1/session_heartbeat", json={"session_id": "a"}, headers=alice.headers
    )
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "out of memory" in answer.text


def test_one_tenant_may_use_half_of_the_memory_for_bodies():
    room, (one, other) = budgets.BodyBudget(100), (Tenant("one"), Tenant("other"))
    room.reserve(one, 50)
    with pytest.raises(Unavailable):
        room.reserve(one, 1)
    room.reserve(other, 50)
    room.release(one, 50)
    assert room.used == 50


async def test_large_bodies_are_read_one_at_a_time_beside_a_small_one_of_another_tenant(
    client: TestClient,
):
    """A parsed body takes many times its size in memory: eight bodies of 60 MiB took 5.5 GB at
    once.
    """
    state = client.app.state.http  # type: ignore[attr-defined]
    large, small = budgets.MAX_TRAINING_BODY // 4, budgets.MAX_SMALL_BODY
    reading, most, go_on = [0], [0], threading.Event()

    def read() -> None:
        reading[0] += 1
        most[0] = max(most[0], reading[0])
        assert go_on.wait(60)
        reading[0] -= 1

    def compute(tenant: str, size: int, work: Any) -> Any:
        request = Request({"type": "http", "method": "POST", "headers": []})
        return context.RequestContext(request, state, Tenant(tenant)).compute(size, work)

    readers = [
        asyncio.create_task(compute(tenant, large, read)) for tenant in ("alice", "bob", "alice")
    ]
    await asyncio.sleep(0)
    await asyncio.wait_for(compute("carol", small, lambda: None), 60)
    go_on.set()
    await asyncio.gather(*readers)
    assert most == [1]


async def test_a_stalled_body_is_rejected(client: TestClient, monkeypatch):
    monkeypatch.setattr(context, "_STALL_SECONDS", 0.05)
    state, pieces = client.app.state.http, [bytes(100_000)]  # type: ignore[attr-defined]

    async def receive() -> dict[str, Any]:
        if not pieces:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": pieces.pop(), "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(Unavailable, match="send the request again"):
        async with context.RequestContext(request, state, Tenant("alice")).body(
            budgets.MAX_SMALL_BODY
        ):
            pass
    assert state.body_budget.used == 0


@pytest.mark.parametrize("rate", [1e9, 0.01])
def test_a_body_that_trickles_in_is_rejected(client: TestClient, monkeypatch, rate: float):
    monkeypatch.setattr(context, "_STALL_SECONDS", 100)
    monkeypatch.setattr(context, "_MIN_BODY_RATE", rate)
    state, pieces = client.app.state.http, [b"x"] * 10  # type: ignore[attr-defined]
    seconds = [0.0]

    def now() -> float:
        return time.monotonic() + seconds[0]

    monkeypatch.setattr(context, "time", SimpleNamespace(monotonic=now))

    async def receive() -> dict[str, Any]:
        asyncio.get_running_loop().time = now
        seconds[0] += 30  # never long enough for a stall
        await asyncio.sleep(0)
        piece = pieces.pop()
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def read() -> bytes:
        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        async with context.RequestContext(request, state, Tenant("alice")).body(
            budgets.MAX_SMALL_BODY
        ) as body:
            return body

    if rate == 0.01:
        assert asyncio.run(read()) == 10 * b"x"
    else:
        with pytest.raises(Unavailable, match="less than 1e.09 bytes per second"):
            asyncio.run(read())
        assert pieces


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"session_id": 3}', b'{"session_id": "../x"}']
)
def test_a_malformed_body_is_rejected_with_a_message(alice: Caller, body: bytes):
    assert len(alice.post("/session_heartbeat", body, 400)["detail"]) > 10


# Sessions


def test_a_session_is_created_recorded_and_finished(alice: Caller):
    session = alice.session(display_name="Night Run", user_metadata={"a": "b"})
    assert alice.post(
        "/session_heartbeat", {"session_id": session, "type": "session_heartbeat"}
    ) == {"type": "session_heartbeat"}
    model, sampler = alice.model(session), alice.sampler(session)
    record = alice.get(f"/sessions/{session}")
    assert record["training_run_ids"] == [model]
    assert record["sampler_ids"] == [sampler]
    assert (record["user_metadata"], record["display_name"]) == ({"a": "b"}, "Night Run")
    assert alice.get("/sessions?limit=1")["sessions"] == [session]
    finish = {"reason": {"type": "success"}, "detail": None}
    alice.post(f"/sessions/{session}/finish", finish, 204)
    alice.post(f"/sessions/{session}/finish", finish, 204)
    alice.post("/session_heartbeat", {"session_id": session}, 410)
    alice.post(f"/sessions/{session}/finish", {"reason": {"type": "bored"}}, 400)


def test_sessions_can_be_searched(alice: Caller):
    names = ["Search Alpha", "Search Beta", "Search alpha two"]
    sessions = [alice.session(display_name=name, user_metadata={"set": "search"}) for name in names]
    found = alice.post("/sessions/search", {"display_name": "ALPHA search"})["sessions"]
    assert [item["session_id"] for item in found] == [sessions[2], sessions[0]]
    first = alice.post("/sessions/search", {"user_metadata": {"set": "search"}, "limit": 2})
    second = alice.post(
        "/sessions/search",
        {"user_metadata": {"set": "search"}, "limit": 2, "cursor": first["next_cursor"]},
    )
    assert [item["session_id"] for item in first["sessions"] + second["sessions"]] == sessions[::-1]
    assert second["next_cursor"] is None
    assert alice.post("/sessions/search", {"session_id": sessions[1]})["sessions"][0]["status"] == {
        "type": "active"
    }
    alice.post(f"/sessions/{sessions[1]}/finish", {"reason": {"type": "success"}}, 204)
    active = {"user_metadata": {"set": "search"}, "statuses": [{"type": "active"}]}
    assert len(alice.post("/sessions/search", active)["sessions"]) == 2


def test_checkpoints_can_be_searched(alice: Caller, bob: Caller):
    model = alice.model()
    saves: list[tuple[str, dict[str, Any]]] = [
        ("save_weights", {"path": name, "user_metadata": {"set": "found", "name": name}})
        for name in ("one", "two", "three")
    ]
    saves.append(("save_weights_for_sampler", {"path": "four", "user_metadata": {"set": "found"}}))
    saves.append(("save_weights_external", {"path": "five"}))
    for seq, (call, body) in enumerate(saves, 1):
        alice.result(alice.post(f"/{call}", {"model_id": model, "seq_id": seq, **body}))

    def search(caller: Caller = alice, **query: Any) -> tuple[list[str], Any]:
        page = caller.post("/checkpoints/search", query)
        paths = [one["tinker_path"] for one in page["checkpoints"]]
        assert all(one["base_model"] == BASE for one in page["checkpoints"])
        return [path.removeprefix(f"tinker://{model}/") for path in paths], page["next_cursor"]

    found = {"set": "found"}
    training = ["weights/three", "weights/two", "weights/one"]
    assert search(user_metadata=found) == (["sampler_weights/four", *training], None)
    assert search(user_metadata={**found, "name": "two"}) == (["weights/two"], None)
    assert search(user_metadata=found, checkpoint_type="training") == (training, None)
    assert search(user_metadata=found, checkpoint_type="sampler")[0] == ["sampler_weights/four"]
    assert "external_weights/five" in search(checkpoint_type="external", limit=200)[0]
    assert search(user_metadata=found, base_models=[BASE, "other"])[0] == [
        "sampler_weights/four",
        *training,
    ]
    assert search(user_metadata=found, base_models=["other"]) == ([], None)
    assert search(user_metadata=found, base_models=[]) == ([], None)
    for listed in ("/checkpoints", f"/training_runs/{model}/checkpoints"):
        assert {one["base_model"] for one in alice.get(listed)["checkpoints"]} == {BASE}
    first, cursor = search(user_metadata=found, limit=2)
    second, last = search(user_metadata=found, limit=2, cursor=cursor)
    assert [*first, *second] == ["sampler_weights/four", *training]
    assert last is None
    assert search(bob, user_metadata=found) == ([], None)
    for wrong in ({"checkpoint_type": "x"}, {"project_ids": ["p"]}, {"owner": {"type": "user"}}):
        alice.post("/checkpoints/search", wrong, 400)


def test_the_client_config_has_the_expected_settings(alice: Caller):
    config = alice.post("/client/config", {"sdk_version": "0.38.0"})
    assert config["parallel_fwdbwd_chunks"] is False
    assert config["proto_compress_fwdbwd"] is False
    assert config["fwdbwd_max_chunk_bytes_count"] < budgets.MAX_TRAINING_BODY
    assert alice.post("/client/dynamic_config", {})["sample_cancel_enabled"] is True
    assert alice.post("/telemetry", {"events": []}) == {"status": "accepted"}
    models = alice.get("/get_server_capabilities")["supported_models"]
    assert [(model["model_name"], model["max_context_length"]) for model in models] == [
        (BASE, 2048)
    ]


def test_an_unknown_base_model_is_rejected_with_the_list(alice: Caller):
    session = alice.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "someone/else"}
    assert BASE in alice.post("/create_model", body, 400)["detail"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "someone/else"}
    assert BASE in alice.post("/create_sampling_session", body, 400)["detail"]


# Training


def test_training_steps_reduce_the_loss(alice: Caller):
    model = alice.model()
    losses = []
    for seq in range(1, 7, 2):
        first, second = alice.forward_backward(model, seq), alice.optim_step(model, seq + 1)
        losses.append(
            output_from_message(alice.result(first, headers=PROTOBUF)).metrics["loss:sum"]
        )
        assert alice.result(second)["metrics"]["grad_norm"] > 0
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.slow
def test_requests_may_arrive_out_of_order(alice: Caller):
    model = alice.model()
    later = [alice.optim_step(model, 3), alice.forward_backward(model, 2)]
    alice.post("/retrieve_future", {"request_id": later[0]["request_id"]}, 408)
    later.append(alice.forward_backward(model, 1))
    assert alice.result(later[0])["metrics"]["adam_step"] == 1


def test_a_repeated_request_returns_the_same_answer(alice: Caller):
    model = alice.model()
    first = alice.forward_backward(model, 1)
    assert alice.forward_backward(model, 1) == first
    assert alice.forward_backward(model, 1, 400, tokens=(9, 9, 9))["detail"]
    step = alice.optim_step(model, 2)
    assert alice.optim_step(model, 2) == step
    assert alice.result(step)["metrics"]["adam_step"] == 1
    session, number = model.split(":")[0], 0
    body = {
        "session_id": session,
        "model_seq_id": number,
        "base_model": BASE,
        "lora_config": {"rank": 4, "seed": 1},
    }
    assert alice.post("/create_model", body)["model_id"] == model
    alice.post("/create_model", {**body, "lora_config": {"rank": 8, "seed": 1}}, 400)


def test_a_rejected_request_uses_up_its_number(alice: Caller):
    model = alice.model()
    body = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy")
    body.data.add().model_input.add().image.data = b"png"
    rejected = alice.post("/forward_backward", body.SerializeToString(), 400, PROTOBUF)
    assert "ImageChunk.format=''" in rejected["detail"]
    accepted = alice.forward_backward(model, 2)
    assert output_from_message(alice.result(accepted, headers=PROTOBUF)).metrics["loss:sum"] > 0


def test_a_step_after_a_rejected_gradient_fails(alice: Caller):
    """Pipelined parts of a gradient are applied together or not at all."""
    model = alice.model()
    alice.forward_backward(model, 1)
    body = pb.ForwardBackwardRequest(model_id=model, seq_id=2, loss_fn="cross_entropy")
    body.data.add().model_input.add().image.data = b"png"
    alice.post("/forward_backward", body.SerializeToString(), 400, PROTOBUF)
    failed = alice.result(alice.optim_step(model, 3))
    assert failed["category"] == "user"
    step = alice.forward_backward(model, 4), alice.optim_step(model, 5)
    assert alice.result(step[1])["metrics"]["adam_step"] == 1


def test_a_step_after_other_rejected_requests_succeeds(alice: Caller):
    model = alice.model()
    alice.forward_backward(model, 1)
    alice.post("/save_weights", {"model_id": model, "seq_id": 2, "path": 5}, 400)
    body = pb.ForwardBackwardRequest(
        model_id=model, seq_id=3, loss_fn="cross_entropy", forward_only=True
    )
    body.data.add().model_input.add().image.data = b"png"
    alice.post("/forward_backward", body.SerializeToString(), 400, PROTOBUF)
    assert alice.result(alice.optim_step(model, 4))["metrics"]["adam_step"] == 1


def test_a_failed_request_returns_a_failed_future(alice: Caller):
    model = alice.model()
    inputs: dict[str, Any] = {"logprobs": [-200.0] * 3, "advantages": [1.0] * 3}
    failed = alice.result(
        alice.forward_backward(model, 1, loss_fn="importance_sampling", **inputs), headers=PROTOBUF
    )
    assert failed["category"] == "user"
    assert "finite" in failed["error"]


@pytest.mark.parametrize("path", ["/forward_backward", "/forward"])
def test_the_json_wire_of_the_older_sdk_works(alice: Caller, path: str):
    """The wire of SDK 0.21."""
    model = alice.model()
    operation = ForwardBackward(
        model, fb(model).data, "cross_entropy", {}, forward_only=path == "/forward"
    )
    accepted = alice.post(path, forward_backward_to_json(operation, 1))
    as_json = alice.result(accepted)
    as_protobuf = output_from_message(
        alice.result(accepted, headers={"accept": "application/x-protobuf, application/json"})
    )
    assert as_json["metrics"] == as_protobuf.metrics
    data = np.asarray(as_json["loss_fn_outputs"][0]["logprobs"]["data"], np.float32)
    np.testing.assert_array_equal(data, as_protobuf.loss_fn_outputs[0]["logprobs"].to_numpy())


def test_info_names_the_tokenizer_to_clients_of_this_machine_only(
    alice: Caller, model_directory: Path
):
    model = alice.model()
    info = alice.post("/get_info", {"model_id": model})
    assert info["model_data"]["tokenizer_id"] == str(model_directory)
    far = TestClient(alice.client.app, base_url="http://server", client=("192.168.1.7", 1))
    far.portal = alice.client.portal  # the server's event loop
    info = Caller(far, "tml-alice-key").post("/get_info", {"model_id": model})
    assert "tokenizer_id" not in info["model_data"]
    assert Caller(far, "tml-alice-key").post("/client/config", {})["proto_compress_fwdbwd"] is True


def test_tokenizer_files_are_served(alice: Caller, model_directory: Path):
    files = alice.get(f"/tokenizer?base_model={BASE}")["files"]
    assert files["tokenizer.json"] == (model_directory / "tokenizer.json").read_text()
    assert BASE in alice.get("/tokenizer?base_model=other", 404)["detail"]


def test_a_model_can_be_unloaded(alice: Caller):
    model = alice.model()
    alice.forward_backward(model, 1)
    assert alice.result(alice.post("/unload_model", {"model_id": model}))["type"] == "unload_model"


# Sampling


def test_samples_are_equal_in_json_and_protobuf(alice: Caller):
    sampler = alice.sampler()
    accepted = alice.sample(sampler, 0, prompt_logprobs=True, topk_prompt_logprobs=2)
    assert len(set(accepted["sample_sequence_ids"])) == 2
    response = sample_response_from_message(alice.result(accepted, headers=PROTOBUF))
    as_json = alice.result(accepted)
    assert [s["tokens"] for s in as_json["sequences"]] == [s.tokens for s in response.sequences]
    assert as_json["prompt_logprobs"] == response.prompt_logprobs
    assert alice.sample(sampler, 0, prompt_logprobs=True, topk_prompt_logprobs=2) == accepted
    alice.sample(sampler, 0, 400, prompt_logprobs=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**7}, "num_samples"),
        ({"sampling_params": {"max_tokens": 10**6}}, "max_tokens"),
        ({"sampling_params": {"stop": [10**6]}}, "stop"),
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**6]}]}}, "prompt"),
        ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"beam_width": 4}, "beam_width"),
        ({"sampling_params": {"logit_bias": {"a": 1.0}}}, "logit_bias"),
        ({"sampling_params": {"logit_bias": {"5": "1"}}}, "logit_bias"),
        ({"sampling_params": {"bad_words": ["a"]}}, "bad_words"),
    ],
)
def test_an_unsupported_option_is_named(alice: Caller, change: dict[str, Any], named: str):
    assert named in alice.sample(alice.sampler(), 0, 400, **change)["detail"]


def test_a_sampler_of_published_weights_samples(alice: Caller):
    model = alice.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "snapshot"}
    result = alice.result(alice.post("/save_weights_for_sampler", body))
    assert result["sampling_session_id"] == f"{model.split(':')[0]}:sample:0"
    assert alice.get(f"/samplers/{result['sampling_session_id']}")["base_model"] == BASE
    alice.result(alice.sample(result["sampling_session_id"], 0), headers=PROTOBUF)


@pytest.mark.slow
def test_a_response_that_could_be_too_large_is_rejected(alice: Caller):
    much = {
        "num_samples": 4096,
        "sampling_params": {"max_tokens": 2000},
        "topk_sample_logprobs": 20,
    }
    sampler = alice.sampler()
    assert "MiB" in alice.sample(sampler, 0, 400, **much)["detail"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    csr = {
        "data": [],
        "dtype": "int64",
        "shape": [1, 1 << 22],
        "sparse_crow_indices": [0, 0],
        "sparse_col_indices": [],
    }
    one = {"sampling_session_id": sampler, "prompt": prompt}
    asking = {"target_prompt_logprobs": csr, "sampling_params": {"max_tokens": 1}}
    requests = [
        {**one, "seq_id": 0, **much},
        *({**one, "seq_id": seq, **asking} for seq in range(1, 18)),
    ]
    frames = FrameReader().feed(alice.post("/planish/draw", {"requests": requests}).content)
    problems = [
        frame.header["detail"] for frame in sorted(frames, key=lambda frame: frame.header["index"])
    ]
    assert "MiB" in problems[0]
    assert all("at most 272" in problem for problem in problems[1:17])  # the vocabulary
    assert "in dense form" in problems[17]  # which is of the whole body


def test_a_sample_can_be_cancelled_over_http(alice: Caller):
    sampler = alice.sampler()
    accepted = alice.sample(
        sampler, 0, num_samples=64, sampling_params={"max_tokens": 2000, "stop": []}
    )
    alice.post("/cancel_future", {"request_id": accepted["request_id"]}, 204)
    assert "error" in alice.result(accepted)


# Checkpoints


@pytest.fixture(scope="module")
def run(alice: Caller) -> str:
    """Return a model with one checkpoint of each kind, named a."""
    model = alice.model()
    for seq, kind in enumerate(
        ("save_weights", "save_weights_for_sampler", "save_weights_external"), start=1
    ):
        path = alice.result(
            alice.post(f"/{kind}", {"model_id": model, "seq_id": seq, "path": "a"})
        )["path"]
        assert (
            path
            == f"tinker://{model}/{kind.removeprefix('save_').replace('weights_for_sampler', 'sampler_weights').replace('weights_external', 'external_weights')}/a"
        )
    return model


def test_checkpoints_and_runs_are_listed(alice: Caller, run: str):
    kinds = {
        item["checkpoint_type"]: item
        for item in alice.get(f"/training_runs/{run}/checkpoints")["checkpoints"]
    }
    assert {kind: item["checkpoint_id"] for kind, item in kinds.items()} == {
        "training": "weights/a",
        "sampler": "sampler_weights/a",
        "external": "external_weights/a",
    }
    record = alice.get(f"/training_runs/{run}")
    assert (record["base_model"], record["lora_rank"], record["model_owner"]) == (BASE, 4, "alice")
    assert record["last_checkpoint"]["checkpoint_id"] == "weights/a"
    # The external weights are newer, but no sampler can be made of their path.
    assert record["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/a"
    page = alice.get("/training_runs?limit=1")
    assert (len(page["training_runs"]), page["cursor"]["limit"]) == (1, 1)
    assert page["cursor"]["total_count"] >= 1
    page = alice.get("/checkpoints?limit=2&offset=1")
    assert (len(page["checkpoints"]), page["cursor"]["offset"]) == (2, 1)
    for query in ("limit=x", "limit=-1", "offset=1e9", "limit=99999"):
        assert query.split("=")[0] in alice.get(f"/checkpoints?{query}", 400)["detail"]


def test_older_clients_see_only_checkpoint_types_that_they_know(alice: Caller, run: str):
    path = f"/training_runs/{run}/checkpoints"
    for version, kind in (("0.21.0", "sampler"), ("0.38.1", "external"), ("1.0.0", "external")):
        listed = alice.call("GET", path, headers={"x-stainless-package-version": version})[
            "checkpoints"
        ]
        kinds = {item["checkpoint_id"]: item["checkpoint_type"] for item in listed}
        assert kinds["external_weights/a"] == kind


def test_other_access_scopes_and_projects_are_rejected(alice: Caller, run: str):
    for path in (
        "/training_runs",
        f"/training_runs/{run}",
        "/sessions",
        f"/sessions/{run.split(':')[0]}",
    ):
        assert alice.get(f"{path}?access_scope=accessible")
        assert "access_scope" in alice.get(f"{path}?access_scope=mine", 400)["detail"]
        assert "no projects" in alice.get(f"{path}?project_id=p", 400)["detail"]
    copy = {"source_path": f"tinker://{run}/weights/a", "destination_project_id": "p"}
    header = {"x-tinker-weights-access-token": "secret"}
    assert "are public" in alice.post("/copy_weights", copy, 400, header)["detail"]
    assert (
        "are public"
        in alice.post("/copy_weights", {**copy, "weights_access_token": "secret"}, 400)["detail"]
    )
    load = {
        "session_id": alice.session(),
        "model_seq_id": 0,
        "path": f"tinker://{run}/weights/a",
        "optimizer": True,
    }
    assert (
        "are public"
        in alice.post("/load_weights", {**load, "weights_access_token": "secret"}, 400)["detail"]
    )


def test_the_ttl_of_a_checkpoint_can_be_changed(alice: Caller, run: str):
    at = f"/training_runs/{run}/checkpoints/weights/a"
    alice.call("PUT", f"{at}/ttl", {"ttl_seconds": 3600}, 204)
    expires = {
        c["checkpoint_id"]: c["expires_at"]
        for c in alice.get(f"/training_runs/{run}/checkpoints")["checkpoints"]
    }
    assert expires["weights/a"] is not None
    assert expires["sampler_weights/a"] is None
    alice.call("PUT", f"{at}/ttl", {"ttl_seconds": None}, 204)
    alice.call("PUT", f"{at}/ttl", {"ttl_seconds": 0}, 400)


def test_publishing_twice_is_a_conflict(alice: Caller, run: str):
    at = f"/training_runs/{run}/checkpoints/sampler_weights/a/publish"
    alice.call("POST", at, None, 204)
    alice.call("POST", at, None, 409)
    alice.call("DELETE", at, None, 204)
    alice.call("DELETE", at, None, 409)


def test_a_checkpoint_can_be_copied_and_deleted(alice: Caller, run: str):
    body = {"source_path": f"tinker://{run}/weights/a", "destination_project_id": "archive"}
    first = alice.post("/copy_weights", body, headers={"x-idempotency-key": "k1"})["tinker_path"]
    assert (
        alice.post("/copy_weights", body, headers={"x-idempotency-key": "k1"})["tinker_path"]
        == first
    )
    assert (
        alice.post("/copy_weights", body, headers={"x-idempotency-key": "k2"})["tinker_path"]
        != first
    )
    session = alice.session()
    path = alice.post(
        "/copy_weights", {"source_path": first, "session_id": session, "model_seq_id": 3}
    )["tinker_path"]
    assert path.startswith(f"tinker://{session}:train:3/weights/")
    copied, checkpoint = path.removeprefix("tinker://").split("/", 1)
    alice.call("DELETE", f"/training_runs/{copied}/checkpoints/{checkpoint}", None, 204)
    alice.call("DELETE", f"/training_runs/{copied}/checkpoints/{checkpoint}", None, 404)
    alice.post("/copy_weights", {"source_path": first}, 400)


def test_a_model_can_be_created_from_a_checkpoint(alice: Caller, run: str):
    session = alice.session()
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "path": f"tinker://{run}/weights/a",
        "optimizer": True,
    }
    result = alice.result(alice.post("/load_weights", body))
    assert (result["model_id"], result["path"]) == (f"{session}:train:0", body["path"])
    body = {"model_id": result["model_id"], "seq_id": 1, "path": body["path"], "optimizer": False}
    assert alice.result(alice.post("/load_weights", body))["path"] == body["path"]
    assert alice.sampler(session, model_path=f"tinker://{run}/sampler_weights/a", base_model=None)


def test_external_weights_can_be_saved_and_downloaded(alice: Caller, run: str, client: TestClient):
    urls = alice.get(f"/training_runs/{run}/checkpoints/external_weights/a/external_weights_urls")[
        "urls"
    ]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    for name, url in urls.items():
        answer = client.get(url)
        assert answer.status_code == 200, url
        assert int(answer.headers["content-length"]) == len(answer.content) > 0
        assert name != "adapter_config.json" or answer.json()["r"] == 4
    url = urls["adapter_config.json"]
    assert client.get(url.replace("adapter_config.json", "planish.json2")).status_code == 404
    assert client.get(url.replace("adapter_config.json", "..%2f..%2fserver.db")).status_code == 404
    token = url.split("/downloads/")[1].split("/")[0]
    assert client.get(url.replace(token, token[:-2] + "xx")).status_code == 404
    info = alice.post("/weights_info", {"tinker_path": f"tinker://{run}/external_weights/a"})
    assert info["base_model"] == BASE


@pytest.mark.parametrize("kind", ["file", "archive"])
def test_a_part_of_a_download_can_be_requested(
    alice: Caller, run: str, client: TestClient, kind: str
):
    place = f"/training_runs/{run}/checkpoints/external_weights/a"
    url = (
        alice.get(f"{place}/external_weights_urls")["urls"]["adapter_model.safetensors"]
        if kind == "file"
        else alice.call("GET", f"{place}/archive", None, 302).headers["location"]
    )
    whole = client.get(url)
    content, tag = whole.content, whole.headers["etag"]
    size = len(content)
    assert whole.headers["accept-ranges"] == "bytes"
    for text, start, end in (
        ("0-0", 0, 1),
        ("100-599", 100, 600),
        ("513-", 513, size),
        ("-700", size - 700, size),
        (f"5-{size + 50}", 5, size),
        (f"-{size + 50}", 0, size),
    ):
        part = client.get(url, headers={"range": f"bytes={text}", "if-range": tag})
        assert (part.status_code, part.content) == (206, content[start:end]), text
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
        assert int(part.headers["content-length"]) == end - start
    for headers in (
        {"range": "bytes=1-", "if-range": '"another"'},
        {"range": "bytes=1-2,4-5"},
        {"range": "bytes=5-2"},
        {"range": "bytes=-"},
        {"range": "items=0-5"},
    ):
        part = client.get(url, headers=headers)
        assert (part.status_code, len(part.content)) == (200, size), headers
    for text in (f"{size}-", "-0"):
        part = client.get(url, headers={"range": f"bytes={text}"})
        assert (part.status_code, part.content) == (416, b"")
        assert part.headers["content-range"] == f"bytes */{size}"
    unchanged = client.get(url, headers={"if-none-match": tag})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    for headers in ({}, {"range": "bytes=5-9"}):
        head = client.head(url, headers=headers)
        assert (head.status_code, int(head.headers["content-length"])) == (200, size)
        assert head.content == b""


def test_encrypted_external_weights_need_the_recipient_key(
    alice: Caller, run: str, client: TestClient
):
    pyrage = pytest.importorskip("pyrage", reason="it is of an extra")
    mine, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    body = {
        "model_id": run,
        "seq_id": 4,
        "path": "sealed",
        "age_encryption_recipients": [str(mine.to_public())],
    }
    alice.result(alice.post("/save_weights_external", body))
    place = f"/training_runs/{run}/checkpoints/external_weights"
    plain, sealed = (
        alice.get(f"{place}/{name}/external_weights_urls")["urls"] for name in ("a", "sealed")
    )
    assert set(sealed) == {f"{name}.age" for name in plain}
    for name, url in plain.items():
        answer = client.get(sealed[f"{name}.age"], headers={"range": "bytes=1-"})
        assert (answer.status_code, answer.headers["accept-ranges"]) == (200, "none")
        assert "etag" not in answer.headers
        assert int(answer.headers["content-length"]) == len(answer.content)
        opened = pyrage.decrypt(answer.content, [mine])
        assert name == "planish.json" or opened == client.get(url).content
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(answer.content, [other])
        assert client.get(sealed[f"{name}.age"].removesuffix(".age")).status_code == 404, "in plain"
    archive = client.get(
        alice.call("GET", f"{place}/sealed/archive", None, 302).headers["location"]
    )
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert {*sealed, "checkpoint_complete"} == set(tar.getnames())


@pytest.mark.parametrize(
    ("recipients", "named"),
    [
        (["age1qqq"], r"age_encryption_recipients\[0\]='age1qqq'"),
        (["ssh-ed25519 x"], r"age_encryption_recipients\[0\]='ssh-ed25519 x'"),
        ([7], r"age_encryption_recipients\[0\]"),
        (["age1qqq"] * 11, "at most 10"),
        ("age1qqq", "age_encryption_recipients"),
    ],
)
def test_an_invalid_recipient_is_rejected(alice: Caller, run: str, recipients: object, named: str):
    pytest.importorskip("pyrage", reason="it is of an extra")
    body = {"model_id": run, "seq_id": 4, "path": "sealed", "age_encryption_recipients": recipients}
    assert re.search(named, alice.post("/save_weights_external", body, 400)["detail"])


def test_encryption_without_the_extra_is_rejected_with_a_remedy(
    alice: Caller, run: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("planish.server.durable.checkpoints.find_spec", lambda name: None)
    body = {
        "model_id": run,
        "seq_id": 4,
        "path": "sealed",
        "age_encryption_recipients": ["age1qqq"],
    }
    assert "planish[age]" in alice.post("/save_weights_external", body, 400)["detail"]


def test_a_checkpoint_archive_can_be_downloaded(alice: Caller, run: str, client: TestClient):
    answer = alice.call(
        "GET", f"/training_runs/{run}/checkpoints/sampler_weights/a/archive", None, 302
    )
    data = client.get(answer.headers["location"])
    assert int(data.headers["content-length"]) == len(data.content)
    with tarfile.open(fileobj=io.BytesIO(data.content)) as tar:
        assert {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"} <= set(
            tar.getnames()
        )
        member = tar.extractfile("adapter_config.json")
        assert member is not None
        assert orjson.loads(member.read())["r"] == 4


def test_names_reserved_for_external_weights_are_rejected(alice: Caller, run: str):
    body = {"model_id": run, "seq_id": 4, "path": "external:b"}
    assert "external" in alice.post("/save_weights_for_sampler", body, 400)["detail"]
    alice.call("DELETE", f"/training_runs/{run}/checkpoints/sampler_weights/external:a", None, 400)


@pytest.mark.parametrize(
    "checkpoint",
    ["weights", "weights/a/b", "weights/..", "weights/../../x", "other/a", "weights/%2e%2e"],
)
def test_an_id_with_a_path_is_rejected(alice: Caller, run: str, checkpoint: str):
    answer = alice.client.request(
        "DELETE", f"/api/v1/training_runs/{run}/checkpoints/{checkpoint}", headers=alice.headers
    )
    assert answer.status_code in (400, 404, 405)
    assert answer.json()["detail"]


# Results


@pytest.mark.slow
def test_a_poll_waits_for_the_result(tmp_path: Path, model_directory: Path):
    with client_of(tmp_path, model_directory, None, poll_seconds=60) as client:
        caller = Caller(client, "tml-any-key")
        model = caller.model()
        poll = {"request_id": caller.forward_backward(model, 2)["request_id"]}
        began, accept = time.monotonic(), {"accept": "application/x-protobuf"}
        threading.Timer(0.5, caller.forward_backward, (model, 1)).start()
        answer = caller.post("/retrieve_future", poll, headers=accept)
    assert output_from_message(answer.content).metrics["loss:sum"] > 0
    assert time.monotonic() - began > 0.3


@pytest.mark.slow
def test_a_poll_for_an_unfinished_result_says_try_again(alice: Caller):
    model = alice.model()
    accepted = alice.optim_step(model, 2)
    began = time.monotonic()
    answer = alice.post("/retrieve_future", {"request_id": accepted["request_id"]}, 408)
    assert 1.5 < time.monotonic() - began < 60
    assert answer["type"] == "try_again"
    assert answer["request_id"] == accepted["request_id"]
    assert answer["queue_state"] in ("active", "paused_capacity", "paused_rate_limit")


def test_a_stop_ends_waiting_polls(tmp_path: Path, model_directory: Path):
    with client_of(tmp_path, model_directory, None, poll_seconds=60) as client:
        caller = Caller(client, "tml-any-key")
        accepted = caller.optim_step(caller.model(), 2)
        state = client.app.state.http  # type: ignore[attr-defined]
        client.portal.call(state.ending.set)  # type: ignore[union-attr]
        began = time.monotonic()
        caller.post("/retrieve_future", {"request_id": accepted["request_id"]}, 408)
        assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_stop_ends_requests_that_wait_for_memory(
    tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """The same holds for requests that wait for a model to be created. After the next start, the
    ended requests run.
    """
    with client_of(tmp_path, model_directory, None) as client:
        caller = Caller(client, "tml-any-key")
        session, state = caller.session(), client.app.state.http  # type: ignore[attr-defined]
        waiting = threading.Event()

        async def no_room(*_: object) -> None:
            waiting.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(state.server.adapter_cache, "_load", no_room)
        model = caller.post(
            "/create_model",
            {
                "session_id": session,
                "model_seq_id": 0,
                "base_model": BASE,
                "lora_config": {"rank": 4},
            },
        )["model_id"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        waiting.clear()
        portal = client.portal
        assert portal is not None
        stop = threading.Thread(target=lambda: waiting.wait(60) and portal.call(state.stopping.set))
        stop.start()
        began = time.monotonic()
        assert "stopping" in caller.post("/create_sampling_session", sampler, 503)["detail"]
        assert "stopping" in caller.post("/get_info", {"model_id": model}, 503)["detail"]
        stop.join()
        assert time.monotonic() - began < 60
    with client_of(tmp_path, model_directory, None) as client:
        monkeypatch.undo()
        caller = Caller(client, "tml-any-key")
        assert (
            caller.post("/create_sampling_session", sampler)["sampling_session_id"]
            == f"{session}:sample:0"
        )


def test_session_metadata_is_limited_and_not_kept_in_memory(alice: Caller, client: TestClient):
    body = {"tags": ["a"], "user_metadata": {"b": "c" * 70_000}}
    assert "at most 65,536" in alice.post("/create_session", body, 400)["detail"]
    session = alice.session(user_metadata={"b": "c"})
    server = client.app.state.http.server  # type: ignore[attr-defined]
    assert server.sessions._open_rows[session].spec == ""
    assert alice.get(f"/sessions/{session}")["user_metadata"] == {"b": "c"}


def test_a_checkpoint_can_have_the_name_of_an_endpoint(alice: Caller):
    model = alice.model()
    alice.result(alice.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "publish"}))
    path = f"/training_runs/{model}/checkpoints/weights/publish"
    alice.call("POST", f"{path}/publish", status=204)
    alice.call("DELETE", f"{path}/publish", status=204)
    alice.call("DELETE", path, status=204)
    assert alice.get(f"/training_runs/{model}/checkpoints")["checkpoints"] == []
