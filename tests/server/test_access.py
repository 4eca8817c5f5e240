"""The access log, the form of log lines, and which key opens which page."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.testclient import TestClient

from planish.server import serve
from planish.server.http import access
from planish.server.http.context import HttpState, RequestContext, endpoint, json_response
from planish.server.http.metrics_page import metrics_route
from planish.server.metrics import Counters, DiskUsage, Metrics
from planish.server.settings import HttpSettings

KEYS = {"tml-alice-key": "alice", "tml-reader-key": "metrics"}


class StubServer:
    """Has what the page for Prometheus reads."""

    async def metrics(self) -> Metrics:
        fields: dict[str, Any] = dict.fromkeys(
            set(Metrics.__dataclass_fields__) - {"counters", "disk"}, 0
        )
        fields["queued_requests"] = fields["checkpoint_bytes"] = {}
        return Metrics(counters=Counters(), disk=DiskUsage(0, 0, 0, 0), **fields)


@pytest.fixture
def client() -> TestClient:
    async def whoami(context: RequestContext) -> Response:
        return json_response({"tenant": context.tenant.name})

    registry = CollectorRegistry()
    app = Starlette(routes=[endpoint("/whoami", whoami, "GET"), metrics_route(registry)])
    server: Any = StubServer()
    app.state.http = HttpState(server, HttpSettings(tenants_by_key=KEYS))
    app.add_middleware(access.AccessLog, metrics=access.RequestMetrics(registry))
    return TestClient(app)


def test_the_access_log_names_the_tenant_beside_a_bad_authorization_header(
    client: TestClient, kept_logging: None
):
    stream = io.StringIO()
    access.set_up_logging("json", "info", stream)
    headers = {"x-api-key": "tml-alice-key", "authorization": "Bearer tml-unknown-key"}
    assert client.get("/api/v1/whoami", headers=headers).json() == {"tenant": "alice"}
    assert client.get("/api/v1/whoami").status_code == 401
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    first, second = [record for record in records if record["logger"] == "planish.access"]
    assert first["tenant"] == "alice"
    assert "tenant" not in second


def test_the_metrics_key_reads_the_metrics_and_nothing_else(client: TestClient):
    reader, alice = {"x-api-key": "tml-reader-key"}, {"x-api-key": "tml-alice-key"}
    assert client.get("/metrics", headers=reader).status_code == 200
    refused = client.get("/api/v1/whoami", headers=reader)
    assert refused.status_code == 401
    assert "/metrics only" in refused.json()["detail"]
    assert client.get("/metrics", headers=alice).status_code == 401


HOSTILE = "a\x1b[2Jb\r\nERROR forged\x9b31mc\u202edone\udc80\x7f"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_lines_hold_no_control_characters(log_format: access.LogFormat, kept_logging: None):
    stream = io.StringIO()
    access.set_up_logging(log_format, "info", stream)
    log = logging.getLogger("planish.server")
    log.warning("path %s", HOSTILE, extra=access.log_fields(name=HOSTILE))
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("failed")
    lines = stream.getvalue().split("\n")
    assert lines.pop() == ""
    assert not any(access._UNPRINTABLE.search(line) for line in lines)
    assert not any(line.startswith("ERROR forged") for line in lines)
    assert "ERROR forged" in lines[0]
    if log_format == "json":
        first, second = map(json.loads, lines)
        assert first["name"].startswith("a\x1b[2Jb\r\n")  # JSON keeps the text, escaped
        assert "Traceback" in second["error"]


def test_printable_text_is_kept():
    assert access.printable("Grüße 你好 \N{PARTY POPPER} C:\\new") == (
        "Grüße 你好 \N{PARTY POPPER} C:\\new"
    )


def test_a_flush_waits_for_the_queued_lines(monkeypatch):
    monkeypatch.setattr(access.BackgroundHandler, "_STALL_SECONDS", 60.0)
    handler = access.BackgroundHandler(os.open(os.devnull, os.O_WRONLY))
    written: list[str] = []

    def write_slowly(line: str) -> None:
        time.sleep(0.01)
        written.append(line)

    monkeypatch.setattr(handler, "_write", write_slowly)
    for message in ("a", "b", "c"):
        handler.emit(logging.makeLogRecord({"msg": message}))
    handler.flush()
    assert written == ["a", "b", "c"]


def test_a_second_signal_flushes_the_log_before_it_ends_the_process(monkeypatch):
    calls: list[str] = []
    handler = logging.NullHandler()
    monkeypatch.setattr(handler, "flush", lambda: calls.append("flush"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "raise_signal", lambda _: calls.append("end"))
    server: Any = SimpleNamespace(should_exit=True, _loop=None)
    serve._UvicornServer.handle_exit(server, signal.SIGTERM, None)
    assert calls == ["flush", "end"]


def test_running_out_of_file_descriptors_is_logged_once_a_minute(kept_logging: None):
    stream = io.StringIO()
    access.set_up_logging("json", "info", stream)
    log = logging.getLogger("asyncio")
    for _ in range(3):
        log.error("socket.accept() out of system resource\nsocket: %s", 1)
    log.error("something else")
    first, second = (json.loads(line)["message"] for line in stream.getvalue().splitlines())
    assert "LimitNOFILE" in first
    assert second == "something else"
