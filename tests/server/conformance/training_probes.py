"""Probes of TrainingClient: gradients and steps."""

from __future__ import annotations

import importlib
import math
from typing import Any

from conformance.bench import Bench, awaited, probe, value


@probe("TrainingClient.get_info")
def _(bench: Bench) -> None:
    info = bench.training.get_info()
    assert info.model_data.model_name == bench.base_model


@probe("TrainingClient.get_info_async")
def _(bench: Bench) -> None:
    assert awaited(bench.training.get_info_async()).model_data.model_name == bench.base_model


@probe("TrainingClient.get_tokenizer", "no network, client on the server's machine")
def _(bench: Bench) -> None:
    assert bench.training.get_tokenizer().encode("hello")


@probe("TrainingClient.forward")
def _(bench: Bench) -> None:
    output = value(bench.training.forward([bench.datum(), bench.datum()], "cross_entropy"))
    assert [len(datum["logprobs"].tolist()) for datum in output.loss_fn_outputs] == [4, 4]


@probe("TrainingClient.forward_async")
def _(bench: Bench) -> None:
    assert awaited(bench.training.forward_async([bench.datum()], "cross_entropy")).loss_fn_outputs


def _loss_probe(loss_fn: str, config: dict[str, float] | None = None, **inputs: Any) -> None:
    @probe("TrainingClient.forward_backward", loss_fn)
    def _(bench: Bench) -> None:
        bench.trained(loss_fn, [bench.rl_datum(**inputs), bench.rl_datum(**inputs)], config)


@probe("TrainingClient.forward_backward", "cross_entropy")
def _(bench: Bench) -> None:
    plain = bench.trained("cross_entropy", [bench.datum(weights=[1.0, 1.0, 1.0, 1.0])]).metrics[
        "loss:sum"
    ]
    negative = bench.trained(
        "cross_entropy", [bench.datum(weights=[-2.0, -2.0, -2.0, -2.0])]
    ).metrics["loss:sum"]
    assert math.isclose(negative, -2 * plain, rel_tol=1e-4)


@probe("TrainingClient.forward_backward", "cross_entropy with K targets per position")
def _(bench: Bench) -> None:
    targets = [[2, 3], [3, 4], [4, 5], [5, 6]]
    data = [bench.datum(target_tokens=targets, weights=[[0.5, 0.5]] * 4)]
    assert bench.trained("cross_entropy", data).loss_fn_outputs[0]["logprobs"].shape == [4, 2]


@probe("TrainingClient.forward_backward", "cross_entropy with sparse tensors")
def _(bench: Bench) -> None:
    torch = importlib.import_module("torch")
    targets, weights = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8)
    targets[:, 0] = torch.tensor([2, 3, 4, 5])
    weights[:, 0] = 1.0
    sparse = bench.trained(
        "cross_entropy", [bench.datum(target_tokens=targets, weights=weights)]
    ).metrics["loss:sum"]
    dense = bench.trained("cross_entropy", [bench.datum(weights=[1.0] * 4)]).metrics["loss:sum"]
    assert math.isclose(sparse, dense, rel_tol=1e-4)


_loss_probe("importance_sampling")
_loss_probe("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})
_loss_probe("cispo")
_loss_probe("dro", {"beta": 0.05})


@probe("TrainingClient.forward_backward", "gspo")
def _(bench: Bench) -> None:
    array = importlib.import_module("numpy").array([0.0, 1.0, 1.0, 1.0], dtype="float32")
    bench.trained(
        "gspo", [bench.rl_datum(sequence_ratio_mask=bench.types.TensorData.from_numpy(array))]
    )


@probe("TrainingClient.forward_backward", "more than one request's worth of datums")
def _(bench: Bench) -> None:
    assert (
        len(bench.trained("cross_entropy", [bench.datum() for _ in range(1500)]).loss_fn_outputs)
        == 1500
    )


@probe("TrainingClient.forward_backward", "stable_reinforce", refused=True)
def _(bench: Bench) -> None:
    client = bench.new_training()
    value(client.forward_backward([bench.rl_datum()], "stable_reinforce"))


@probe("TrainingClient.forward_backward", "an image", refused=True)
def _(bench: Bench) -> None:
    chunk = bench.types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=4)
    datum = bench.types.Datum(
        model_input=bench.types.ModelInput(chunks=[chunk]),
        loss_fn_inputs={"target_tokens": [1, 2, 3, 4]},
    )
    value(bench.new_training().forward_backward([datum], "cross_entropy"))


@probe("TrainingClient.forward_backward", "a token outside the vocabulary", refused=True)
def _(bench: Bench) -> None:
    value(
        bench.new_training().forward_backward(
            [bench.datum(target_tokens=[10**8] * 4)], "cross_entropy"
        )
    )


@probe("TrainingClient.forward_backward_async")
def _(bench: Bench) -> None:
    assert awaited(bench.training.forward_backward_async([bench.datum()], "cross_entropy")).metrics


def _squared(data: Any, logprobs: Any) -> Any:
    loss = sum((part**2).sum() for part in logprobs)
    return loss, {"squared": float(loss)}


@probe("TrainingClient.forward_backward_custom")
def _(bench: Bench) -> None:
    output = value(bench.training.forward_backward_custom([bench.datum(), bench.datum()], _squared))
    assert output.metrics["squared"] > 0


@probe("TrainingClient.forward_backward_custom_async")
def _(bench: Bench) -> None:
    assert (
        awaited(bench.training.forward_backward_custom_async([bench.datum()], _squared)).metrics[
            "squared"
        ]
        > 0
    )


@probe("TrainingClient.optim_step")
def _(bench: Bench) -> None:
    training = bench.new_training()
    params = bench.types.AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)
    losses = []
    for _ in range(4):
        pending, step = (
            training.forward_backward([bench.datum()], "cross_entropy"),
            training.optim_step(params),
        )
        losses.append(value(pending).metrics["loss:sum"])
        assert set(value(step).metrics) == {"grad_norm", "adam_step"}, (
            "loops put these into rows that have a step of their own"
        )
    assert losses[-1] < losses[0]


@probe("TrainingClient.optim_step_async")
def _(bench: Bench) -> None:
    bench.trained("cross_entropy", [bench.datum()])
    assert (
        awaited(bench.training.optim_step_async(bench.types.AdamParams(learning_rate=1e-3)))
        is not None
    )


@probe("TrainingClient.optim_step", "Dimuon", refused=True)
def _(bench: Bench) -> None:
    value(bench.new_training().optim_step(bench.of("DimuonParams")(learning_rate=1e-3)))


@probe("TrainingClient.save_state")
def _(bench: Bench) -> None:
    name = bench.name()
    path = value(bench.training.save_state(name, ttl_seconds=7200)).path
    assert path == f"tinker://{bench.training.model_id}/weights/{name}"


@probe("TrainingClient.optim_step", "sent with a gradient that was refused", refused=True)
def _(bench: Bench) -> None:
    """What was pipelined is applied as a whole or not at all."""
    training, params = bench.new_training(), bench.types.AdamParams(learning_rate=1e-2)
    good = training.forward_backward([bench.datum()], "cross_entropy")
    refused = training.forward_backward([bench.datum(target_tokens=[10**8] * 4)], "cross_entropy")
    step = training.optim_step(params)
    value(good)
    try:
        value(refused)
    except Exception:
        value(step)
    raise AssertionError("a target that is no token was taken")


@probe("TrainingClient.optim_step", "after a failed gradient and its step")
def _(bench: Bench) -> None:
    training, params = bench.new_training(), bench.types.AdamParams(learning_rate=1e-2)
    overflowing = bench.rl_datum(logprobs=[-200.0] * 4, advantages=[1.0] * 4)
    pending = [
        training.forward_backward([overflowing], "importance_sampling"),
        training.optim_step(params),
    ]
    for future in pending:
        bench.fails(future, "RequestFailed", "user")
    bench.trained("cross_entropy", [bench.datum()], client=training)
    assert value(training.optim_step(params)).metrics["adam_step"] == 1.0


@probe("TrainingClient.get_console_url")
def _(bench: Bench) -> None:
    assert bench.training.model_id in bench.training.get_console_url()


@probe("TrainingClient.get_telemetry")
def _(bench: Bench) -> None:
    bench.training.get_telemetry()
