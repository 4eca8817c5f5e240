"""The OpenAI-compatible endpoints, which let unmodified agents and evaluation tools use a model,
even while it is being trained. The second column names the module that answers the endpoint:

    POST /v1/chat/completions   chat         messages in, a message out
    POST /v1/completions        completions  text in, text out
    POST /v1/responses          responses    items in, items out
    GET  /v1/models             model_names  base models and sampler checkpoints
    POST /tokenize, /detokenize tokenizing   as in vLLM
    GET  /openapi.json          openapi      the description of these endpoints

lora_adapters.py has two further endpoints, for the server's operator. Requests of Anthropic's
clients are answered by planish.server.messages, on the same models.

`model` in a request is the name of a base model, or the tinker:// path of a checkpoint. The API key
of the server is sent as the bearer token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from planish.server.http.compatible_routes import authenticated, post_route
from planish.server.http.context import Answer, Json, RequestContext, json_response
from planish.server.http.openai_errors import OPENAI_API, make_openai_error_body
from planish.server.messages import routes as messages_routes
from planish.server.openai.chat import chat_completions
from planish.server.openai.completions import completions
from planish.server.openai.models import OpenAIModels
from planish.server.openai.openapi import openapi
from planish.server.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    R,
    TokenizeRequest,
    read_request,
)
from planish.server.openai.response_requests import ResponsesRequest
from planish.server.openai.responses import responses
from planish.server.openai.tokenizing import detokenize, tokenize
from planish.server.results import Tenant


def routes(models: OpenAIModels, has_adapter_routes: bool = False) -> list[Route]:
    """Return the routes. `has_adapter_routes` says whether the application has the routes of
    lora_adapters.py too.
    """
    return [
        *messages_routes.routes(models),
        _post_route("/v1/chat/completions", ChatRequest, chat_completions, models),
        _post_route("/v1/completions", CompletionRequest, completions, models),
        _post_route("/v1/responses", ResponsesRequest, responses, models),
        _post_route("/tokenize", TokenizeRequest, tokenize, models),
        _post_route("/detokenize", DetokenizeRequest, detokenize, models),
        _get_route("/v1/models", _list_models, models),
        _get_route("/v1/models/", _list_models, models),
        _get_route("/v1/models/{model:path}", _get_model, models),
        _description_route(has_adapter_routes),
        *(_unsupported_route(path, sentence) for path, sentence in _UNSUPPORTED_ENDPOINTS.items()),
        messages_routes.fallback_route(),
    ]


_UNSUPPORTED_ENDPOINTS = {
    "/v1/embeddings": "the models here write text, and give no embeddings",
}
"""Endpoints of OpenAI that are not served, with the reason or the remedy."""


def _unsupported_route(path: str, remedy: str) -> Route:
    async def answer(request: Request) -> Response:
        message = f"there is no endpoint {request.method[:20]} {path}: {remedy}"
        return json_response(make_openai_error_body(message, 404), 404)

    return Route(path, answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])


def _description_route(has_adapter_routes: bool) -> Route:
    async def answer(request: Request) -> Response:
        return json_response(openapi(has_adapter_routes))

    # No key is needed, because the answer is the same for everyone.
    return Route("/openapi.json", answer, methods=["GET"])


def _post_route(
    path: str,
    request_type: type[R],
    endpoint: Callable[[OpenAIModels, Tenant, Request, R], Awaitable[Answer]],
    models: OpenAIModels,
) -> Route:
    return post_route(
        OPENAI_API,
        path,
        lambda fields: read_request(request_type, fields),
        lambda context, options: endpoint(models, context.tenant, context.request, options),
    )


def _get_route(
    path: str,
    handler: Callable[[OpenAIModels, RequestContext], Awaitable[Answer]],
    models: OpenAIModels,
) -> Route:
    answer = authenticated(OPENAI_API, lambda context: handler(models, context))
    return Route(path, answer, methods=["GET"])


async def _list_models(models: OpenAIModels, context: RequestContext) -> Json:
    return {"object": "list", "data": await models.list.entries(context.tenant)}


async def _get_model(models: OpenAIModels, context: RequestContext) -> Json:
    return await models.entry(context.tenant, context.path_parameter("model"))
