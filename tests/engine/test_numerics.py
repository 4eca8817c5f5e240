"""The numerics that a loaded base model reports match its measured numerics."""

import logging

import numpy as np
import pytest
import torch
from backends import load_on
from test_sampler_equals_trainer import gap

from planish.engine.engine import Engine
from planish.engine.numerics import Numerics, describe_numerics
from planish.engine.settings import EngineSettings
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.choose import choose_backend, reference_backend
from planish.model.kernels.cpp import ops
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference.probe import probe
from planish.model.kernels.triton.families import FAMILIES
from planish.model.layers.row_tiling import FIXED, RowTiling
from planish.testing import tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HALF, FLOAT = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ModelConfig:
    path = tiny_model(tmp_path_factory.mktemp("model"), vocab_size=320)
    return ModelConfig.from_directory(path)


@pytest.fixture
def library() -> ops.Library:
    found = ops.load_library()
    if found is None or not found.has_fast_bf16_matmul():
        pytest.skip("this machine does not multiply bf16 by our kernels")
    return found


def described(backend: Backend, tiling: RowTiling | None) -> Numerics:
    backend.tiling = tiling
    return describe_numerics(backend)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("deterministic", [RowTiling(), None])
def test_planish_kernels_are_reported_as_exact(library, config, dtype, deterministic):
    found = described(choose_backend(config, dtype, CPU, False), deterministic)
    assert found.kernels.startswith("C++ kernels (")
    assert (found.torch_families, found.is_batch_invariant) == ((), True)
    assert (found.expected_kl, found.alarm_kl) == (0, 1e-6)
    assert "kl_sample_train_v2 is 0" in found.summary


def test_kernel_families_replaced_by_torch_are_named(library, config, monkeypatch):
    monkeypatch.setattr(library, "torch_families", frozenset({"matmul", "decode"}))
    backend = choose_backend(config, HALF, CPU, False)
    padded, free = described(backend, RowTiling(min_rows=4)), described(backend, None)
    assert "torch for decode, lora, matmul" in free.summary
    assert padded.is_batch_invariant
    assert padded.expected_kl == 1e-8
    assert not free.is_batch_invariant
    assert (free.expected_kl, free.alarm_kl) == (1e-3, 1e-2)
    assert "not batch-invariant" in free.summary
    assert "deterministic=True" in free.summary


def test_numerics_without_kernels_and_with_fixed_tiles(config):
    tiles = described(reference_backend(config, HALF, CPU), FIXED)
    plain = described(reference_backend(config, FLOAT, CPU), None)
    assert tiles.kernels == plain.kernels == "torch"
    assert tiles.is_batch_invariant
    assert tiles.alarm_kl == 1e-2  # only the sampler computes in tiles
    assert not plain.is_batch_invariant
    assert plain.alarm_kl == 1e-4


def test_a_gpu_reports_the_families_that_passed_the_check(config):
    assert describe_numerics(choose_backend(config, HALF, GPU, None)).kernels == "torch"
    found = describe_numerics(choose_backend(config, HALF, GPU, None, {*FAMILIES} - {"lora"}))
    assert found.summary.startswith("bfloat16 on cuda:0, Triton kernels, torch for lora; not")
    assert found.alarm_kl == 1e-2
    # The families without work for a model are not among the checked ones.
    backend = choose_backend(config, HALF, GPU, None, {*FAMILIES} - {"experts", "quantized"})
    assert describe_numerics(backend).torch_families == ()
    assert describe_numerics(backend, "nf4").torch_families == ("quantized",)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("path", ["native", "matmul", "log_sum_exp", "torch"])
def test_the_measured_logprob_gap_matches_the_reported_one(
    library, path, dtype, tmp_path, monkeypatch
):
    """The gap is measured between sampler and trainer of a small model, on each kernel path."""
    if path == "torch":
        monkeypatch.setattr(ops, "load_library", lambda: None)
    elif path != "native":
        monkeypatch.setattr(library, "torch_families", frozenset({path, "decode"}))
    name = str(dtype).removeprefix("torch.")
    tiny_model(tmp_path, "qwen3", kv_heads=4, intermediate=128, vocab_size=320, dtype=name)
    decoder = load_on(tmp_path, dtype, CPU)
    expected = described(decoder.backend, probe(decoder.backend))
    assert 0.5 * np.mean(gap(decoder, 1.0) ** 2) <= expected.expected_kl


def test_loading_a_model_logs_its_numerics_in_one_line(tmp_path, caplog):
    model = tiny_model(tmp_path / "model")
    engine = Engine({"m": str(model)}, tmp_path / "data", EngineSettings(dtype="float32"))
    with caplog.at_level(logging.INFO, "planish"):
        numerics = engine._base_models.get("m").numerics()
    engine.close()
    [line] = [each.message for each in caplog.records if numerics.summary in each.message]
    assert line.startswith("m: ")
    assert f"threads: {torch.get_num_threads()}; memory up to " in line
