"""The check of the kernels on a GPU, in its own process, for the heads of common models."""

import json
from pathlib import Path

import pytest
import torch

from planish.engine.settings import head_shape, kernel_shapes
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.self_test.verdicts import read_verdicts
from planish.model.kernels.triton.families import FAMILIES
from planish.model.kernels.triton.self_test import Request, run_checks, verdict_path
from planish.testing import tiny_model

pytestmark = pytest.mark.gpu
SHAPES = {
    "Qwen3-8B": (4096, 12288, 32, 8, 128),
    "SmolLM2-135M": (576, 1536, 9, 3, 64),
}
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SHAPES)
def test_all_families_pass(tmp_path: Path, device: torch.device, name: str, dtype: str):
    if device.type == "cpu":
        pytest.skip("tests/engine/kernel_check/test_gpu_check.py has the check on a CPU")
    directory = tiny_model(tmp_path / "model", family="qwen3")
    config = json.loads((directory / "config.json").read_text())
    config |= dict(zip(NAMES, SHAPES[name], strict=True))
    (directory / "config.json").write_text(json.dumps(config))
    verdicts = run_checks(Request(str(directory), dtype, str(device), FAMILIES))
    assert [(verdict.family, verdict.reason) for verdict in verdicts] == [
        (family, "") for family in FAMILIES
    ]
    shapes = ModelConfig.from_directory(directory)
    heads = head_shape(shapes, getattr(torch, dtype))
    assert not read_verdicts(verdict_path(kernel_shapes(shapes), heads, device))
