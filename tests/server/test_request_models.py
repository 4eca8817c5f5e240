"""A long invalid request holds the interpreter for no longer than a valid one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from planish.server import messages, openai
from planish.server.http.openai_errors import WrongParameterError
from planish.server.messages.requests import MessagesRequest
from planish.server.openai.requests import read_request
from planish.wire.fields import Fields


def collections(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lists and mappings with typed elements in a schema of pydantic."""
    if isinstance(schema, dict):
        values = schema.get("items_schema") or schema.get("values_schema") or {"type": "any"}
        if schema.get("type") in ("list", "dict") and values["type"] != "any":
            yield path, schema
        for key, value in schema.items():
            yield from collections(value, f"{path}.{key}" if key != "schema" else path)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from collections(value, path)


def test_all_collections_end_at_their_first_fault():
    """pydantic lists all faults at once, and no other request runs in the meantime."""
    found = {}
    for package in (messages, openai):
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for model in vars(importlib.import_module(info.name)).values():
                if isinstance(model, type) and issubclass(model, BaseModel):
                    found |= dict(collections(model.__pydantic_core_schema__, model.__name__))
    assert len(found) > 20
    is_short = {path: s.get("max_length", 1_000) <= 16 for path, s in found.items()}
    assert [
        path for path, s in found.items() if not s.get("fail_fast") and not is_short[path]
    ] == []


def test_many_unknown_keys_are_counted_and_not_listed():
    message = {"role": "user", "content": "Hi"} | {str(i): 1 for i in range(2_000)}
    body = {"model": "m", "max_tokens": 1, "messages": [message]}
    with pytest.raises(WrongParameterError, match="2,000 unknown keys"):
        read_request(MessagesRequest, Fields(body))
