"""The SDK's exceptions. Some names are planish's own exceptions, so `except` clauses of a script
catch what planish raises. The other exceptions are never raised, but a script can name them.

An exception has a message, but no `status_code`, `response`, `request_id` or `category`.
"""

from planish.client.remote_errors import ServerFaultError, ServerUnreachableError
from planish.errors import CheckpointError, PlanishError, UserError

TinkerError = PlanishError
APIError = PlanishError
APIStatusError = PlanishError
APIConnectionError = ServerUnreachableError
BadRequestError = UserError
UnprocessableEntityError = UserError
RequestFailedError = UserError
NotFoundError = CheckpointError
InternalServerError = ServerFaultError


class APITimeoutError(APIConnectionError):
    """Never raised. `result(timeout=...)` raises TimeoutError, as in the SDK."""


class APIResponseValidationError(APIError):
    """Never raised."""


class AuthenticationError(APIStatusError):
    """Never raised. A server that rejects an API key causes a UserError."""


class BillingError(APIStatusError):
    """Never raised."""


class PermissionDeniedError(APIStatusError):
    """Never raised."""


class ConflictError(APIStatusError):
    """Never raised. Saving under a name that exists raises CheckpointError."""


class RateLimitError(APIStatusError):
    """Never raised."""
