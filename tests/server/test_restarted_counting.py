"""logits-sdk counts a model's requests from 1 again once it has loaded a checkpoint into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from test_app import PROTOBUF, Caller, client_of, fb

from planish.wire.training import forward_backward_to_message, output_from_message


def loaded(caller: Caller) -> tuple[str, dict[str, Any]]:
    """A model into which a checkpoint was loaded, and the request that did it."""
    source = caller.model()
    path = caller.result(
        caller.post("/save_weights", {"model_id": source, "seq_id": 1, "path": "a"})
    )["path"]
    model = caller.model()
    load = {"model_id": model, "seq_id": 1, "path": path, "optimizer": False}
    assert caller.result(caller.post("/load_weights", load))["path"] == path
    return model, load


def step(caller: Caller, model: str, seq: int) -> float:
    """A gradient and a step; the number of the step."""
    caller.forward_backward(model, seq)
    return caller.result(caller.optim_step(model, seq + 1))["metrics"]["adam_step"]


def test_numbers_can_restart_after_a_load_and_survive_a_server_restart(
    tmp_path: Path, model_dir: Path
):
    with client_of(tmp_path, model_dir, None) as client:
        caller = Caller(client, "tml-any")
        model, load = loaded(caller)
        assert step(caller, model, 1) == 1
        first = caller.forward_backward(model, 3)
        assert caller.forward_backward(model, 3) == first
        assert output_from_message(caller.result(first, headers=PROTOBUF)).metrics["loss:sum"] > 0
        # The load is still itself, and is not done again.
        assert caller.post("/load_weights", load)["request_id"] == f"{model}:1"
    with client_of(tmp_path, model_dir, None) as client:
        caller = Caller(client, "tml-any")
        assert caller.forward_backward(model, 3) == first
        assert caller.result(caller.optim_step(model, 4))["metrics"]["adam_step"] == 2
        assert step(caller, model, 5) == 3


def test_numbers_that_continue_after_a_load_are_not_shifted(tmp_path: Path, model_dir: Path):
    with client_of(tmp_path, model_dir, None) as client:
        caller = Caller(client, "tml-any")
        model, _ = loaded(caller)
        assert caller.forward_backward(model, 2)["request_id"] == f"{model}:2"
        assert caller.result(caller.optim_step(model, 3))["metrics"]["adam_step"] == 1
        # Two counts are told apart only where nothing but the load was there.
        body = forward_backward_to_message(fb(model), 1)
        assert "seq_id=1" in caller.post("/forward_backward", body, 400, PROTOBUF)["detail"]


def test_a_rejected_body_uses_up_its_number_after_a_restart_of_numbers(
    tmp_path: Path, model_dir: Path
):
    with client_of(tmp_path, model_dir, None) as client:
        caller = Caller(client, "tml-any")
        model, _ = loaded(caller)
        assert step(caller, model, 1) == 1
        refused = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": "much"}}
        assert "learning_rate" in caller.post("/optim_step", refused, 400)["detail"]
        assert step(caller, model, 4) == 2
