"""Arguments of the command `planish`, each declared in one call."""

import argparse
from collections.abc import Sequence
from typing import Any, Protocol

from planish.errors import UserError


class AddArgument(Protocol):
    """Adds one argument to a parser. `argument_adder` makes these functions."""

    def __call__(self, name: str, help: str, **options: Any) -> None:
        """`name` contains the option strings and the metavar, as they appear in the help:
        "--limit N" and "--yes -y" are options, and "PATH" is a positional argument.

        `options` are those of `ArgumentParser.add_argument`. An option with a default has the type
        of this default, and its help ends with the default, unless it names the default itself.
        """


def argument_adder(
    parser: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup,
) -> AddArgument:
    """Return a function that adds arguments to `parser`."""

    def add(name: str, help: str, **options: Any) -> None:
        words = name.split()
        flags = [word for word in words if word.startswith("-")]
        if flags != words:
            options["metavar"] = words[-1]
        if not flags:
            options.setdefault("dest", words[-1].lower())
        default = options.get("default")
        if default is not None and "action" not in options:
            options.setdefault("type", type(default))
            help += "" if "%(default)s" in help else " (default: %(default)s)"
        parser.add_argument(*flags, help=help, **options)

    return add


def parse_pairs(option: str, form: str, entries: Sequence[str]) -> dict[str, str]:
    """Return the entries NAME=VALUE of a repeated option as a dictionary.

    `option` and `form`, such as "--model" and "NAME=PATH", appear in the UserError for an entry
    that has another form or repeats a name.
    """
    pairs: dict[str, str] = {}
    for entry in entries:
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not (name and equals and value):
            raise UserError(f"{option} {entry!r}: write {form}")
        if name in pairs:
            raise UserError(f"{option} names {name!r} twice; keep one")
        pairs[name] = value
    return pairs
