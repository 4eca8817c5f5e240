"""The environments that peers run in, one virtual environment each, made from the package index
when first needed.

    python benchmarks/environments.py            all of them
    python benchmarks/environments.py vllm       one

All that is in one is pinned in peers/requirements-NAME.txt. It lies in .peers/NAME of the checkout.
"""

import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
HOME = Path(__file__).parents[1] / ".peers"
# A wheel of exactly this torch is installed first, so that no other package draws in a larger one.
TORCH = "torch==2.13.0"


def names() -> list[str]:
    return sorted(
        path.stem.removeprefix("requirements-") for path in PEERS.glob("requirements-*.txt")
    )


def python_of(name: str) -> Path:
    """The interpreter of an environment, which is made if it is not there as its requirements say."""
    requirements = PEERS / f"requirements-{name}.txt"
    directory = HOME / name
    python, installed = directory / "bin" / "python", directory / "installed.txt"
    if not installed.is_file() or installed.read_text() != requirements.read_text():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        if "\ntorch==" in requirements.read_text():
            subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, "--no-deps", "-r", requirements], check=True)
        installed.write_text(requirements.read_text())
    return python


if __name__ == "__main__":
    for name in sys.argv[1:] or names():
        print(python_of(name))
