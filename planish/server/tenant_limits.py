"""The limits of one tenant's unanswered requests, their bytes, and its tokens per minute.

durable/quotas.py has the limits of what a tenant stores and keeps open.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from planish.server.results import TooManyRequests
from planish.server.settings import TenantSettings

_MINUTE = 60.0
_BUSY_SECONDS = 1.0


@dataclass
class _TenantUsage:
    """The unanswered requests and the token budget of one tenant."""

    num_requests: int = 0
    body_bytes: int = 0
    token_budget: float = 0.0
    """Tokens that may be used now. The number is negative after the tenant exceeded its limit."""
    updated: float = 0.0
    """The time of the clock at which `token_budget` was last updated."""


class TenantLimits:
    """Limits the unanswered requests, their bytes, and the tokens per minute of each tenant."""

    def __init__(
        self, settings: TenantSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`settings` contains the limits. `clock` returns seconds."""
        self._settings = settings
        self._clock = clock
        self._usage_by_tenant: dict[str, _TenantUsage] = {}

    def check(self, tenant: str, size: int) -> None:
        """Raise TooManyRequests if a request of `size` bytes cannot be accepted now."""
        usage, settings = self._usage(tenant), self._settings
        if usage.num_requests >= settings.max_queued_requests:
            raise TooManyRequests(
                f"{usage.num_requests:,} requests of this tenant are unanswered, which is the "
                "limit (max_queued_requests); wait until some are answered",
                _BUSY_SECONDS,
            )
        if usage.num_requests and usage.body_bytes + size > settings.max_queued_bytes:
            raise TooManyRequests(
                f"the unanswered requests of this tenant have {usage.body_bytes:,} bytes, and the "
                f"limit is {settings.max_queued_bytes:,} (max_queued_bytes); wait until some are "
                "answered",
                _BUSY_SECONDS,
            )
        if usage.token_budget < 0:
            rate = settings.max_tokens_per_minute
            raise TooManyRequests(
                f"this tenant may use {rate:,} tokens per minute (max_tokens_per_minute), and has "
                "used more; wait",
                _MINUTE * -usage.token_budget / rate,
            )

    def add_request(self, tenant: str, size: int) -> None:
        """Count an accepted request."""
        usage = self._usage(tenant)
        usage.num_requests += 1
        usage.body_bytes += size

    def remove_request(self, tenant: str, size: int) -> None:
        """Count a request as answered."""
        usage = self._usage(tenant)
        usage.num_requests -= 1
        usage.body_bytes -= size

    def use_tokens(self, tenant: str, tokens: int) -> None:
        """Subtract `tokens` from the token budget of the tenant."""
        self._usage(tenant).token_budget -= tokens

    def unanswered_by_tenant(self) -> dict[str, int]:
        """Return the number of unanswered requests, by tenant."""
        return {
            tenant: usage.num_requests
            for tenant, usage in self._usage_by_tenant.items()
            if usage.num_requests
        }

    def _usage(self, tenant: str) -> _TenantUsage:
        now, rate = self._clock(), self._settings.max_tokens_per_minute
        usage = self._usage_by_tenant.setdefault(
            tenant, _TenantUsage(token_budget=rate, updated=now)
        )
        usage.token_budget = min(rate, usage.token_budget + rate * (now - usage.updated) / _MINUTE)
        usage.updated = now
        return usage
