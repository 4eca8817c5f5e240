"""Two servers with vLLM's protocol, of which one is killed, stopped, hangs, or returns. See
test_vllm_sampler.py.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, start_server
from short_datum import STEP, datum
from tcp_gate import TcpGate
from test_vllm_sampler import BASE_MODEL, PROMPT, gap, served_adapters

from planish import EngineClosedError, ModelInput, SamplingClient, SamplingParams, ServiceClient
from planish.fleet.vllm.engine import VllmEngine
from planish.fleet.vllm.options import VllmSampler
from planish.fleet.vllm.server_set import ServerSet
from planish.testing import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WAIT = 300.0
LONG = SamplingParams(max_tokens=200, seed=1, stop=[])


class Servers:
    """Two servers behind gates, and a client whose samples come from them."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._directory = model, directory
        self._adapters = directory / "adapters"
        self._adapters.mkdir()
        self._num_starts = 0
        with ThreadPoolExecutor(2) as threads:
            self.processes = list(threads.map(self.start, range(2)))
        self.ports = [int(server.url.rpartition(":")[2]) for server in self.processes]
        self.gates = [TcpGate(port) for port in self.ports]
        self._num_clients = 0

    def start(self, number: int, model: Path | None = None, port: int = 0) -> ServerProcess:
        options = ("--dtype", "float32", "--adapter-dir", str(self._adapters), "--port", str(port))
        # A server that starts again has no adapters, as vLLM.
        self._num_starts += 1
        data = self._directory / f"data-{self._num_starts}"
        return start_server(data, model or self._model, *options)

    def restart(self, number: int, model: Path | None = None) -> None:
        """Start a server again that was killed, at the same port."""
        self.processes[number] = self.start(number, model, self.ports[number])

    def client(self, **limits: Any) -> ServiceClient:
        self._num_clients += 1
        sampler = VllmSampler(
            [gate.url for gate in self.gates], adapter_dir=self._adapters, **limits
        )
        return ServiceClient(
            models={BASE_MODEL: str(self._model)},
            data_dir=self._directory / f"runs-{self._num_clients}",
            dtype="float32",
            sampler=sampler,
        )

    def close(self) -> None:
        for gate in self.gates:
            gate.close()
        for server in self.processes:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def servers(model_dir, tmp_path_factory) -> Iterator[Servers]:
    """The servers of all tests. Each test leaves both of them in use."""
    servers = Servers(model_dir, tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


def trained(client: ServiceClient) -> SamplingClient:
    training_client = client.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    training_client.forward_backward([datum()], "cross_entropy").result(WAIT)
    training_client.optim_step(STEP).result(WAIT)
    return training_client.save_weights_and_get_sampling_client()


def server_set(client: ServiceClient) -> ServerSet:
    engine: Any = client._session.service
    assert isinstance(engine, VllmEngine)
    (model,) = engine._vllm_models.values()
    return model._set


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def num_ready(client: ServiceClient) -> int:
    return len(server_set(client).ready())


def test_samples_of_a_killed_server_are_sampled_elsewhere_until_it_returns(servers, caplog):
    with servers.client() as client:
        sampler = trained(client)
        (name,) = served_adapters(servers.processes[0])
        assert served_adapters(servers.processes[1]) == {name}
        futures = [sampler.sample(PROMPT, 2, LONG).future() for _ in range(12)]
        servers.processes[1].stop(signal.SIGKILL)
        assert not wait(futures, WAIT).not_done
        assert all(len(future.result().sequences) == 2 for future in futures)
        assert gap(sampler) < 1e-4
        # A version that is published meanwhile is on the other one.
        trained(client)
        wait_until(lambda: num_ready(client) == 1)

        # The server lost its adapters with its process, and gets them again. Both servers sample.
        servers.restart(1)
        wait_until(lambda: num_ready(client) == 2)
        assert name not in served_adapters(servers.processes[1])
        futures = [sampler.sample(PROMPT, 2, LONG).future() for _ in range(8)]
        assert not wait(futures, WAIT).not_done
        assert name in served_adapters(servers.processes[1])
        scores = sampler.compute_logprobs(
            ModelInput.from_ints(PROMPT.to_ints() + futures[0].result().sequences[0].tokens)
        ).result(WAIT)[PROMPT.length :]
        for future in futures:  # the seed is the same
            for sampled, score in zip(future.result().sequences[0].logprobs, scores, strict=True):
                assert abs(sampled - float(score or 0)) < 1e-4
        assert f"{servers.gates[1].url} is used again" in caplog.text


def test_a_stopped_server_is_given_up_and_used_again_when_it_continues(servers):
    with servers.client(silent_seconds=30.0) as client:
        sampler = trained(client)
        stopped = servers.processes[0].process.pid
        os.kill(stopped, signal.SIGSTOP)
        futures = [sampler.sample(PROMPT, 2, LONG).future() for _ in range(4)]
        assert not wait(futures, WAIT).not_done
        assert all(len(future.result().sequences) == 2 for future in futures)
        assert gap(sampler) < 1e-4
        os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: num_ready(client) == 2)
        assert gap(sampler) < 1e-4


def test_a_server_that_answers_and_computes_nothing_is_given_up(servers):
    with servers.client(stall_seconds=30.0) as client:
        sampler = trained(client)
        servers.gates[0].hold()
        futures = [sampler.sample(PROMPT, 2, LONG).future() for _ in range(4)]
        assert not wait(futures, WAIT).not_done
        assert all(len(future.result().sequences) == 2 for future in futures)
        servers.gates[1].hold()
        with pytest.raises(EngineClosedError, match="has computed nothing for 30 s") as info:
            sampler.sample(PROMPT, 1, LONG).result(WAIT)
        assert all(gate.url in str(info.value) for gate in servers.gates)
        for gate in servers.gates:
            gate.release()
        wait_until(lambda: all(server.fault is None for server in server_set(client).servers))
        wait_until(lambda: num_ready(client) == 2)
        assert gap(sampler) < 1e-4


def test_a_request_whose_connection_is_closed_is_sent_again(servers):
    with servers.client() as client:
        sampler = trained(client)
        servers.gates[0].cut_next(1)  # of equal servers, the first gets the request
        for _ in range(2):
            assert gap(sampler) < 1e-4
        assert [gate.num_cut for gate in servers.gates] == [1, 0]
        assert num_ready(client) == 2


def test_a_server_that_returns_with_other_weights_is_not_used(servers, tmp_path, caplog):
    with servers.client() as client:
        sampler = trained(client)
        servers.processes[1].stop(signal.SIGKILL)
        # A loss is noticed when a request meets it, so both servers get some.
        futures = [sampler.sample(PROMPT, 2, LONG).future() for _ in range(4)]
        assert not wait(futures, WAIT).not_done
        wait_until(lambda: num_ready(client) == 1)
        servers.restart(1, tiny_model(tmp_path / "other", seed=5))
        wait_until(lambda: "does not sample from the weights of planish" in caplog.text)
        assert num_ready(client) == 1
        assert gap(sampler) < 1e-4
        servers.processes[1].stop(signal.SIGKILL)
        servers.restart(1)
        wait_until(lambda: num_ready(client) == 2)
