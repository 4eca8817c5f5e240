"""GET /openapi.json: the OpenAPI description of the endpoints under /v1. The request
schemas are generated from the pydantic types that validate the requests.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from planish.server.messages.requests import CountTokensRequest, MessagesRequest
from planish.server.openai.adapter_requests import (
    LOAD_PATH,
    UNLOAD_PATH,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from planish.server.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestBody,
    TokenizeRequest,
    request_schemas,
)
from planish.server.openai.response_requests import ResponsesRequest

_REQUESTS: dict[str, tuple[type[RequestBody], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer the messages of a chat."),
    "/v1/completions": (CompletionRequest, "Continue a prompt as it is."),
    "/v1/responses": (ResponsesRequest, "Answer the items of a conversation."),
    "/tokenize": (TokenizeRequest, "Return the tokens of a prompt or of a chat."),
    "/detokenize": (DetokenizeRequest, "Return the text of tokens."),
    "/v1/messages": (MessagesRequest, "Answer the messages of a chat, in Anthropic's form."),
    "/v1/messages/count_tokens": (CountTokensRequest, "Return the number of tokens of a prompt."),
}
_ADAPTER_REQUESTS: dict[str, tuple[type[RequestBody], str]] = {
    LOAD_PATH: (LoadAdapterRequest, "Load an adapter. This needs the operator's key."),
    UNLOAD_PATH: (UnloadAdapterRequest, "Unload an adapter. This needs the operator's key."),
}
_LISTS = {
    "/v1/models": "List the base models and the checkpoints.",
    "/v1/models/{model}": "Return one model.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@cache
def openapi(has_adapter_routes: bool) -> dict[str, Any]:
    """Return the description as an OpenAPI 3.1 document. `has_adapter_routes` says whether the
    server has the endpoints that load and unload adapters.
    """
    requests = {**_REQUESTS, **(_ADAPTER_REQUESTS if has_adapter_routes else {})}
    kinds = [kind for kind, _ in requests.values()]
    paths: dict[str, Any] = {}
    for path, (kind, summary) in requests.items():
        body = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
        operation = {
            "operationId": kind.__name__.removesuffix("Request").lower(),
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": body}},
            "responses": _responses(path),
        }
        paths[path] = {"post": operation}
    for path, summary in _LISTS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(path)}}
    paths["/v1/models/{model}"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "planish", "version": version("planish")},
        # The second entry allows requests without a key: a server without API keys needs none.
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                **request_schemas(kinds),
                "Error": _ERROR,
                "MessagesError": _MESSAGES_ERROR,
            },
        },
    }


def _responses(path: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in _ADAPTER_REQUESTS:
        content = {"text/plain": {}}
    if path in _STREAMING:
        content["text/event-stream"] = {}
    error_name = "MessagesError" if path.startswith("/v1/messages") else "Error"
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_name}"}}}
    return {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "An error.", "content": error},
    }
