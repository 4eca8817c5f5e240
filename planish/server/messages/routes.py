"""The endpoints of Anthropic's Messages API:

    POST /v1/messages               messages in, a message out
    POST /v1/messages/count_tokens  the number of tokens of a prompt
    GET  /v1/models                 for requests with the header `anthropic-version`

The key of the server is sent as x-api-key or as the bearer token. The header `anthropic-beta` and
the query `?beta=true` change nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from planish.errors import UserError
from planish.server.http.compatible_routes import authenticated, post_route
from planish.server.http.context import Answer, Json, RequestContext
from planish.server.http.openai_errors import WrongParameterError
from planish.server.messages.answers import PING_EVENT, MessageStreamWriter, message_body
from planish.server.messages.conversation import Conversation, translate
from planish.server.messages.errors import ANTHROPIC_API, error_response
from planish.server.messages.requests import CountTokensRequest, MessagesRequest
from planish.server.messages.sampling import error_of_messages, parse_messages
from planish.server.openai.models import OpenAIModels
from planish.server.openai.protocol import answer
from planish.server.openai.requests import read_request

R = TypeVar("R", bound=CountTokensRequest)

_VERSION_HEADER = b"anthropic-version"
_MAX_PAGE, _DEFAULT_PAGE = 1000, 20
_UNSUPPORTED_ENDPOINTS = {
    "/v1/messages/batches": "send each request to POST /v1/messages",
    "/v1/complete": "send the messages to POST /v1/messages",
    "/v1/files": "give the text in the messages",
}
"""Endpoints of Anthropic that are not served, with the remedy."""


def routes(models: OpenAIModels) -> list[Route]:
    """Return the routes. They must precede other routes of the same paths."""
    return [
        _post_route("/v1/messages", MessagesRequest, _create_message, models),
        _post_route("/v1/messages/count_tokens", CountTokensRequest, _count_tokens, models),
        _get_route("/v1/models", _list_models, models),
        _get_route("/v1/models/{model:path}", _get_model, models),
    ]


def fallback_route() -> Route:
    """Return the route that answers requests of Anthropic's clients for other endpoints. It must
    come last.
    """
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return _AnthropicRoute("/v1/{path:path}", _no_endpoint, methods=methods)


class _AnthropicRoute(Route):
    """A route for requests with the header that Anthropic's clients send."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the route answers a request."""
        headers = scope.get("headers", ())
        if not any(name == _VERSION_HEADER for name, _ in headers):
            return Match.NONE, {}
        return super().matches(scope)


def _post_route(
    path: str,
    request_type: type[R],
    endpoint: Callable[[OpenAIModels, RequestContext, Conversation], Awaitable[Answer]],
    models: OpenAIModels,
) -> Route:
    async def handle(context: RequestContext, conversation: Conversation) -> Answer:
        try:
            return await endpoint(models, context, conversation)
        except WrongParameterError as error:
            raise error_of_messages(error, conversation) from None

    return post_route(
        ANTHROPIC_API, path, lambda fields: translate(read_request(request_type, fields)), handle
    )


def _get_route(
    path: str,
    handler: Callable[[OpenAIModels, RequestContext], Awaitable[Json]],
    models: OpenAIModels,
) -> Route:
    answer = authenticated(ANTHROPIC_API, lambda context: handler(models, context))
    return _AnthropicRoute(path, answer)


async def _create_message(
    models: OpenAIModels, context: RequestContext, conversation: Conversation
) -> Response:
    return await answer(
        models,
        context.tenant,
        context.request,
        conversation.chat,
        lambda model, _: parse_messages(model, conversation),
        MessageStreamWriter,
        message_body,
        PING_EVENT,
    )


async def _count_tokens(
    models: OpenAIModels, context: RequestContext, conversation: Conversation
) -> Json:
    model = await models.find(context.tenant, conversation.chat.model)
    parsed = await models.run_tokenizer(
        context.tenant, context.request, lambda: parse_messages(model, conversation)
    )
    return {"input_tokens": parsed.num_prompt_tokens}


async def _list_models(models: OpenAIModels, context: RequestContext) -> Json:
    entries = [_model_entry(entry) for entry in await models.list.entries(context.tenant)]
    ids = [entry["id"] for entry in entries]
    limit = context.query_integer("limit", _DEFAULT_PAGE, 1, _MAX_PAGE)
    begin, end = 0, len(entries)
    for name in ("after_id", "before_id"):
        cursor = context.request.query_params.get(name)
        if cursor is None:
            continue
        if cursor not in ids:
            raise UserError(f"{name}={cursor[:200]!r} is no model of this list")
        if name == "after_id":
            begin = ids.index(cursor) + 1
        else:
            end = ids.index(cursor)
            begin = max(begin, end - limit)
    page = entries[begin:end][:limit]
    is_backward = "before_id" in context.request.query_params
    return {
        "data": page,
        "has_more": begin > 0 if is_backward else begin + len(page) < end,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


async def _get_model(models: OpenAIModels, context: RequestContext) -> Json:
    return _model_entry(await models.entry(context.tenant, context.path_parameter("model")))


def _model_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a model in Anthropic's form for one in OpenAI's form."""
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": datetime.fromtimestamp(entry["created"], UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": entry["max_model_len"],
        "max_tokens": entry["max_model_len"],
    }


async def _no_endpoint(request: Request) -> Response:
    path = request.scope["path"]
    remedy = next(
        (text for prefix, text in _UNSUPPORTED_ENDPOINTS.items() if path.startswith(prefix)),
        "Anthropic's clients can use POST /v1/messages, POST /v1/messages/count_tokens and GET "
        "/v1/models; their base_url must not end with /v1",
    )
    message = f"there is no endpoint {request.method[:20]} {path[:200]}: {remedy}"
    return error_response(message, 404)
