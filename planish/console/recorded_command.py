"""The command that started a run, as the run has recorded it."""

import shlex
from pathlib import Path
from typing import Any

from planish.files import read_object
from planish.runlog.run_directory import COMMAND


def recorded_command(run: Path) -> dict[str, Any] | None:
    """Return the `command` (a list) and the `directory` that a run has recorded; None if there are
    none.
    """
    try:
        recorded = read_object(run / COMMAND)
    except (OSError, ValueError):
        return None
    command, directory = recorded.get("command"), recorded.get("directory")
    is_valid = isinstance(command, list) and all(isinstance(word, str) for word in command)
    return recorded if is_valid and command and isinstance(directory, str) else None


def command_text(run: Path) -> str | None:
    """Return the recorded command as one line for a shell; None if there is none."""
    recorded = recorded_command(run)
    if recorded is None:
        return None
    return f"cd {shlex.quote(recorded['directory'])} && {shlex.join(recorded['command'])}"
