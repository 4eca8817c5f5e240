"""The pages of `planish serve --console`, on the server's own address below /console.

A server without keys serves programs on its own machine, and so does its console. On a server with
keys, a person gives the API key once. The console then sets a cookie with a random token, which
scripts of a page cannot read and which browsers send to the console only. The key itself stays in
the server's memory. A tenant sees its own sessions and runs. The key with the name `operator` in the
key file sees those of all tenants. Chats are requests of the tenant like those of POST
/v1/chat/completions, with the same limits.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from planish.console.row_tail import parse_object
from planish.console.server_answers import ServerAnswers, TokenRates
from planish.console.web import (
    OwnPagesOnly,
    data_response,
    error_json,
    export_response,
    json_response,
    shell_page,
    static_files,
)
from planish.errors import PlanishError
from planish.server.http.budgets import MAX_SAMPLE_BODY
from planish.server.http.compatible_routes import ClientGoneError
from planish.server.http.context import RequestContext, authenticate, status_and_message
from planish.server.http.keys import OPERATOR_KEY_NAME
from planish.server.http.routes_traces import trace_response
from planish.server.openai.chat import chat_completions
from planish.server.openai.models import OpenAIModels
from planish.server.openai.requests import ChatRequest, read_request
from planish.server.results import Unauthorized, status_of
from planish.server.server import Server
from planish.server.settings import HttpSettings

PATH = "/console"
VIEWS = (
    "server",
    "sessions",
    "session",
    "runs",
    "curves",
    "checkpoints",
    "findings",
    "chat",
    "options",
)
_ANSWERS = (
    "server",
    "sessions",
    "session",
    "runs",
    "run",
    "curves",
    "checkpoints",
    "findings",
)
_COOKIE = "planish-console"
_LOGIN_SECONDS = 12 * 3600.0
_MAX_LOGINS = 10_000
_MAX_LOGIN_BODY = 4096


@dataclass
class Logins:
    """The keys that browsers have given, by the tokens of their cookies."""

    clock: Callable[[], float] = time.monotonic
    _keys: dict[str, tuple[str, float]] = field(default_factory=dict)

    def open(self, key: str) -> str:
        """Keep a key for _LOGIN_SECONDS, and return its token."""
        now = self.clock()
        self._keys = {token: kept for token, kept in self._keys.items() if kept[1] > now}
        while len(self._keys) >= _MAX_LOGINS:
            del self._keys[next(iter(self._keys))]
        token = secrets.token_urlsafe(32)
        self._keys[token] = (key, now + _LOGIN_SECONDS)
        return token

    def key(self, token: str) -> str | None:
        """Return the key of a token; None for an unknown or expired one."""
        key, expires = self._keys.get(token, (None, 0.0))
        return key if expires > self.clock() else None

    def close(self, token: str) -> None:
        """Forget a token."""
        self._keys.pop(token, None)


class ServerConsole:
    """The console of one server."""

    def __init__(self, server: Server, settings: HttpSettings, models: OpenAIModels) -> None:
        self._server = server
        self._models = models
        self._has_keys = settings.tenants_by_key is not None
        public = urlsplit(settings.public_url or "")
        self._base = public.path.rstrip("/") + PATH
        self._is_https = public.scheme == "https"
        self._page = shell_page(VIEWS, self._base, has_keys=self._has_keys)
        self._logins = Logins()
        self._rates = TokenRates()
        self._answers: dict[str, ServerAnswers] = {}

    def routes(self) -> list[BaseRoute]:
        """Return the routes of all pages."""
        pages = Mount(
            PATH,
            routes=[
                Route("/", self._shell),
                *(Route(f"/{view}", self._shell) for view in VIEWS[1:]),
                *(Route(f"/api/{name}", self._data_endpoint(name)) for name in _ANSWERS),
                Route("/api/login", self._log_in, methods=["POST"]),
                Route("/api/logout", self._log_out, methods=["POST"]),
                Route("/api/chat", self._chat, methods=["POST"]),
                Route("/trace", self._trace),
                Route("/export", self._export),
                static_files(),
            ],
            middleware=[Middleware(OwnPagesOnly, accepts_any_host=self._has_keys)],
        )
        return [Route(PATH, lambda request: RedirectResponse(f"{self._base}/")), pages]

    async def _shell(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html")

    def _context(self, request: Request) -> RequestContext:
        """Return the context of a request with its tenant. Raises Unauthorized without a cookie."""
        key = self._logins.key(request.cookies.get(_COOKIE, ""))
        if self._has_keys and key is None:
            raise Unauthorized("Give your API key to see your sessions and runs.")
        return authenticate(request, key)

    def _answers_of(self, request: Request) -> ServerAnswers:
        """Return the answers for the tenant of a request. Raises Unauthorized without a cookie."""
        tenant = self._context(request).tenant
        sees_all = not self._has_keys or tenant.name == OPERATOR_KEY_NAME
        if tenant.name not in self._answers:
            self._answers[tenant.name] = ServerAnswers(
                self._server, None if sees_all else tenant, self._rates
            )
        return self._answers[tenant.name]

    def _data_endpoint(self, name: str) -> Callable:
        async def endpoint(request: Request) -> Response:
            try:
                answers = self._answers_of(request)
            except PlanishError as error:
                return error_json(str(error), status_of(error))
            return await run_in_threadpool(data_response, request, getattr(answers, name))

        return endpoint

    async def _export(self, request: Request) -> Response:
        try:
            answers = self._answers_of(request)
        except PlanishError as error:
            return error_json(str(error), status_of(error))
        return await run_in_threadpool(export_response, answers, request)

    async def _log_in(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_LOGIN_BODY:
                return error_json("The request is too large.", 413)
        given = (parse_object(body) or {}).get("key")
        key = given.strip() if isinstance(given, str) else ""
        try:
            tenant = authenticate(request, key).tenant
        except PlanishError as error:
            return error_json(str(error), status_of(error))
        response = json_response({"tenant": tenant.name})
        response.set_cookie(
            _COOKIE,
            self._logins.open(key),
            path=self._base,
            httponly=True,
            samesite="strict",
            secure=self._is_https or request.url.scheme == "https",
        )
        return response

    async def _log_out(self, request: Request) -> Response:
        self._logins.close(request.cookies.get(_COOKIE, ""))
        response = json_response({})
        response.delete_cookie(_COOKIE, path=self._base)
        return response

    async def _chat(self, request: Request) -> Response:
        """Answer a chat request of OpenAI's API with a stream of events."""
        try:
            context = self._context(request)
            self._server.engine.check_open()
            read = partial(read_request, ChatRequest)
            async with context.read_body(MAX_SAMPLE_BODY, read) as options:
                return await chat_completions(self._models, context.tenant, request, options)
        except (ClientDisconnect, ClientGoneError):
            return Response(status_code=499)
        except Exception as error:
            status, message = status_and_message(error)
            return error_json(message, status)

    async def _trace(self, request: Request) -> Response:
        try:
            answers = self._answers_of(request)
            timeline = await answers.timeline(request.query_params.get("session", ""))
            return await trace_response(timeline)
        except PlanishError as error:
            return error_json(str(error), status_of(error))


def console_routes(server: Server, settings: HttpSettings, models: OpenAIModels) -> list[BaseRoute]:
    """Return the routes of the console of a server. `models` samples the answers of chats."""
    return ServerConsole(server, settings, models).routes()
