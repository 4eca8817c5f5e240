"""planish.tinker.ServiceClient: one engine per process, and the arguments of the SDK's methods."""

import asyncio
import json

import pytest

import planish.tinker as tinker
from planish.errors import UnsupportedError, UserError
from planish.testing import tiny_model
from planish.tinker.service_client import OPTIONS_VARIABLE


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    place = tmp_path_factory.mktemp("tinker")
    model = tiny_model(place / "model")
    return {"models": {"tiny": str(model)}, "data_dir": str(place / "data")}


@pytest.fixture
def service(options, monkeypatch):
    monkeypatch.delenv(OPTIONS_VARIABLE, raising=False)
    return tinker.ServiceClient(**options, substitute_losses={"stable_reinforce": "cispo"})


def datum(**inputs):
    model_input = tinker.ModelInput.from_ints([3, 8, 13])
    return tinker.Datum(
        model_input=model_input, loss_fn_inputs={"target_tokens": [8, 13, 18]} | inputs
    )


RL = {"logprobs": [-1.0, -2.0, -1.5], "advantages": [0.5, -1.0, 0.25]}


def test_all_clients_of_a_process_share_one_engine(service, options):
    training = service.create_lora_training_client("tiny", rank=4, seed=1)
    path = training.save_weights_for_sampler("shared").result().path
    service.close("success")
    other = tinker.ServiceClient(**options, substitute_losses={"stable_reinforce": "cispo"})
    sampler = other.create_sampling_client(path)
    assert len(sampler.compute_logprobs(tinker.ModelInput.from_ints([1, 2])).result()) == 2
    assert training.forward([datum()], "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_client_can_be_awaited_asked_for_its_result_or_used(service):
    async def by_await():
        training = await service.create_lora_training_client("tiny", rank=4)
        sampler = await training.save_weights_and_get_sampling_client()
        return await sampler.compute_logprobs(tinker.ModelInput.from_ints([1, 2]))

    assert len(asyncio.run(by_await())) == 2
    training = service.create_lora_training_client("tiny", rank=4).result()
    assert isinstance(training, tinker.TrainingClient)
    sampler = training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert isinstance(sampler, tinker.SamplingClient)


def test_the_names_of_the_options_are_in_the_metadata_and_listed(service, options):
    named = tinker.ServiceClient(
        {"recipe": "test"},
        display_name="a run",
        **options,
        substitute_losses={"stable_reinforce": "cispo"},
    )
    training = named.create_lora_training_client("tiny", rank=4)
    path = training.save_state("s").result().path
    rest = named.create_rest_client()
    run = rest.get_training_run_by_tinker_path(path).result()
    assert run.user_metadata == {"recipe": "test", "display_name": "a run"}
    assert (run.base_model, run.lora_rank) == ("tiny", 4)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == path
    listed = rest.list_training_runs(limit=100).result()
    assert run.training_run_id in [each.training_run_id for each in listed.training_runs]
    assert listed.cursor.total_count == len(listed.training_runs)


def test_options_of_the_command_reach_each_client(options, monkeypatch):
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({"data_dir": options["data_dir"]}))
    names = tinker.ServiceClient(models=options["models"]).get_server_capabilities()
    assert "tiny" in [model.model_name for model in names.supported_models]
    monkeypatch.setenv(OPTIONS_VARIABLE, '{"base_urll": "x"}')
    with pytest.raises(TypeError, match="base_urll"):
        tinker.ServiceClient()


def test_a_substitute_is_computed_and_told(service):
    training = service.create_lora_training_client("tiny", rank=4, seed=1)
    asked = training.forward_backward([datum(**RL)], "stable_reinforce").result()
    training.optim_step(adam_params=tinker.AdamParams(learning_rate=0.0)).result()
    plain = training.forward_backward([datum(**RL)], "cispo").result()
    told = "substituted_loss/stable_reinforce=cispo:max"
    assert asked.metrics == {**plain.metrics, told: 1.0}
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True)
    sampler.sample(
        tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1)
    ).result()


def test_without_a_substitute_the_refusal_names_the_option(options):
    service = tinker.ServiceClient(**options)
    training = service.create_lora_training_client("tiny", rank=4)
    with pytest.raises(UnsupportedError, match="--substitute-loss stable_reinforce=cispo"):
        training.forward_backward([datum(**RL)], "stable_reinforce").result()
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True)
    with pytest.raises(UnsupportedError, match="--substitute-loss stable_reinforce=cispo"):
        sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"ppo": "cispo"}, "'ppo' cannot be substituted"),
        ({"stable_reinforce": "cross_entropy"}, "'cross_entropy' cannot be substituted"),
        ({"stable_reinforce": "other"}, "'other' cannot be substituted"),
    ],
)
def test_a_wrong_substitute_is_named(options, given, named):
    with pytest.raises(UserError, match=named):
        tinker.ServiceClient(**options, substitute_losses=given)


def test_meaningless_options_are_rejected_by_name(service):
    training = service.create_lora_training_client("tiny", rank=4)
    path = training.save_state("o").result().path
    with pytest.raises(UnsupportedError, match="weights_access_token"):
        service.create_training_client_from_state(path, weights_access_token="t")
    with pytest.raises(UnsupportedError, match="AdamW"):
        service.create_lora_training_client("tiny", optimizer=object())
    assert service.create_lora_training_client(
        "tiny", rank=4, optimizer=tinker.AdamOptimizerConfig()
    )
    with pytest.raises(UnsupportedError, match="default_headers_overrides"):
        tinker.ServiceClient(default_headers_overrides={"a": "b"})
    with pytest.raises(UserError, match="kind='other'"):
        training.save_weights_and_get_sampling_client(kind="other")
    with pytest.raises(UserError, match="status='fine'"):
        service.close("fine")
    with pytest.raises(UserError, match="either optim_params or adam_params"):
        training.optim_step()
