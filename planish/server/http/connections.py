"""The connections of a server: how many may be open, and how long a client may take.

Anybody who reaches the port can open connections. A connection is keyless until it sends a request
with a valid key. Limits and timeouts ensure that keyless connections cannot keep a tenant out:

    total      Every connection is an open file, so `ConnectionLimits.from_max_files` derives the total
               from the limit of open files, and leaves files for the journal and checkpoints.
               When the total is reached, a new connection replaces an idle connection: the oldest
               keyless one, or else the least recently used one of a tenant.
    keyless    If the server has keys, keyless connections may take at most half of the total, but
               never more than 4,096. One address (for IPv6, one /64 network) may have at most an
               eighth of the total, but never more than 1,024. At either limit, a new keyless
               connection replaces the oldest idle keyless connection.
    headers    A connection is closed if the headers of a request are not complete in time. A
               keyless connection is also closed if it sends no request in time.
    reading    A connection is closed if its client stops reading a response for too long.
    tenant     If the server has keys, one tenant may have at most half of the total.

A connection is idle between requests. An idle connection of a tenant is closed by uvicorn after its
keep-alive timeout. `RequestContext.body` limits how long a client may take to send a body.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from planish.server.results import Tenant, Unavailable, retry_headers, stopping

CONNECTION_SCOPE_KEY = "planish.connection"
"""The entry of an ASGI scope with the `Connection` of the request."""
RESERVED_FILES = 256
"""Open files that are reserved for the database, bodies, checkpoints and downloads."""
_ASSUMED_FILES, _UNLIMITED_FILES = 512, 1 << 20
"""The assumed limits of open files. The first is used if the system cannot report its limit, and
the second if the system has no limit.
"""
_MIN_CONNECTIONS = 64
_IPV6_NETWORK = 64
_MAX_CONNECTIONS = 20_000
_MAX_KEYLESS_CONNECTIONS = 4096
"""This limits the memory of keyless connections to about 100 MB. A connection with 4 KiB of headers
takes 23 KiB, measured with 1,850 connections.
"""
_BUSY_BODY = b'{"detail":"this server has too many connections; try again later"}'
_BUSY_RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(_BUSY_BODY), _BUSY_BODY)
)


def _openai_error(message: str, kind: str) -> dict[str, str | None]:
    return {"message": message, "type": kind, "param": None, "code": None}


_INVALID_DETAIL = (
    "the request is not HTTP/1.1: its headers have more than 64 KiB, or a part of it is invalid"
)
# The path of an invalid request is unknown. So this body has the fields that the SDK reads and
# the fields that OpenAI clients read.
_INVALID_BODY = orjson.dumps(
    {
        "detail": _INVALID_DETAIL,
        "error": _openai_error(_INVALID_DETAIL, "invalid_request_error"),
    }
)
_INVALID_RESPONSE = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_INVALID_BODY), _INVALID_BODY)
)


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections may be open, and their timeouts in seconds."""

    total: int = 4096
    has_keys: bool = True
    """Whether the server has keys. Without keys it listens on the loopback interface only, and only
    the total limits its connections.
    """
    header_seconds: float = 15.0
    """How long the headers of a request may take to arrive. The time counts from their first byte.
    For a keyless connection, it counts from the moment at which the connection became idle.
    """
    write_seconds: float = 60.0
    """How long a client may read nothing while the server has data for it."""

    @classmethod
    def from_max_files(cls, max_files: int, has_keys: bool) -> ConnectionLimits:
        """Return the limits of a process that may open `max_files` files. Connections get three
        quarters of the unreserved files, because each download needs a second file.
        """
        fitting = (max_files - RESERVED_FILES) * 3 // 4
        return cls(min(max(_MIN_CONNECTIONS, fitting), _MAX_CONNECTIONS), has_keys)

    @property
    def keyless(self) -> int:
        """The maximum number of connections that have not sent a valid key."""
        return min(self.total // 2, _MAX_KEYLESS_CONNECTIONS) if self.has_keys else self.total

    @property
    def per_address(self) -> int:
        """The maximum number of keyless connections from one address."""
        return (
            min(max(16, self.total // 8), _MAX_KEYLESS_CONNECTIONS // 4)
            if self.has_keys
            else self.total
        )

    @property
    def per_tenant(self) -> int:
        """The maximum number of connections of one tenant, if the server has keys."""
        return self.total // 2


@dataclass(eq=False)
class Connection:
    """One open connection."""

    table: ConnectionTable
    address: str
    close: Callable[[], None]
    """Closes the connection at once and drops unsent data."""
    tenant: str | None = None
    """The tenant of the last request with a valid key; None for a keyless connection."""
    running: int = 0
    """The number of requests in progress. It is briefly two if a client pipelines requests."""

    def accept(self, tenant: Tenant, has_keys: bool) -> None:
        """Note that the current request has a valid key. Raise Unavailable if its tenant has too
        many connections.
        """
        self.table.accept(self, tenant.name, has_keys)


@dataclass
class ConnectionTable:
    """All open connections of a server. It also knows which of them are idle."""

    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    clock: Callable[[], float] = time.monotonic
    open: set[Connection] = field(default_factory=set[Connection])
    _by_address: Counter[str] = field(default_factory=Counter[str])
    """The number of keyless connections of each address."""
    _by_tenant: Counter[str] = field(default_factory=Counter[str])
    """The number of connections of each tenant."""
    _idle_keyless: OrderedDict[Connection, float] = field(
        default_factory=OrderedDict[Connection, float]
    )
    """When each idle keyless connection became idle, oldest first."""
    _idle_at: dict[str, OrderedDict[Connection, None]] = field(
        default_factory=dict[str, OrderedDict[Connection, None]]
    )
    """The idle keyless connections of each address, oldest first."""
    _idle_keyed: OrderedDict[Connection, None] = field(
        default_factory=OrderedDict[Connection, None]
    )
    """The idle connections of tenants, least recently used first."""
    _begun: OrderedDict[Connection, float] = field(default_factory=OrderedDict[Connection, float])
    """When the first byte of a request arrived on an idle connection of a tenant."""
    _unread: OrderedDict[Connection, float] = field(default_factory=OrderedDict[Connection, float])
    """The connections whose client does not read its response. The value is the time at which the
    client stopped reading.
    """

    def add(self, address: str, close: Callable[[], None]) -> Connection | None:
        """Add a new connection, which may replace an idle one, and return it. Return None if a
        limit is reached and no idle connection can be replaced.
        """
        limits, source = self.limits, _source(address)
        if self._by_address[source] >= limits.per_address and not self._evict_at(source):
            return None
        if self._by_address.total() >= limits.keyless and not self._evict(self._idle_keyless):
            return None
        if len(self.open) >= limits.total and not (
            self._evict(self._idle_keyless) or self._evict(self._idle_keyed)
        ):
            return None
        connection = Connection(self, source, close)
        self.open.add(connection)
        self._by_address[source] += 1
        self._wait(connection)
        return connection

    def remove(self, connection: Connection) -> None:
        """Remove a connection. Do nothing if it is unknown."""
        if connection not in self.open:
            return
        self.open.remove(connection)
        self._stop_waiting(connection)
        self._unread.pop(connection, None)
        self._count(connection, -1)

    def bytes_arrived(self, connection: Connection) -> None:
        """Note that bytes arrived. On an idle connection, they are the beginning of a request."""
        if connection in self._idle_keyed:
            self._begun.setdefault(connection, self.clock())

    def begin_request(self, connection: Connection) -> None:
        """Note that the headers of a request are complete."""
        connection.running += 1
        self._stop_waiting(connection)

    def end_request(self, connection: Connection) -> None:
        """Note that a request was answered."""
        connection.running -= 1
        if connection in self.open and not connection.running:
            self._wait(connection)

    def accept(self, connection: Connection, tenant: str, has_keys: bool) -> None:
        """Note that a request had a valid key of `tenant`. Raise Unavailable if the server has keys
        and the tenant has too many connections.
        """
        if connection.tenant == tenant or connection not in self.open:
            return
        if has_keys and self._by_tenant[tenant] >= self.limits.per_tenant:
            raise Unavailable("this key has too many connections; close some, or wait", 5.0)
        self._count(connection, -1)
        connection.tenant = tenant
        self._count(connection, 1)

    def set_unread(self, connection: Connection, is_unread: bool) -> None:
        """Note that the client has stopped reading its response, or reads again."""
        if is_unread and connection in self.open:
            self._unread[connection] = self.clock()
        else:
            self._unread.pop(connection, None)

    def close_overdue(self) -> int:
        """Close the connections that exceeded a timeout, and return their number."""
        now = self.clock()
        overdue = [
            connection
            for since_when, seconds in (
                (self._idle_keyless, self.limits.header_seconds),
                (self._begun, self.limits.header_seconds),
                (self._unread, self.limits.write_seconds),
            )
            for connection in _older_than(since_when, now - seconds)
        ]
        for connection in overdue:
            self._close(connection)
        return len(overdue)

    def _wait(self, connection: Connection) -> None:
        if connection.tenant is None:
            self._idle_keyless[connection] = self.clock()
            self._idle_at.setdefault(connection.address, OrderedDict())[connection] = None
        else:
            self._idle_keyed[connection] = None

    def _stop_waiting(self, connection: Connection) -> None:
        self._idle_keyless.pop(connection, None)
        self._idle_keyed.pop(connection, None)
        self._begun.pop(connection, None)
        waiting = self._idle_at.get(connection.address)
        if waiting is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._idle_at[connection.address]

    def _count(self, connection: Connection, change: int) -> None:
        keyless = connection.tenant is None
        counts = self._by_address if keyless else self._by_tenant
        key = connection.tenant or connection.address
        counts[key] += change
        if not counts[key]:
            del counts[key]

    def _evict(self, idle: OrderedDict[Connection, Any]) -> bool:
        """Close the oldest of the idle connections. Return False if there is none."""
        connection = next(iter(idle), None)
        if connection is not None:
            self._close(connection)
        return connection is not None

    def _evict_at(self, address: str) -> bool:
        return self._evict(self._idle_at.get(address, OrderedDict()))

    def _close(self, connection: Connection) -> None:
        self.remove(connection)
        connection.close()


def _older_than(since_when: OrderedDict[Connection, float], latest: float) -> list[Connection]:
    """Return the connections whose time is at most `latest`. `since_when` is ordered by time."""
    found: list[Connection] = []
    for connection, since in since_when.items():
        if since > latest:
            break
        found.append(connection)
    return found


def _source(address: str) -> str:
    """Return the name under which `ConnectionTable` counts the connections from an address. It is
    the address itself for IPv4, and the /64 network for IPv6, because one client usually has a
    whole network.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return str(getattr(parsed, "ipv4_mapped", None) or parsed)
    return str(ipaddress.ip_network((parsed, _IPV6_NETWORK), strict=False))


def protocol_class(table: ConnectionTable) -> type[asyncio.Protocol]:
    """Return a uvicorn protocol class that registers its connections in `table`."""

    class LimitedProtocol(_LimitedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.table = table

    return LimitedProtocol


class _LimitedProtocol(H11Protocol):
    """The HTTP/1.1 protocol of one connection, which follows the limits of a `ConnectionTable`."""

    table: ConnectionTable
    connection: Connection | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Add the connection to the table, or answer 503 if the table has no space for it."""
        super().connection_made(transport)
        address = self.client[0] if self.client is not None else ""
        self.connection = self.table.add(address, transport.abort)
        if self.connection is None:
            transport.write(_BUSY_RESPONSE)
            transport.close()
        else:
            self.app = partial(_run, self.table, self.connection, self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the table."""
        if self.connection is not None:
            self.table.remove(self.connection)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received bytes, unless the connection was rejected or is being closed."""
        if self.connection is None or self.transport.is_closing():
            return
        self.table.bytes_arrived(self.connection)
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not valid HTTP. The body is JSON, as for all other errors."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_INVALID_RESPONSE)
        self.transport.close()

    def pause_writing(self) -> None:
        """Note that the client does not read its response."""
        if self.connection is not None:
            self.table.set_unread(self.connection, True)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client reads its response again."""
        if self.connection is not None:
            self.table.set_unread(self.connection, False)
        super().resume_writing()


async def _run(
    table: ConnectionTable,
    connection: Connection,
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Run the application for one request of a connection."""
    scope[CONNECTION_SCOPE_KEY] = connection
    has_started = False

    async def send_and_note(message: Message) -> None:
        nonlocal has_started
        has_started = True
        await send(message)

    table.begin_request(connection)
    try:
        await app(scope, receive, send_and_note)
    except asyncio.CancelledError:
        # uvicorn cancels the requests that are left at the end of a stop. Without this, it would
        # log a traceback for each, and answer with plain text.
        if has_started:
            connection.close()
            await asyncio.sleep(0)  # uvicorn notices the closed connection
        else:
            await _stopping_response()(scope, receive, send)
    finally:
        table.end_request(connection)


def _stopping_response() -> Response:
    """Return a response with the fields that the SDK reads and the fields that OpenAI clients read,
    for a request that a stop has ended.
    """
    error = stopping()
    body = {"detail": str(error), "error": _openai_error(str(error), "server_error")}
    headers = {**retry_headers(error), "Connection": "close"}
    return Response(orjson.dumps(body), error.status, headers, media_type="application/json")


def raise_file_limit() -> int:
    """Raise the limit of open files as far as possible, and return the limit. Each waiting request
    holds a connection, and each connection is an open file.
    """
    try:
        import resource  # not available on every system
    except ImportError:
        return _ASSUMED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return _UNLIMITED_FILES if soft == resource.RLIM_INFINITY else soft
