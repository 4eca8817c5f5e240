"""Decisions are plain Python: what schedules, packs and stops loads no torch, so its tests take
milliseconds.
"""

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
def test_it_loads_no_torch(module):
    code = f"import sys, planish.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
