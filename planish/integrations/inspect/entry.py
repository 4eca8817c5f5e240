# pyright: reportMissingImports=false
# inspect_ai is an extra (docs/guide/evaluation.md), which the environment of the tests lacks.
"""The entry point `inspect_ai`, through which Inspect finds planish's model provider."""

from importlib import import_module
from typing import Any

from inspect_ai.model import modelapi


def planish_api() -> Any:
    """Return the class PlanishAPI. It is imported here, because Inspect loads this module at each
    start, and importing torch takes seconds.
    """
    return import_module("planish.integrations.inspect.model").PlanishAPI


provider: Any = modelapi(name="planish")(planish_api)
"""Creates a PlanishAPI and registers its name with Inspect, which writes the name into its logs."""
