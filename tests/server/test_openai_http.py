"""Requests that are not HTTP get JSON too."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from http_thread import serving_app
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from planish.server.http.connections import ConnectionLimits, ConnectionTable, protocol_class


async def _hello(request: object) -> PlainTextResponse:
    return PlainTextResponse("hello")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    protocol = protocol_class(ConnectionTable(ConnectionLimits()))
    app = Starlette(routes=[Route("/", _hello)])
    with serving_app(app, http=protocol) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.parametrize(
    "request_head",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nNo colon\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_a_request_that_is_not_http_gets_json(port, request_head):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with suppress(ConnectionError):  # the server may have answered before the end
            connection.sendall(request_head)
        answer = b""
        while piece := _received(connection):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    error = json.loads(body)
    assert "64 KiB" in error["error"]["message"]
    assert error["error"]["type"] == "invalid_request_error"
    assert error["detail"] == error["error"]["message"]


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:  # after an answer, if more of the request arrives
        return b""
