"""The package contains all files that an installed planish needs besides its modules."""

import subprocess
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
    others = {
        path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert {"kernels.cpp", "amx.h"} <= {path.name for path in others}
    assert others <= packed
