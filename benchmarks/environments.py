"""The peers' virtual environments, installed from the package index when they are first needed.

    python benchmarks/environments.py            all of them
    python benchmarks/environments.py vllm       one

peers/requirements-NAME.txt pins all packages. The environment is .peers/NAME in the checkout.
"""

import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
HOME = Path(__file__).parents[1] / ".peers"
# Exactly this torch wheel is installed first, so that no other package installs a larger one.
TORCH = "torch==2.13.0"


def names() -> list[str]:
    return sorted(
        path.stem.removeprefix("requirements-") for path in PEERS.glob("requirements-*.txt")
    )


def python_of(name: str) -> Path:
    """Return the interpreter of an environment. Installs it if missing or out of date."""
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
