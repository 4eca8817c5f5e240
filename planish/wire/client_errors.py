"""planish's errors on the wire: beside its sentence, an error has the name of its class, so that a
client can raise the same one.

The name is planish's own addition. Without it, or with one that is not known here, what the server
says about the call is a UserError.
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
"""The field beside "detail" or "error" that holds the name."""

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
    """The name of the nearest class that both sides know; None for an error that does not blame the
    call.
    """
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _CLASSES), None)


def named_error(message: str, name: object, default: type[UserError] = UserError) -> UserError:
    """The error that `name_of` named."""
    kind = _CLASSES.get(name, default) if isinstance(name, str) else default
    return kind(message)
