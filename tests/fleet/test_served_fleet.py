"""A server in front of replicas: clients see one engine, also when a replica is lost."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="needs planish[ray]; run by make test-extras")

from client_tests import *  # noqa: F403
from fleet_runs import (
    SETTINGS,
    WAIT,
    pid_of,
    run_grpo,
    served_fleet,
    training_data,
    wait_until_whole,
)
from server_process import BASE_MODEL, running_server
from server_thread import ServerThread, serving
from short_datum import STEP

from planish import ModelInput, PlanishError, SamplingParams, ServiceClient, UserError
from planish.commands.cli import main
from planish.engine.settings import EngineSettings
from planish.fleet.served import ServedFleet
from planish.processes.ray_cluster import leave_cluster, start_cluster
from planish.server.memory_plan import device_memory, fleet_memory_plan
from planish.server.models.replay import Replay
from planish.server.options import ServeOptions
from planish.server.serve import serve
from planish.server.settings import ServerSettings
from planish.types import Constraint, LoraConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]

NUM_STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_cluster(num_cpus=6, num_gpus=0, object_store_bytes=100 << 20)
    yield
    leave_cluster()


@pytest.fixture(scope="module")
def server(model_dir, tmp_path_factory) -> Iterator[ServerThread]:
    data_dir = tmp_path_factory.mktemp("served")
    fleet = served_fleet(model_dir, data_dir, 2)
    with serving(data_dir, {"tiny": model_dir}, engine=fleet) as thread:
        yield thread


@pytest.fixture
def fleet(server) -> Iterator[ServedFleet]:
    """The replicas of the server. Those that a test ends are replaced before the next test."""
    fleet = server.server.engine._engine
    assert isinstance(fleet, ServedFleet)
    yield fleet
    wait_until_whole(fleet)


@pytest.fixture
def make_client(server):
    return lambda: ServiceClient(base_url=server.url)


@pytest.fixture(scope="module")
def undisturbed(model_dir, tmp_path_factory) -> dict[str, Any]:
    """What an engine in this process computes."""
    models, data = {"tiny": str(model_dir)}, tmp_path_factory.mktemp("own")
    with ServiceClient(models=models, data_dir=data, **SETTINGS) as client:
        return {"grpo": run_grpo(client, NUM_STEPS), "pipelined": train_pipelined(client)}


def train_pipelined(client: ServiceClient, disturb: Any = lambda: None) -> list[Any]:
    """Submit steps, samplers and a checkpoint at once, and return all results."""
    training_client = client.create_lora_training_client("tiny", rank=4, seed=1)
    futures: list[Any] = []
    for step in range(4):
        futures.append(training_client.forward_backward(training_data(step), "cross_entropy"))
        futures.append(training_client.optim_step(STEP))
    saved = training_client.save_state("saved")
    futures.append(training_client.forward_backward(training_data(9), "cross_entropy"))
    futures.append(training_client.optim_step(STEP))
    disturb()
    results = [future.result(WAIT).metrics for future in futures]
    again = client.create_training_client_from_state_with_optimizer(saved.result(WAIT).path)
    backward = again.forward_backward(training_data(9), "cross_entropy")
    results += [backward.result(WAIT).metrics, again.optim_step(STEP).result(WAIT).metrics]
    return results


def test_each_replica_plans_the_memory_of_its_device(fleet, model_dir):
    plan = fleet_memory_plan(fleet, ServerSettings(), 0)
    own = device_memory({"tiny": model_dir}, EngineSettings(**SETTINGS), ServerSettings())
    assert [memory.device for memory in plan.replicas.values()] == ["cpu"] * 2
    for memory in plan.replicas.values():
        assert memory.models["tiny"].weight_bytes == own.claim(model_dir).weight_bytes
    assert plan.num_here == 2
    # The server's process asks the replicas for the size of an adapter, too.
    lora = LoraConfig(rank=4)
    size = fleet.administration.adapter_bytes("tiny", lora)
    assert size == fleet.replicas.replicas[0].engine.call(
        "administration.adapter_bytes", "tiny", lora
    )


def test_a_server_with_replicas_has_the_bits_of_one_engine(fleet, undisturbed, make_client):
    assert run_grpo(make_client(), NUM_STEPS) == undisturbed["grpo"]
    assert all(replica.num_samples for replica in fleet.replicas.replicas)


def home_killer(fleet: ServedFleet) -> Callable[[], None]:
    """Return a function that kills the home of the one model that is created after this call."""
    others = set(fleet._models.by_id)

    def kill() -> None:
        (model,) = (model for id, model in fleet._models.by_id.items() if id not in others)
        os.kill(pid_of(model.home), signal.SIGKILL)

    return kill


def test_models_of_a_lost_home_continue_on_another_replica(server, fleet, make_client, undisturbed):
    kill_home = home_killer(fleet)

    def disturb(step: int) -> None:
        if step in (2, 5):
            wait_until_whole(fleet)
            kill_home()

    assert run_grpo(make_client(), NUM_STEPS, disturb) == undisturbed["grpo"]
    assert server.server.engine.fault is None


def test_requests_that_run_or_wait_when_a_home_is_lost_run_once(fleet, make_client, undisturbed):
    assert train_pipelined(make_client(), home_killer(fleet)) == undisturbed["pipelined"]


def test_a_model_that_no_other_replica_can_hold_names_its_checkpoint(
    fleet, make_client, monkeypatch
):
    async def restore_without_memory(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    kill_home = home_killer(fleet)
    training_client = make_client().create_lora_training_client("tiny", rank=4, seed=1)
    training_client.forward_backward(training_data(0), "cross_entropy")
    training_client.optim_step(STEP).result(WAIT)
    saved = training_client.save_state("kept").result(WAIT).path
    with monkeypatch.context() as fault:
        fault.setattr(Replay, "restore", restore_without_memory)
        kill_home()
        with pytest.raises(PlanishError, match="lacks the memory .*DefaultCPUAllocator") as info:
            training_client.forward_backward(training_data(1), "cross_entropy").result(WAIT)
    assert f"Create a new client from your last checkpoint, {saved}" in str(info.value)


def test_a_constraint_is_compiled_before_the_request_is_submitted(make_client):
    sampler = make_client().create_sampling_client(base_model="tiny")
    params = SamplingParams(
        max_tokens=8, seed=1, constraint=Constraint("choice", choices=("yes", "no"))
    )
    response = sampler.sample(ModelInput.from_ints([1, 2, 3]), 2, params).result(WAIT)
    assert len(response.sequences) == 2
    invalid = SamplingParams(max_tokens=8, constraint=Constraint("regex", "("))
    with pytest.raises(UserError, match="constraint of kind regex cannot be used"):
        sampler.sample(ModelInput.from_ints([1, 2, 3]), 1, invalid).result(WAIT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 4096}, r"replicas=4096: each replica needs a device of its own"),
        ({"replicas": 0}, r"replicas=0: give a whole number of at least 1"),
        ({"ray": "here"}, r"ray='here': give 'auto' or HOST:PORT"),
    ],
)
def test_invalid_options_are_errors_before_the_server_starts(
    options, message, model_dir, tmp_path, monkeypatch
):
    from planish.processes import ray_cluster

    # Ray itself stays as it is: the replicas of other tests use it.
    no_cluster = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: no_cluster)
    with pytest.raises(UserError, match=message):
        serve(ServeOptions(port=0, data_dir=tmp_path, models={"tiny": str(model_dir)}, **options))


def test_the_command_lists_drains_and_adds_the_replicas_of_a_server(
    model_dir, tmp_path, undisturbed, capsys
):
    def fleet(*arguments: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main(["fleet", *arguments, "--base-url", server.url, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    options = ("--replicas", "2", "--dtype", "float32", "--micro-batch-tokens", "32")
    with running_server(tmp_path, model_dir, *options) as server:
        drained = []

        def drain_home(step: int) -> None:
            if step == 3:
                (home,) = (row["replica"] for row in fleet("status") if row["models"])
                drained.append(home)
                assert fleet("drain", str(home))[home]["state"] == "draining"

        client = ServiceClient(base_url=server.url)
        assert run_grpo(client, NUM_STEPS, drain_home, model=BASE_MODEL) == undisturbed["grpo"]
        deadline = time.monotonic() + WAIT
        while fleet("status")[drained[0]]["state"] != "drained":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        rows = fleet("status")
        assert [row["state"] for row in rows].count("running") == 1
        assert all(row["samples"] and row["device"] for row in rows)
        page = httpx.get(f"{server.url}/metrics", timeout=WAIT).text
        for row in rows:
            up = float(row["state"] == "running")
            assert f'planish_replica_up{{replica="{row["replica"]}"}} {up}' in page
            samples = float(row["samples"])
            assert f'planish_replica_samples_total{{replica="{row["replica"]}"}} {samples}' in page
        other = str(1 - drained[0])
        assert main(["fleet", "drain", other, "--base-url", server.url]) == 1
        assert "is the only one that takes work" in capsys.readouterr().err
        assert main(["fleet", "drain", "7", "--base-url", server.url]) == 1
        assert "replica 7: there is no such replica" in capsys.readouterr().err
        assert server.stop() == 0
    with running_server(tmp_path, model_dir, *options) as server:
        states = [row["state"] for row in fleet("status")]
        assert (states[drained[0]], states[1 - drained[0]]) == ("drained", "running")
        assert fleet("add")[drained[0]]["state"] == "starting"
        deadline = time.monotonic() + WAIT
        while fleet("status")[drained[0]]["state"] != "running":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert server.stop() == 0
