"""Limits of one tenant: other tenants are not affected, and tokens come back with time."""

import pytest

from planish.errors import UserError
from planish.server.results import TooManyRequests
from planish.server.settings import ServerSettings
from planish.server.tenant_limits import TenantLimits


def test_unanswered_requests_are_limited():
    limits = TenantLimits(ServerSettings(max_queued_requests=2))
    for _ in range(2):
        limits.check("a", 1)
        limits.add_request("a", 1)
    with pytest.raises(TooManyRequests, match="2 requests"):
        limits.check("a", 1)
    limits.check("b", 1)
    assert limits.unanswered_by_tenant() == {"a": 2}
    limits.remove_request("a", 1)
    limits.check("a", 1)


def test_waiting_bytes_are_limited_but_one_request_is_always_accepted():
    limits = TenantLimits(ServerSettings(max_queued_bytes=100))
    limits.check("a", 1000)
    limits.add_request("a", 1000)
    with pytest.raises(TooManyRequests, match="1,000 bytes"):
        limits.check("a", 1)
    limits.remove_request("a", 1000)
    limits.add_request("a", 60)
    limits.check("a", 40)
    with pytest.raises(TooManyRequests):
        limits.check("a", 41)


def test_the_token_budget_refills_over_time():
    now = 0.0
    limits = TenantLimits(ServerSettings(max_tokens_per_minute=600), clock=lambda: now)
    limits.use_tokens("a", 650)
    with pytest.raises(TooManyRequests, match="600 tokens per minute") as refused:
        limits.check("a", 1)
    assert refused.value.retry_after == pytest.approx(5.0)
    limits.check("b", 1)
    now = 5.0
    limits.check("a", 1)
    now = 1000.0
    limits.use_tokens("a", 600)
    limits.check("a", 1)
    limits.use_tokens("a", 1)
    with pytest.raises(TooManyRequests):  # a key that was idle has saved no more than a minute's
        limits.check("a", 1)


@pytest.mark.parametrize(
    "settings", [{"adapter_idle_timeout": 0}, {"training_slots": 1.5}, {"max_result_bytes": True}]
)
def test_invalid_limits_are_rejected(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        ServerSettings(**settings)
