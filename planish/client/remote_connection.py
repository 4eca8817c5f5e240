"""HTTP requests to one server, with retries.

A request is retried after a broken connection, while the server restarts (5xx, connection refused),
and when it hits a rate limit (429). Request bodies contain sequence numbers
(planish/wire/operations.py), so the server executes a retried request only once. A server that is
unreachable for longer than a restart takes is an error. After a rate limit, the client retries
without a time limit.
"""

# pyright: reportUnnecessaryIsInstance=false

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

from planish.client.remote_errors import NoSuchEndpointError, error_from_result, json_body_of
from planish.client.remote_http import HttpClient, NoAnswerError
from planish.client.remote_retries import PATIENCE_SECONDS, RetryState
from planish.client.remote_thread import run_in_pool
from planish.errors import UserError
from planish.wire.client_frames import Frame, FrameReader
from planish.wire.messages import PROTOBUF
from planish.wire.operations import JSON_MEDIA_TYPE, PostRequest

if TYPE_CHECKING:
    from httpx2 import Response

API = "/api/v1"
_MIN_POLL_SECONDS = 0.5
_MIN_COMPRESSED_BYTES = 64 * 1024
_MAX_CONCURRENT_REQUESTS = 64
"""Maximum number of concurrent requests, not counting requests for results."""
_NO_ENDPOINT_STATUSES = (404, 405)
_API_KEY_VARIABLES = ("PLANISH_API_KEY", "TINKER_API_KEY")
_KEY_PATTERN = re.compile(r"[\x21-\x7e]+")


@dataclass
class ServerConnection:
    """A connection to one server. Use it as an async context manager, in one event loop.

    Raise UserError if `url` is invalid.
    """

    url: str
    api_key: str | None
    max_retry_seconds: float = PATIENCE_SECONDS
    compress: bool = False
    """Compress large bodies with zstd. Useful for a server on another machine."""
    _request_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)
    )

    def __post_init__(self) -> None:
        headers = {"Accept": JSON_MEDIA_TYPE} | (
            {"X-API-Key": self.api_key} if self.api_key else {}
        )
        # Polls for results keep many connections open, and the search for a free connection takes
        # time proportional to their number, so other requests have a pool of their own.
        self._request_http = HttpClient(self.url, headers)
        self._poll_http = HttpClient(self.url, headers)

    async def __aenter__(self) -> ServerConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._request_http.close()
        await self._poll_http.close()

    async def get(self, path: str, params: Mapping[str, str | int] | None = None) -> Response:
        """Return the response of a GET request, after retries. Raise PlanishError for an error."""
        return await self._request("GET", path, params=params)

    async def delete(self, path: str) -> None:
        """Send a DELETE request, with retries. Raise PlanishError if it fails."""
        await self._request("DELETE", path)

    async def post(
        self,
        posted: PostRequest,
        *,
        returned_statuses: Collection[int] = (),
        max_retry_seconds: float | None = None,
        response_timeout: float | None = None,
    ) -> Response:
        """Return the response of a POST request, after retries. Raise PlanishError for an error
        status, unless the status is in `returned_statuses`.

        `max_retry_seconds` limits all retries together and `response_timeout` the wait for one
        response, in seconds.
        """
        content, headers = await self._encode_body(posted)
        options: dict[str, Any] = {"content": content, "headers": headers}
        if response_timeout is not None:
            options["timeout"] = response_timeout
        return await self._request(
            "POST", posted.path, max_retry_seconds, returned_statuses, **options
        )

    async def frames(self, request: Callable[[], PostRequest | None]) -> AsyncIterator[Frame]:
        """Yield the frames of a streamed response to `request()`.

        When the stream ends or breaks, `request` is called again: it returns the next request, or
        None to stop. Raise NoSuchEndpointError if the server does not have the endpoint.
        """
        retry_state = RetryState(self.max_retry_seconds, self.url)
        posted = request()
        while posted is not None:
            content, headers = await self._encode_body(posted)
            stream_error = NoAnswerError("the response ended early")  # e.g. the server shuts down
            try:
                async with self._poll_http.stream(
                    "POST", API + posted.path, content=content, headers=headers
                ) as response:
                    if response.status_code in _NO_ENDPOINT_STATUSES:
                        raise NoSuchEndpointError(f"the server has no {posted.path}")
                    if response.status_code != 200:
                        await response.aread()
                        await retry_state.wait_after_error(response)
                        continue
                    reader = FrameReader()
                    async for data in response.aiter_raw():
                        retry_state.reset()
                        for frame in reader.feed(data):
                            yield frame
            except NoAnswerError as error:
                stream_error = error
            posted = request()
            if posted is not None:
                await retry_state.wait_after_no_answer(stream_error)

    async def result(self, request_id: str, takes_protobuf: bool) -> bytes:
        """Wait without a time limit for the result of an accepted request. Raise PlanishError if
        the request failed.
        """
        posted = PostRequest.json(
            "/retrieve_future", {"request_id": request_id, "allow_metadata_only": False}
        )
        headers = {
            "Content-Type": JSON_MEDIA_TYPE,
            "Accept": f"{PROTOBUF}, {JSON_MEDIA_TYPE}" if takes_protobuf else JSON_MEDIA_TYPE,
        }
        retry_state = RetryState(self.max_retry_seconds, self.url)
        while True:
            poll_start = time.monotonic()
            try:
                response = await self._poll_http.request(
                    "POST", API + posted.path, content=posted.content, headers=headers
                )
            except NoAnswerError as error:
                await retry_state.wait_after_no_answer(error)
                continue
            if response.status_code == 408:
                retry_state.reset()
                # A server that shuts down answers polls at once, so limit the rate of polls.
                await asyncio.sleep(
                    _MIN_POLL_SECONDS if time.monotonic() - poll_start < _MIN_POLL_SECONDS else 0
                )
            elif response.status_code != 200:
                await retry_state.wait_after_error(response)
            elif PROTOBUF in response.headers.get("content-type", ""):
                return response.content
            else:
                body = json_body_of(response)
                if "error" in body:
                    raise error_from_result(body)
                return response.content

    async def _encode_body(self, posted: PostRequest) -> tuple[bytes, dict[str, str]]:
        headers = {"Content-Type": posted.media_type}
        if not self.compress or len(posted.content) < _MIN_COMPRESSED_BYTES:
            return posted.content, headers
        return await run_in_pool(zstandard.compress, posted.content), {
            **headers,
            "Content-Encoding": "zstd",
        }

    async def _request(
        self,
        method: str,
        path: str,
        max_retry_seconds: float | None = None,
        returned_statuses: Collection[int] = (),
        **options: Any,
    ) -> Response:
        retry_state = RetryState(
            self.max_retry_seconds if max_retry_seconds is None else max_retry_seconds, self.url
        )
        is_retry = False
        while True:
            try:
                async with self._request_slots:
                    response = await self._request_http.request(method, API + path, **options)
            except NoAnswerError as error:
                await retry_state.wait_after_no_answer(error)
            else:
                if response.is_success or response.status_code in returned_statuses:
                    return response
                if method == "DELETE" and is_retry and response.status_code == 404:
                    return response  # an earlier try deleted it, and its response was lost
                await retry_state.wait_after_error(response)
            is_retry = True


def normalize_url(base_url: str) -> str:
    """Return the URL without trailing slash and API path. Raise UserError if it is invalid."""
    split_url = urlsplit(base_url.strip()) if isinstance(base_url, str) else None
    if split_url is None or split_url.scheme not in ("http", "https") or not split_url.hostname:
        raise UserError(f"base_url={base_url!r}: give a URL such as http://127.0.0.1:8000")
    if split_url.query or split_url.fragment or split_url.username:
        raise UserError(
            f"base_url={base_url!r}: give scheme, host, port and path only; a key goes into api_key"
        )
    with suppress(ValueError):
        _ = split_url.port
        return base_url.strip().rstrip("/").removesuffix(API)
    raise UserError(f"base_url={base_url!r}: give a port from 0 to 65535")


def resolve_api_key(api_key: str | None) -> str | None:
    """Return the API key: `api_key`, else the environment's, else None. Raise UserError if the key
    is invalid.
    """
    candidates = [
        ("api_key", api_key),
        *((name, os.environ.get(name)) for name in _API_KEY_VARIABLES),
    ]
    source, key = next(((source, key) for source, key in candidates if key), ("", None))
    if key is not None and not _KEY_PATTERN.fullmatch(key):
        raise UserError(
            f"{source} is not a valid key; give printable ASCII characters without blanks"
        )
    return key
