"""The blocks of the documents that use a server, on a server with a tiny model. Each block is given
to bash as it stands; only the address of the server differs, and the line that starts one is left
out.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import PAGES, ROOT, TUTORIALS, shell_blocks
from server_process import running_server

from planish.model.sources.resolve import DEFAULT_MODEL
from planish.testing import tiny_model

for client in ("anthropic", "agents"):
    pytest.importorskip(client, reason="make test-extras runs it")
pytestmark = pytest.mark.slow

ADDRESS = "http://127.0.0.1:8000"
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    if page.relative_to(ROOT).as_posix() not in TUTORIALS
    for number, block in enumerate(shell_blocks(page))
    if "python - <<" in block or f"curl {ADDRESS}/v1/completions" in block
]
LEFT_OUT = re.compile(r"^(planish serve .*&|pip install .*)$", re.MULTILINE)
VARIABLES = {
    "OPENAI_BASE_URL": f"{ADDRESS}/v1",
    "OPENAI_API_KEY": "any",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What earlier blocks of a page have set."""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    model = tiny_model(tmp_path_factory.mktemp("model"))
    named = f"{DEFAULT_MODEL}={model}"
    with running_server(tmp_path_factory.mktemp("data"), model, "--model", named) as server:
        yield server.url


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs_with_a_server(block, url, tmp_path):
    variables = os.environ | VARIABLES
    variables |= {name: value.replace(ADDRESS, url) for name, value in VARIABLES.items()}
    # `python` is the Python of the tests, and planish is that of the repository.
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    variables["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", LEFT_OUT.sub("", block).replace(ADDRESS, url)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=variables,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_blocks_of_five_pages_are_run():
    assert len(BLOCKS) >= 7
