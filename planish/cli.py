"""The command `planish`: what can be loaded as a base model here, and from where.

planish models            list
planish models --fetch    get the embedded model now, rather than at its first use
"""

import argparse
import sys
from collections.abc import Sequence

from planish.errors import PlanishError
from planish.model.listing import print_models
from planish.model.sources import DEFAULT_MODEL, resolve_model


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 on success, 1 with a message on stderr when it could not be done."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.fetch is not None:
            print(f"{arguments.fetch}: {resolve_model(arguments.fetch)}")
        else:
            print_models()
    except PlanishError as error:
        print(f"planish: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="planish", description="Reinforcement learning of language models, locally.")
    commands = parser.add_subparsers(dest="command", required=True)
    models = commands.add_parser("models", help="list the base models that can be loaded, and from where")
    models.add_argument(
        "--fetch",
        metavar="NAME",
        nargs="?",
        const=DEFAULT_MODEL,
        help="download and cache NAME (by default the embedded model) instead of listing",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
