"""HTTP to one server: every request is repeated until it is answered, and a repetition is the same
request.

What may be repeated: a connection that broke, a server that is restarting (5xx, connection
refused), a limit (429). Bodies carry numbers (planish/wire/client_operations.py), so the server
does nothing twice. A server that stays silent longer than a restart takes is an error; one that
says "later" is waited for as long as it says so.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import zstandard

from planish.client.remote_errors import NoSuchEndpointError, body_of, failure
from planish.client.remote_http import Http, NoAnswerError
from planish.client.remote_patience import PATIENCE_SECONDS, Patience
from planish.client.remote_thread import in_pool
from planish.errors import UserError
from planish.wire.client_frames import Frame, FrameReader
from planish.wire.client_operations import JSON, Posted
from planish.wire.messages import PROTOBUF

if TYPE_CHECKING:
    from httpx2 import Response

API = "/api/v1"
_MIN_POLL_SECONDS = 0.5
_MIN_COMPRESSED = 64 * 1024
_MOST_ASKED = 64
"""Requests that the server has at once, apart from those for results."""
_NO_ENDPOINT = (404, 405)
_KEY_VARIABLES = ("PLANISH_API_KEY", "TINKER_API_KEY")
_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass
class Link:
    """Use it within `async with`, in one event loop. UserError for a URL that cannot be one."""

    url: str
    api_key: str | None
    patience: float = PATIENCE_SECONDS
    compress: bool = False
    """Large bodies by zstd: for a server that is not on this machine."""
    _asking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_ASKED))

    def __post_init__(self) -> None:
        headers = {"Accept": JSON} | ({"X-API-Key": self.api_key} if self.api_key else {})
        # Two pools: the time to find a free connection grows with their number, and polls hold
        # many.
        self._calling, self._polling = Http(self.url, headers), Http(self.url, headers)

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._calling.close()
        await self._polling.close()

    async def get(self, path: str, params: Mapping[str, str | int] | None = None) -> Response:
        return await self._answered("GET", path, params=params)

    async def delete(self, path: str) -> None:
        await self._answered("DELETE", path)

    async def post(
        self,
        posted: Posted,
        *,
        returned: Collection[int] = (),
        patience: float | None = None,
        silence: float | None = None,
    ) -> Response:
        """The answer of the endpoint; PlanishError for a status that is an error, and not one of
        those `returned`.

        Seconds: `patience` for all repetitions, `silence` for the answer to one of them.
        """
        content, headers = await self._packed(posted)
        options: dict[str, Any] = {"content": content, "headers": headers}
        if silence is not None:
            options["timeout"] = silence
        return await self._answered("POST", posted.path, patience, returned, **options)

    async def frames(self, request: Callable[[], Posted | None]) -> AsyncIterator[Frame]:
        """The frames of an answer that goes on. When it breaks off, it is asked for by what
        `request` gives then; None is the end.

        NoSuchEndpointError if the server knows no such answers.
        """
        patience = Patience(self.patience, self.url)
        posted = request()
        while posted is not None:
            content, headers = await self._packed(posted)
            broken = NoAnswerError("the answer ended early")  # as when the server is about to stop
            try:
                async with self._polling.stream(
                    "POST", API + posted.path, content=content, headers=headers
                ) as response:
                    if response.status_code in _NO_ENDPOINT:
                        raise NoSuchEndpointError(f"the server has no {posted.path}")
                    if response.status_code != 200:
                        await response.aread()
                        await patience.after_refusal(response)
                        continue
                    reader = FrameReader()
                    async for data in response.aiter_raw():
                        patience.heard()
                        for frame in reader.feed(data):
                            yield frame
            except NoAnswerError as error:
                broken = error
            posted = request()
            if posted is not None:
                await patience.after_silence(broken)

    async def result(self, request_id: str, takes_protobuf: bool) -> bytes:
        """The result of an accepted request, however long it takes; PlanishError if it failed."""
        posted = Posted.json(
            "/retrieve_future", {"request_id": request_id, "allow_metadata_only": False}
        )
        headers = {
            "Content-Type": JSON,
            "Accept": f"{PROTOBUF}, {JSON}" if takes_protobuf else JSON,
        }
        patience = Patience(self.patience, self.url)
        while True:
            began = time.monotonic()
            try:
                response = await self._polling.request(
                    "POST", API + posted.path, content=posted.content, headers=headers
                )
            except NoAnswerError as error:
                await patience.after_silence(error)
                continue
            if response.status_code == 408:
                patience.heard()
                # A server that is stopping sends everybody away at once.
                await asyncio.sleep(
                    _MIN_POLL_SECONDS if time.monotonic() - began < _MIN_POLL_SECONDS else 0
                )
            elif response.status_code != 200:
                await patience.after_refusal(response)
            elif PROTOBUF in response.headers.get("content-type", ""):
                return response.content
            else:
                body = body_of(response)
                if "error" in body:
                    raise failure(body)
                return response.content

    async def _packed(self, posted: Posted) -> tuple[bytes, dict[str, str]]:
        headers = {"Content-Type": posted.media}
        if not self.compress or len(posted.content) < _MIN_COMPRESSED:
            return posted.content, headers
        return await in_pool(zstandard.compress, posted.content), {
            **headers,
            "Content-Encoding": "zstd",
        }

    async def _answered(
        self,
        method: str,
        path: str,
        seconds: float | None = None,
        returned: Collection[int] = (),
        **options: Any,
    ) -> Response:
        patience = Patience(self.patience if seconds is None else seconds, self.url)
        repeated = False
        while True:
            try:
                async with self._asking:
                    response = await self._calling.request(method, API + path, **options)
            except NoAnswerError as error:
                await patience.after_silence(error)
            else:
                if response.is_success or response.status_code in returned:
                    return response
                if method == "DELETE" and repeated and response.status_code == 404:
                    return response  # the first time, only the answer was lost
                await patience.after_refusal(response)
            repeated = True


def checked_url(base_url: str) -> str:
    """The URL without what it cannot mean; UserError if it is none."""
    parts = urlsplit(base_url.strip()) if isinstance(base_url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"base_url={base_url!r}: give a URL such as http://127.0.0.1:8000")
    if parts.query or parts.fragment or parts.username:
        raise UserError(
            f"base_url={base_url!r}: give scheme, host, port and path only; a key goes into api_key"
        )
    with suppress(ValueError):
        _ = parts.port
        return base_url.strip().rstrip("/").removesuffix(API)
    raise UserError(f"base_url={base_url!r}: its port is no number from 0 to 65535")


def checked_key(given: str | None) -> str | None:
    """The key, or that of the environment; UserError for what is none."""
    named = [("api_key", given), *((name, os.environ.get(name)) for name in _KEY_VARIABLES)]
    source, key = next(((source, key) for source, key in named if key), ("", None))
    if key is not None and not _KEY.fullmatch(key):
        raise UserError(
            f"{source} holds something that is no key: give printable characters without blanks"
        )
    return key
