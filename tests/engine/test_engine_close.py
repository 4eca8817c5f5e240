"""An engine can be closed in the middle of a forward pass."""

import threading
from typing import Any

import pytest

from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.errors import EngineClosedError
from planish.model.layers.linear import PackedLinear
from planish.service import CreateModel, CreateSampler, ForwardBackward, Sample
from planish.testing import tiny_model
from planish.types import Datum, LoraConfig, ModelInput, SamplingParams

WAIT = 60.0
TOKENS = list(range(64))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "tiny", layers=4))


@pytest.mark.parametrize("at", ["matmul", "matmul_backward"])
def test_a_pass_ends_at_the_next_matmul(model, tmp_path, monkeypatch, at):
    """Closing does not wait for the rest of a pass of many seconds."""
    engine = Engine({"m": model}, tmp_path, EngineSettings(dtype="float32"))
    engine.submit(CreateModel("a", "m", LoraConfig(rank=4))).result(WAIT)
    reached, go_on = threading.Event(), threading.Event()
    matmuls = 0
    whole = getattr(PackedLinear, at)

    def product(self: PackedLinear, *arguments: Any) -> Any:
        nonlocal matmuls
        found = whole(self, *arguments)
        matmuls += 1
        if matmuls == 3:
            reached.set()
            assert go_on.wait(WAIT)
        return found

    monkeypatch.setattr(PackedLinear, at, product)
    data = [Datum(ModelInput.from_ints(TOKENS), {"target_tokens": TOKENS})]
    backward = engine.submit(ForwardBackward("a", data, "cross_entropy"))
    assert reached.wait(WAIT)
    closing = threading.Thread(target=engine.close, args=(False,))
    closing.start()
    while not engine._thread._is_aborted:
        pass
    go_on.set()
    closing.join(WAIT)
    assert matmuls == 3
    with pytest.raises(EngineClosedError, match="closed before this operation was done"):
        backward.result(WAIT)


def test_a_prompt_ends_at_the_next_matmul(model, tmp_path, monkeypatch):
    engine = Engine({"m": model}, tmp_path, EngineSettings(dtype="float32", deterministic=True))
    engine.submit(CreateSampler("s", "m")).result(WAIT)
    whole = PackedLinear.matmul

    def product(self: PackedLinear, *arguments: Any) -> Any:
        engine._thread.stop(finish=False)  # from the engine's own thread, as a dropped client does
        return whole(self, *arguments)

    monkeypatch.setattr(PackedLinear, "matmul", product)
    params = SamplingParams(max_tokens=8, stop=[])
    answer = engine.submit(Sample("s", ModelInput.from_ints(TOKENS), 1, params))
    with pytest.raises(EngineClosedError, match="closed before this operation was done"):
        answer.result(WAIT)
    engine.close()
