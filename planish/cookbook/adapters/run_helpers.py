"""Where runs are written, and how sessions are named."""

import os
import re
import shutil
from pathlib import Path
from typing import Literal

from planish.errors import UserError

LogdirBehavior = Literal["delete", "resume", "ask", "raise"]
RUNS_DIR_ENV_VAR = "TINKER_COOKBOOK_RUNS_DIR"
DEFAULT_RUNS_DIR = "~/tinker-runs"


def runs_path(*parts: str) -> str:
    """Return a path below $TINKER_COOKBOOK_RUNS_DIR, or ~/tinker-runs."""
    home = Path(os.environ.get(RUNS_DIR_ENV_VAR) or DEFAULT_RUNS_DIR)
    return str(home.expanduser().joinpath(*parts))


def model_name_from_argv(argv: list[str], default: str) -> str:
    """Return the last model_name=NAME among the arguments, or `default`."""
    given = [word.removeprefix("model_name=") for word in argv if word.startswith("model_name=")]
    return given[-1] if given else default


def check_log_dir(log_dir: str, behavior_if_exists: LogdirBehavior) -> None:
    """Decide what happens to a run directory that exists: delete it, resume it, ask, or raise."""
    if not Path(log_dir).exists():
        return
    while behavior_if_exists == "ask":
        answer = input(f"{log_dir} exists already: delete, resume or exit? ").strip()
        if answer == "exit":
            raise SystemExit(0)
        if answer in ("delete", "resume"):
            behavior_if_exists = "delete" if answer == "delete" else "resume"
    match behavior_if_exists:
        case "delete":
            shutil.rmtree(log_dir)
        case "raise":
            raise UserError(f"{log_dir} exists already; give another log_path")
        case "resume":
            pass
        case _:
            raise UserError(
                f"behavior_if_exists={behavior_if_exists!r}: give 'delete', 'resume', 'ask' or "
                "'raise'"
            )


def recipe_user_metadata(recipe_name: str) -> dict[str, str]:
    """Return the metadata of a recipe's checkpoints."""
    return {"recipe_name": recipe_name}


def slugify(text: str) -> str:
    """Return `text` in lower case, with a hyphen for each run of other characters than a-z, 0-9."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def default_cookbook_session_name(*parts: str | None, wandb_name: str | None = None) -> str:
    """Return `wandb_name`, else "cookbook-" and the slugs of the parts."""
    if wandb_name:
        return wandb_name
    return "-".join(slugify(part) for part in ("cookbook", *parts) if part and slugify(part))


def resolve_session_display_name(*, session_name: str | None, wandb_name: str | None) -> str | None:
    """Return `session_name`, else `wandb_name`, else None."""
    return session_name or wandb_name or None
