"""A wrong call that ends a user's own script prints its message alone, and hides nothing else."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import chz
import pytest

from planish.errors import UserError
from planish.rl.types import RLDatasetBuilder
from planish.tensors import TensorData
from planish.training import train_rl
from planish.training.rl_config import Config


@chz.chz
class Builder(RLDatasetBuilder):
    """A dataset builder with one of three mistakes."""

    mistake: str

    async def __call__(self) -> Any:
        """Return a wrong result, call planish wrongly, or raise an error of its own."""
        if self.mistake == "result":
            return []
        if self.mistake == "call":
            return TensorData([1], shape=[2])
        raise KeyError("own")


@pytest.fixture
def printed(service, tmp_path, monkeypatch, capsys):
    """A function that returns what the interpreter prints after a run with the given mistake."""

    def end_with(mistake: str, hook: Callable[..., Any] = sys.__excepthook__) -> str:
        monkeypatch.setattr(sys, "excepthook", hook)
        config = Config(
            dataset_builder=Builder(mistake=mistake),
            model_name="tiny",
            learning_rate=0.1,
            max_tokens=8,
            log_path=str(tmp_path / "run"),
        )
        with pytest.raises((UserError, KeyError)) as raised:
            asyncio.run(train_rl.main(config, service))
        raised.value.add_note("a note")
        sys.excepthook(raised.type, raised.value, raised.tb)
        return capsys.readouterr().err

    return end_with


def test_a_wrong_result_ends_a_script_with_its_message_and_notes(printed):
    assert printed("result") == (
        "error: dataset_builder returned a list; return a tuple of two datasets, for training and "
        "for evaluation (or None)\n  a note\n"
    )


@pytest.mark.parametrize("mistake", ["call", "own"])
def test_a_mistake_within_the_environment_keeps_its_traceback(printed, mistake):
    lines = printed(mistake).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert any("test_script_errors.py" in line and "__call__" in line for line in lines)


def test_an_exception_hook_of_the_program_is_kept(printed):
    seen = []

    def own_hook(kind: type[BaseException], error: BaseException, frames: Any) -> None:
        seen.append(str(error))

    assert printed("result", own_hook) == ""
    assert seen[0].startswith("dataset_builder returned a list")
