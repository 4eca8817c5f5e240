"""`planish serve --substitute-loss`: told in each response and at /metrics."""

import urllib.request

import pytest
from server_process import BASE_MODEL, running_server, start_server

from planish import Datum, ModelInput, SamplingParams, ServiceClient
from planish.testing import tiny_model

pytestmark = pytest.mark.slow

TOLD = "substituted_loss/stable_reinforce=cispo:max"


def test_a_substitute_loss_is_computed_and_reported(tmp_path):
    model = tiny_model(tmp_path / "model")
    options = ("--substitute-loss", "stable_reinforce=cispo")
    inputs = {"target_tokens": [2, 3], "logprobs": [-1.0, -1.0], "advantages": [1.0, -1.0]}
    datum = Datum(ModelInput.from_ints([1, 2]), inputs)
    with running_server(tmp_path / "data", model, *options) as server:
        with ServiceClient(base_url=server.url) as service:
            trainer = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
            asked = trainer.forward([datum], "stable_reinforce").result().metrics
            plain = trainer.forward([datum], "cispo").result().metrics
            sampler = service.create_sampling_client(
                base_model=BASE_MODEL, record_stability_info=True
            )
            prompt, params = ModelInput.from_ints([1]), SamplingParams(max_tokens=1)
            assert sampler.sample(prompt, 1, params).result().sequences
        page = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
        server.wait_for_line("compute 'cispo' instead")
    assert asked == {**plain, TOLD: 1.0}
    assert 'planish_substituted_losses_total{computed="cispo",loss="stable_reinforce"} 1.0' in page


def test_an_invalid_substitute_loss_is_rejected_at_the_start(tmp_path):
    model = tiny_model(tmp_path / "model")
    with pytest.raises(RuntimeError, match="'ppo' cannot be substituted"):
        start_server(tmp_path / "data", model, "--substitute-loss", "ppo=cispo")
