"""The script that docs/reference/metrics.md names runs, here two steps on a tiny random model in the
place of the embedded one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planish.model.sources.resolve import DEFAULT_MODEL
from planish.testing import tiny_model

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path, planish_home):
    assert "python examples/reward_e.py" in (ROOT / "docs/reference/metrics.md").read_text()
    script = (ROOT / "examples/reward_e.py").read_text()
    assert "range(10)" in script
    assert "max_tokens=96" in script
    (tmp_path / "script.py").write_text(
        script.replace("range(10)", "range(2)").replace("max_tokens=96", "max_tokens=8")
    )
    environment = os.environ | {
        "PLANISH_MODELS": f"{DEFAULT_MODEL}={tiny_model(tmp_path / 'model')}",
        "PLANISH_HOME": str(planish_home(tmp_path / "home")),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "error::ResourceWarning", "script.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    form = r"\d+: reward [\d.]+, \d+ tokens, \d+% cut off, entropy [\d.]+"
    assert [bool(re.fullmatch(form, line)) for line in done.stdout.splitlines()] == [True] * 2
