"""planish's errors on the wire: an error has the name of its class in addition to its message, so
that a client can raise the same class.

The name is an addition of planish to the protocol. If the name is missing or unknown, the client
raises a UserError for a rejected request or an error of category "user".
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
"""The JSON field with the name of the class, next to the message in "detail" or "error"."""

_CLASSES_BY_NAME = {
    error_class.__name__: error_class
    for error_class in (
        CheckpointError,
        DamagedFileError,
        NonFiniteError,
        UnknownModelError,
        UnsupportedError,
        UserError,
    )
}


def error_class_name(error: BaseException) -> str | None:
    """Return the name of the error's class, or of its nearest base class that clients know. Return
    None if clients know neither, for example for a fault of the server.
    """
    return next(
        (
            error_class.__name__
            for error_class in type(error).__mro__
            if error_class.__name__ in _CLASSES_BY_NAME
        ),
        None,
    )


def error_from_name(message: str, name: object, default: type[UserError] = UserError) -> UserError:
    """Return an error of the class with this name; of class `default` if the name is unknown."""
    error_class = _CLASSES_BY_NAME.get(name, default) if isinstance(name, str) else default
    return error_class(message)
