"""What one tenant may have under way: requests, bytes, and tokens a minute. What is above answers
TooManyRequests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from planish.server.errors import TooManyRequests
from planish.server.settings import ServerSettings

_MINUTE = 60.0
_RETRY_SECONDS = 1.0


@dataclass
class _Account:
    requests: int = 0
    bytes: int = 0
    tokens: float = 0.0
    """That may be used now; below 0, a debt."""
    filled: float = 0.0


class Limits:
    def __init__(
        self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def check(self, tenant: str, size: int) -> None:
        """TooManyRequests if a request of `size` bytes cannot be taken now."""
        account, settings = self._account(tenant), self._settings
        if account.requests >= settings.max_queued_requests:
            raise TooManyRequests(
                f"{account.requests} requests of this key are not done yet, and no more may be; wait for some of them",
                _RETRY_SECONDS,
            )
        if account.requests and account.bytes + size > settings.max_queued_bytes:
            raise TooManyRequests(
                f"requests of this key that are not done yet have {account.bytes:,} bytes; wait for some of them",
                _RETRY_SECONDS,
            )
        if account.tokens < 0:
            rate = settings.tokens_per_minute
            raise TooManyRequests(
                f"this key may use {rate:,} tokens a minute, and has used more; wait",
                _MINUTE * -account.tokens / rate,
            )

    def enter(self, tenant: str, size: int) -> None:
        """A request was accepted."""
        account = self._account(tenant)
        account.requests += 1
        account.bytes += size

    def leave(self, tenant: str, size: int) -> None:
        """It is done."""
        account = self._account(tenant)
        account.requests -= 1
        account.bytes -= size

    def use(self, tenant: str, tokens: int) -> None:
        """Tokens were computed for the tenant."""
        self._account(tenant).tokens -= tokens

    def queued(self) -> dict[str, int]:
        """Requests that are not done, by tenant."""
        return {
            tenant: account.requests
            for tenant, account in self._accounts.items()
            if account.requests
        }

    def _account(self, tenant: str) -> _Account:
        now, rate = self._clock(), self._settings.tokens_per_minute
        account = self._accounts.setdefault(tenant, _Account(tokens=rate, filled=now))
        account.tokens = min(rate, account.tokens + rate * (now - account.filled) / _MINUTE)
        account.filled = now
        return account
