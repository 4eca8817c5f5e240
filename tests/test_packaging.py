"""The package contains all files that an installed planish needs besides its modules."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "planish"


def test_clean_leaves_the_runs_of_a_user(tmp_path):
    command = ["make", "-n", "-f", str(PACKAGE.parent / "Makefile"), "clean"]
    words = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert "runs/demo" in words
    assert "runs" not in words


def test_every_file_that_is_no_module_is_package_data():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["planish"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    # Another process may write bytecode meanwhile, first to a file with another ending.
    files = {path for path in PACKAGE.rglob("*") if path.parent.name != "__pycache__"}
    others = {path for path in files if path.is_file() and path.suffix != ".py"}
    assert {"kernels.cpp", "amx.h"} <= {path.name for path in others}
    assert others <= packed


def test_an_old_python_is_named_in_one_line(tmp_path):
    """The Python is a real one that says it is 3.10."""
    old = tmp_path / "python3.10"
    program = "import sys; sys.version_info = (3, 10, 4); exec(sys.argv[2])"
    old.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c '{program}' \"$@\"\n")
    old.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    command = ["make", "-f", str(PACKAGE.parent / "Makefile"), f"PYTHON={old}", "demo"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 2
    said, failed = made.stderr.splitlines()
    assert said == (
        f"planish needs Python 3.11 or newer, and {old} is 3.10; name another one: make "
        "PYTHON=python3.12 demo"
    )
    assert re.match(r"make(\[\d+\])?: \*\*\*", failed)
    assert not (tmp_path / ".venv").exists()
