"""The modules for scheduling, packing and stop conditions do not import torch."""

import subprocess
import sys

MODULES = (
    "engine.sampling.requests",
    "engine.sampling.scheduler",
    "engine.sampling.prefix_cache",
    "engine.sampling.stopping",
    "engine.sampling.randomness",
    "engine.fairness",
    "model.sequences.prefix_tree",
    "model.sequences.positions",
)


def test_the_modules_import_without_torch():
    program = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(f"planish.{module}")
    if "torch" in sys.modules:
        sys.exit(f"{module} imports torch")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *MODULES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
