"""One HTTP request: who sends it, what its body says, and how errors are returned.

Every endpoint is a function of a `RequestContext`. `endpoint` turns this function into a route. The
route checks the key first, and answers an error with its HTTP status and {"detail": message}. One
limit applies to each body, and another limit to all bodies together, so that no client can exhaust
the memory. Work on large bodies runs in a thread, so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from planish.errors import PlanishError, UnsupportedError, UserError
from planish.server.http.access import TENANT_SCOPE_KEY
from planish.server.http.budgets import MAX_SMALL_BODY, BodyBudget, DownloadSlots
from planish.server.http.connections import CONNECTION_SCOPE_KEY, Connection
from planish.server.http.keys import (
    ANONYMOUS_TENANT,
    METRICS_KEY_NAME,
    OPERATOR_KEY_NAME,
    ApiKeys,
)
from planish.server.http.origins import check_is_not_web_page, is_loopback
from planish.server.results import (
    Page,
    Tenant,
    Unauthorized,
    Unavailable,
    client_error,
    retry_headers,
    status_of,
)
from planish.server.scheduling import ActiveTenants, FairQueue
from planish.server.server import Server
from planish.server.settings import HttpSettings
from planish.wire.bodies import body_too_large, decompress_body
from planish.wire.client_errors import ERROR_CLASS, error_class_name
from planish.wire.fields import Fields
from planish.wire.messages import PROTOBUF
from planish.wire.pacing import paced

T = TypeVar("T")

API = "/api/v1"
_MAX_UNCOUNTED_BODY = 64 * 1024
"""Bodies up to this size do not count against the memory for bodies."""
_MAX_INLINE_BODY = 16 * 1024
"""Bodies up to this size are decoded in the event loop."""
_DECODING_THREADS = 2
"""The number of threads that decode bodies. At most one of them decodes a body above
MAX_SMALL_BODY, because decoding takes many times the memory of the body. There are few threads,
because all of them compete with the event loop for the interpreter lock.
"""
_ACTIVE_SECONDS = 1.0
"""A tenant's bodies are decoded slowly for this long after the last request of another tenant."""
_DECODING_SHARE = 0.1
"""The share of the time in which one tenant's large bodies are decoded while other tenants send
requests. A tenth keeps the 99th percentile of another tenant's waiting time below five times its
idle value on two cores (docs/operators/reliability.md). A quarter gives six times.
"""
_STALL_SECONDS = 30.0
"""A request fails if no bytes of its body arrive for this long."""
_MIN_BODY_RATE = 4096
"""The minimum rate of a body, in bytes per second. A request fails if the first n bytes of its body
take longer than n / _MIN_BODY_RATE + _STALL_SECONDS seconds.
"""
_MAX_PAGE_LIMIT = 1000
_FIRST_SDK_WITH_EXTERNAL = (0, 38)
"""The first release of the SDK that knows checkpoints of type `external`."""

_log = logging.getLogger("planish.server")


@dataclass
class HttpState:
    """The state that all requests to one server share."""

    server: Server
    settings: HttpSettings
    body_budget: BodyBudget = field(default_factory=BodyBudget)
    decoding_queue: FairQueue = field(
        default_factory=lambda: FairQueue(
            _DECODING_THREADS, 1, long_capacity=1, long_tokens=MAX_SMALL_BODY
        )
    )
    """Decides which large body is decoded next, or which large result is encoded next."""
    active_tenants: ActiveTenants = field(default_factory=lambda: ActiveTenants(_ACTIVE_SECONDS))
    """Decides whether the decoding of large bodies is slowed down for the sake of other tenants.
    A server without keys has only one tenant, which is not recorded here.
    """
    downloads: DownloadSlots = field(default_factory=DownloadSlots)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server begins to stop, which ends requests that wait for memory."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a stopping server has finished its work, which ends waiting polls."""
    is_loading: bool = False
    """Whether the server is still loading base models. The server already accepts requests, and
    each request waits for its base model.
    """

    def paced(self, tenant: Tenant, work: Callable[[], T]) -> T:
        """Return `work()`, which decodes a large body. While other tenants send requests, it may
        compute for `_DECODING_SHARE` of the time only.
        """

        def share() -> float:
            return _DECODING_SHARE if self.active_tenants.has_others(tenant.name) else 1.0

        with paced(share):
            return work()

    @cached_property
    def api_keys(self) -> ApiKeys | None:
        """Finds the tenant of each request. None on a server without keys."""
        keys = self.settings.tenants_by_key
        return None if keys is None else ApiKeys(keys)


@dataclass(frozen=True)
class RequestContext:
    """A request of a known tenant."""

    request: Request
    state: HttpState
    tenant: Tenant

    @property
    def server(self) -> Server:
        """The server."""
        return self.state.server

    @property
    def open_server(self) -> Server:
        """The server. Raise Unavailable if it takes no new work."""
        self.server.engine.check_open()
        return self.server

    @property
    def is_protobuf(self) -> bool:
        """Whether the body is protobuf."""
        return PROTOBUF in self.request.headers.get("content-type", "")

    @property
    def accepts_protobuf(self) -> bool:
        """Whether the client accepts protobuf."""
        return PROTOBUF in self.request.headers.get("accept", "")

    @property
    def supports_external(self) -> bool:
        """Whether the client can read checkpoints of type `external`. Older SDKs fail on a list
        that contains one.
        """
        return self.sdk_version is None or self.sdk_version >= _FIRST_SDK_WITH_EXTERNAL

    @property
    def sdk_version(self) -> tuple[int, int] | None:
        """The first two numbers of the SDK's version; None for another client."""
        text = self.request.headers.get("x-stainless-package-version", "")
        version = re.match(r"(\d+)\.(\d+)", text)
        return None if version is None else (int(version[1]), int(version[2]))

    @property
    def idempotency_key(self) -> str | None:
        """The key that the client sends again when it repeats a request; None without one."""
        return self.request.headers.get("x-idempotency-key")

    def check_operator(self, what: str) -> None:
        """Raise Unauthorized unless the server's operator has sent the request. `what` is done by
        operators only.
        """
        has_keys = self.state.settings.tenants_by_key is not None
        if has_keys and self.tenant.name != OPERATOR_KEY_NAME:
            raise Unauthorized(
                f"{what} by the server's operator: this needs a key with the name "
                f"{OPERATOR_KEY_NAME} in the key file"
            )

    @property
    def is_local(self) -> bool:
        """Whether the client is a process on this machine."""
        return self.request.client is not None and is_loopback(self.request.client.host)

    def path_parameter(self, name: str) -> str:
        """Return a parameter of the path."""
        return self.request.path_params[name]

    def query_integer(self, name: str, default: int, low: int, high: int) -> int:
        """Return an integer of the query string."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise UserError(f"{name}={text[:40]!r}: give a whole number from {low} to {high}")
        return value

    def limit_and_offset(self, default: int) -> tuple[int, int]:
        """Return `limit` and `offset` of the query string."""
        return self.query_integer("limit", default, 0, _MAX_PAGE_LIMIT), self.query_integer(
            "offset", 0, 0, 2**53
        )

    def check_scope(self) -> None:
        """Raise UserError for an invalid `access_scope`, and UnsupportedError for a `project_id`.
        The scopes "owned" and "accessible" have the same meaning on this server.
        """
        scope = self.request.query_params.get("access_scope", "owned")
        if scope not in ("owned", "accessible"):
            raise UserError(f"access_scope={scope[:40]!r}: give 'owned' or 'accessible'")
        if self.request.query_params.get("project_id"):
            raise UnsupportedError("project_id: this server has no projects; leave it out")

    @asynccontextmanager
    async def body(self, limit: int) -> AsyncGenerator[bytes]:
        """Yield the decompressed body, of at most `limit` bytes. A body above 64 KiB counts against
        the budget of all bodies until the block ends. Raise Unavailable if the budget is exhausted,
        or if the body arrives too slowly.
        """
        budget, reserved_bytes, size = self.state.body_budget, 0, 0

        def reserve(num_bytes: int) -> None:
            nonlocal reserved_bytes
            budget.reserve(self.tenant, num_bytes)
            reserved_bytes += num_bytes

        try:
            pieces: list[bytes] = []
            stream = self.request.stream()
            content_length = self.request.headers.get("content-length", "0")
            if (
                content_length.isascii()
                and content_length.isdigit()
                and int(content_length) > limit
            ):
                raise body_too_large(limit)
            start_time = time.monotonic()
            while (piece := await _next_piece(stream)) is not None:
                size += len(piece)
                if time.monotonic() - start_time > _STALL_SECONDS + size / _MIN_BODY_RATE:
                    raise Unavailable(
                        f"the body arrived at less than {_MIN_BODY_RATE:g} bytes per second; send "
                        "the request again over a faster connection",
                        1.0,
                    )
                if size > _MAX_UNCOUNTED_BODY:
                    reserve(size - reserved_bytes)
                pieces.append(piece)
                if size > limit:
                    raise body_too_large(limit)
            encoding = self.request.headers.get("content-encoding", "")

            def decompress() -> bytes:
                compressed = b"".join(pieces)
                pieces.clear()  # frees the memory of the pieces
                return decompress_body(compressed, encoding, limit)

            # A small compressed body may be large after the decompression.
            body = (
                await self._run_in_turn(size, decompress)
                if encoding
                else await self.compute(size, decompress)
            )
            if encoding and len(body) > _MAX_UNCOUNTED_BODY:
                reserve(len(body))
            yield body
        finally:
            if reserved_bytes:
                budget.release(self.tenant, reserved_bytes)

    @asynccontextmanager
    async def decoded_body(self, limit: int, decode: Callable[[bytes], T]) -> AsyncGenerator[T]:
        """Yield what `decode` makes of the body."""
        async with self.body(limit) as body:
            yield await self.compute(len(body), lambda: decode(body))

    @asynccontextmanager
    async def read_body(self, limit: int, read: Callable[[Fields], T]) -> AsyncGenerator[T]:
        """Yield what `read` makes of the body, a JSON object. `request.state.body` is the body."""

        def decode(body: bytes) -> T:
            self.request.state.body = body
            return read(Fields.of(body))

        async with self.decoded_body(limit, decode) as value:
            yield value

    @asynccontextmanager
    async def fields(self, limit: int = MAX_SMALL_BODY) -> AsyncGenerator[Fields]:
        """Yield the body as a JSON object."""
        async with self.read_body(limit, lambda fields: fields) as fields:
            yield fields

    async def cancelled_by(self, event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`. If the event is set first, cancel `work` and return None."""
        working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            waiting.cancel()

    async def compute(self, size: int, work: Callable[[], T]) -> T:
        """Return `work()`, which processes a body of `size` bytes. If the body is above 16 KiB,
        `work` runs in a thread when it is the tenant's turn.
        """
        return work() if size <= _MAX_INLINE_BODY else await self._run_in_turn(size, work)

    async def _run_in_turn(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work()`, which runs in a thread when it is the tenant's turn."""
        turn = await self.state.decoding_queue.acquire_slots(self.tenant.name, 1, size)
        try:
            return await asyncio.to_thread(self.state.paced, self.tenant, work)
        finally:
            turn.release()


async def _next_piece(stream: AsyncIterator[bytes]) -> bytes | None:
    """Return the next piece of the body; None at the end."""
    try:
        async with asyncio.timeout(_STALL_SECONDS):
            return await anext(stream, None)
    except TimeoutError:
        raise Unavailable(
            f"no more of the body arrived for {_STALL_SECONDS:g} seconds; send the request again",
            1.0,
        ) from None


PROJECT = "default"
"""The one project that clients see. The server has no projects of its own."""


def check_search_scope(fields: Fields, what: str) -> None:
    """Raise UnsupportedError if a search names other owners or projects. `what` is searched."""
    owner = fields.optional(fields.object, "owner")
    if owner is not None:
        with owner:
            if owner.text("type") not in ("own", "accessible"):
                raise UnsupportedError(
                    f"owner: {what} of other keys cannot be searched; leave it out"
                )
    projects = fields.optional(fields.texts, "project_ids")
    if projects is not None and projects != [PROJECT]:
        raise UnsupportedError(
            f"project_ids: this server has no projects; leave it out, or give [{PROJECT!r}]"
        )


Json = dict[str, Any]
Answer = Response | Json | None
"""What a handler returns: a response, the object of a JSON response, or None for an empty one."""
Handler = Callable[[RequestContext], Awaitable[Answer]]


def endpoint(path: str, handler: Handler, method: str = "POST") -> Route:
    """Return a route under /api/v1 that needs a key."""

    async def answer(request: Request) -> Response:
        try:
            context = authenticate(request, request.headers.get("x-api-key"))
            return to_response(await handler(context))
        except PlanishError as error:
            return error_response(error)
        except ValueError as error:  # for example from numpy, for an invalid value in the body
            return error_response(UserError(str(error)))
        except ClientDisconnect:
            return error_response(
                UserError("the connection was closed before the body was complete")
            )
        except Exception as error:
            sent_error = client_error(error)
            if not isinstance(sent_error, Unavailable):
                raise
            _log.error("%s %s", request.method, request.url.path, exc_info=error)
            return error_response(sent_error)

    return Route(API + path, answer, methods=[method])


def body_endpoint(
    path: str,
    limit: int,
    decode: Callable[[bytes], T],
    handler: Callable[[RequestContext, T], Awaitable[Answer]],
    decode_protobuf: Callable[[bytes], T] | None = None,
) -> Route:
    """Return a route for bodies of at most `limit` bytes. `handler` gets what `decode` makes of a
    JSON body. `decode_protobuf` does the same for a protobuf body; None if there are none.
    """

    async def handle(context: RequestContext) -> Answer:
        chosen = decode
        if decode_protobuf is not None and context.is_protobuf:
            chosen = decode_protobuf
        async with context.decoded_body(limit, chosen) as value:
            return await handler(context, value)

    return endpoint(path, handle)


def authenticate(
    request: Request, key: str | None, is_metrics_page: bool = False
) -> RequestContext:
    """Return the context of a request. Raise Unauthorized if the key is missing, unknown, or not
    allowed to read this page. On a server without keys, raise Unauthorized for a request that a web
    page may have sent. Raise Unavailable if the tenant has too many connections.
    """
    state: HttpState = request.app.state.http
    api_keys = state.api_keys
    if api_keys is None:
        check_is_not_web_page(request.headers, bool(key), state.settings.allowed_origins)
        tenant = ANONYMOUS_TENANT
    else:
        tenant = api_keys.tenant(key)
        state.active_tenants.touch(tenant.name)
    request.scope[TENANT_SCOPE_KEY] = tenant
    connection: Connection | None = request.scope.get(CONNECTION_SCOPE_KEY)
    if connection is not None:
        connection.accept(tenant, api_keys is not None)
    if api_keys is not None and (tenant.name == METRICS_KEY_NAME) != is_metrics_page:
        raise Unauthorized(
            "/metrics is for the server's operator: it needs a key with the name "
            f"{METRICS_KEY_NAME} in the key file"
            if is_metrics_page
            else f"this key has the name {METRICS_KEY_NAME} in the key file, and reads the page "
            "/metrics only; use a key with another name"
        )
    return RequestContext(request, state, tenant)


def error_response(error: PlanishError) -> Response:
    """Return the response for an error. The body has the error's message, and the error's class for
    planish's own client.
    """
    status = status_of(error)
    if status >= 500:
        _log.warning("answered %d: %s", status, error)
    return json_response(
        {"detail": str(error), ERROR_CLASS: error_class_name(error)}, status, retry_headers(error)
    )


def status_and_message(error: Exception) -> tuple[int, str]:
    """Return the status and the message that report an error to a client. The details of internal
    errors are logged, and the client gets only the error's class.
    """
    sent_error = client_error(error)
    status, message = status_of(sent_error), str(sent_error)
    if sent_error is not error or status == 500:
        _log.error("a request under /v1 failed", exc_info=error)
    if status == 500:
        message = f"internal error of the server ({type(error).__name__}); its log has the details"
    return status, message


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def to_response(answer: Answer) -> Response:
    """Return what a handler returned as a response."""
    if isinstance(answer, Response):
        return answer
    return Response(status_code=204) if answer is None else json_response(answer)


def page_to_json(name: str, page: Page[T], to_json: Callable[[T], Any]) -> dict[str, Any]:
    """Return the JSON of a page, with its position in the list."""
    cursor = {"offset": page.offset, "limit": page.limit, "total_count": page.total}
    return {name: [to_json(item) for item in page.items], "cursor": cursor}
