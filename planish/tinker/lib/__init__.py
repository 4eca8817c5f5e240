"""The public part of the SDK's `lib`: its client classes and RetryConfig."""

from planish.tinker.lib import public_interfaces, retry_handler

__all__ = ["public_interfaces", "retry_handler"]
