"""The OpenAI-compatible endpoints, so that agents and evaluation tools can use a model, also one in
training, as they are.

    POST /v1/chat/completions   openai_chat         messages in, a message out
    POST /v1/completions        openai_completions  text in, text out
    GET  /v1/models             here                base models, and the checkpoints that samplers
         are made of

A model is named by its name, or by the tinker:// path of a checkpoint. The key of the server is the
bearer token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from planish.server.access import given_key
from planish.server.answers import Tenant
from planish.server.core import ServerCore
from planish.server.exchange import SAMPLE_BODY, Exchange, answered, exchange_of
from planish.server.openai_answers import ClientGoneError
from planish.server.openai_chat import chat_completions
from planish.server.openai_completions import completions
from planish.server.openai_errors import error_response
from planish.server.openai_models import OpenAIModels
from planish.wire.fields import Fields

Endpoint = Callable[[OpenAIModels, Tenant, Request, Fields], Awaitable[Response]]


def routes(core: ServerCore, directories: Mapping[str, Path]) -> list[Route]:
    """`directories` has the base models that are served."""
    models = OpenAIModels(core, directories)
    return [
        _posted("/v1/chat/completions", chat_completions, models),
        _posted("/v1/completions", completions, models),
        _read("/v1/models", _list_models, models),
        _read("/v1/models/{model:path}", _one_model, models),
    ]


def _posted(path: str, endpoint: Endpoint, models: OpenAIModels) -> Route:
    async def answer(exchange: Exchange) -> Response:
        async with exchange.fields(SAMPLE_BODY) as fields:
            return await endpoint(models, exchange.tenant, exchange.request, fields)

    return Route(path, _guarded(answer), methods=["POST"])


def _read(
    path: str,
    handler: Callable[[OpenAIModels, Exchange], Awaitable[Response]],
    models: OpenAIModels,
) -> Route:
    return Route(path, _guarded(lambda exchange: handler(models, exchange)), methods=["GET"])


def _guarded(
    handler: Callable[[Exchange], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """For those who have a key; every error as OpenAI's clients read it."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(exchange_of(request, given_key(request.headers)))
        except (ClientDisconnect, ClientGoneError):
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return error_response(error)

    return answer


async def _list_models(models: OpenAIModels, exchange: Exchange) -> Response:
    found = await exchange.core.checkpoints(exchange.tenant)
    entries = [
        *(_entry(model.model_name, 0) for model in exchange.core.capabilities().supported_models),
        *(_entry(item.tinker_path, int(item.time.timestamp())) for item in found.items),
    ]
    return answered({"object": "list", "data": entries})


async def _one_model(models: OpenAIModels, exchange: Exchange) -> Response:
    model = await models.find(exchange.tenant, exchange.path("model"))
    return answered(_entry(model.name, int(model.made)))


def _entry(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "planish"}
