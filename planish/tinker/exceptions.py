"""The exceptions of the SDK. What planish raises is caught under the SDK's names; the other names
exist, so that they can be caught, and are never raised.

The errors have a sentence and no `status_code`, `response`, `request_id` or `category`, since there
is no response.
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
    """Never raised; `result(timeout=...)` raises TimeoutError, as the SDK does."""


class APIResponseValidationError(APIError):
    """Never raised."""


class AuthenticationError(APIStatusError):
    """Never raised: no key is needed."""


class BillingError(APIStatusError):
    """Never raised."""


class PermissionDeniedError(APIStatusError):
    """Never raised."""


class ConflictError(APIStatusError):
    """Never raised; a name that is taken is a CheckpointError."""


class RateLimitError(APIStatusError):
    """Never raised."""
