"""The body of a forward_backward as older SDKs write it. The server only reads this encoding."""

from typing import Any

from planish.service import ForwardBackward
from planish.types import Datum
from planish.wire.tensors import model_input_to_json, tensor_to_json


def forward_backward_to_json(operation: ForwardBackward, seq_id: int) -> dict[str, Any]:
    forward_backward_input = {
        "data": [_datum_to_json(datum) for datum in operation.data],
        "loss_fn": operation.loss_fn,
        "loss_fn_config": dict(operation.loss_fn_config),
    }
    name = "forward_input" if operation.forward_only else "forward_backward_input"
    return {"model_id": operation.model_id, "seq_id": seq_id, name: forward_backward_input}


def _datum_to_json(datum: Datum) -> dict[str, Any]:
    tensors = {name: tensor_to_json(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return {"model_input": model_input_to_json(datum.model_input), "loss_fn_inputs": tensors}
