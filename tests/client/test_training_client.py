"""The clients on a real engine with a tiny model: the tutorial's loop, custom losses, checkpoints,
and every kind of bad input.
"""

import asyncio
import copy
import gc
import math
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from server_process import wait_until
from short_datum import STEP, WAIT, datum, logprobs

import planish
from planish import (
    AdamParams,
    CheckpointError,
    Datum,
    EncodedTextChunk,
    ModelInput,
    NonFiniteError,
    SampledSequence,
    SamplingParams,
    ServiceClient,
    TensorData,
    TrainingClient,
)


@pytest.fixture
def training_client(service_client) -> TrainingClient:
    return service_client.create_lora_training_client("tiny", rank=4, seed=1)


# The tutorial's loop


def reward_of(sequence: SampledSequence) -> float:
    """Return the reward: even tokens are good, which a random model can learn quickly."""
    return sum(token % 2 == 0 for token in sequence.tokens) / len(sequence.tokens)


def grpo_datums(prompt: ModelInput, sequences: list[SampledSequence]) -> tuple[list[Datum], float]:
    rewards = [reward_of(sequence) for sequence in sequences]
    mean_reward = sum(rewards) / len(rewards)
    ob_len = prompt.length - 1
    datums = []
    for sequence, reward in zip(sequences, rewards, strict=True):
        model_input = prompt.append(EncodedTextChunk(tokens=sequence.tokens[:-1]))
        target_tokens = [0] * ob_len + sequence.tokens
        padded_logprobs = [0.0] * ob_len + sequence.logprobs
        padded_advantages = [0.0] * ob_len + [reward - mean_reward] * (model_input.length - ob_len)
        inputs = {
            "target_tokens": TensorData.from_torch(torch.tensor(target_tokens)),
            "logprobs": TensorData.from_torch(torch.tensor(padded_logprobs)),
            "advantages": TensorData.from_torch(torch.tensor(padded_advantages)),
        }
        datums.append(Datum(model_input=model_input, loss_fn_inputs=inputs))
    return datums, mean_reward


PROMPTS = ["one", "two", "three"]
STEPS = 8


def sampling_params(step: int) -> SamplingParams:
    return SamplingParams(max_tokens=8, stop=[], seed=step)


async def tutorial_loop(service_client: ServiceClient) -> list[float]:
    training_client = await service_client.create_lora_training_client_async(
        base_model="tiny", rank=8, seed=0
    )
    tokenizer = training_client.get_tokenizer()
    rewards = []
    for step in range(STEPS):
        sampling_client = await training_client.save_weights_and_get_sampling_client_async()
        prompts = [ModelInput.from_ints(tokenizer.encode(text)) for text in PROMPTS]
        results = await asyncio.gather(
            *[
                sampling_client.sample_async(
                    prompt=p, num_samples=8, sampling_params=sampling_params(step)
                )
                for p in prompts
            ]
        )
        datums: list[Datum] = []
        means = []
        for prompt, result in zip(prompts, results, strict=True):
            group, mean = grpo_datums(prompt, result.sequences)
            datums += group
            means.append(mean)
        fwd_bwd_future = await training_client.forward_backward_async(
            datums, loss_fn="importance_sampling"
        )
        optim_future = await training_client.optim_step_async(
            AdamParams(learning_rate=3e-2, beta1=0.9, beta2=0.95)
        )
        out = await fwd_bwd_future.result_async()
        await optim_future.result_async()
        assert out.metrics["ratio:max"] == pytest.approx(1.0, abs=1e-4)
        rewards.append(sum(means) / len(means))
    return rewards


def blocking_loop(service_client: ServiceClient) -> list[float]:
    training_client = service_client.create_lora_training_client(
        base_model="tiny", rank=8, seed=0
    ).result()
    tokenizer = training_client.get_tokenizer()
    rewards = []
    for step in range(STEPS):
        sampling_client = training_client.save_weights_and_get_sampling_client().result()
        prompts = [ModelInput.from_ints(tokenizer.encode(text)) for text in PROMPTS]
        futures = [sampling_client.sample(prompt, 8, sampling_params(step)) for prompt in prompts]
        groups = [
            grpo_datums(p, f.result(WAIT).sequences) for p, f in zip(prompts, futures, strict=True)
        ]
        backward = training_client.forward_backward(
            [d for group, _ in groups for d in group], "importance_sampling"
        )
        update = training_client.optim_step(AdamParams(learning_rate=3e-2, beta1=0.9, beta2=0.95))
        backward.result(WAIT)
        update.result(WAIT)
        rewards.append(sum(mean for _, mean in groups) / len(groups))
    return rewards


@pytest.mark.slow
def test_the_tutorials_loop_raises_the_reward_and_async_equals_blocking(service_client):
    rewards = asyncio.run(tutorial_loop(service_client))
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2
    assert blocking_loop(service_client) == rewards


# Custom losses


@pytest.mark.slow
def test_a_custom_loss_equals_the_built_in_one(service_client):
    old = [-2.0, -1.0, -3.0, -1.5, -2.5, -0.5]
    advantages = [1.0, -1.0, 0.5, 2.0, -0.3, 0.0]
    data = [
        datum(logprobs=old, advantages=advantages),
        datum(4, logprobs=old[:4], advantages=advantages[:4]),
    ]

    def importance_sampling(data, logprobs_list):
        total = torch.zeros(())
        for d, trained in zip(data, logprobs_list, strict=True):
            ratio = torch.exp(trained - d.loss_fn_inputs["logprobs"].to_torch())
            total = total - (ratio * d.loss_fn_inputs["advantages"].to_torch()).sum()
        return total, {"mean_ratio:mean": 3.0}

    ours, theirs = (
        service_client.create_lora_training_client("tiny", rank=4, seed=1) for _ in range(2)
    )
    for _ in range(2):
        custom = ours.forward_backward_custom(data, importance_sampling)
        norm = ours.optim_step(STEP).result(WAIT).metrics["grad_norm"]
        built_in = theirs.forward_backward(data, "importance_sampling").result(WAIT)
        assert norm == pytest.approx(
            theirs.optim_step(STEP).result(WAIT).metrics["grad_norm"], rel=1e-4
        )
        out = custom.result(WAIT)
        assert out.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-5)
        assert out.metrics["mean_ratio:mean"] == 3.0
        assert "surrogate_loss:sum" in out.metrics
        assert [len(o["logprobs"]) for o in out.loss_fn_outputs] == [6, 4]
    assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-4)


@pytest.mark.slow
def test_a_custom_loss_that_raises_fails_the_next_step(training_client):
    before = logprobs(training_client)
    training_client.forward_backward([datum()], "cross_entropy")

    def broken(data, logprobs_list):
        raise LookupError("no reference")

    backward = training_client.forward_backward_custom([datum()], broken)
    update = training_client.optim_step(STEP)
    with pytest.raises(LookupError, match="no reference"):
        backward.result(WAIT)
    with pytest.raises(planish.UserError, match="no reference") as refused:
        update.result(WAIT)
    assert not isinstance(refused.value, NonFiniteError)
    assert logprobs(training_client) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda data, lp: 1.0, "scalar tensor"),
        (lambda data, lp: (1.0, {}), "scalar tensor"),
        (lambda data, lp: (lp[0], {}), "one number"),
        (lambda data, lp: (torch.tensor(1.0), {}), "gradient"),
        (lambda data, lp: (lp[0].sum() * math.nan, {}), "not finite"),
        (lambda data, lp: (lp[0].sum() / 0.0, {}), "not finite"),
        (lambda data, lp: (lp[0].sum(), [1.0]), "metrics of type list"),
        (lambda data, lp: (lp[0].sum(), {"note": "x"}), "'x' as its metric 'note'"),
    ],
)
def test_an_invalid_loss_is_rejected(training_client, loss_fn, message):
    with pytest.raises(planish.UserError, match=message) as refused:
        training_client.forward_backward_custom([datum()], loss_fn).result(WAIT)
    with pytest.raises(type(refused.value), match=f"nothing was applied.*{message}"):
        training_client.optim_step(STEP).result(WAIT)


def test_a_custom_loss_that_calls_its_own_client_is_rejected(training_client):
    """The call would wait for the operation that waits for the loss."""

    def calls(data, logprobs_list):
        training_client.forward(data, "cross_entropy").result()
        raise AssertionError

    with pytest.raises(planish.UserError, match="the custom loss called its own client"):
        training_client.forward_backward_custom([datum()], calls).result(WAIT)
    assert len(logprobs(training_client)) == 6


@pytest.mark.slow
def test_a_slow_custom_loss_blocks_only_its_own_client(service_client, training_client):
    other = service_client.create_lora_training_client("tiny", rank=4, seed=1)
    gate = threading.Event()

    def slow(data, logprobs_list):
        assert gate.wait(WAIT)
        return -sum(lp.sum() for lp in logprobs_list), {}

    custom = training_client.forward_backward_custom([datum()], slow)
    update = training_client.optim_step(STEP)
    other.forward_backward([datum()], "cross_entropy")
    other.optim_step(STEP).result(WAIT)
    assert not update.done()
    gate.set()
    assert custom.result(WAIT).metrics["loss:sum"] > 0
    assert update.result(WAIT).metrics["adam_step"] == 1
    assert logprobs(training_client) == pytest.approx(logprobs(other), abs=1e-5)


# Sampling


@pytest.mark.slow
def test_sampled_and_trained_logprobs_agree(training_client):
    for _ in range(2):
        training_client.forward_backward([datum()], "cross_entropy")
        training_client.optim_step(STEP)
    sampling_client = training_client.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints([5, 6, 7])
    params = SamplingParams(max_tokens=20, stop=[], temperature=0.7, seed=1)
    sequence = sampling_client.sample(prompt, 1, params).result(WAIT).sequences[0]
    whole = [*prompt.to_ints(), *sequence.tokens]
    data = [Datum(ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:]})]
    trained = training_client.forward(data, "cross_entropy", {"temperature": 0.7}).result(WAIT)
    assert trained.loss_fn_outputs[0]["logprobs"].tolist()[2:] == pytest.approx(
        sequence.logprobs, abs=1e-4
    )
    scored = sampling_client.compute_logprobs(ModelInput.from_ints(whole)).result(WAIT)
    at_one = (
        training_client.forward(data, "cross_entropy")
        .result(WAIT)
        .loss_fn_outputs[0]["logprobs"]
        .tolist()
    )
    assert scored[0] is None
    assert scored[1:] == pytest.approx(at_one, abs=1e-4)


def test_all_forms_of_prompt_logprobs(training_client):
    sampling_client = training_client.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints([5, 6, 7, 8])
    targets = TensorData([[1, -1], [2, 3], [-1, 8]], "int64")
    response = sampling_client.sample(
        prompt,
        2,
        SamplingParams(max_tokens=3, stop=[], seed=0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=2,
    ).result(WAIT)
    assert response.prompt_logprobs is not None
    assert [p is None for p in response.prompt_logprobs] == [True, True, False, False]
    assert response.target_prompt_logprobs is not None
    assert response.target_prompt_logprobs.shape == [3, 2]
    assert response.target_prompt_logprobs.to_numpy()[2, 1] == pytest.approx(
        response.prompt_logprobs[3], abs=1e-5
    )
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.shape == [3, 2]
    assert response.sequences[0].topk_logprobs is not None
    assert len(response.sequences[0].topk_logprobs[0]) == 3
    last = sampling_client.compute_logprobs(prompt, prompt_logprobs_last_n=1).result(WAIT)
    assert last == [None, None, None, pytest.approx(response.prompt_logprobs[3], abs=1e-5)]


@pytest.mark.slow
def test_a_stop_string_can_be_a_control_token(training_client):
    client = training_client.save_weights_and_get_sampling_client()
    tokenizer = client.get_tokenizer()
    params = SamplingParams(max_tokens=400, seed=0, temperature=2.0, stop=["<|im_end|>", "<think>"])
    sequence = client.sample(ModelInput.from_ints([1]), 1, params).result(WAIT).sequences[0]
    assert sequence.stop_reason == "stop"
    assert tokenizer.decode(sequence.tokens[-1:]) in ("<|im_end|>", "<think>")


async def test_cancelling_an_async_sample_cancels_the_request(embedded_client):
    client = embedded_client.create_sampling_client(base_model="tiny")
    sampler = embedded_client._session.service._base_models.get("tiny").sampler

    prompt = ModelInput.from_ints([1, 2, 3])
    sampling = asyncio.create_task(
        client.sample_async(prompt, 32, SamplingParams(max_tokens=2000, stop=[]))
    )
    while not sampler.busy:
        await asyncio.sleep(0.001)
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    while sampler.busy or sampler._slots.sample_pools.pools_in_use():
        await asyncio.sleep(0.01)


def collect_until(condition: Callable[[], bool]) -> None:
    """Collect garbage until the condition holds. While another thread collects, `gc.collect`
    returns at once, and what that thread finds is freed later.
    """
    wait_until(lambda: gc.collect() >= 0 and condition())


@pytest.mark.slow
def test_an_unreferenced_sampling_client_frees_its_version(embedded_client):
    engine = embedded_client._session.service
    training_client = embedded_client.create_lora_training_client("tiny", rank=4, seed=1)
    client = training_client.save_weights_and_get_sampling_client()
    pending = client.sample(ModelInput.from_ints([1, 2]), 1, SamplingParams(max_tokens=50, stop=[]))
    assert len(engine.preparation.sampler_sessions) == 1
    del client
    collect_until(lambda: not engine.preparation.sampler_sessions)
    assert len(pending.result(WAIT).sequences[0].tokens) == 50
    clients = [training_client.save_weights_and_get_sampling_client() for _ in range(20)]
    assert len(engine.preparation.sampler_sessions) == 20
    del clients
    collect_until(lambda: not engine.preparation.sampler_sessions)


@pytest.mark.slow
def test_an_unreferenced_training_client_frees_its_adapter(embedded_client):
    engine = embedded_client._session.service
    client = embedded_client.create_lora_training_client("tiny", rank=4)
    update = [client.forward_backward([datum()], "cross_entropy"), client.optim_step(STEP)][1]
    sampling_client = client.save_weights_and_get_sampling_client()
    del client
    gc.collect()
    assert update.result(WAIT).metrics["adam_step"] == 1
    collect_until(lambda: not engine.preparation.training_models)
    assert sampling_client.get_base_model() == "tiny"


@pytest.mark.slow
def test_requests_of_unreferenced_clients_are_answered(make_client):
    """A function may return a future of a client that it made and dropped."""
    prompt = ModelInput.from_ints([1, 2])
    answers = [
        make_client()
        .create_sampling_client(base_model="tiny")
        .sample(prompt, 1, SamplingParams(max_tokens=50)),
        make_client()
        .create_lora_training_client("tiny", rank=4)
        .forward([datum()], "cross_entropy"),
        make_client().create_lora_training_client("tiny", rank=4).save_state("held-by-nobody"),
    ]
    gc.collect()
    assert [type(answer.result(WAIT)).__name__ for answer in answers] == [
        "SampleResponse",
        "ForwardBackwardOutput",
        "SaveWeightsResponse",
    ]


def test_cancelling_the_creation_of_a_client_frees_its_resources(embedded_client, monkeypatch):
    engine = embedded_client._session.service
    training_client = embedded_client.create_lora_training_client("tiny", rank=4)
    path = training_client.save_weights_for_sampler("x").result(WAIT).path

    class Interrupted(Future):
        def result(self, timeout=None):
            monkeypatch.undo()
            raise KeyboardInterrupt

    for create in (
        lambda: embedded_client.create_sampling_client(path),
        lambda: training_client.create_sampling_client(path),
        lambda: embedded_client.create_lora_training_client("tiny", rank=4),
    ):
        monkeypatch.setattr("planish.engine.engine.Future", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            create()
        assert engine.preparation.sampler_sessions == {}
        assert engine.preparation.training_models.keys() == {training_client.model_id}
    logprobs(training_client)  # so that the engine has come so far
    assert engine._thread._sampler_sessions._sessions == []


def test_clients_cannot_be_copied_or_pickled(service_client, training_client):
    for client in (
        service_client,
        training_client,
        service_client.create_sampling_client(base_model="tiny"),
    ):
        for leave in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(
                TypeError, match=f"{type(client).__name__} cannot be copied.*ServiceClient"
            ):
                leave(client)


# Checkpoints


@pytest.mark.slow
def test_a_loaded_state_continues_training_exactly(service_client, another_client, training_client):
    for _ in range(2):
        training_client.forward_backward([datum()], "cross_entropy")
        training_client.optim_step(STEP)
    path = (
        training_client.save_state("two", ttl_seconds=3600, user_metadata={"note": "x"})
        .result(WAIT)
        .path
    )
    assert re.fullmatch(r"tinker://[0-9a-f]+:train:0/weights/two", path)
    resumed = another_client.create_training_client_from_state_with_optimizer(path)
    assert resumed.get_info().model_data.model_name == "tiny"
    assert resumed.get_info().lora_rank == 4
    steps = []
    for client in (training_client, resumed):
        client.forward_backward([datum()], "cross_entropy")
        steps.append(client.optim_step(STEP).result(WAIT))
    assert steps[0] == steps[1]
    assert logprobs(training_client) == logprobs(resumed)
    fresh = another_client.create_training_client_from_state(path)
    fresh.forward_backward([datum()], "cross_entropy")
    assert fresh.optim_step(STEP).result(WAIT).metrics["adam_step"] == 1
    assert training_client.load_state(path).result(WAIT).path == path
    rest = service_client.create_rest_client()
    (checkpoint,) = rest.list_checkpoints(training_client.model_id).result().checkpoints
    assert checkpoint.user_metadata == {"note": "x"}
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    rest.delete_checkpoint(training_client.model_id, checkpoint.checkpoint_id).result()
    assert path not in [
        checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result().checkpoints
    ]


@pytest.mark.slow
def test_an_unknown_run_differs_from_a_run_without_checkpoints(
    service_client, training_client, another_client
):
    rest = service_client.create_rest_client()
    assert rest.list_checkpoints(training_client.model_id).result().checkpoints == []
    with pytest.raises(CheckpointError, match="'nope'"):
        rest.list_checkpoints("nope")
    path = training_client.save_state("a").result(WAIT).path
    elsewhere = another_client.create_rest_client()
    assert len(elsewhere.list_checkpoints(training_client.model_id).result().checkpoints) == 1
    rest.delete_checkpoint_from_tinker_path(path)
    assert rest.list_checkpoints(training_client.model_id).result().checkpoints == []


@pytest.mark.slow
def test_errors_have_the_same_class_locally_and_on_a_server(service_client, training_client):
    unlikely = datum(logprobs=[-1e4] * 6, advantages=[1.0] * 6)
    torn = (
        training_client.forward_backward([unlikely], "importance_sampling"),
        training_client.optim_step(STEP),
    )
    for pending in torn:
        with pytest.raises(NonFiniteError):
            pending.result(WAIT)
    path = training_client.save_weights_for_sampler("one").result(WAIT).path
    training_client.save_state("one").result(WAIT)
    with pytest.raises(CheckpointError, match="'one'"):
        training_client.save_state("one").result(WAIT)
    with pytest.raises(CheckpointError, match=f"{path} .*but no optimizer state"):
        service_client.create_training_client_from_state_with_optimizer(path)
    with pytest.raises(CheckpointError, match=f"{path} .*but no optimizer state"):
        training_client.load_state_with_optimizer(path).result(WAIT)


@pytest.mark.slow
async def test_async_forms_of_checkpoints(service_client, training_client):
    saved = await (await training_client.save_state_async("x"))
    named = await (await training_client.save_weights_for_sampler_async("x"))
    assert (
        await (await training_client.load_state_with_optimizer_async(saved.path))
    ).path == saved.path
    for make in (
        service_client.create_sampling_client_async,
        training_client.create_sampling_client_async,
    ):
        client = await make(model_path=named.path)
        answer = await client.compute_logprobs_async(ModelInput.from_ints([1, 2]))
        assert answer[0] is None
    client = await training_client.save_weights_and_get_sampling_client_async(name="y")
    assert client.model_path is not None
    assert client.model_path.endswith("sampler_weights/y")
    resumed = await service_client.create_training_client_from_state_async(saved.path)
    assert (await resumed.get_info_async()).lora_rank == 4
    rest = service_client.create_rest_client()
    assert len((await rest.list_checkpoints_async(training_client.model_id)).checkpoints) == 3
    await rest.delete_checkpoint_from_tinker_path_async(named.path)
    assert (await service_client.get_server_capabilities_async()).supported_models
    assert (
        await (
            await service_client.create_sampling_client_async(base_model="tiny")
        ).get_base_model_async()
        == "tiny"
    )


# The end


@pytest.mark.slow
def test_calls_after_close_are_rejected(service_client, training_client):
    sampling_client = training_client.save_weights_and_get_sampling_client()
    path = training_client.save_state("a").result(WAIT).path
    rest = service_client.create_rest_client()
    service_client.close()
    for call in (
        lambda: sampling_client.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1)),
        lambda: training_client.optim_step(STEP),
        lambda: service_client.create_lora_training_client("tiny"),
        service_client.get_server_capabilities,
        training_client.get_tokenizer,
        rest.list_user_checkpoints,
        lambda: rest.list_checkpoints(training_client.model_id),
        lambda: rest.get_weights_info_by_tinker_path(path),
        lambda: rest.delete_checkpoint_from_tinker_path(path),
    ):
        with pytest.raises(planish.EngineClosedError, match="new ServiceClient"):
            call()
    service_client.close()


def test_cached_values_can_be_read_after_close(service_client, training_client):
    tokenizer, info = training_client.get_tokenizer(), training_client.get_info()
    service_client.close()
    assert training_client.get_tokenizer() is tokenizer
    assert training_client.get_info() == info


@pytest.mark.slow
def test_close_finishes_a_custom_loss_and_later_operations(service_client, training_client):
    go_on = threading.Event()

    def slow(data, logprobs_list):
        assert go_on.wait(WAIT)
        return -sum(lp.sum() for lp in logprobs_list), {}

    custom = training_client.forward_backward_custom([datum()], slow)
    update, saved = training_client.optim_step(STEP), training_client.save_state("last")
    threading.Timer(0.2, go_on.set).start()
    service_client.close()
    assert custom.result(0).metrics["loss:sum"] > 0
    assert update.result(0).metrics["adam_step"] == 1
    assert saved.result(0).path.endswith("/last")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told_to_create_its_own_client(service_client):
    """A worker of a DataLoader is such a child. It would wait for ever."""
    sampling_client = service_client.create_sampling_client(base_model="tiny")
    child = os.fork()
    if not child:
        try:
            sampling_client.sample(
                ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1)
            ).result(WAIT)
        except planish.EngineClosedError as error:
            os._exit(17 if "parent process" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


LEAVING = """
import logging, sys
logging.getLogger("planish.model.kernels").setLevel("ERROR")  # a machine may lack kernels, which is told
from planish import AdamParams, Datum, ModelInput, ServiceClient
far = {"base_url": sys.argv[1]} if sys.argv[1] else {"models": {"tiny": sys.argv[2]}, "data_dir": sys.argv[3], "dtype": "float32"}
service_client = ServiceClient(**far)
client = service_client.create_lora_training_client("tiny", rank=4)
prompt = ModelInput.from_ints(list(range(60)))
for _ in range(3):
    client.forward_backward([Datum(prompt, {"target_tokens": list(range(60))})] * 100, "cross_entropy")
    client.optim_step(AdamParams())
client.save_state("at-the-end")
print(client.model_id)
"""


@pytest.mark.slow
def test_requested_checkpoints_are_saved_when_a_program_ends(
    request, make_client, model_dir, tmp_path
):
    url = request.getfixturevalue("server_url") if "far" in request.node.name else ""
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, url, str(model_dir), str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0
    # A program says so if it waits for more than a second.
    assert re.sub(r"waiting for checkpoints that are still being saved .*\n", "", done.stderr) == ""
    listed = (
        make_client()
        .create_rest_client()
        .list_checkpoints(done.stdout.strip())
        .result()
        .checkpoints
    )
    assert [checkpoint.checkpoint_id for checkpoint in listed] == ["weights/at-the-end"]


def test_leaving_a_with_block_by_an_error_does_not_wait(model_dir, tmp_path):
    left = []

    def work() -> None:
        with ServiceClient(
            models={"tiny": str(model_dir)}, data_dir=tmp_path, dtype="float32"
        ) as client:
            sampling_client = client.create_sampling_client(base_model="tiny")
            params = SamplingParams(max_tokens=2000, stop=[])
            left.append(sampling_client.sample(ModelInput.from_ints([1]), 64, params))
            raise LookupError

    with pytest.raises(LookupError):
        work()
    with pytest.raises(planish.EngineClosedError):
        left[0].result(WAIT)
