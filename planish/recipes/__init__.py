"""Programs that a person runs: `python -m planish.recipes.NAME key=value ...`."""

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
    # `python -m` is looking for a recipe, whose imports take seconds. Ctrl-C in these would show a
    # traceback; later, `run_command` answers it.
    sys.excepthook = _end_quietly
