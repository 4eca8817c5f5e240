"""The planned memory of training is that of the live tensors (tools/gpu_memory.py)."""

import subprocess
import sys

import gpu_memory
import pytest
import torch

pytest.importorskip("triton")

MODES = {
    **dict.fromkeys(("qwen3", "gemma3", "olmo3"), tuple(gpu_memory.MODES)),
    **dict.fromkeys(("lfm2", "glm4_moe"), ("stored", "prefill", "recomputed", "offloaded")),
    "qwen3_5": ("stored", "prefill", "recomputed"),
    **dict.fromkeys(("qwen3_moe", "qwen3_5_moe", "gemma2"), ("stored",)),
}
"""The program compares all families in all modes by default."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without a GPU only")
@pytest.mark.parametrize("family", MODES)
def test_the_plan_is_close_to_the_peak_of_a_pretended_gpu(family):
    done = subprocess.run(
        [sys.executable, gpu_memory.__file__, family, "--modes", *MODES[family]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    # Each mode has two lengths. A prefill has one number, and so has a family with a score cap.
    num_single = ("prefill" in MODES[family]) + (family == "gemma2")
    assert len(done.stdout.splitlines()) == 2 * len(MODES[family]) - num_single
