"""A model behind an OpenAI-compatible endpoint as a policy over messages, for example a judge, an
opponent or a teacher.

    judge = ChatEndpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-8B", api_key_env="JUDGE_KEY")

Each call sends one request, POST BASE_URL/chat/completions, with the HTTP library that planish
already depends on. OpenAI's client is not used, because it reads the base URL, organisation and
project from the environment if they are not given. A run would then depend on variables that its
options do not record. Here the only such variable is the one named by `api_key_env`. The key itself
is not an option, because options are written to run directories.

Temporary failures are retried with growing delays: connection errors, timeouts, malformed answers,
and the statuses 408, 409, 425, 429 and most of 5xx. Any other status means that the request is
wrong, and is raised at once. The fields are plain data, so an endpoint can be pickled. Its
connections are opened by the first call, and closed when no call is in progress.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from planish.completers import MessageCompleter, PromptSize
from planish.errors import PlanishError, UserError

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

    from planish.renderers import Message

RETRYABLE_STATUSES = (408, 409, 425, 429)
PERMANENT_STATUSES = (501, 505)
FIRST_DELAY, MAX_DELAY, MAX_RETRY_AFTER = 0.5, 30.0, 120.0
"""Seconds between attempts: the first delay, the longest delay, and the longest delay accepted from
the endpoint's Retry-After header.
"""
CONNECT_TIMEOUT_SECONDS = 10.0
CONTEXT_WINDOW_FIELDS = ("max_model_len", "context_length", "context_window")
"""The names of the context window in the answers of /tokenize and /v1/models."""
MAX_ERROR_CHARACTERS = 500
"""How many characters of an endpoint's answer an error message contains."""


class EndpointError(PlanishError, ConnectionError):
    """All attempts failed for temporary reasons, so a later call may succeed."""


class _TemporaryError(Exception):
    """One attempt failed for a temporary reason. `retry_after` is the delay in seconds that the
    endpoint requests.
    """

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass
class _Connections:
    """The connections of one event loop, and the number of calls that use them."""

    client: AsyncClient
    semaphore: asyncio.Semaphore
    num_calls: int = 0


@dataclass(frozen=True)
class ChatEndpoint(MessageCompleter):
    """A chat model at an endpoint. Each event loop has at most `max_concurrent` requests in
    progress; further calls wait.
    """

    base_url: str
    """The URL including the version: https://api.openai.com/v1, http://127.0.0.1:8000/v1."""
    model: str
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; None = no key is sent."""
    max_tokens: int | None = 512
    """None omits it from the request, so the endpoint's own limit applies."""
    temperature: float | None = 0.0
    """None omits it from the request, because some models accept only their default."""
    timeout_seconds: float = 120.0
    """The time limit of one attempt, from the connection to the last byte."""
    max_retries: int = 5
    max_concurrent: int = 16
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as {"reasoning_effort": "low"}. They override
    `max_tokens` and `temperature`. A value of None omits the field.
    """
    _connections_by_loop: dict[asyncio.AbstractEventLoop, _Connections] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Raise UserError for an invalid option, and for a missing key, before any work is done."""
        if not _is_url(self.base_url):
            raise UserError(
                f"base_url={self.base_url!r}: give a URL such as http://127.0.0.1:8000/v1"
            )
        rules = {
            "model": (bool(self.model), "the name by which the endpoint knows the model"),
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            "temperature": (
                self.temperature is None or self.temperature >= 0,
                "0 or more, or None",
            ),
            "timeout_seconds": (self.timeout_seconds > 0, "seconds above 0"),
            "max_retries": (self.max_retries >= 0, "a whole number, 0 for one attempt"),
            "max_concurrent": (self.max_concurrent >= 1, "at least 1"),
        }
        for name, (is_valid, remedy) in rules.items():
            if not is_valid:
                raise UserError(f"{name}={getattr(self, name)!r}: give {remedy}")
        self._headers()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connections_by_loop": {}}

    def __deepcopy__(self, memo: object) -> ChatEndpoint:
        """Return the endpoint itself: its options are immutable, and copies share connections."""
        return self

    async def __call__(self, messages: Sequence[Message]) -> Message:
        """Return the model's answer. Raise EndpointError if the last attempt fails. Raise UserError
        if the endpoint rejects the request.
        """
        all_options = {"max_tokens": self.max_tokens, "temperature": self.temperature, **self.extra}
        request_options = {name: value for name, value in all_options.items() if value is not None}
        body = {"model": self.model, "messages": list(messages), **request_options}
        async with self._connections() as connections, connections.semaphore:
            return await self._request_with_retries(connections.client, body)

    async def measure(self, messages: Sequence[Message]) -> PromptSize:
        """Return the size of a prompt and of the context window, as far as the endpoint tells them.

        vLLM, SGLang and planish have a route /tokenize beside /v1. Other endpoints name the context
        window in /v1/models, or not at all.
        """
        root = self.base_url.rstrip("/").removesuffix("/v1")
        body = {"model": self.model, "messages": list(messages)}
        async with self._connections() as connections:
            counted = await self._read(connections.client, "POST", f"{root}/tokenize", body)
            models = await self._read(
                connections.client, "GET", f"{self.base_url.rstrip('/')}/models", None
            )
        listed = models.get("data")
        described = [
            entry
            for entry in (listed if isinstance(listed, list) else ())
            if isinstance(entry, Mapping) and entry.get("id") == self.model
        ]
        windows = [
            entry.get(name) for entry in (counted, *described) for name in CONTEXT_WINDOW_FIELDS
        ]
        num_tokens = counted.get("count")
        return PromptSize(
            num_tokens if isinstance(num_tokens, int) else None,
            next((window for window in windows if isinstance(window, int)), None),
        )

    async def _read(
        self, client: AsyncClient, method: str, url: str, body: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        """Return the JSON object at a URL; {} if there is none."""
        import httpx2

        try:
            async with asyncio.timeout(self.timeout_seconds):
                response = await client.request(method, url, json=body)
            result = response.json() if response.status_code == 200 else {}
        except (TimeoutError, httpx2.RequestError, ValueError):
            return {}
        return result if isinstance(result, Mapping) else {}

    async def _request_with_retries(self, client: AsyncClient, body: Mapping[str, Any]) -> Message:
        delay = FIRST_DELAY
        for attempt in range(self.max_retries + 1):
            try:
                return await self._request(client, body)
            except _TemporaryError as error:
                if attempt == self.max_retries:
                    raise EndpointError(
                        f"{self._url} returned no answer in {attempt + 1} attempts; the last "
                        f"error: {error}"
                    ) from error
                # Random jitter: otherwise many waiting calls would retry at the same moment.
                await asyncio.sleep(max(error.retry_after, delay) * random.uniform(1.0, 1.5))
                delay = min(2 * delay, MAX_DELAY)
        raise AssertionError("the last attempt answers or raises")

    async def _request(self, client: AsyncClient, body: Mapping[str, Any]) -> Message:
        import httpx2  # imported here, because the import takes 0.1 s and few runs use an endpoint

        try:
            async with asyncio.timeout(self.timeout_seconds):
                response = await client.post(self._url, json=body)
        except TimeoutError:
            raise _TemporaryError(f"no answer in timeout_seconds={self.timeout_seconds}") from None
        except httpx2.RequestError as error:
            raise _TemporaryError(f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise self._status_error(response)
        return _parse_completion(response)

    def _status_error(self, response: Response) -> Exception:
        status = response.status_code
        text = f"status {status}: {response.text[:MAX_ERROR_CHARACTERS]}"
        if status in RETRYABLE_STATUSES or (status >= 500 and status not in PERMANENT_STATUSES):
            return _TemporaryError(text, _retry_after(response))
        return UserError(
            f"{self._url} rejected the request, {text}; check base_url, model and the key"
        )

    @asynccontextmanager
    async def _connections(self) -> AsyncIterator[_Connections]:
        """Yield the connections that all calls of this event loop share."""
        loop, opened = asyncio.get_running_loop(), self._connections_by_loop
        if loop not in opened:
            opened[loop] = _Connections(self._client(), asyncio.Semaphore(self.max_concurrent))
        connections = opened[loop]
        connections.num_calls += 1
        try:
            yield connections
        finally:
            connections.num_calls -= 1
            if connections.num_calls == 0:
                del opened[loop]
                await connections.client.aclose()

    def _client(self) -> AsyncClient:
        import httpx2

        # Proxy variables of the environment are ignored for an endpoint on this machine.
        host = urlsplit(self.base_url).hostname or ""
        is_local = host in ("localhost", "::1") or host.startswith("127.")
        return httpx2.AsyncClient(
            headers=self._headers(),
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_SECONDS),
            limits=httpx2.Limits(max_connections=self.max_concurrent),
            trust_env=not is_local,
        )

    def _headers(self) -> dict[str, str]:
        if self.api_key_env is None:
            return {}
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UserError(
                f"api_key_env={self.api_key_env}: there is no such variable in the environment; "
                "set it"
            )
        return {"Authorization": f"Bearer {key}"}

    @property
    def _url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
    except ValueError:  # urlsplit raises it for an incomplete IPv6 address
        return False
    return url.scheme in ("http", "https") and bool(url.hostname)


def _parse_completion(response: Response) -> Message:
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise _TemporaryError(
            f"this is not a chat completion: {response.text[:MAX_ERROR_CHARACTERS]}"
        ) from None
    if not isinstance(content, str | None):
        raise _TemporaryError(f"its content is not a text: {content!r:.{MAX_ERROR_CHARACTERS}}")
    return {"role": "assistant", "content": content or ""}


def _retry_after(response: Response) -> float:
    """Return the delay in seconds that the endpoint asks for; 0 if it asks for none."""
    try:
        return min(MAX_RETRY_AFTER, max(0.0, float(response.headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0
