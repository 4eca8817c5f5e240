"""Where planish keeps what it can make or fetch again."""

import os
from pathlib import Path


def cache_home() -> Path:
    """PLANISH_HOME, or ~/.cache/planish."""
    return Path(os.environ.get("PLANISH_HOME") or "~/.cache/planish").expanduser().absolute()
