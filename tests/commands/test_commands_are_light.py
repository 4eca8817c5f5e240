"""Commands that only list something do not import torch, which takes seconds."""

import os
import subprocess
import sys

import pytest
from variants import slow_after


@pytest.mark.parametrize("command", slow_after(1, ["models", "runs", "checkpoints list"]))
def test_the_command_imports_no_torch(tmp_path, command):
    code = (
        "import sys; from planish.commands.cli import main; main(sys.argv[1:]); sys.exit('torch' "
        "in sys.modules)"
    )
    environment = os.environ | {
        "PLANISH_DATA": str(tmp_path),
        "PLANISH_HOME": str(tmp_path),
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
