"""What an installed planish needs besides its modules is in the package."""

import tomllib
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "planish"


def test_every_file_that_is_no_module_is_package_data():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["planish"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert {"kernels.cpp", "tiles.h"} <= {path.name for path in others}
    assert others <= packed
