"""An engine in a process of its own behaves like one in this process, and its death is an error."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from client_tests import *  # noqa: F403
from short_datum import STEP, WAIT, datum

from planish import EngineClosedError, ModelInput, SamplingParams, ServiceClient, UserError
from planish.fleet.process import ProcessLink
from planish.fleet.remote_engine import RemoteEngine
from planish.fleet.start import checked_options

pytestmark = pytest.mark.slow

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=8, seed=1, stop=[])


def train_and_sample(client: ServiceClient) -> tuple[list[float], list[int], list[float]]:
    training_client = client.create_lora_training_client("tiny", rank=4, seed=1)
    losses = []
    for _ in range(3):
        output = training_client.forward_backward([datum(), datum(9)], "cross_entropy")
        training_client.optim_step(STEP)
        losses.append(output.result(WAIT).metrics["loss:sum"])
    sampling_client = training_client.save_weights_and_get_sampling_client()
    (sequence,) = sampling_client.sample(PROMPT, 1, PARAMS).result(WAIT).sequences
    return losses, sequence.tokens, sequence.logprobs or []


def test_results_equal_those_of_an_engine_in_this_process(service_client, model_dir, tmp_path):
    with ServiceClient(models={"tiny": str(model_dir)}, data_dir=tmp_path, dtype="float32") as own:
        assert train_and_sample(service_client) == train_and_sample(own)


def test_the_death_of_the_process_fails_all_operations(model_dir, tmp_path):
    options = checked_options({"tiny": str(model_dir)}, tmp_path, {"dtype": "float32"})
    link = ProcessLink(options)
    client = ServiceClient(service=RemoteEngine(link))
    training_client = client.create_lora_training_client("tiny", rank=4, seed=1)
    sampler = training_client.save_weights_and_get_sampling_client()
    os.kill(link.pid, signal.SIGSTOP)  # so that the operations cannot finish before the death
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(_error_of(sampler))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    os.kill(link.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(WAIT)
    assert len(results) == 3
    for error in results:
        assert isinstance(error, EngineClosedError)
        assert f"process {link.pid} was ended by SIGKILL" in str(error)
        assert "make a new ServiceClient" in str(error)
    with pytest.raises(EngineClosedError, match="was ended by SIGKILL"):
        training_client.forward_backward([datum()], "cross_entropy")
    client.close()


def _error_of(sampler) -> BaseException | None:
    try:
        return sampler.sample(PROMPT, 1, PARAMS).future().exception(WAIT)
    except EngineClosedError as error:
        return error


def test_tokens_are_streamed_and_an_error_of_the_callback_fails_the_request(process_engine):
    from planish.service import CreateSampler, Sample

    process_engine.submit(CreateSampler("streamed", "tiny")).result(WAIT)
    tokens = []
    sample = Sample(
        "streamed", PROMPT, 1, PARAMS, on_token=lambda sampled: tokens.append(sampled.token)
    )
    response = process_engine.submit(sample).result(WAIT)
    assert tokens == response.sequences[0].tokens

    def fail(_: object) -> None:
        raise RuntimeError("no more tokens")

    failing = Sample("streamed", PROMPT, 1, PARAMS, on_token=fail)
    with pytest.raises(RuntimeError, match="no more tokens"):
        process_engine.submit(failing).result(WAIT)


def test_a_program_without_a_main_guard_saves_its_checkpoint_when_it_ends(model_dir, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        from planish import Datum, ModelInput, ServiceClient
        client = ServiceClient(models={{"tiny": {str(model_dir)!r}}}, data_dir={str(tmp_path)!r},
                               dtype="float32", engine="process")
        training_client = client.create_lora_training_client("tiny", rank=4, seed=1)
        datum = Datum(ModelInput.from_ints([1] * 100), {{"target_tokens": [2] * 100}})
        for _ in range(20):  # the checkpoint waits for these steps when the program ends
            training_client.forward_backward([datum] * 8, "cross_entropy")
        training_client.save_state("last")
        """)
    )
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=150, check=False
    )
    # On a busy machine, the program says at its end that it waits for the checkpoint.
    said = re.sub(r"waiting for checkpoints that are still being saved .*\n", "", result.stderr)
    assert (result.returncode, said) == (0, "")
    assert len(list(tmp_path.glob("*/weights/last"))) == 1


def test_invalid_options_are_errors_before_a_process_starts(tmp_path):
    with pytest.raises(UserError, match="engine='fork': give 'thread'"):
        ServiceClient(data_dir=tmp_path, engine="fork")
    with pytest.raises(UserError, match="dtype='float16'"):
        ServiceClient(data_dir=tmp_path, engine="process", dtype="float16")
    with pytest.raises(UserError, match="names a server, but engine configures"):
        ServiceClient(base_url="http://127.0.0.1:1", engine="process")
