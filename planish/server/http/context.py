"""One HTTP request and its answer: who asks, what the body says, and how an error is told.

Every endpoint is a function of an `RequestContext`. `endpoint` makes a route of it: it looks at the key
first, and turns every error of ours into its status with {"detail": sentence}. Bodies are read
under a cap of their own and a cap on what all requests hold together, so that no client can fill
the memory; work on large bodies is done in a thread, so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from planish.errors import PlanishError, UnsupportedError, UserError
from planish.server.results import (
    NotFound,
    Page,
    Tenant,
    Unauthorized,
    Unavailable,
    retry_headers,
    status_of,
)
from planish.server.scheduling.fair_queue import FairQueue
from planish.server.server import Server
from planish.server.settings import HttpSettings, is_loopback
from planish.wire.bodies import open_body, too_large
from planish.wire.client_errors import ERROR_CLASS, name_of
from planish.wire.fields import Fields
from planish.wire.messages import PROTOBUF

T = TypeVar("T")

API = "/api/v1"
MIB = 1 << 20
SMALL_BODY, SAMPLE_BODY, TRAINING_BODY = 4 * MIB, 64 * MIB, 256 * MIB
ALL_BODIES = 1024 * MIB
"""Of all requests together; one alone may be packed and opened in memory, which is half of it."""
_INLINE_BODY = 64 * 1024
_READ_TOGETHER = 64 * MIB
"""Of bodies above SMALL_BODY, or a single one: while it is read, a body takes many times its size.
"""
_STALL_SECONDS = 30.0
"""A client that sends nothing more of its body for so long is not waited for."""
_MAX_PAGE = 1000
_KNOWS_EXTERNAL = (0, 38)
"""The first release of the SDK that is known to."""

_log = logging.getLogger("planish.server")


@dataclass
class BodyBudget:
    """How many bytes of bodies are held at the moment, by all requests. One tenant may have half of
    the room.
    """

    limit: int = ALL_BODIES
    held: Counter[str] = field(default_factory=Counter)
    """By tenant."""

    @property
    def used(self) -> int:
        return self.held.total()

    def take(self, tenant: Tenant, size: int) -> None:
        if self.used + size > self.limit or self.held[tenant.name] + size > self.limit // 2:
            raise Unavailable(
                "too many large requests at once; this one is taken when others are done", 2.0
            )
        self.held[tenant.name] += size

    def give_back(self, tenant: Tenant, size: int) -> None:
        self.held[tenant.name] -= size


@dataclass
class HttpState:
    """What all requests of one server share."""

    server: Server
    settings: HttpSettings
    room: BodyBudget = field(default_factory=BodyBudget)
    reading: FairQueue = field(default_factory=lambda: FairQueue(_READ_TOGETHER))
    """Whose large body is read next."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server begins to stop: whoever waits for a result is sent away at once."""
    is_loading: bool = False
    """Whether base models are still brought into memory: requests are taken, and wait for theirs.
    """
    copies: dict[tuple[Tenant, str | None], str] = field(default_factory=dict)
    """Sessions of recent copies of checkpoints, by tenant and idempotency key."""

    @cached_property
    def keyring(self) -> ApiKeys:
        """Finds the tenant of each request."""
        return ApiKeys(self.settings.keys)


@dataclass(frozen=True)
class RequestContext:
    """A request of a known tenant."""

    request: Request
    state: HttpState
    tenant: Tenant

    @property
    def server(self) -> Server:
        return self.state.server

    @property
    def is_protobuf(self) -> bool:
        return PROTOBUF in self.request.headers.get("content-type", "")

    @property
    def takes_protobuf(self) -> bool:
        return PROTOBUF in self.request.headers.get("accept", "")

    @property
    def knows_external(self) -> bool:
        """Whether the client can read a checkpoint of type `external`. Older SDKs take a list that
        has one for a fault of the server.
        """
        version = re.match(
            r"(\d+)\.(\d+)", self.request.headers.get("x-stainless-package-version", "")
        )
        return version is None or (int(version[1]), int(version[2])) >= _KNOWS_EXTERNAL

    @property
    def is_local(self) -> bool:
        """Whether the client is a process of this machine."""
        return self.request.client is not None and is_loopback(self.request.client.host)

    def path(self, name: str) -> str:
        """A part of the URL."""
        return self.request.path_params[name]

    def query(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number of the query string."""
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

    def window(self, default: int) -> tuple[int, int]:
        """`limit` and `offset` of the query string."""
        return self.query("limit", default, 0, _MAX_PAGE), self.query("offset", 0, 0, 2**53)

    def check_scope(self) -> None:
        """A list or a record is asked for among one's own things, or those one may see, which are
        the same here.
        """
        scope = self.request.query_params.get("access_scope", "owned")
        if scope not in ("owned", "accessible"):
            raise UserError(f"access_scope={scope[:40]!r}: give 'owned' or 'accessible'")
        if self.request.query_params.get("project_id"):
            raise UnsupportedError("project_id: this server has no projects; leave it out")

    @asynccontextmanager
    async def body(self, limit: int) -> AsyncIterator[bytes]:
        """The body, opened if it is compressed. Unless it is small, it counts against the room of
        all bodies until the block ends.
        """
        room, held, size = self.state.room, 0, 0

        def hold(more: int) -> None:
            nonlocal held
            room.take(self.tenant, more)
            held += more

        try:
            pieces, stream = [], self.request.stream()
            announced = self.request.headers.get("content-length", "0")
            if announced.isascii() and announced.isdigit() and int(announced) > limit:
                raise too_large(limit)
            while (piece := await _next(stream)) is not None:
                size += len(piece)
                if size > _INLINE_BODY:
                    hold(size - held)
                pieces.append(piece)
                if size > limit:
                    raise too_large(limit)
            packed = b"".join(pieces)
            pieces.clear()  # or the body would be held twice
            encoding = self.request.headers.get("content-encoding", "")
            opened = await self.compute(packed, lambda: open_body(packed, encoding, limit))
            if encoding and len(opened) > _INLINE_BODY:
                hold(len(opened))
            yield opened
        finally:
            room.give_back(self.tenant, held)

    @asynccontextmanager
    async def fields(self, limit: int = SMALL_BODY) -> AsyncIterator[Fields]:
        """The body as a JSON object."""
        async with self.body(limit) as body:
            yield await self.compute(body, lambda: Fields.of(body))

    async def unless_stopping(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` answers; None, and it is given up, if the server begins to stop before that."""
        working, stopping = (
            asyncio.ensure_future(work),
            asyncio.ensure_future(self.state.stopping.wait()),
        )
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stopping.cancel()

    async def compute(self, body: bytes, work: Callable[[], T]) -> T:
        """`work()`, in a thread if what it reads is large, and in the tenant's turn if it is very
        large.
        """
        if len(body) <= _INLINE_BODY:
            return work()
        if len(body) <= SMALL_BODY:
            return await asyncio.to_thread(work)
        turn = await self.state.reading.turn(self.tenant.name, len(body), len(body))
        try:
            return await asyncio.to_thread(work)
        finally:
            turn.give_back()


async def _next(stream: AsyncIterator[bytes]) -> bytes | None:
    """None at the end."""
    try:
        async with asyncio.timeout(_STALL_SECONDS):
            return await anext(stream, None)
    except TimeoutError:
        raise Unavailable(
            f"nothing more of the body came for {_STALL_SECONDS:g} seconds; send it again", 1.0
        ) from None


Handler = Callable[[RequestContext], Awaitable[Response]]


def endpoint(path: str, handler: Handler, method: str = "POST") -> Route:
    """A route under /api/v1 for those who have a key."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(context_of(request, request.headers.get("x-api-key")))
        except PlanishError as error:
            return refused(error)
        except ValueError as error:  # of numpy, for instance, in what a user gave
            return refused(UserError(str(error)))
        except ClientDisconnect:
            return refused(UserError("the connection was closed before the body was whole"))

    return Route(API + path, answer, methods=[method])


def context_of(request: Request, key: str | None) -> RequestContext:
    """The request of whoever has this key. Unauthorized if nobody has, or where no key is asked for
    and it is that of a web page.
    """
    state: HttpState = request.app.state.http
    if state.settings.keys is None:
        _refuse_web_pages(request)
    return RequestContext(request, state, state.keyring.tenant(key))


def refused(error: PlanishError) -> Response:
    """The answer to a request that failed: a sentence, and for our own client the kind of error."""
    status = status_of(error)
    if status >= 500:
        _log.warning("answered %d: %s", status, error)
    return answered(
        {"detail": str(error), ERROR_CLASS: name_of(error)}, status, retry_headers(error)
    )


def answered(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def nothing() -> Response:
    """The answer where the client expects none."""
    return Response(status_code=204)


def paged(name: str, page: Page[T], to_json: Callable[[T], Any]) -> dict[str, Any]:
    """A page of a list, with its place in the whole."""
    cursor = {"offset": page.offset, "limit": page.limit, "total_count": page.total}
    return {name: [to_json(item) for item in page.items], "cursor": cursor}


def _refuse_web_pages(request: Request) -> None:
    """Unauthorized for what a page in a browser of this machine sends, from its own site or from a
    name that leads here.
    """
    host = request.url.hostname or ""
    is_foreign = (
        request.headers.get("origin") is not None and request.headers.get("x-api-key") is None
    )
    if is_foreign or not is_loopback(host):
        raise Unauthorized(
            f"this server has no keys, and is for programs of its own machine: Host {host[:100]!r} or the Origin of a web page "
            "is refused"
        )


EVERYBODY = Tenant("everybody")
"""The one tenant of a server without keys."""

_TENANT_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,100}")
_COMMENT = re.compile(r"(?:^|\s)#")
_KEY = re.compile(r"[\x21-\x7e]{8,500}")


def read_keys(path: str | Path) -> dict[str, str]:
    """Tenants' names by key. UserError for a file that cannot be read, is empty, or has a line that
    is none.
    """
    try:
        lines = Path(path).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"api_key_file={path}: {error}; give a text file with one key a line"
        ) from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = _COMMENT.split(line, maxsplit=1)[0]
        if "#" in text:
            raise UserError(
                f"api_key_file={path}, line {number}: a # within a key; give another key, or a space before a comment"
            )
        words = text.split()
        if words:
            *names, key = words
            if (
                not _KEY.fullmatch(key)
                or len(names) > 1
                or not all(_TENANT_NAME.fullmatch(name) for name in names)
            ):
                raise UserError(
                    f"api_key_file={path}, line {number}: give KEY or NAME KEY, with a key of at least 8 printable characters"
                )
            if key in keys:
                raise UserError(
                    f"api_key_file={path}, line {number}: this key is there twice; remove one"
                )
            keys[key] = names[0] if names else f"key-{_key_digest(key).hex()[:12]}"
    if not keys:
        raise UserError(f"api_key_file={path} holds no key; give one a line")
    return keys


class ApiKeys:
    """Tells tenants by their keys, in the same time for every key."""

    def __init__(self, keys: Mapping[str, str] | None) -> None:
        """`keys` maps keys to tenants' names; None: nobody is asked for one."""
        self._tenants = (
            None
            if keys is None
            else [(_key_digest(key), Tenant(name)) for key, name in keys.items()]
        )

    def tenant(self, key: str | None) -> Tenant:
        if self._tenants is None:
            return EVERYBODY
        if not key:
            raise Unauthorized("a key is needed here: set TINKER_API_KEY (header X-API-Key)")
        given = _key_digest(key)
        found = [tenant for digest, tenant in self._tenants if hmac.compare_digest(digest, given)]
        if not found:
            raise Unauthorized("this key is not known here; ask whoever runs the server for one")
        return found[0]


def _key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


_log = logging.getLogger("planish.server")

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class UnsupportedParameterError(UserError):
    """A parameter that OpenAI knows, or a value of one, and that means nothing here."""

    code = "unsupported_parameter"

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"{name} is not supported here: {remedy}")
        self.param = name


class WrongParameterError(UserError):
    """A parameter with a value that it cannot have."""

    code = "invalid_value"

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.param = name


class ModelNotFoundError(NotFound):
    code = "model_not_found"
    param = "model"


def error_body(error: Exception) -> dict[str, Any]:
    """What the client is told; the server's log is told what is nobody's business but the server's."""
    status = status_of(error)
    message = str(error)
    if status == 500:
        _log.error("an OpenAI-compatible request failed", exc_info=error)
        message = f"a fault of the server ({type(error).__name__}); its log has the whole of it"
    code = "invalid_api_key" if status == 401 else getattr(error, "code", None)
    return body_of(message, status, getattr(error, "param", None), code)


def body_of(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> Response:
    return answered(error_body(error), status_of(error), retry_headers(error))
