"""Defaults that depend on the device."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from planish.engine.base_models import BaseModel
from planish.engine.sampler import SamplerSettings
from planish.engine.settings import EngineSettings, choose_device
from planish.engine.trainer import TrainerSettings
from planish.model.config import ModelConfig
from planish.testing import tiny_model

GPU = torch.device("cuda")


@pytest.fixture
def of_memory(monkeypatch):
    def set_memory(gib: int) -> None:
        properties = SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return set_memory


def test_a_gpu_keeps_a_share_of_its_memory_for_keys_and_values(of_memory):
    of_memory(80)
    assert SamplerSettings.on(GPU).kv_cache_bytes == 20 << 30
    assert SamplerSettings.on(GPU).prefix_cache_bytes == 5 << 30


def test_a_model_is_loaded_with_its_gpu_current(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def set_device(device: torch.device) -> None:
        raise RuntimeError(f"current: {device}")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(RuntimeError, match="current: cuda:1"):
        BaseModel(tiny_model(tmp_path), EngineSettings(device="cuda:1"))


@pytest.mark.parametrize(("gib", "tokens"), [(1, 16384), (0, 1024)])
def test_a_gpu_trains_in_the_largest_micro_batches_that_fit(gib, tokens, tmp_path, of_memory):
    of_memory(gib)
    config = ModelConfig.from_directory(tiny_model(tmp_path))
    assert TrainerSettings.on(GPU, config).micro_batch_tokens == tokens


def test_float32_logits_count_where_a_gpu_s_micro_batch_is_chosen(tmp_path, of_memory):
    """Of Qwen3-0.6B they are a third of what is kept: 16,384 rows would keep 30 of 80 GB."""
    config = dataclasses.replace(
        ModelConfig.from_directory(tiny_model(tmp_path)),
        **{"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16},
        **{"num_kv_heads": 8, "head_dim": 128},
    )
    kept = [TrainerSettings(16384).activation_bytes(config, logit_itemsize=size) for size in (2, 4)]
    assert kept[1] - kept[0] == 2 * 16384 * 151_936
    of_memory(80)
    assert kept[0] < (80 << 30) // 3 < kept[1]
    assert TrainerSettings.on(GPU, config).micro_batch_tokens == 8192


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_a_number_by_which_torch_makes_it_current(monkeypatch, name, number):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made_current: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", made_current.append, raising=False)
    torch.cuda.set_device(choose_device(name))
    assert made_current == [number]


def test_what_is_given_goes_before_defaults(tmp_path):
    config = ModelConfig.from_directory(tiny_model(tmp_path))
    assert EngineSettings(device="cpu").sampler == SamplerSettings()
    assert EngineSettings(device="cpu").trainer(config) == TrainerSettings()
    given = EngineSettings(device="cpu", max_batch=3, micro_batch_tokens=100)
    assert given.sampler == SamplerSettings(max_batch=3)
    assert given.trainer(config) == TrainerSettings(100)
