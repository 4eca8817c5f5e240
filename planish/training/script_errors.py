"""The message of a wrong call that ends a user's own script, without a traceback.

A script `asyncio.run(main(config))` has no frame of its own in such an error, so a traceback would
only list lines of planish and of asyncio. Recipes print the same message for the same error.
"""

import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from types import TracebackType

from planish.errors import UserError, message_with_notes

_OWN_MODULES = {"planish", "chz", *sys.stdlib_module_names}


@contextmanager
def message_only() -> Generator[None]:
    """If a UserError leaves the block and ends the program, print its message and its notes, and no
    traceback. The exit status stays 1.

    The traceback is printed as usual if it has a frame of other code, such as the user's
    environment, if an exception hook is set, and for all other exceptions.
    """
    try:
        yield
    except UserError as error:
        modules = {
            frame.f_globals.get("__name__", "").partition(".")[0]
            for frame, _ in traceback.walk_tb(error.__traceback__)
        }
        if modules <= _OWN_MODULES and sys.excepthook is sys.__excepthook__:
            sys.excepthook = partial(_print_message, error)
        raise


def _print_message(
    wrong_call: UserError,
    kind: type[BaseException],
    error: BaseException,
    frames: TracebackType | None,
) -> None:
    if error is wrong_call:
        print(f"error: {message_with_notes(wrong_call)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, frames)
