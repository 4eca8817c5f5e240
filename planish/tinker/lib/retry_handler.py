"""The SDK's options of retries."""

from typing import Any


class RetryConfig:
    """How the SDK would repeat requests. An engine in this process needs no retries, and a session
    with a server has its own, so the options change nothing.
    """

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)
