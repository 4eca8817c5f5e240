"""`planish models`: what can be loaded as a base model here, and from where."""

import argparse

from planish.model.listing import print_models
from planish.model.sources import DEFAULT_MODEL, resolve_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fetch",
        metavar="NAME",
        nargs="?",
        const=DEFAULT_MODEL,
        help="get ready for NAME (by default the embedded model): download, convert, compile, instead of listing",
    )


def run(arguments: argparse.Namespace) -> None:
    if arguments.fetch is not None:
        print(f"{arguments.fetch}: {resolve_model(arguments.fetch)}")
        from planish.model.kernels.cpp import cpu  # and torch, which a list does not wait for

        cpu.loaded()  # compiled now rather than at the first sample
    else:
        print_models()
