"""The modules for scheduling, packing and stop conditions do not import torch."""

import subprocess
import sys

import pytest

MODULES = (
    "engine.sampling.scheduler",
    "engine.sampling.prefix_cache",
    "engine.sampling.stopping",
    "engine.sampling.randomness",
    "engine.fairness",
    "model.prefix_tree",
    "model.positions",
)


@pytest.mark.parametrize("module", MODULES)
def test_the_module_imports_without_torch(module):
    code = f"import sys, planish.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
