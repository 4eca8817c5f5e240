"""`planish models`: list the base models that can be loaded here, and from where."""

import argparse

from planish.model.sources.listing import print_models
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model
from planish.processes.arguments import argument_adder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish models`."""
    add = argument_adder(parser)
    add(
        "--fetch NAME",
        "download and convert the base model NAME and compile the kernels, instead of listing "
        "models (without NAME: %(const)s)",
        nargs="?",
        const=DEFAULT_MODEL,
    )


def run(arguments: argparse.Namespace) -> None:
    """List the base models, or prepare one with --fetch."""
    if arguments.fetch is not None:
        print(f"{arguments.fetch}: {resolve_model(arguments.fetch)}")
        from planish.model.kernels.cpp import ops  # also imports torch, which a list does not need

        ops.load_library()  # compile now rather than at the first sample
    else:
        print_models()
