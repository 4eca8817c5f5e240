"""The choice of the device, and warnings about unused GPUs."""

import pytest
import torch

from planish.engine import settings
from planish.engine.base_models import BaseModel, is_wsl
from planish.engine.memory import ModelMemory
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.settings import EngineSettings, choose_device
from planish.engine.training.trainer_settings import TrainerSettings
from planish.errors import UserError
from planish.testing import tiny_model


def test_a_model_is_loaded_with_its_gpu_as_current_device(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def set_device(device: torch.device) -> None:
        raise RuntimeError(f"current: {device}")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    directory, of_one = tiny_model(tmp_path), EngineSettings(device="cuda:1")
    nothing = ModelMemory(0, 0, SamplerSettings(), 0, 0, TrainerSettings(), 0)
    with pytest.raises(RuntimeError, match="current: cuda:1"):
        BaseModel(directory, of_one, nothing)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Fake the files of an NVIDIA driver that torch cannot use."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.0")
    monkeypatch.setattr(
        settings, "_NVIDIA_DRIVER_FILES", (tmp_path / "missing", tmp_path / "version")
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings._warn_of_unused_gpu.cache_clear()
    yield
    settings._warn_of_unused_gpu.cache_clear()


def test_a_driver_that_is_too_old_is_reported_once(monkeypatch, driver, caplog):
    def init() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nMore."
        )

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    assert choose_device("auto") == choose_device("auto") == torch.device("cpu")
    (line,) = caplog.messages
    assert line == (
        "device='auto' takes the CPU. This machine has an NVIDIA GPU that torch for CUDA 13.0 "
        "cannot use (The NVIDIA driver on your system is too old (found version 11040)): update "
        "the NVIDIA driver, or install a torch for the CUDA of the driver; device='cpu' silences "
        "this"
    )
    with pytest.raises(UserError, match=r"device='cuda:0'.*update the NVIDIA driver"):
        choose_device("cuda:0")


def test_a_cpu_build_of_torch_on_a_gpu_machine_is_reported(monkeypatch, driver):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a torch for CUDA" in str(settings.unused_gpu())


def test_a_gpu_hidden_by_the_environment_is_not_reported(monkeypatch, driver, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") == torch.device("cpu")
    assert not caplog.messages


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_device_cuda_resolves_to_an_indexed_gpu(monkeypatch, name, number):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made_current: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", made_current.append, raising=False)
    torch.cuda.set_device(choose_device(name))
    assert made_current == [number]


def test_wsl_is_detected_by_its_kernel_release(tmp_path):
    release = tmp_path / "osrelease"
    for text, expected in (
        ("5.15.167.4-microsoft-standard-WSL2\n", True),
        ("6.8.0-generic\n", False),
    ):
        release.write_text(text)
        assert is_wsl(release) == expected
    assert not is_wsl(tmp_path / "missing")
