"""`planish serve`: serve base models to the tinker SDK, planish clients and OpenAI clients."""

from __future__ import annotations

import argparse

from planish.console.server_app import console_routes
from planish.export.importing import import_adapter
from planish.server.options import add_arguments, options_of
from planish.server.serve import serve

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives. Return the exit status, which is 0 after a graceful stop."""
    return serve(options_of(arguments), import_adapter, console_routes)
