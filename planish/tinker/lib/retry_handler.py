"""The SDK's retry options, which have no effect here."""

from typing import Any


class RetryConfig:
    """Accepts the SDK's retry options and ignores them. An engine in this process needs no retries.
    A client of a server retries by its own rules.
    """

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)
