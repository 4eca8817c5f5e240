"""Programs that a person runs with `python -m` and options as key=value."""

import sys
from types import TracebackType


def _end_quietly(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if kind is KeyboardInterrupt:
        print("stopped before the run began", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


if sys.argv[:1] == ["-m"]:
    # `python -m` is importing a recipe, which takes seconds. Ctrl-C would show a traceback here.
    # Later, `run_command` handles it.
    sys.excepthook = _end_quietly
