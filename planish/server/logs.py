"""What the server says, set up in one place: lines for people on a terminal, and one JSON object a
line elsewhere.

A record is a message and fields, `_log.info("snapshot", extra=fields(model=..., seconds=...))`. As
JSON they are siblings:

    {"time": "2026-01-01T12:00:00.000+00:00", "level": "info", "logger": "planish.access", "message": "POST /api/v1/asample 200", ...}

Every request is a record of the logger planish.access, with the route's pattern, status,
milliseconds and the tenant's name. Neither keys, nor prompts, nor what was drawn are ever written.
What clients repeat all the time (polls for results, heartbeats, health, metrics) is of level debug,
as long as it succeeds.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import orjson

from planish.errors import UserError

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
_FIELDS = "planish_fields"
_REFUSED_SECONDS = 60.0
_LIBRARIES = ("uvicorn", "uvicorn.error", "uvicorn.access", "py.warnings")


def fields(**values: object) -> dict[str, Any]:
    """Fields of a record, for `extra=`."""
    return {_FIELDS: values}


def set_up(log_format: LogFormat | None, level: str, stream: TextIO | None = None) -> None:
    """Send the log to `stream` (stderr) and nowhere else. `log_format`: None is text on a terminal,
    else JSON.
    """
    if level not in LEVELS:
        raise UserError(f"--log-level {level}: give one of {', '.join(LEVELS)}")
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    is_terminal = stream is not None and stream.isatty()
    as_text = log_format == "text" or (log_format is None and is_terminal)
    handler.addFilter(_few_refused_connections())
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("planish").setLevel(level.upper())
    logging.captureWarnings(True)
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _few_refused_connections() -> Callable[[logging.LogRecord], bool]:
    """Without files for more connections, asyncio says so at every one that waits, thousands of
    times a second: a line a minute will do.
    """
    told = -_REFUSED_SECONDS

    def is_kept(record: logging.LogRecord) -> bool:
        nonlocal told
        if record.name != "asyncio" or "out of system resource" not in record.msg:
            return True
        if record.created - told < _REFUSED_SECONDS:
            return False
        told, record.exc_info = record.created, None
        record.msg = (
            "no more connections can be taken until some end: this process may not open more files. Raise the limit (ulimit -Hn, "
            "LimitNOFILE of systemd); each waiting request is a connection"
        )
        record.args = ()
        return True

    return is_kept


class JsonFormatter(logging.Formatter):
    """One object a line; whatever a field is, the line can be read back."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = "".join(traceback.format_exception(*record.exc_info))
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class TextFormatter(logging.Formatter):
    """TIME LEVEL logger: message  name=value ..."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        named = " ".join(f"{name}={value}" for name, value in _fields_of(record).items())
        return f"{text}  {named}" if named else text


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    return getattr(record, _FIELDS, {})
