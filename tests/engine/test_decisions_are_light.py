"""Decisions are plain Python: what schedules, packs and stops loads no torch, so its tests take
milliseconds.
"""

import subprocess
import sys

import pytest

MODULES = (
    "scheduler",
    "packing",
    "prefix_cache",
    "stopping",
    "fairness",
    "positions",
    "randomness",
)


@pytest.mark.parametrize("module", MODULES)
def test_it_loads_no_torch(module):
    code = f"import sys, planish.engine.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
