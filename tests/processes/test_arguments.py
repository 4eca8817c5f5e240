"""`argument_adder` declares an argument from its help line; `parse_pairs` reads NAME=VALUE."""

import argparse
from pathlib import Path

import pytest

from planish.errors import UserError
from planish.processes.arguments import argument_adder, parse_pairs


@pytest.fixture(name="parser")
def _parser():
    return argparse.ArgumentParser(prog="program")


def test_the_name_has_the_flags_and_the_metavar(parser):
    add = argument_adder(parser)
    add("FILE", "file to read", type=Path)
    add("--limit -n N", "maximum number of rows", type=int)
    add("--yes -y", "ask nothing", action="store_true")
    arguments = parser.parse_args(["rows.jsonl", "-n", "3", "-y"])
    assert vars(arguments) == {"file": Path("rows.jsonl"), "limit": 3, "yes": True}
    assert "--limit" in parser.format_usage()
    assert "ask nothing" in parser.format_help()


def test_a_default_gives_the_type_and_is_part_of_the_help(parser):
    add = argument_adder(parser)
    add("--temperature T", "sampling temperature", default=0.7)
    add("--port", "port (%(default)s: the usual one)", default=8000)
    assert vars(parser.parse_args(["--temperature", "1"])) == {"temperature": 1.0, "port": 8000}
    text = " ".join(parser.format_help().split())
    assert "sampling temperature (default: 0.7)" in text
    assert "port (8000: the usual one)" in text
    assert text.count("default: ") == 1


def test_pairs_of_a_repeated_option():
    assert parse_pairs("--model", "NAME=PATH", ["a=/x", " b = /y=z "]) == {"a": "/x", "b": "/y=z"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [(["a"], "--model 'a': write NAME=PATH"), (["a=x", "a=y"], "--model names 'a' twice")],
)
def test_an_invalid_pair_names_the_option(entries, message):
    with pytest.raises(UserError, match=message):
        parse_pairs("--model", "NAME=PATH", entries)
