"""The routes under /v1: the key of a request, its body, and errors in the form that the clients of
its API read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from planish.server.http.access import key_from_headers
from planish.server.http.budgets import MAX_SAMPLE_BODY
from planish.server.http.context import (
    Answer,
    Handler,
    RequestContext,
    authenticate,
    to_response,
)
from planish.server.results import Unauthorized
from planish.server.settings import HttpSettings
from planish.wire.fields import Fields

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True)
class Api:
    """What the clients of one API under /v1 expect."""

    missing_key: str
    """The message for a request without a key. It names the option and the header of the key."""
    error_response: Callable[[Exception], Response]
    """Returns the response that reports an error."""
    complete: Callable[[Response], None] = lambda response: None
    """Adds the headers that every response has."""


def authenticated(api: Api, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that requires a key, and answers errors in the form of the API."""

    async def answer(request: Request) -> Response:
        try:
            key = key_from_headers(request.headers)
            settings: HttpSettings = request.app.state.http.settings
            if not key and settings.tenants_by_key is not None:
                raise Unauthorized(api.missing_key)
            response = to_response(await handler(authenticate(request, key)))
        except (ClientDisconnect, ClientGoneError):
            return Response(status_code=499)  # the client has disconnected and does not read this
        except Exception as error:
            response = api.error_response(error)
        api.complete(response)
        return response

    return answer


def post_route(
    api: Api,
    path: str,
    read: Callable[[Fields], T],
    endpoint: Callable[[RequestContext, T], Awaitable[Answer]],
) -> Route:
    """Return a route for requests to a model. `read` turns the body into the options of
    `endpoint`.
    """

    async def handle(context: RequestContext) -> Answer:
        context.server.engine.check_open()
        async with context.read_body(MAX_SAMPLE_BODY, read) as options:
            return await endpoint(context, options)

    return Route(path, authenticated(api, handle), methods=["POST"])
