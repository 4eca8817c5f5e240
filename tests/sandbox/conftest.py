import pytest

from planish.sandbox import Limits, Sandbox


@pytest.fixture
def sandbox():
    """A sandbox with the limits of a test: `sandbox(cpu_seconds=1)`. A busy machine is given time."""
    return lambda **limits: Sandbox(Limits(**{"wall_seconds": 60.0, **limits}))
