"""The requests with which the server's operator loads and unloads adapters, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from planish.server.openai.requests import Integer, RequestBody
from planish.types import NAME_PATTERN

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
AdapterName = Annotated[
    str,
    Field(
        pattern=f"^{NAME_PATTERN}$",
        max_length=200,
        description="The name for clients to use as `model`.",
    ),
]
ShortText = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadAdapterRequest(RequestBody):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: Annotated[
        ShortText, Field(description="The adapter's directory, relative to --adapter-dir.")
    ]
    base_model_name: Annotated[
        ShortText | None,
        Field(description="A served base model, if the adapter names another one."),
    ] = None
    load_inplace: Annotated[bool, Field(description="Replace a loaded adapter of this name.")] = (
        False
    )


class UnloadAdapterRequest(RequestBody):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: AdapterName
    lora_int_id: Annotated[
        Annotated[Integer, Field(ge=0, lt=1 << 63)] | None,
        Field(description="Not used. vLLM takes this number beside the name."),
    ] = None
