"""Probes of TrainingClient: saving, loading, and sampling clients of weights in training."""

from __future__ import annotations

from conformance.bench import Bench, awaited, probe, value


@probe("TrainingClient.save_state", "overwrite and user_metadata")
def _(bench: Bench) -> None:
    name = bench.name()
    value(bench.training.save_state(name))
    path = value(bench.training.save_state(name, overwrite=True, user_metadata={"step": "1"})).path
    found = {
        item.tinker_path: item for item in value(bench.rest.list_user_checkpoints()).checkpoints
    }
    assert found[path].user_metadata == {"step": "1"}


@probe("TrainingClient.save_state", "a name that is taken", refused=True)
def _(bench: Bench) -> None:
    training = bench.new_training()
    for _ in range(2):
        value(training.save_state("taken"))


@probe("TrainingClient.save_state_async")
def _(bench: Bench) -> None:
    assert awaited(bench.training.save_state_async(bench.name())).path


@probe("TrainingClient.load_state")
def _(bench: Bench) -> None:
    training = bench.new_training()
    path = value(training.save_state(bench.name())).path
    value(training.load_state(path))
    bench.trained("cross_entropy", [bench.datum()], client=training)


@probe("TrainingClient.load_state_async")
def _(bench: Bench) -> None:
    training = bench.new_training()
    awaited(training.load_state_async(value(training.save_state(bench.name())).path))


@probe("TrainingClient.load_state_with_optimizer")
def _(bench: Bench) -> None:
    training = bench.new_training()
    value(training.load_state_with_optimizer(value(training.save_state(bench.name())).path))


@probe("TrainingClient.load_state_with_optimizer_async")
def _(bench: Bench) -> None:
    training = bench.new_training()
    awaited(training.load_state_with_optimizer_async(value(training.save_state(bench.name())).path))


@probe("TrainingClient.save_weights_for_sampler")
def _(bench: Bench) -> None:
    name = bench.name()
    path = value(bench.training.save_weights_for_sampler(name, ttl_seconds=7200)).path
    assert path == f"tinker://{bench.training.model_id}/sampler_weights/{name}"


@probe("TrainingClient.save_weights_for_sampler_async")
def _(bench: Bench) -> None:
    assert awaited(bench.training.save_weights_for_sampler_async(bench.name())).path


@probe("TrainingClient.save_weights_external")
def _(bench: Bench) -> None:
    assert "/external_weights/" in bench.external
    kinds = {
        item.tinker_path: item.checkpoint_type
        for item in value(bench.rest.list_user_checkpoints()).checkpoints
    }
    assert kinds[bench.external] == "external"


@probe("TrainingClient.save_weights_external_async")
def _(bench: Bench) -> None:
    assert awaited(bench.training.save_weights_external_async(bench.name())).path


@probe("TrainingClient.save_weights_external", "encrypted for an invalid key", refused=True)
def _(bench: Bench) -> None:
    value(
        bench.new_training().save_weights_external(
            bench.name(), age_encryption_recipients=["age1qqq"]
        )
    )


@probe("TrainingClient.save_weights_and_get_sampling_client")
def _(bench: Bench) -> None:
    training = bench.new_training()
    before = value(training.save_weights_and_get_sampling_client())
    first = bench.sample(sampler=before).sequences[0].logprobs
    for _ in range(3):
        training.forward_backward([bench.datum()], "cross_entropy")
        value(training.optim_step(bench.types.AdamParams(learning_rate=5e-2)))
    after = value(training.save_weights_and_get_sampling_client())
    assert bench.sample(sampler=before).sequences[0].logprobs == first
    assert bench.sample(sampler=after).sequences[0].logprobs != first


@probe("TrainingClient.save_weights_and_get_sampling_client", "kind=inflight")
def _(bench: Bench) -> None:
    assert bench.sample(
        sampler=value(bench.training.save_weights_and_get_sampling_client(kind="inflight"))
    )


@probe("TrainingClient.save_weights_and_get_sampling_client_async")
def _(bench: Bench) -> None:
    assert bench.sample(
        sampler=awaited(bench.training.save_weights_and_get_sampling_client_async())
    )


@probe("TrainingClient.create_sampling_client")
def _(bench: Bench) -> None:
    assert bench.sample(sampler=value(bench.training.create_sampling_client(bench.weights)))


@probe("TrainingClient.create_sampling_client_async")
def _(bench: Bench) -> None:
    assert bench.sample(sampler=awaited(bench.training.create_sampling_client_async(bench.weights)))
