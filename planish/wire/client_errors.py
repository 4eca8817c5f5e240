"""planish's errors on the wire: besides its message, an error carries the name of its class, so
that a client can raise the same class.

The name is an addition of planish. Without it, or with an unknown one, what the server says about a
call is a UserError.
"""

from __future__ import annotations

from planish.errors import (
    CheckpointError,
    DamagedFileError,
    NonFiniteError,
    UnknownModelError,
    UnsupportedError,
    UserError,
)

ERROR_CLASS = "error_class"
"""The field with the name, beside "detail" or "error"."""

_CLASSES = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        DamagedFileError,
        NonFiniteError,
        UnknownModelError,
        UnsupportedError,
        UserError,
    )
}


def name_of(error: BaseException) -> str | None:
    """Return the name of the nearest class that both sides know; None for an error that does not
    blame the call.
    """
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _CLASSES), None)


def named_error(message: str, name: object, default: type[UserError] = UserError) -> UserError:
    """Return the error whose class `name_of` named."""
    kind = _CLASSES.get(name, default) if isinstance(name, str) else default
    return kind(message)
