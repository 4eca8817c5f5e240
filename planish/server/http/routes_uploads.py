"""Endpoints that make checkpoints from uploaded adapters.

The SDK (0.39 and later) and planish's own client start an upload with their key, send each file to
a URL without a key, and finish the upload with their key:

    POST /external_weights_upload_start, /external_weights_upload_finish    the SDK. The checkpoint
                                                                            has type "external"
    POST /planish/import_start, /planish/import_finish                      `planish checkpoints
                                                                            import --base-url`. It
                                                                            is a training checkpoint
    PUT  /uploads/{upload_id}/{secret}/{name}                               one file
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from planish.errors import PlanishError, UserError
from planish.server.durable.checkpoints import (
    EXTERNAL_PREFIX,
    check_name_is_not_external,
    check_name_is_not_private,
    shown_path,
)
from planish.server.http.context import API, Json, RequestContext, endpoint, error_response
from planish.server.http.downloads import public_url
from planish.server.results import Unavailable
from planish.server.uploads import (
    REQUIRED_FILES,
    UPLOAD_SECONDS,
    ImportOptions,
    Upload,
    Uploads,
    result_to_json,
)
from planish.types import check_name
from planish.wire.fields import Fields
from planish.wire.models import lora_from_json

STALL_SECONDS = 30.0
"""An upload of a file fails if no bytes arrive for this long."""
_FIRST_SDK_WITH_HEADERS = (0, 40)
"""The first release of the SDK that takes an object with headers in place of each URL."""


def routes(uploads: Uploads) -> list[Route]:
    """Return the routes."""

    async def start_external(context: RequestContext) -> Json:
        """Begin the upload of external weights."""
        async with context.fields() as fields:
            options = _external_options(fields)
        return _started(context, await uploads.start(context.tenant, options))

    async def finish_external(context: RequestContext) -> Json:
        """Make a checkpoint of uploaded external weights."""
        imported = await uploads.finish(context.tenant, await _upload_id(context))
        return {"tinker_path": shown_path(str(imported.path))}

    async def start_import(context: RequestContext) -> Json:
        """Begin the upload of an adapter to be imported."""
        async with context.fields() as fields:
            options = _import_options(fields)
        return _started(context, await uploads.start(context.tenant, options))

    async def finish_import(context: RequestContext) -> Json:
        """Import an uploaded adapter."""
        return result_to_json(await uploads.finish(context.tenant, await _upload_id(context)))

    async def put(request: Request) -> Response:
        """Receive one file."""
        parameters = request.path_params
        try:
            length = request.headers.get("content-length", "")
            if not (length.isascii() and length.isdigit()):
                raise UserError("Content-Length is missing; send the file with its size")
            await uploads.write(
                parameters["upload_id"],
                parameters["secret"],
                parameters["name"],
                int(length),
                _pieces(request),
            )
            return Response(status_code=200)
        except PlanishError as error:
            return error_response(error)

    return [
        endpoint("/external_weights_upload_start", start_external),
        endpoint("/external_weights_upload_finish", finish_external),
        endpoint("/planish/import_start", start_import),
        endpoint("/planish/import_finish", finish_import),
        Route(API + "/uploads/{upload_id}/{secret}/{name}", put, methods=["PUT"]),
    ]


def _external_options(fields: Fields) -> ImportOptions:
    with fields:
        fields.optional(fields.text, "destination_project_id")  # there are no projects
        return ImportOptions(
            fields.text("base_model"),
            f"{EXTERNAL_PREFIX}uploaded",
            "sampler",
            lora=lora_from_json(fields.object("lora_config")),
        )


def _import_options(fields: Fields) -> ImportOptions:
    with fields:
        name = fields.optional(fields.text, "name", "imported")
        check_name("name", name)
        check_name_is_not_private(name)
        check_name_is_not_external(name)
        files = fields.optional(fields.array, "files", list(REQUIRED_FILES))
        if not all(isinstance(file, str) for file in files):
            raise UserError("files contains a value that is not a string")
        return ImportOptions(
            fields.text("base_model"),
            name,
            quantize=fields.optional(fields.text, "quantize"),
            source=fields.optional(fields.text, "source", "upload"),
            files=tuple(files),
        )


async def _upload_id(context: RequestContext) -> str:
    async with context.fields() as fields:
        return fields.identifier("upload_id")


def _started(context: RequestContext, upload: Upload) -> Json:
    base = f"{public_url(context)}{API}/uploads/{upload.id}/{upload.secret}"
    version = context.sdk_version
    urls: dict[str, Any] = {name: f"{base}/{name}" for name in upload.options.files}
    if version is not None and version >= _FIRST_SDK_WITH_HEADERS:
        urls = {name: {"url": url, "headers": {}} for name, url in urls.items()}
    expires = datetime.now(UTC) + timedelta(seconds=UPLOAD_SECONDS)
    return {"upload_id": upload.id, "urls": urls, "expires": expires.isoformat()}


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                piece = await anext(stream, None)
        except TimeoutError:
            raise Unavailable(
                f"no more of the file arrived for {STALL_SECONDS:g} seconds; send it again", 1.0
            ) from None
        if piece is None:
            return
        yield piece
