"""The ASGI application: every endpoint of the protocol, on one `Server`.

    context               one request: key, body, errors
    routes_sessions       client settings, sessions, telemetry, search
    routes_training       creating, training, saving and loading models
    routes_sampling       samplers and samples
    routes_results        the results of all requests
    routes_checkpoints    training runs, checkpoints, tokenizers
    routes_traces         timelines of sessions for Perfetto
    downloads             the files of checkpoints
    this module           the application, health checks, and endpoints that are not offered

A route decodes a body, calls one method of the server, and encodes the result.

Endpoints of the protocol that this server does not have return status 404. The SDK then raises an
error at once and does not retry. Unsupported options of supported endpoints are rejected by the
code that reads the body.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from planish.errors import PlanishError
from planish.server.http import (
    downloads,
    routes_checkpoints,
    routes_results,
    routes_sampling,
    routes_sessions,
    routes_traces,
    routes_training,
)
from planish.server.http.context import API, HttpState, RequestContext, endpoint, json_response
from planish.server.http.graceful_stop import STOP_SECONDS
from planish.server.http.openai_errors import make_openai_error_body
from planish.server.http.origins import cors_options
from planish.server.results import Unavailable, client_error, retry_headers
from planish.server.server import Server
from planish.server.settings import HttpSettings

_ROUTE_MODULES = (
    routes_sessions,
    routes_training,
    routes_sampling,
    routes_checkpoints,
    routes_results,
    routes_traces,
    downloads,
)

_log = logging.getLogger("planish.server")


def create_app(
    server: Server, settings: HttpSettings | None = None, other_routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """Return the application. Its lifespan starts and stops the server. Setting the events
    `app.state.http.stopping` and `app.state.http.ending` stops it earlier (graceful_stop.py).

    `other_routes` are those of other protocols (openai.routes.routes, metrics_page.metrics_route).
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        try:
            await server.start()
        except PlanishError as error:
            _log.critical("the server cannot start: %s", error)
            raise
        try:
            yield
        finally:
            app.state.http.stopping.set()
            app.state.http.ending.set()
            await server.stop(STOP_SECONDS)

    health_paths = ("/healthz", "/health", API + "/healthz")
    health = [Route(path, healthz, methods=["GET"]) for path in health_paths]
    health.append(Route("/readyz", readyz, methods=["GET"]))
    health.append(Route("/version", show_version, methods=["GET"]))
    app = Starlette(
        routes=[
            *health,
            *(route for group in _ROUTE_MODULES for route in group.ROUTES),
            *_UNSUPPORTED_ROUTES,
            *other_routes,
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _no_endpoint, Exception: _internal_error},
    )
    app.router.redirect_slashes = False
    settings = settings or HttpSettings()
    app.state.http = HttpState(server, settings)
    if settings.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors_options(settings.allowed_origins))
    return app


async def healthz(request: Request) -> Response:
    """Answer 200 if the process works, and 503 if it is stopping or must be restarted. The request
    needs no key. The SDK requests this path under /api/v1 too, and vLLM calls it /health.
    """
    healthy = request.app.state.http.server.engine.is_healthy
    return (
        json_response({"status": "ok"}) if healthy else json_response({"status": "stopping"}, 503)
    )


async def show_version(request: Request) -> Response:
    """Answer with planish's version. The request needs no key."""
    return json_response({"version": version("planish")})


async def readyz(request: Request) -> Response:
    """Answer 200 if the server accepts new work and is not loading base models. Otherwise answer
    503. The request needs no key.
    """
    state: HttpState = request.app.state.http
    if state.stopping.is_set() or not state.server.engine.is_healthy:
        return json_response({"status": "stopping"}, 503)
    intake = state.server.intake
    if await asyncio.to_thread(intake.disk_is_full):
        reason = "out of memory" if intake.lacks_memory else "disk full"
        return json_response({"status": reason}, 503)
    return (
        json_response({"status": "loading"}, 503)
        if state.is_loading
        else json_response({"status": "ready"})
    )


async def _no_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method_and_path = f"{request.method} {request.scope['path']}"[:200]
    detail = {
        404: f"there is no endpoint {method_and_path}",
        405: f"{method_and_path}: the path does not support this method; "
        "the Allow header names the supported methods",
    }.get(error.status_code, error.detail)
    headers = {"Allow": _allowed_methods(request)} if error.status_code == 405 else None
    if request.url.path.startswith("/api/"):
        return json_response({"detail": detail}, error.status_code, headers)
    if "//" in request.scope["path"]:
        detail += (
            "; the path has two slashes in a row, so remove the one at the end of the base_url"
        )
    elif not request.url.path.startswith("/v1/"):
        detail += (
            "; the endpoints for OpenAI's clients start with /v1, so their base_url must end with "
            "/v1"
        )
    return json_response(
        make_openai_error_body(detail, error.status_code), error.status_code, headers
    )


def _allowed_methods(request: Request) -> str:
    """Return the methods that a path supports. Each method of a path has its own route, and
    Starlette's error names only the methods of one route.
    """
    routes = [
        route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE
    ]
    return ", ".join(
        sorted({method for route in routes for method in getattr(route, "methods", None) or ()})
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    sent_error = client_error(error)
    if isinstance(sent_error, Unavailable):  # for lack of memory; clients send the request again
        return json_response({"detail": str(sent_error)}, 503, retry_headers(sent_error))
    return json_response(
        {
            "detail": f"internal server error ({type(error).__name__}); "
            "the server's log has the details"
        },
        500,
    )


_UNSUPPORTED_ENDPOINTS = {
    "POST /auth/token": "use the key itself instead of a token (pjwt_auth_enabled is false)",
    "GET /auth/apikey/me": "this server has no accounts; set TINKER_API_KEY to a key of this "
    "server",
    "DELETE /auth/apikey/me": "clients cannot delete keys; remove the key from the server's key "
    "file",
    "POST /create_custom_loss": "the server cannot run custom losses; forward_backward_custom runs "
    "them in the client",
    "POST /join_sampling_session": "copies of a sampling client number their requests themselves "
    "(sample_join_sampling_session is false)",
    "POST /retrieve_futures": "request each result with /retrieve_future "
    "(sample_use_retrieve_futures is false)",
    "PUT /sessions/{session_id}/project": "this server has no projects",
    "GET /audit": "this server keeps no audit log",
    "GET /billing/usage/events": "this server bills nothing",
    "GET /billing/usage/checkpoints/current": "this server bills nothing; `GET "
    "/api/v1/checkpoints` has the sizes of checkpoints",
}
"""The endpoints of the protocol that this server does not offer, each with the reason or remedy."""


def _unsupported_route(method_and_path: str, reason: str) -> Route:
    async def handler(context: RequestContext) -> Response:
        return json_response({"detail": f"not offered: {reason}"}, 404)

    method, path = method_and_path.split(" ")
    return endpoint(path, handler, method)


_UNSUPPORTED_ROUTES = [_unsupported_route(*entry) for entry in _UNSUPPORTED_ENDPOINTS.items()]
