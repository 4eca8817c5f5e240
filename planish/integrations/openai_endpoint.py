"""A model behind an OpenAI-compatible endpoint as a policy over messages: a judge, an opponent, a
teacher.

    judge = ChatEndpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-8B", api_key_env="JUDGE_KEY")

One request a call, POST BASE_URL/chat/completions, by the HTTP library that planish has anyway.
OpenAI's own client would bring the retries along, but it reads base URL, organisation and project
from the environment where they are not given, and what a judge is shown would then depend on it;
here the only variable that is read is the one that the options name, and the key is never an
option, since options are written into run directories.

What may go better at another time is asked again after a while that grows: no connection, no answer
in time, a broken answer, 408, 409, 425, 429 and most of 5xx. Anything else says that the request is
wrong, and is raised at once. Options are plain data, so an endpoint pickles; connections are opened
with the first call and closed with the last one under way.
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

from planish.completers import MessageCompleter
from planish.errors import PlanishError, UserError

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

    from planish.renderers import Message

LATER = (408, 409, 425, 429)
NEVER = (501, 505)
FIRST_DELAY, LONGEST_DELAY, LONGEST_WISH = 0.5, 30.0, 120.0
"""Seconds between attempts: at first, at most, and at most if the endpoint asks for it
(Retry-After).
"""
CONNECT_SECONDS = 10.0
SHOWN_CHARACTERS = 500
"""Of an endpoint's answer, in an error."""


class EndpointError(PlanishError, ConnectionError):
    """The endpoint gave no usable answer, in as many attempts as there are; another time it may."""


class _NoAnswerError(Exception):
    """This attempt failed; the next may not. `wish`: seconds that the endpoint wants to be left
    alone.
    """

    def __init__(self, reason: str, wish: float = 0.0) -> None:
        super().__init__(reason)
        self.wish = wish


@dataclass
class _Connections:
    """Those of one event loop, and how many calls need them."""

    client: AsyncClient
    places: asyncio.Semaphore
    users: int = 0


@dataclass(frozen=True)
class ChatEndpoint(MessageCompleter):
    """`max_concurrent` bounds the requests of this process that are under way; others wait."""

    base_url: str
    """Up to and with the version: https://api.openai.com/v1, http://127.0.0.1:8000/v1."""
    model: str
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; None = no key is sent."""
    max_tokens: int | None = 512
    """None leaves it out: the endpoint's own limit."""
    temperature: float | None = 0.0
    """None leaves it out: some models take no other than their own."""
    timeout_seconds: float = 120.0
    """For one attempt, from the connection to the last byte."""
    max_retries: int = 5
    max_concurrent: int = 16
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as {"reasoning_effort": "low"}. They win over those
    above; None leaves a field out.
    """
    _opened: dict[asyncio.AbstractEventLoop, _Connections] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """UserError for an option that cannot be right; the key is looked up, so a missing one is
        noticed before any work.
        """
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
        for name, (holds, remedy) in rules.items():
            if not holds:
                raise UserError(f"{name}={getattr(self, name)!r}: give {remedy}")
        self._headers()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    def __deepcopy__(self, memo: object) -> ChatEndpoint:
        """Itself: nothing of it changes, and its connections are shared."""
        return self

    async def __call__(self, messages: Sequence[Message]) -> Message:
        """The model's answer; EndpointError after the last attempt, UserError for a request that
        the endpoint refuses.
        """
        options = {"max_tokens": self.max_tokens, "temperature": self.temperature, **self.extra}
        sent = {name: value for name, value in options.items() if value is not None}
        body = {"model": self.model, "messages": list(messages), **sent}
        async with self._connections() as connections, connections.places:
            return await self._ask_until_answered(connections.client, body)

    async def _ask_until_answered(self, client: AsyncClient, body: Mapping[str, Any]) -> Message:
        delay = FIRST_DELAY
        for attempt in range(self.max_retries + 1):
            try:
                return await self._ask(client, body)
            except _NoAnswerError as error:
                if attempt == self.max_retries:
                    raise EndpointError(
                        f"{self._url} gave no answer in {attempt + 1} attempts, at last: {error}"
                    ) from error
                # Many calls wait for one endpoint: each at a moment of its own.
                await asyncio.sleep(max(error.wish, delay) * random.uniform(1.0, 1.5))
                delay = min(2 * delay, LONGEST_DELAY)
        raise AssertionError("the last attempt answers or raises")

    async def _ask(self, client: AsyncClient, body: Mapping[str, Any]) -> Message:
        import httpx2  # a tenth of a second, which only those pay who have an endpoint

        try:
            async with asyncio.timeout(self.timeout_seconds):
                response = await client.post(self._url, json=body)
        except TimeoutError:
            raise _NoAnswerError(f"no answer in timeout_seconds={self.timeout_seconds}") from None
        except httpx2.RequestError as error:
            raise _NoAnswerError(f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise self._refusal(response)
        return _message(response)

    def _refusal(self, response: Response) -> Exception:
        status = response.status_code
        text = f"status {status}: {response.text[:SHOWN_CHARACTERS]}"
        if status in LATER or (status >= 500 and status not in NEVER):
            return _NoAnswerError(text, _retry_after(response))
        return UserError(
            f"{self._url} refused the request, {text}; check base_url, model and the key"
        )

    @asynccontextmanager
    async def _connections(self) -> AsyncIterator[_Connections]:
        """Shared by the calls under way in this event loop."""
        loop, opened = asyncio.get_running_loop(), self._opened
        if loop not in opened:
            opened[loop] = _Connections(self._client(), asyncio.Semaphore(self.max_concurrent))
        connections = opened[loop]
        connections.users += 1
        try:
            yield connections
        finally:
            connections.users -= 1
            if connections.users == 0:
                del opened[loop]
                await connections.client.aclose()

    def _client(self) -> AsyncClient:
        import httpx2

        # A proxy of the environment is for the world outside.
        host = urlsplit(self.base_url).hostname or ""
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        return httpx2.AsyncClient(
            headers=self._headers(),
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=self.max_concurrent),
            trust_env=not is_here,
        )

    def _headers(self) -> dict[str, str]:
        if self.api_key_env is None:
            return {}
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UserError(
                f"api_key_env={self.api_key_env}: there is no such variable in the environment; set it"
            )
        return {"Authorization": f"Bearer {key}"}

    @property
    def _url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:  # half of an IPv6 address
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _message(response: Response) -> Message:
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise _NoAnswerError(
            f"this is no chat completion: {response.text[:SHOWN_CHARACTERS]}"
        ) from None
    if not isinstance(content, str | None):
        raise _NoAnswerError(f"its content is no text: {content!r:.{SHOWN_CHARACTERS}}")
    return {"role": "assistant", "content": content or ""}


def _retry_after(response: Response) -> float:
    """Seconds that the endpoint asks for."""
    try:
        return min(LONGEST_WISH, max(0.0, float(response.headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0
