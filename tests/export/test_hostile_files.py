"""Adapters, checkpoints and models of strangers end in a clear error, soon and in little memory."""

import resource
import time
from pathlib import Path

import pytest
import torch
from backends import load_on
from hostile_files import ADAPTERS, CHECKPOINTS, MODELS, copied
from peft_adapters import saved
from trained_adapters import Trained

from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import PlanishError
from planish.export import weights
from planish.export.importing import import_adapter
from planish.testing import tiny_model

MAX_SECONDS = 5.0
MAX_KIB = 600_000


@pytest.fixture(scope="module", name="base")
def _base(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "model", "llama", tied=True)


@pytest.fixture(scope="module", name="adapter")
def _adapter(base, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("adapter") / "adapter"
    saved(base, out, r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    return out


@pytest.fixture(name="bounded")
def _bounded():
    """Check that a test takes little time and memory."""
    start = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - start < MAX_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_KIB


def check_message(error: PlanishError, *directories: Path) -> None:
    """Check that a message is short and names the file or directory."""
    assert len(str(error)) < 9000
    assert any(str(directory) in str(error) for directory in directories), error


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", ADAPTERS)
def test_hostile_adapters_are_rejected(base, adapter, tmp_path, name):
    directory = copied(adapter, tmp_path / "adapter")
    ADAPTERS[name](directory)
    store = CheckpointStore(tmp_path / "data")
    with pytest.raises(PlanishError) as raised:
        import_adapter(directory, store, base_model=str(base))
    check_message(raised.value, directory)
    assert not (tmp_path / "data").exists()
    with pytest.raises(PlanishError) as raised:
        weights.build_hf_model(
            base_model=str(base), adapter_path=directory, output_path=tmp_path / "out"
        )
    check_message(raised.value, directory)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module", name="checkpoint")
def _checkpoint(trained) -> Trained:
    return trained("llama", kind="weights")


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_hostile_checkpoints_are_rejected(checkpoint, tmp_path, name):
    directory = copied(checkpoint.files, tmp_path / "checkpoint")
    CHECKPOINTS[name](directory)
    with pytest.raises(PlanishError) as raised:
        import_adapter(
            directory, CheckpointStore(tmp_path / "data"), base_model=str(checkpoint.base)
        )
    check_message(raised.value, directory)
    assert not (tmp_path / "data").exists()


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", MODELS)
def test_hostile_models_are_rejected(base, tmp_path, name):
    directory = copied(base, tmp_path / "model")
    MODELS[name](directory)
    with pytest.raises(PlanishError) as raised:
        load_on(directory, torch.float32, torch.device("cpu"))
    check_message(raised.value, directory)


def test_there_are_many_hostile_files():
    assert len({*ADAPTERS, *CHECKPOINTS, *MODELS}) >= 150
