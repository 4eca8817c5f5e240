"""vLLM itself as the sampler: `make test-vllm` installs it and runs this file."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from short_datum import STEP, datum

from planish import ModelInput, SamplingClient, SamplingParams, ServiceClient, TrainingClient
from planish.files import read_rows
from planish.fleet.vllm.options import VllmSampler
from planish.fleet.vllm.process import VllmProcess, free_port
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model
from planish.recipes import shorter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PROMPT = ModelInput.from_ints([504, 3575, 282, 4649, 314])
SERVER_ARGUMENTS = ("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16")
PYTHON = os.environ.get("PLANISH_VLLM_PYTHON", sys.executable)
WAIT = 600.0
TOLERANCE = 0.1


def vllm_processes() -> list[str]:
    """Return the command lines of the vLLM servers that run with an interpreter."""
    lines: list[str] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            lines.append(file.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if line.startswith(f"{PYTHON} -m vllm.entrypoints")]


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def step(training_client: TrainingClient) -> SamplingClient:
    """Train one step, and return a sampler of the new weights."""
    training_client.forward_backward([datum()], "cross_entropy").result()
    training_client.optim_step(STEP).result()
    return training_client.save_weights_and_get_sampling_client()


def mean_gap(sampler: SamplingClient, responses: list[Any]) -> float:
    """Return the mean difference from the logprobs that the engine computes."""
    gaps: list[float] = []
    for sequence in (sequence for response in responses for sequence in response.sequences):
        tokens = PROMPT.to_ints() + sequence.tokens
        scores = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()[PROMPT.length :]
        gaps += [abs(float(a or 0) - b) for a, b in zip(scores, sequence.logprobs, strict=True)]
    return sum(gaps) / len(gaps)


def sample(sampler: SamplingClient, count: int = 1, max_tokens: int = 8) -> list[Any]:
    params = SamplingParams(max_tokens=max_tokens, seed=1, stop=[])
    futures = [sampler.sample(PROMPT, 2, params).future() for _ in range(count)]
    assert not wait(futures, WAIT).not_done
    return [future.result() for future in futures]


def test_logprobs_of_trained_adapters(tmp_path):
    sampler = VllmSampler(python=PYTHON, arguments=SERVER_ARGUMENTS)
    with ServiceClient(data_dir=tmp_path, sampler=sampler) as client:
        policy = step(client.create_lora_training_client(DEFAULT_MODEL, rank=4, seed=1))
        # vLLM adds in another order, so an exact 0 would mean that the engine has sampled.
        assert 0 < mean_gap(policy, sample(policy)) < TOLERANCE
        assert vllm_processes()
    assert not vllm_processes()


def test_a_recipe_runs_to_its_end_with_the_gap_in_its_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANISH_VLLM_PYTHON", PYTHON)
    monkeypatch.setenv("PLANISH_VLLM_ARGUMENTS", " ".join(SERVER_ARGUMENTS))
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))
    # Answers of one question differ in length, so each step has rewards to learn from.
    options = shorter.Options(
        model_name=DEFAULT_MODEL,
        log_path=str(tmp_path / "run"),
        sampler="vllm",
        batch_size=4,
        max_tokens=32,
        max_steps=2,
        test_size=0,
        eval_every=0,
    )
    rows = read_rows(shorter.main(options) / "metrics.jsonl")
    gaps = [row["optim/kl_sample_train_v2"] for row in rows if "optim/kl_sample_train_v2" in row]
    assert len(gaps) == 2
    assert all(0 < gap < TOLERANCE for gap in gaps)
    assert not vllm_processes()


class Vllm:
    """A vLLM server that reads adapters from `directory`."""

    def __init__(self, directory: Path, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            PYTHON, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(resolve_model(DEFAULT_MODEL)), "--port", str(self.port),
            "--host", "127.0.0.1", "--enable-lora", "--max-loras", "4", "--max-lora-rank", "64",
            "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
            "--dtype", "bfloat16", *SERVER_ARGUMENTS,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        self._log = directory / f"vllm-{self.port}.log"
        self.process = VllmProcess(command, environment, self._log)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + WAIT
        while True:
            with suppress(httpx2.TransportError):
                if httpx2.get(f"{self.url}/health").status_code == 200:
                    return
            assert self.process.status is None, self.process.describe_end()
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def adapters(self) -> set[str]:
        models = httpx2.get(f"{self.url}/v1/models", timeout=WAIT).json()["data"]
        return {model["id"] for model in models if model["id"].startswith("planish-")}

    def pids(self, name: str) -> list[int]:
        """Return the processes of this server whose command line contains `name`."""
        server = self._descendants(os.getpid(), f"--port {self.port} ")
        return [pid for parent in server for pid in self._descendants(parent, name)]

    def _descendants(self, pid: int, name: str) -> list[int]:
        """Return the processes below a process whose command line contains `name`."""
        found: list[int] = []
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [child] if name in line else self._descendants(child, name)
        return found


@pytest.fixture
def two_servers(tmp_path) -> Iterator[list[Vllm]]:
    servers = [Vllm(tmp_path), Vllm(tmp_path)]
    try:
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.process.end()


def is_used(client: ServiceClient, *servers: Vllm) -> bool:
    """Return whether exactly these servers are in use."""
    engine: Any = client._session.service
    (model,) = engine._vllm_models.values()
    return {server.url for server in model._set.ready()} == {server.url for server in servers}


def wait_until_used(client: ServiceClient, *servers: Vllm) -> None:
    deadline = time.monotonic() + WAIT
    while not is_used(client, *servers):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_servers_of_which_one_forgets_hangs_dies_and_returns(two_servers, tmp_path):
    first, second = two_servers
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    sampler = VllmSampler(
        [first.url, second.url], adapter_dir=adapters, stall_seconds=120.0, silent_seconds=120.0
    )
    with ServiceClient(data_dir=tmp_path / "data", sampler=sampler) as client:
        training_client = client.create_lora_training_client(DEFAULT_MODEL, rank=4, seed=1)
        before = training_client.save_weights_and_get_sampling_client()
        (old,) = first.adapters()
        assert second.adapters() == {old}
        responses = sample(before, 4)
        assert 0 < mean_gap(before, responses) < TOLERANCE

        # The next version has a name of its own on both servers. Samples of the earlier one with
        # the same prompt come from its own weights and from its own cached prefix.
        after = step(training_client)
        (new,) = first.adapters() - {old}
        assert second.adapters() == {old, new}
        assert 0 < mean_gap(after, sample(after, 4)) < TOLERANCE
        assert 0 < mean_gap(before, sample(before, 4)) < TOLERANCE
        assert mean_gap(after, responses) > 2 * mean_gap(before, responses)

        # A server forgets the adapter.
        unload = httpx2.post(
            f"{second.url}/v1/unload_lora_adapter", json={"lora_name": new}, timeout=WAIT
        )
        unload.raise_for_status()
        assert new not in second.adapters()
        assert 0 < mean_gap(after, sample(after, 4)) < TOLERANCE
        assert new in second.adapters()

        # A server's engine hangs, while its HTTP server answers.
        (engine,) = second.pids("EngineCore")
        os.kill(engine, signal.SIGSTOP)
        assert 0 < mean_gap(after, sample(after, 4)) < TOLERANCE
        wait_until_used(client, first)
        assert httpx2.get(f"{second.url}/health", timeout=WAIT).status_code == 200
        os.kill(engine, signal.SIGCONT)
        wait_until_used(client, first, second)

        # A server's engine dies while it samples.
        params = SamplingParams(max_tokens=200, seed=1, stop=[])
        futures = [after.sample(PROMPT, 2, params).future() for _ in range(6)]
        os.kill(engine, signal.SIGKILL)
        assert not wait(futures, WAIT).not_done
        assert 0 < mean_gap(after, [future.result() for future in futures]) < TOLERANCE
        wait_until_used(client, first)

        # It is started again, and has no adapter. It gets the present one before it samples.
        second.process.end()
        two_servers[1] = second = Vllm(tmp_path, second.port)
        second.wait_until_ready()
        assert not second.adapters()
        wait_until_used(client, first, second)
        assert 0 < mean_gap(after, sample(after, 4)) < TOLERANCE
        assert new in second.adapters()
