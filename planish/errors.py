"""The error tree. Every message names the argument at fault and what to do next.

    PlanishError
    |- UserError (also ValueError)     the call is wrong; nothing was changed; retrying as it is
                                       cannot help
    |  |- UnknownModelError            no source has a base model of this name
    |  |- UnsupportedError             a known feature that planish does not offer
    |  |- DamagedFileError             a file is truncated, altered, or not what its name says
    |  |- CheckpointError              a checkpoint is missing, expired, or of another base model,
       rank or kind
    |  `- NonFiniteError               a loss, gradient or input holds NaN or infinity; the step was
       refused
    |- EngineClosedError (RuntimeError)  the engine was closed, or stopped by an earlier fault
    `- StorageError (OSError)          the disk refused a write; what was on it before is whole

Each class also derives from its standard relative, so `except ValueError` and `except OSError`
hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class PlanishError(Exception):
    """Base of all errors that planish raises on purpose."""


class UserError(PlanishError, ValueError):
    """The call is wrong. No state was changed."""


class UnknownModelError(UserError):
    """No source has a base model of this name; the message lists what was tried."""


class UnsupportedError(UserError):
    """A feature that exists in the field, but not here; refused rather than ignored."""


class DamagedFileError(UserError):
    """A file is truncated, altered, or not what its name says."""


class CheckpointError(UserError):
    """A checkpoint is missing, expired, or does not fit the model it is loaded into."""


class NonFiniteError(UserError):
    """A loss, gradient or input holds NaN or infinity. Weights and optimizer state are as they
    were.
    """


class EngineClosedError(PlanishError, RuntimeError):
    """The engine was closed, or stopped by an earlier fault that the message names."""


class StorageError(PlanishError, OSError):
    """The disk refused a write. Nothing that was whole before is damaged."""


class UnjudgedAnswerError(PlanishError):
    """A grader cannot say whether an answer is right. An environment counts the answer as wrong;
    any other error of a grader ends the rollout.
    """


def refused_step(error: BaseException) -> UserError:
    """The error of an optimizer step behind a forward_backward that ended with `error`:
    NonFiniteError if that was one.
    """
    kind = NonFiniteError if isinstance(error, NonFiniteError) else UserError
    reason = str(error) or type(error).__name__
    return kind(
        f"optim_step refused, nothing was applied: the forward_backward before it failed ({reason})"
    )


@contextmanager
def as_user_errors(option: str) -> Iterator[None]:
    """A plain ValueError of the block is a UserError that names `option`: for commands, which read
    what a user typed.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error
