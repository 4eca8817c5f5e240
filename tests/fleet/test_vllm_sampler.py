"""Samples from a server with vLLM's protocol. `planish serve` has the same requests, so its samples
show what is published, and its logprobs must equal those of the engine.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from server_process import BASE_MODEL, ServerProcess, running_server, start_server
from short_datum import STEP, WAIT, datum

from planish import (
    Constraint,
    EngineClosedError,
    ModelInput,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    UserError,
)
from planish.detokenizer import Detokenizer
from planish.engine.sampling.stopping import StopCondition
from planish.fleet.vllm.options import VllmSampler, checked_sampler
from planish.fleet.vllm.process import VllmProcess
from planish.fleet.vllm.requests import ended_sample, engine_options
from planish.fleet.vllm.server import Completion
from planish.service import Sample
from planish.testing import tiny_model

PROMPT = ModelInput.from_ints([1, 2, 3])


@pytest.fixture(scope="module")
def adapter_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(model_dir, adapter_dir, tmp_path_factory) -> Iterator[ServerProcess]:
    options = ("--dtype", "float32", "--adapter-dir", str(adapter_dir))
    with running_server(tmp_path_factory.mktemp("server"), model_dir, *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server, model_dir, adapter_dir, tmp_path_factory) -> Iterator[ServiceClient]:
    with client_of(
        server, model_dir, tmp_path_factory.mktemp("runs"), adapter_dir=adapter_dir
    ) as client:
        yield client


def client_of(server: ServerProcess, model: Path, data_dir: Path, **options) -> ServiceClient:
    return ServiceClient(
        models={BASE_MODEL: str(model)},
        data_dir=data_dir,
        dtype="float32",
        sampler=VllmSampler([server.url], **options),
    )


def served_adapters(server: ServerProcess) -> set[str]:
    models = httpx2.get(f"{server.url}/v1/models", timeout=WAIT).json()["data"]
    return {model["id"] for model in models if model["id"].startswith("planish-")}


def gap(sampler: SamplingClient, temperature: float = 1.0) -> float:
    """Sample, and return the largest difference from the logprobs that the engine computes."""
    params = SamplingParams(max_tokens=12, seed=1, stop=[], temperature=temperature)
    response = sampler.sample(PROMPT, 3, params).result(WAIT)
    assert [len(sequence.tokens) for sequence in response.sequences] == [12] * 3
    assert {sequence.stop_reason for sequence in response.sequences} == {"length"}
    assert len({sequence.sequence_id for sequence in response.sequences}) == 3
    gaps = []
    for sequence in response.sequences:
        tokens = PROMPT.to_ints() + sequence.tokens
        scores = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result(WAIT)[3:]
        gaps += [abs(a - b) for a, b in zip(map(float, scores), sequence.logprobs, strict=True)]  # pyright: ignore[reportArgumentType]
    return max(gaps)


@pytest.mark.slow
def test_each_version_is_sampled_from_its_own_adapter(client, server):
    before = served_adapters(server)
    training_client = client.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    samplers = []
    for _ in range(3):
        training_client.forward_backward([datum()], "cross_entropy").result(WAIT)
        training_client.optim_step(STEP).result(WAIT)
        samplers.append(training_client.save_weights_and_get_sampling_client())
    assert len(served_adapters(server) - before) == 3
    # The weights have changed, and each sampler keeps its own.
    params = SamplingParams(max_tokens=1, seed=1, stop=[])
    first, *_, last = (
        sampler.sample(PROMPT, 1, params).result(WAIT).sequences[0].logprobs for sampler in samplers
    )
    assert first != last
    assert max(map(gap, samplers)) < 1e-4
    # The base model has a sampler too.
    assert gap(client.create_sampling_client(base_model=BASE_MODEL)) < 1e-4
    del samplers[:]
    deadline = time.monotonic() + WAIT
    while served_adapters(server) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not served_adapters(server) - before


@pytest.mark.slow
def test_a_missing_adapter_is_loaded_again(client, server):
    before = served_adapters(server)
    training_client = client.create_lora_training_client(BASE_MODEL, rank=4, seed=2)
    training_client.forward_backward([datum()], "cross_entropy").result(WAIT)
    training_client.optim_step(STEP).result(WAIT)
    sampler = training_client.save_weights_and_get_sampling_client()
    (name,) = served_adapters(server) - before
    unload = f"{server.url}/v1/unload_lora_adapter"
    httpx2.post(unload, json={"lora_name": name}, timeout=WAIT).raise_for_status()
    assert name not in served_adapters(server)
    assert gap(sampler) < 1e-4
    assert name in served_adapters(server)


@pytest.mark.slow
def test_a_checkpoint_is_published(client):
    training_client = client.create_lora_training_client(BASE_MODEL, rank=4, seed=3)
    training_client.forward_backward([datum()], "cross_entropy").result(WAIT)
    training_client.optim_step(STEP).result(WAIT)
    path = training_client.save_weights_for_sampler("one").result(WAIT).path
    assert gap(client.create_sampling_client(model_path=path)) < 1e-4


@pytest.mark.slow
def test_greedy_samples_and_stop_tokens(client):
    sampler = client.create_sampling_client(base_model=BASE_MODEL)
    params = SamplingParams(max_tokens=6, temperature=0, stop=[])
    (sequence,) = sampler.sample(PROMPT, 1, params).result(WAIT).sequences
    stop_token = sequence.tokens[2]
    stop = SamplingParams(max_tokens=6, temperature=0, stop=[stop_token])
    (stopped,) = sampler.sample(PROMPT, 1, stop).result(WAIT).sequences
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == sequence.tokens[: sequence.tokens.index(stop_token) + 1]


@pytest.mark.slow
def test_stop_strings(client, caplog):
    sampler = client.create_sampling_client(base_model=BASE_MODEL)
    params = SamplingParams(max_tokens=12, temperature=0, stop=[])
    (sequence,) = sampler.sample(PROMPT, 1, params).result(WAIT).sequences
    decode = sampler.get_tokenizer().decode
    # Most tokens of a random model are parts of characters.
    string = next(text for text in map(decode, sequence.tokens) if text.isalnum())
    stop = SamplingParams(max_tokens=12, temperature=0, stop=[string, "never"])
    (stopped,) = sampler.sample(PROMPT, 1, stop).result(WAIT).sequences
    num_tokens = next(n for n in range(1, 12) if string in decode(sequence.tokens[:n]))
    assert (stopped.stop_reason, stopped.tokens) == ("stop", sequence.tokens[:num_tokens])
    assert len(stopped.logprobs) == num_tokens
    (whole,) = sampler.sample(
        PROMPT, 1, SamplingParams(max_tokens=12, temperature=0, stop="never")
    ).result(WAIT).sequences  # fmt: skip
    assert (whole.stop_reason, whole.tokens) == ("length", sequence.tokens)
    assert "are sampled by the engine" not in caplog.text


class EarlyServer:
    """A server that ends each sample after two tokens, as at a stop string."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[int], int, int | None]] = []

    async def complete(self, name: str, prompt: list[int], **options: Any) -> list[Completion]:
        assert (options["n"], options["stop"]) == (1, [])
        self.requests.append((prompt, options["max_tokens"], options["seed"]))
        tokens = np.array([len(prompt), len(prompt) + 1][: options["max_tokens"]], np.int32)
        return [Completion(tokens, np.zeros(len(tokens), np.float32), "stop")]


@pytest.mark.parametrize(
    ("strings", "tokens", "reason"),
    [
        (["\x07"], [100, 101, 5, 6, 7], "stop"),
        (["never"], [100, 101, 5, 6, 7, 8, 9], "length"),
        (["e"], [100, 101], "stop"),
    ],
)
def test_a_sample_that_vllm_ends_early_is_continued(strings, tokens, reason):
    detokenizer = Detokenizer(lambda tokens: bytes(tokens).decode())
    server = EarlyServer()
    first = Completion(np.array([100, 101], np.int32), np.zeros(2, np.float32), "stop")
    options = {"n": 4, "max_tokens": 7, "seed": 1, "stop": strings}
    ended = asyncio.run(
        ended_sample(
            server,  # pyright: ignore[reportArgumentType]
            "base",
            [1, 2, 3],
            options,
            first,
            StopCondition(detokenizer, strings=tuple(strings)),
        )
    )
    assert (ended.tokens.tolist(), ended.finish_reason) == (tokens, reason)
    assert len(ended.logprobs) == len(tokens)
    prompts = [([1, 2, 3, 100, 101], 5), ([1, 2, 3, 100, 101, 5, 6], 3)]
    prompts.append(([1, 2, 3, 100, 101, 5, 6, 7, 8], 1))
    assert [request[:2] for request in server.requests] == prompts[: len(server.requests)]
    assert len({seed for *_, seed in server.requests}) == len(server.requests)


@pytest.mark.slow
def test_requests_that_vllm_cannot_answer_go_to_the_engine(client, caplog):
    sampler = client.create_sampling_client(base_model=BASE_MODEL)
    params = SamplingParams(max_tokens=6, constraint=Constraint("choice", choices=["yes"]))
    (sequence,) = sampler.sample(PROMPT, 1, params).result(WAIT).sequences
    assert bytes(sequence.tokens[:3]) == b"yes"
    assert "requests with constraint are sampled by the engine" in caplog.text


@pytest.mark.slow
def test_other_weights_are_an_error_before_training(server, adapter_dir, tmp_path):
    other = tiny_model(tmp_path / "other", seed=5)
    with (
        client_of(server, other, tmp_path / "runs", adapter_dir=adapter_dir) as client,
        pytest.raises(UserError, match="does not sample from the weights of planish"),
    ):
        client.create_lora_training_client(BASE_MODEL, rank=4)


@pytest.mark.slow
def test_an_adapter_that_the_server_cannot_load_is_an_error_before_training(
    server, model_dir, tmp_path
):
    with (
        client_of(server, model_dir, tmp_path, adapter_dir=tmp_path / "elsewhere") as client,
        pytest.raises(UserError, match="vLLM cannot sample from adapters with rank=4.*adapter-dir"),
    ):
        client.create_lora_training_client(BASE_MODEL, rank=4)


@pytest.mark.slow
def test_planish_serve_samples_from_vllm(server, model_dir, adapter_dir, tmp_path):
    with (
        running_server(
            tmp_path / "data", model_dir, "--dtype", "float32", "--sampler", server.url,
            environment={**os.environ, "PLANISH_VLLM_ADAPTERS": str(adapter_dir)},
        ) as front,
        ServiceClient(base_url=front.url) as client,
    ):  # fmt: skip
        before = served_adapters(server)
        training_client = client.create_lora_training_client(BASE_MODEL, rank=4, seed=4)
        training_client.forward_backward([datum()], "cross_entropy").result(WAIT)
        training_client.optim_step(STEP).result(WAIT)
        sampler = training_client.save_weights_and_get_sampling_client()
        assert len(served_adapters(server) - before) == 1
        assert gap(sampler) < 1e-4
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2, top_p=0.5)).result(WAIT)
        page = httpx2.get(f"{front.url}/metrics", timeout=WAIT).text
        assert 'planish_engine_samples_total{option="top_p"} 1.0' in page


@pytest.mark.slow
def test_the_death_of_the_server_is_an_error(model_dir, adapter_dir, tmp_path):
    options = ("--dtype", "float32", "--adapter-dir", str(adapter_dir))
    server = start_server(tmp_path / "server", model_dir, *options)
    try:
        with client_of(server, model_dir, tmp_path / "runs", adapter_dir=adapter_dir) as client:
            sampler = client.create_sampling_client(base_model=BASE_MODEL)
            server.stop(signal.SIGKILL)
            with pytest.raises(EngineClosedError, match=f"vLLM server at {server.url} does not"):
                sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2)).result(WAIT)
    finally:
        server.process.kill()


def test_closing_ends_the_processes_and_their_children(tmp_path):
    # The kernel needs a moment to free the memory of a process that it ends.
    program = "import os, time; x = bytearray(1 << 29); print(os.getpid(), flush=True); "
    program += "time.sleep(1000)"
    command = ["sh", "-c", f"{sys.executable} -c '{program}' & wait"]
    process = VllmProcess(command, os.environ, tmp_path / "log")
    pid = wait_for_pid(tmp_path / "log")
    assert process.status is None
    process.end()
    assert process.status is not None
    assert has_ended(pid)


@pytest.mark.slow
def test_the_death_of_the_program_ends_the_processes(tmp_path):
    program = (
        "import os, pathlib, sys, time; from planish.fleet.vllm.process import VllmProcess; "
        "process = VllmProcess(['sh', '-c', 'sleep 1000 & echo $!; wait'], os.environ, "
        "pathlib.Path(sys.argv[1])); time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "log")])
    try:
        pid = wait_for_pid(tmp_path / "log")
        assert not has_ended(pid)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + WAIT
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert has_ended(pid)


def test_the_last_lines_of_a_server_that_fails_are_shown(tmp_path):
    process = VllmProcess(["sh", "-c", "echo no memory; exit 3"], os.environ, tmp_path / "log")
    deadline = time.monotonic() + WAIT
    while process.status is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.describe_end() == (
        "vLLM has ended with exit status 3. Its last lines:\nno memory"
    )


def wait_for_pid(log: Path) -> int:
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        if log.is_file() and log.read_text().endswith("\n"):
            return int(log.read_text())
        time.sleep(0.05)
    raise AssertionError("the process has not started")


def has_ended(pid: int) -> bool:
    try:
        # Nobody may have waited for it yet.
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"temperature": 0.7, "stop": [3], "seed": 5, "stop_token_ids": [4]}, []),
        ({"top_p": 0.9, "min_p": 0.1}, ["top_p", "min_p"]),
        ({"logit_bias": {1: 2.0}}, ["logit_bias"]),
        ({"stop": ["a"], "stop_token_ids": [4]}, []),
        ({"temperature": 0.001}, ["temperature below 0.01"]),
    ],
)
def test_options_that_the_engine_answers(options, names):
    assert engine_options(Sample("s", PROMPT, 2, SamplingParams(**options))) == names


def test_scores_and_greedy_groups_are_the_engines():
    scores = Sample("s", PROMPT, 1, SamplingParams(), prompt_logprobs=True, prompt_only=True)
    assert engine_options(scores) == ["prompt_logprobs", "prompt_only"]
    greedy = Sample("s", PROMPT, 2, SamplingParams(temperature=0))
    assert engine_options(greedy) == ["num_samples above 1 at temperature 0"]


def test_wrong_options(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="sampler='vlm': give 'engine', 'vllm', or the URLs"):
        ServiceClient(sampler="vlm")
    with pytest.raises(UserError, match="leave out replicas, ray and engine"):
        checked_sampler("vllm", 2, None)
    with pytest.raises(UserError, match="quantize='nf4' is for the engine's own sampler"):
        ServiceClient(sampler="http://127.0.0.1:9", quantize="nf4")
    with pytest.raises(UserError, match="tolerance=0"):
        VllmSampler(tolerance=0)
    monkeypatch.setenv("PLANISH_VLLM_TOLERANCE", "small")
    with pytest.raises(UserError, match="PLANISH_VLLM_TOLERANCE='small'"):
        VllmSampler()
    monkeypatch.delenv("PLANISH_VLLM_TOLERANCE")
    monkeypatch.setenv("PLANISH_VLLM_PYTHON", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"vLLM is not installed for .*none\. Install it"):
        ServiceClient(sampler="vllm")
    assert checked_sampler("engine", 2, None) is None
