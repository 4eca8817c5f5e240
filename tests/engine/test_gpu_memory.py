"""The planned memory of training is that of the live tensors (tools/gpu_memory.py)."""

import subprocess
import sys

import gpu_memory
import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without a GPU only")
def test_the_plan_is_close_to_the_peak_of_a_pretended_gpu():
    done = subprocess.run(
        [sys.executable, gpu_memory.__file__, "qwen3", "gemma3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 2 * 6
