"""`planish console`: show runs in a browser, while they train and afterwards."""

from __future__ import annotations

import argparse
import secrets
import socket
import webbrowser
from contextlib import closing, nullcontext
from pathlib import Path

import uvicorn

from planish.console.actions import Actions
from planish.console.answers import Answers
from planish.console.app import create_app
from planish.console.catalog import Catalog
from planish.errors import UserError
from planish.processes.arguments import argument_adder
from planish.server.http.origins import is_loopback

DEFAULT_PORT = 6160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish console`."""
    add = argument_adder(parser)
    add(
        "DIR",
        "directories of runs, or directories that contain them (default: runs, or the current "
        "directory)",
        dest="directories",
        nargs="*",
        type=Path,
    )
    add("--host ADDRESS", "address of this machine's loopback interface", default="127.0.0.1")
    add("--port N", "port; 0 = any free port", default=DEFAULT_PORT)
    add(
        "--allow-actions",
        "let the page stop and resume runs and replay rollouts; its address then has a key",
        action="store_true",
    )
    add("--open", "open the page in a browser", action="store_true")


def run(arguments: argparse.Namespace) -> None:
    """Serve the console until Ctrl-C."""
    catalog = Catalog(_directories(arguments.directories))
    actions = Actions(catalog) if arguments.allow_actions else None
    key = secrets.token_urlsafe(24) if actions is not None else ""
    app = create_app(Answers(catalog), actions, key)
    with (
        closing(actions) if actions else nullcontext(),
        _listener(arguments.host, arguments.port) as listener,
    ):
        address = f"http://{_display_host(arguments.host)}:{listener.getsockname()[1]}"
        address += f"/?key={key}" if key else ""
        print(f"planish console: {address}  (Ctrl-C ends it)", flush=True)
        if arguments.open:
            webbrowser.open(address)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
        )
        uvicorn.Server(config).run([listener])


def _directories(given: list[Path]) -> list[Path]:
    """Return the given directories; by default `runs` if it exists, else the current directory."""
    if given:
        return [directory.expanduser() for directory in given]
    return [Path("runs") if Path("runs").is_dir() else Path(".")]


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises UserError if the address is not this machine's loopback
    interface, or if the port is in use.
    """
    if not is_loopback(host):
        raise UserError(
            f"--host {host}: the console has no keys, so it listens on this machine only; to read "
            f"it from another machine, use a tunnel: ssh -L {port}:127.0.0.1:{port} MACHINE"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(
            f"--port {port}: {error}; give another port, or 0 for any free one"
        ) from error
    return listener


def _display_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
