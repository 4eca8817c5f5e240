"""Defaults that depend on the device."""

import pytest
import torch

from planish.engine.base_models import BaseModel
from planish.engine.memory import ModelMemory
from planish.engine.sampler import SamplerSettings
from planish.engine.settings import EngineSettings, choose_device
from planish.engine.trainer import TrainerSettings
from planish.testing import tiny_model


def test_a_model_is_loaded_with_its_gpu_current(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def set_device(device: torch.device) -> None:
        raise RuntimeError(f"current: {device}")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    directory, settings = tiny_model(tmp_path), EngineSettings(device="cuda:1")
    nothing = ModelMemory(0, 0, SamplerSettings(), 0, 0, TrainerSettings(), 0)
    with pytest.raises(RuntimeError, match="current: cuda:1"):
        BaseModel(directory, settings, nothing)


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_a_number_by_which_torch_makes_it_current(monkeypatch, name, number):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made_current: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", made_current.append, raising=False)
    torch.cuda.set_device(choose_device(name))
    assert made_current == [number]
