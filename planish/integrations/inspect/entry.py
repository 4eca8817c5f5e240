# pyright: reportMissingImports=false
# inspect_ai is an extra, which the environment of the tests does not have (see docs/evaluation.md).
"""What Inspect loads of planish (the entry point `inspect_ai`): the name of the provider, and how
to get it.
"""

from importlib import import_module
from typing import Any

from inspect_ai.model import modelapi


def planish_api() -> Any:
    """Imported here and not above: Inspect loads this module at each start, and torch takes
    seconds.
    """
    return import_module("planish.integrations.inspect.model").PlanishAPI


provider: Any = modelapi(name="planish")(planish_api)
"""Makes a PlanishAPI that Inspect's logs can name."""
