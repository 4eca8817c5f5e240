"""The whole engine on a GPU by its public API: an iteration is what it is on the CPU, and a
checkpoint goes from one to the other.
"""

import numpy as np
import pytest
from iteration import count_tokens, rollouts, run_iteration, train_step, with_completions
from rounding import DIVERGING, assert_equal_but_for_rounding

import planish

pytestmark = pytest.mark.gpu
WORK = {
    "prompts": [[1, 2, 3, seed] for seed in range(5)],
    "samples": 6,
    "new_tokens": 30,
    "seed": 3,
}


@pytest.fixture
def service(device, tmp_path):
    with planish.ServiceClient(
        device=str(device), dtype="float32", data_dir=tmp_path / "device"
    ) as service_client:
        yield service_client


def test_an_iteration_equals_one_on_the_cpu(service, model_of, tmp_path):
    path = str(model_of("qwen3"))
    with planish.ServiceClient(device="cpu", dtype="float32", data_dir=tmp_path / "cpu") as on_cpu:
        pair = [one.create_lora_training_client(path, rank=8, seed=0) for one in (service, on_cpu)]
        for _ in range(3):
            ours, expected = (run_iteration(client, WORK) for client in pair)
            same = [
                one.tokens == other.tokens
                for pair_of_groups in zip(ours.groups, expected.groups, strict=True)
                for one, other in zip(*pair_of_groups, strict=True)
            ]
            assert np.mean(same) >= 1 - DIVERGING
            assert ours.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-3)
            assert count_tokens(ours.groups) == 5 * 6 * 30


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_an_iteration_on_quantized_weights_equals_one_on_the_cpu(
    device, model_of, tmp_path, scheme
):
    path, runs = str(model_of("qwen3", intermediate=128)), []
    for place in (str(device), "cpu"):
        with planish.ServiceClient(
            device=place, dtype="float32", quantize=scheme, data_dir=tmp_path / scheme
        ) as service_client:
            client = service_client.create_lora_training_client(path, rank=8, seed=0)
            runs.append(run_iteration(client, WORK))
    ours, expected = runs
    assert ours.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-3)
    assert count_tokens(ours.groups) == 5 * 6 * 30


def test_training_lowers_the_loss(service, model_of):
    client = service.create_lora_training_client(str(model_of("llama")), rank=8, seed=0)
    work = with_completions(WORK, rollouts(client.save_weights_and_get_sampling_client(), WORK))
    losses = [train_step(client, work) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_a_checkpoint_of_the_device_is_continued_on_the_cpu(service, model_of, tmp_path):
    path = str(model_of("llama"))
    client = service.create_lora_training_client(path, rank=8, seed=0)
    work = iteration_work(client)
    train_step(client, work)
    saved = client.save_state("after").result().path
    with planish.ServiceClient(
        device="cpu", dtype="float32", data_dir=tmp_path / "device"
    ) as on_cpu:
        other = on_cpu.create_training_client_from_state_with_optimizer(saved)
        losses = [[train_step(one, work) for _ in range(3)] for one in (client, other)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3, atol=1e-3)


def iteration_work(client: planish.TrainingClient) -> dict:
    return with_completions(WORK, rollouts(client.save_weights_and_get_sampling_client(), WORK))


def test_tenants_sample_and_train_beside_one_another(service, model_of):
    """Adapters of several ranks under way at once; each has what it has alone."""
    path = str(model_of("qwen2"))
    clients = [
        service.create_lora_training_client(path, rank=rank, seed=rank) for rank in (4, 8, 8, 16)
    ]
    works = [iteration_work(client) for client in clients]
    samplers = [client.save_weights_and_get_sampling_client() for client in clients]
    prompt = planish.ModelInput.from_ints([9, 8, 7])
    params = planish.SamplingParams(max_tokens=40, stop=[], seed=1)
    alone = [sampler.sample(prompt, 5, params).result() for sampler in samplers]
    asked = [sampler.sample(prompt, 5, params) for sampler in samplers]
    for client, work in zip(clients, works, strict=True):
        train_step(client, work)
    assert_equal_but_for_rounding([future.result() for future in asked], alone)
