import pytest

from planish.sandbox import Limits, Sandbox


@pytest.fixture
def sandbox():
    """Return a sandbox with the limits of a test, such as `sandbox(cpu_seconds=1)`, and time for a
    busy machine.
    """
    return lambda **limits: Sandbox(Limits(**{"wall_seconds": 60.0, **limits}))
