"""Probes of ServiceClient."""

from __future__ import annotations

import importlib

from conformance.bench import Bench, awaited, probe, value


@probe("ServiceClient.get_server_capabilities")
def _(bench: Bench) -> None:
    models = value(bench.service.get_server_capabilities()).supported_models
    assert bench.base_model in [model.model_name for model in models]


@probe("ServiceClient.get_server_capabilities_async")
def _(bench: Bench) -> None:
    assert awaited(bench.service.get_server_capabilities_async()).supported_models


@probe("ServiceClient.create_lora_training_client")
def _(bench: Bench) -> None:
    client = value(
        bench.service.create_lora_training_client(
            bench.base_model, rank=8, seed=3, train_mlp=False, user_metadata={"key": "value"}
        )
    )
    assert client.get_info().lora_rank == 8


@probe("ServiceClient.create_lora_training_client_async")
def _(bench: Bench) -> None:
    assert awaited(
        bench.service.create_lora_training_client_async(bench.base_model, rank=4)
    ).model_id


@probe("ServiceClient.create_lora_training_client", "a base model that is not served", refused=True)
def _(bench: Bench) -> None:
    value(bench.service.create_lora_training_client("nobody/has-this-model"))


@probe("ServiceClient.create_lora_training_client", "Dimuon", refused=True)
def _(bench: Bench) -> None:
    config = importlib.import_module("tinker.types.optimizer").DimuonOptimizerConfig()
    value(bench.service.create_lora_training_client(bench.base_model, optimizer=config))


@probe("ServiceClient.create_training_client_from_state")
def _(bench: Bench) -> None:
    client = value(bench.service.create_training_client_from_state(bench.state))
    bench.trained("cross_entropy", [bench.datum()], client=client)


@probe("ServiceClient.create_training_client_from_state_async")
def _(bench: Bench) -> None:
    assert awaited(bench.service.create_training_client_from_state_async(bench.state)).model_id


@probe("ServiceClient.create_training_client_from_state_with_optimizer")
def _(bench: Bench) -> None:
    training = bench.new_training()
    for _ in range(2):
        bench.trained("cross_entropy", [bench.datum()], client=training)
        value(training.optim_step(bench.types.AdamParams(learning_rate=1e-2)))
    path = value(training.save_state(bench.name())).path
    resumed = value(bench.service.create_training_client_from_state_with_optimizer(path))
    losses = []
    for client in (training, resumed):
        bench.trained("cross_entropy", [bench.datum()], client=client)
        value(client.optim_step(bench.types.AdamParams(learning_rate=1e-2)))
        losses.append(
            bench.trained("cross_entropy", [bench.datum()], client=client).metrics["loss:sum"]
        )
    assert losses[0] == losses[1], losses


@probe("ServiceClient.create_training_client_from_state_with_optimizer_async")
def _(bench: Bench) -> None:
    assert awaited(
        bench.service.create_training_client_from_state_with_optimizer_async(bench.state)
    ).model_id


@probe("ServiceClient.create_sampling_client", "base model")
def _(bench: Bench) -> None:
    assert bench.sample().sequences


@probe("ServiceClient.create_sampling_client", "checkpoint")
def _(bench: Bench) -> None:
    sampler = value(bench.service.create_sampling_client(model_path=bench.weights))
    assert sampler.get_base_model() == bench.base_model
    assert bench.sample(sampler=sampler).sequences


@probe("ServiceClient.create_sampling_client_async")
def _(bench: Bench) -> None:
    assert bench.sample(
        sampler=awaited(bench.service.create_sampling_client_async(base_model=bench.base_model))
    )


@probe("ServiceClient.create_sampling_client", "record_stability_info", refused=True)
def _(bench: Bench) -> None:
    options = {"base_model": bench.base_model, "record_stability_info": True}
    bench.sample(sampler=value(bench.service.create_sampling_client(**options)))


@probe("ServiceClient.create_custom_loss", "runs in the client")
def _(bench: Bench) -> None:
    def weighted(logprobs, weights):
        loss = -(logprobs * weights).sum()
        return loss, {"custom/weighted:sum": loss}

    handle = value(bench.service.create_custom_loss(weighted, {"logprobs": 1, "weights": 1}))
    output = value(
        bench.training.forward_backward_custom([bench.datum(weights=[0.0, 1.0, 1.0, 1.0])], handle)
    )
    assert output.metrics["loss:sum"] > 0


@probe("ServiceClient.copy_weights")
def _(bench: Bench) -> None:
    copying = bench.sdk.ServiceClient(project_id="archive")
    path = value(copying.copy_weights(bench.state))
    assert path != bench.state
    assert value(bench.service.create_training_client_from_state(path)).model_id
    value(copying.close("success"))


@probe("ServiceClient.create_rest_client")
def _(bench: Bench) -> None:
    assert value(bench.service.create_rest_client().list_sessions()).sessions


@probe("ServiceClient.close")
def _(bench: Bench) -> None:
    service = bench.sdk.ServiceClient()
    value(service.create_sampling_client(base_model=bench.base_model))
    value(service.close("success", detail="done"))


@probe("ServiceClient.get_console_url")
def _(bench: Bench) -> None:
    assert bench.service.get_console_url().startswith("https://")


@probe("ServiceClient.get_telemetry")
def _(bench: Bench) -> None:
    telemetry = bench.service.get_telemetry()
    if telemetry is not None:  # logits-sdk has it off
        telemetry.log("conformance", {"key": "value"})
        value(bench.service.holder.run_coroutine_threadsafe(telemetry._flush()))


@probe("ServiceClient.holder")
def _(bench: Bench) -> None:
    assert bench.service.holder.get_loop()
