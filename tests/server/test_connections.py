"""Limits of connections: what keyless clients cannot use up, and which connections are closed."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from server_process import BASE_MODEL, ServerProcess, running_server

from planish.files import write_remedy
from planish.server.http.connections import Connection, ConnectionLimits, ConnectionTable
from planish.server.results import Tenant, Unavailable

ALICE = Tenant("alice")


@dataclass
class Fixture:
    """A table with a clock that a test moves, and the connections that it closed."""

    limits: ConnectionLimits
    now: float = 0.0
    closed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = ConnectionTable(self.limits, lambda: self.now)

    def open(self, name: str, address: str = "192.0.2.1") -> Connection:
        connection = self.table.add(address, lambda: self.closed.append(name))
        assert connection is not None
        return connection

    def request(self, connection: Connection, tenant: Tenant | None = ALICE) -> None:
        self.table.bytes_arrived(connection)
        self.table.begin_request(connection)
        if tenant is not None:
            connection.accept(tenant, has_keys=True)


def test_limits_follow_from_the_open_files():
    limits = ConnectionLimits.from_max_files(65536, True)
    assert limits.total < 65536 - 256
    assert ConnectionLimits.from_max_files(1024, True).total == 576
    assert ConnectionLimits.from_max_files(10, True).total == 64
    assert ConnectionLimits.from_max_files(1 << 20, True).total == 20_000


def test_without_keys_only_the_total_limits_connections():
    limits = ConnectionLimits.from_max_files(1024, False)
    assert limits.keyless == limits.per_address == limits.total


def test_idle_keyless_connections_are_replaced_oldest_first():
    fixture = Fixture(ConnectionLimits(total=64))
    for number in range(32):  # half of the total, from many addresses
        fixture.open(str(number), f"192.0.2.{number}")
    assert fixture.closed == []
    fixture.open("new", "198.51.100.1")
    assert fixture.closed == ["0"]
    assert len(fixture.table.open) == 32


def test_one_address_has_an_eighth_of_the_total():
    fixture = Fixture(ConnectionLimits(total=256))
    other = fixture.open("other", "198.51.100.1")
    for number in range(33):
        fixture.open(str(number))
    assert fixture.closed == ["0"]
    assert other in fixture.table.open
    for number in range(33):  # one network of IPv6
        fixture.open(f"six {number}", f"2001:db8::{number:x}")
    assert fixture.closed == ["0", "six 0"]


def test_keyless_connections_never_replace_those_of_tenants_in_use():
    fixture = Fixture(ConnectionLimits(total=64))
    keyed = [fixture.open(f"k{number}", f"10.0.0.{number}") for number in range(32)]
    for connection in keyed:
        fixture.request(connection)
    for number in range(100):
        fixture.open(str(number), f"10.1.0.{number}")
    assert all(connection in fixture.table.open for connection in keyed)
    for connection in keyed[1:]:
        fixture.table.end_request(connection)
    assert all(connection in fixture.table.open for connection in keyed)


def test_a_full_table_replaces_idle_connections_and_then_rejects_new_ones():
    fixture = Fixture(ConnectionLimits(total=64))
    keyed = [fixture.open(f"k{number}", f"10.0.{number}.1") for number in range(64)]
    assert fixture.closed[:1] == ["k0"]  # keyless until it is used
    fixture = Fixture(ConnectionLimits(total=64))
    keyed = []
    for number in range(64):
        keyed.append(fixture.open(f"k{number}", f"10.0.{number}.1"))
        fixture.request(keyed[-1], Tenant(str(number % 8)))
    assert fixture.table.add("10.9.9.9", lambda: None) is None  # all are in use
    fixture.table.end_request(keyed[5])
    fixture.table.end_request(keyed[3])
    fixture.open("new", "10.9.9.9")
    assert fixture.closed == ["k5"]  # the tenant has not used it for longest


def test_a_tenant_has_half_of_the_total():
    fixture = Fixture(ConnectionLimits(total=64))
    for number in range(32):
        fixture.request(fixture.open(str(number), f"10.0.{number}.1"))
    one_more = fixture.open("one more")
    with pytest.raises(Unavailable, match="too many connections"):
        fixture.request(one_more)
    fixture.request(one_more, Tenant("bob"))
    alone = Fixture(ConnectionLimits(total=64))
    for number in range(60):  # a server without keys has one tenant
        connection = alone.open(str(number), f"10.0.{number}.1")
        alone.table.begin_request(connection)
        connection.accept(ALICE, has_keys=False)


def test_headers_and_reading_have_a_time_limit():
    fixture = Fixture(ConnectionLimits(header_seconds=15, write_seconds=60))
    fixture.open("silent")
    keyed = fixture.open("keyed")
    fixture.request(keyed)
    fixture.now = 16
    assert fixture.table.close_overdue() == 1
    assert fixture.closed == ["silent"]
    fixture.table.end_request(keyed)
    fixture.now = 100
    assert fixture.table.close_overdue() == 0  # uvicorn's keep-alive timeout applies
    fixture.table.bytes_arrived(keyed)
    fixture.now = 110
    fixture.table.bytes_arrived(keyed)  # more bytes of the same headers
    fixture.now = 116
    assert fixture.table.close_overdue() == 1
    reader = fixture.open("reader")
    fixture.request(reader)
    fixture.table.set_unread(reader, True)
    fixture.now = 150
    fixture.table.set_unread(reader, False)
    fixture.table.set_unread(reader, True)
    fixture.now = 200
    assert fixture.table.close_overdue() == 0
    fixture.now = 211
    assert fixture.table.close_overdue() == 1
    assert fixture.table.open == set()
    fixture.table.end_request(reader)  # its request ends later
    assert fixture.table._idle_keyed == {}
    assert fixture.table._by_tenant == fixture.table._by_address == {}


def test_errors_about_open_files_do_not_advise_to_free_space():
    for number in (errno.EMFILE, errno.ENFILE):
        assert "limit" in write_remedy(OSError(number, os.strerror(number)), "free space")
    assert "memory" in write_remedy(OSError(errno.ENOMEM, "no memory"), "free space")
    assert write_remedy(OSError(errno.ENOSPC, "full"), "free space") == "free space"


# A process.

KEY = "tml-alices-key"
FILES = 400


def with_header_seconds(seconds: float) -> str:
    """Return Python that changes the timeout of a server before it starts."""
    return f"""
import dataclasses, resource
from planish.server.http.connections import ConnectionLimits
made = ConnectionLimits.from_max_files
ConnectionLimits.from_max_files = lambda n, has_keys: dataclasses.replace(made(n, has_keys), header_seconds={seconds})
"""


FEW_FILES = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
"""


@pytest.fixture
def server(tmp_path: Path, model_dir: Path) -> Iterator[ServerProcess]:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY}\n")
    with running_server(
        tmp_path / "data",
        model_dir,
        "--api-key-file",
        str(keys),
        prelude=FEW_FILES + with_header_seconds(600),
    ) as server:
        yield server


def connect(url: str) -> socket.socket:
    parsed = httpx.URL(url)
    return socket.create_connection((parsed.host, parsed.port or 80), timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"POST /api/v1/asample HTTP/1.1\r\nHost: a\r\nX-A: "])
def test_idle_connections_keep_no_tenant_out_and_no_save_fails(server: ServerProcess, sent: bytes):
    with ExitStack() as stack:
        for _ in range(2 * FILES):
            one = stack.enter_context(connect(server.url))
            one.sendall(sent)
        begun = time.monotonic()
        http = stack.enter_context(
            httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": KEY}, timeout=60)
        )

        def post(path: str, body: object) -> dict[str, str]:
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def result(accepted: dict[str, str]) -> dict[str, str]:
            body = {"request_id": accepted["request_id"]}
            while (answer := http.post("/retrieve_future", json=body)).status_code == 408:
                pass
            assert answer.status_code == 200, answer.text
            return answer.json()

        session = post("/create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
        options = {"model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
        model = post("/create_model", {"session_id": session, **options})
        result(model)
        for number in range(3):
            save = {"model_id": model["model_id"], "seq_id": number + 1, "path": f"save-{number}"}
            result(post("/save_weights", save))
        assert time.monotonic() - begun < 100
    assert not any("Too many open files" in line for line in server.output)
    server.wait_for_line("only 108 connections")


@pytest.mark.slow
def test_a_slow_client_is_disconnected(tmp_path: Path, model_dir: Path):
    with running_server(tmp_path / "data", model_dir, prelude=with_header_seconds(0.5)) as server:
        for sent in (b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
            with connect(server.url) as client:
                client.sendall(sent)
                begun = time.monotonic()
                with suppress(ConnectionResetError):
                    assert client.recv(100) == b""
                assert time.monotonic() - begun < 14  # The default is 15 seconds.
        answer, give_up = b"", time.monotonic() + 60
        while not answer and time.monotonic() < give_up:  # a paused client is slow too
            with connect(server.url) as client, suppress(ConnectionError):
                client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                answer = client.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200")
