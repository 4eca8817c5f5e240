"""The requests of a session with their times, as a Perfetto trace."""

import json
import sqlite3
import time
from contextlib import closing
from typing import Any

import httpx
import pytest
from server_client import Client, adam, gradient, running
from starlette.testclient import TestClient

from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.server.http.app import create_app
from planish.server.perfetto import perfetto_trace
from planish.server.results import NotFound, Tenant
from planish.server.server import Server
from planish.server.session_timeline import SessionTimeline, TimedRequest
from planish.server.settings import HttpSettings
from planish.service import LoadWeights


def decoded(content: bytes) -> list[tuple[int, Any]]:
    """Return the fields of a protobuf message, bytes or int, with their numbers."""
    fields, place = [], 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = content[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(content):
        number, kind = divmod(varint(), 8)
        value: bytes | int = varint()
        if kind == 2:
            size = int(value)
            value = content[place : place + size]
            place += size
        fields.append((number, value))
    return fields


def timed(seq: int, accepted: float, begun: float | None, finished: float | None, **other):
    values = {"id": f"a:train:0:{seq}", "kind": "optim_step", "owner": "a:train:0", "seq": seq}
    times = {"accepted": accepted, "begun": begun, "finished": finished}
    rest = {"state": "done", "body_bytes": 300, "result_bytes": 0, "message": None}
    return TimedRequest(**{**values, **times, **rest, **other})


async def test_a_timeline_has_the_times_of_all_requests(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        start = time.time()
        client = await Client.start(server)
        model = await client.model()
        await model.step()
        await client.sample(await client.sampler())
        timeline = await server.timelines.read(client.session_id)
        assert timeline.owners == [model.model_id, f"{client.session_id}:sample:0"]
        kinds = [request.kind for request in timeline.requests]
        assert kinds == ["create_model", "forward_backward", "optim_step", "sample"]
        for request in timeline.requests:
            assert request.begun is not None
            assert request.finished is not None
            assert start <= request.accepted <= request.begun <= request.finished <= time.time()
            assert request.state == "done"
        newest = await server.timelines.read(client.session_id, limit=1)
        assert ([each.kind for each in newest.requests], newest.num_left_out) == (["sample"], 3)
        with pytest.raises(NotFound):
            await server.timelines.token(Tenant("another"), client.session_id, 60)


async def test_each_step_has_a_row_of_metrics(model_dir, data_dir):
    def rows() -> dict[int, dict[str, float]]:
        with closing(sqlite3.connect(data_dir / "server.db")) as db:
            found = db.execute("SELECT step, metrics FROM steps WHERE model = ?", [model.model_id])
            return {step: json.loads(text) for step, text in found}

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        state = await model.save("start")
        await model.run(gradient(model.model_id, 1))
        await model.run(gradient(model.model_id, 2))
        await model.run(gradient(model.model_id, 3, forward_only=True))
        stepped = json.loads(await model.run(adam(model.model_id)))["metrics"]
        await model.step()
        first, second = rows()[1], rows()[2]
        tokens = [gradient(model.model_id, seed).num_tokens for seed in (1, 2)]
        assert first["num_tokens"] == sum(tokens)
        assert first["num_sequences"] == 6
        assert first["grad_norm"] == stepped["grad_norm"]
        assert first["learning_rate"] == 1e-2
        assert first["loss_per_token"] == first["loss:sum"] / sum(tokens)
        assert first["time/total"] >= first["time/device"] > 0
        assert second["num_sequences"] == 3
        await model.run(LoadWeights(model.model_id, state))
        await model.step()
        assert list(rows()) == [1]


def test_slices_of_one_track_are_nested():
    requests = [
        timed(1, 10.0, 10.5, 12.0),
        timed(2, 11.0, None, 12.5, state="refused", message="no"),
        timed(3, 12.0, 13.0, None, state="accepted"),
    ]
    content = perfetto_trace(SessionTimeline("a", ["a:train:0"], requests, 0), now=14.0)
    packets = [dict(decoded(packet)) for _, packet in decoded(content)]
    tracks = [dict(decoded(packet[60])) for packet in packets if 60 in packet]
    assert [track[2] for track in tracks] == [b"session a", b"a:train:0", b"a:train:0"]
    assert [track.get(5) for track in tracks] == [None, 1, 1]
    events = [(dict(decoded(packet[11])), packet[8] / 1e9) for packet in packets if 11 in packet]
    described = [
        (event[11], event[9], event.get(23, b"").decode(), seconds) for event, seconds in events
    ]
    assert described == [
        (2, 1, "optim_step", 10.0),
        (2, 1, "runs", 10.5),
        (2, 2, "", 12.0),
        (2, 2, "", 12.0),
        (2, 1, "optim_step", 12.0),
        (2, 1, "runs", 13.0),
        (2, 2, "", 14.0),
        (2, 2, "", 14.0),
        (3, 1, "optim_step", 11.0),
        (3, 2, "", 12.5),
    ]
    notes = [dict(decoded(note)) for number, note in decoded(packets[-2][11]) if number == 4]
    assert {note[10]: note.get(6, note.get(4)) for note in notes} == {
        b"id": b"a:train:0:2",
        b"seq": 2,
        b"state": b"refused",
        b"body_bytes": 300,
        b"result_bytes": 0,
        b"message": b"no",
    }


def test_perfetto_reads_the_trace():
    pytest.importorskip("perfetto", reason="make test-extras runs it")
    from perfetto.protos.perfetto.trace import (  # pyright: ignore[reportMissingImports]
        perfetto_trace_pb2,
    )

    timeline = SessionTimeline("a", ["a:train:0"], [timed(1, 10.0, 10.5, 12.0)], 0)
    trace = perfetto_trace_pb2.Trace.FromString(perfetto_trace(timeline, 14.0))
    session, model = (each.track_descriptor for each in trace.packet if each.track_descriptor.uuid)
    assert (session.name, model.name, model.parent_uuid) == ("session a", "a:train:0", session.uuid)
    begin, runs, *ends = [each for each in trace.packet if each.HasField("track_event")]
    kind = perfetto_trace_pb2.TrackEvent
    assert begin.track_event.type == runs.track_event.type == kind.TYPE_SLICE_BEGIN
    assert [each.track_event.type for each in ends] == [kind.TYPE_SLICE_END] * 2
    assert (begin.timestamp, begin.track_event.name) == (10_000_000_000, "optim_step")
    notes = {each.name: each for each in begin.track_event.debug_annotations}
    assert notes["id"].string_value == "a:train:0:1"
    assert notes["seq"].int_value == 1
    assert {each.trusted_packet_sequence_id for each in trace.packet} == {1}


@pytest.fixture
def app_client(model_dir, data_dir):
    engine = Engine({"tiny": str(model_dir)}, data_dir, EngineSettings(device="cpu"))
    keys = {"tml-alice-key": "alice", "tml-bob-key": "bob"}
    app = create_app(Server(engine, data_dir, ["tiny"]), HttpSettings(tenants_by_key=keys))
    with TestClient(app) as client:
        yield client


def test_a_trace_is_downloaded_by_a_signed_url(app_client):
    alice, bob = {"x-api-key": "tml-alice-key"}, {"x-api-key": "tml-bob-key"}
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
    session = app_client.post("/api/v1/create_session", json=body, headers=alice).json()[
        "session_id"
    ]
    path = f"/api/v1/sessions/{session}/trace_export"
    assert app_client.get(path, headers=bob).status_code == 404
    assert app_client.get(path).status_code == 401
    answer = app_client.get(path, headers=alice).json()
    assert answer["status"] == "ready"
    url = httpx.URL(answer["url"])
    trace = app_client.get(url.path)
    assert trace.status_code == 200
    assert f"session {session}".encode() in trace.content
    token = url.path.rpartition("/")[2]
    assert app_client.get(f"/api/v1/traces/{token}x").status_code == 404
    assert app_client.get(f"/api/v1/downloads/{token}/archive.tar").status_code == 400
    other = app_client.app.state.http.server.downloads.token(Tenant("alice"), "tinker://a", 60)
    assert app_client.get(f"/api/v1/traces/{other}").status_code == 404
