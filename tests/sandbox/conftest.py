import asyncio

import pytest

from planish.sandbox import Limits, Sandbox, SandboxUnavailableError


def unavailable() -> str | None:
    """Why there is no sandbox here, if there is none."""
    try:
        asyncio.run(Sandbox().check())
    except SandboxUnavailableError as error:
        return str(error)
    return None


REASON = unavailable()


@pytest.fixture
def sandbox():
    """One that is made with the limits of a test: `sandbox(cpu_seconds=1)`. A busy machine is given
    time.
    """
    if REASON:
        pytest.skip(REASON)
    return lambda **limits: Sandbox(Limits(**{"wall_seconds": 60.0, **limits}))
