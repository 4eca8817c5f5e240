"""The table of commands: each is there, none is loaded before it is named."""

import subprocess
import sys
from importlib import import_module

import pytest

from planish.commands.cli import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_has_help_of_its_own(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command.name, "--help"])
    assert ended.value.code == 0
    assert command.name in capsys.readouterr().out
    module = import_module(command.module)
    assert callable(module.add_arguments)
    assert callable(module.run)


def test_help_names_all_commands_and_loads_none():
    program = (
        "import sys\nfrom planish.commands.cli import main\n"
        "try: main(['--help'])\nfinally: print(sorted({'torch', 'starlette', 'transformers', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, loaded = done.stdout.strip().splitlines()
    assert loaded == "[]"
    assert all(any(command.name in line for line in lines) for command in COMMANDS)


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["plot"]])
def test_what_is_no_command_is_told_how_to_be_one(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: planish" in capsys.readouterr().err
