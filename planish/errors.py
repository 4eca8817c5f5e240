"""The exceptions that planish raises. Every message names the wrong argument and the remedy.

    PlanishError
    |- UserError (ValueError)            the call is wrong; nothing was changed, and repeating the
    |  |                                 same call fails again
    |  |- UnknownModelError              no base model of this name was found
    |  |- UnsupportedError               a known feature that planish does not have
    |  |- UnknownArgumentError (TypeError)  a class does not take an argument of this name
    |  |- DamagedFileError               a file is truncated, altered, or of another kind
    |  |- CheckpointError                a checkpoint is missing, expired, or of another base model,
    |  |                                 rank or kind
    |  `- NonFiniteError                 a loss, gradient or input contains NaN or infinity; the
    |                                    step was rejected
    |- EngineClosedError (RuntimeError)  the engine was closed, or stopped after an earlier error
    |- StorageError (OSError)            a write to disk failed; existing files are undamaged
    |- UnjudgedAnswerError               a grader cannot judge an answer, which counts as wrong
    `- AbstainError                      a grader cannot judge an answer, which is left out

The classes also derive from the built-in exceptions in parentheses, so `except ValueError` and
`except OSError` catch them.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")

MAX_MESSAGE = 8000
"""Maximum number of characters of an error message."""
_TAIL_CHARACTERS = 2000
"""Characters that a shortened message keeps of its end, where the remedy is."""


def shortened(message: str) -> str:
    """Return `message`, without its middle if it has more than MAX_MESSAGE characters."""
    if len(message) <= MAX_MESSAGE:
        return message
    gap = f" [... {len(message) - MAX_MESSAGE:,} characters left out ...] "
    return message[: MAX_MESSAGE - _TAIL_CHARACTERS - len(gap)] + gap + message[-_TAIL_CHARACTERS:]


def message_with_notes(error: Exception) -> str:
    """Return the error's message, and its notes below it, indented."""
    return "\n  ".join([str(error), *getattr(error, "__notes__", ())])


class PlanishError(Exception):
    """Base of all errors that planish raises on purpose. Messages may quote an argument of any
    size, so messages of more than MAX_MESSAGE characters are shortened.
    """

    def __init__(self, *args: object) -> None:
        """Usually the only argument is the message."""
        super().__init__(*(shortened(arg) if isinstance(arg, str) else arg for arg in args))


class UserError(PlanishError, ValueError):
    """A call is wrong, for example an argument. No state was changed."""


class UnknownModelError(UserError):
    """No base model of this name was found. The message lists the places that were searched."""


class ContextLengthError(UserError):
    """A prompt, or a prompt and the tokens to sample, exceed the context of the model. The wording
    of the messages is OpenAI's, because agents look for it to decide that they must truncate.
    """

    code = "context_length_exceeded"


class UnsupportedError(UserError):
    """A feature that similar libraries have and planish does not. It is rejected, never ignored."""


class UnknownArgumentError(UserError, TypeError):
    """A class does not take an argument of this name. The message names the right one if it is
    known.
    """


class DamagedFileError(UserError):
    """A file is truncated, altered, or of another kind than expected."""


class CheckpointError(UserError):
    """A checkpoint is missing, expired, or does not fit the model it is loaded into."""


class NonFiniteError(UserError):
    """A loss, gradient or input contains NaN or infinity. Weights and optimizer state are
    unchanged.
    """


class EngineClosedError(PlanishError, RuntimeError):
    """The engine was closed, or stopped after an earlier error that the message names."""


class StorageError(PlanishError, OSError):
    """A write to disk failed. Files that existed before are undamaged."""


class UnjudgedAnswerError(PlanishError):
    """A grader cannot judge an answer because of the answer's text. A ProblemEnv counts the answer
    as wrong, since a policy must not profit from such texts.
    """


class AbstainError(PlanishError):
    """A grader abstains: it cannot judge an answer for a reason outside of the answer, such as a
    judge that does not reply. The answer is left out of its group, so it has no effect on the
    baseline, the advantages and the metrics. The metric env/<tag>/abstained counts such answers.

    An exception leaves the return types of graders as they are. A value such as None would be
    indistinguishable from a forgotten `return`.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU or main memory ran out.

    For main memory torch raises a plain RuntimeError, so its message is searched.
    """
    if isinstance(error, PlanishError) or not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def rejected_step(error: BaseException) -> UserError:
    """Return the error for an optim_step that follows a forward_backward which failed with `error`.

    It is a NonFiniteError if `error` is one, otherwise a UserError.
    """
    kind = NonFiniteError if isinstance(error, NonFiniteError) else UserError
    reason = str(error) or type(error).__name__
    return kind(
        "optim_step rejected, nothing was applied: the forward_backward before it failed "
        f"({reason})"
    )


@contextmanager
def as_user_errors(option: str) -> Iterator[None]:
    """Turn a plain ValueError of the block into a UserError that names `option`, a command-line
    option.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def suggest_arguments(**usual_names: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator of classes: for an unknown argument they raise an UnknownArgumentError
    that names the right one. `usual_names` maps names that other libraries use to those of the
    class.
    """

    def decorate(cls: type[T]) -> type[T]:
        original: Callable[..., None] = cls.__init__
        known = list(inspect.signature(original).parameters)[1:]

        @wraps(original)
        def __init__(self: T, *args: Any, **kwargs: Any) -> None:
            for name in kwargs.keys() - known:
                raise UnknownArgumentError(
                    f"{cls.__name__} got an unexpected keyword argument {name!r}"
                    f"{suggestion(name, known, usual_names)}"
                )
            original(self, *args, **kwargs)

        cls.__init__ = __init__
        return cls

    return decorate


def suggestion(name: str, known: Iterable[str], usual_names: Mapping[str, str]) -> str:
    """Return the end of a message about an unknown name: which known one is meant, or all."""
    known = list(known)
    if (usual := usual_names.get(name)) is not None:
        return f"; give {usual}"
    if close := get_close_matches(name, known, n=1):
        return f"; did you mean {close[0]}?"
    return f"; it takes {', '.join(known)}"
