"""Every command is in the table, and none is imported before it is used."""

import subprocess
import sys

import pytest

from planish.commands.cli import COMMANDS, command_module, main


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_its_own_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert command in capsys.readouterr().out
    module = command_module(command)
    assert callable(module.add_arguments)
    assert callable(module.run)


def test_help_lists_all_commands_without_importing_them():
    program = (
        "import sys\nfrom planish.commands.cli import main\n"
        "try: main(['--help'])\nfinally: print(sorted({'torch', 'starlette', 'transformers', "
        "'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, loaded = done.stdout.strip().splitlines()
    assert loaded == "[]"
    assert all(any(command in line for line in lines) for command in COMMANDS)


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["plot"]])
def test_an_unknown_command_names_the_remedy(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: planish" in capsys.readouterr().err
