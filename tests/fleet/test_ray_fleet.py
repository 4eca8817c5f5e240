"""Fleets of one, two and three replicas on a real Ray cluster of this machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs planish[ray]; run by make test-extras")

from client_tests import *  # noqa: F403
from fleet_runs import (
    SETTINGS,
    WAIT,
    home_of,
    pid_of,
    ray_fleet,
    run_grpo,
    training_data,
    wait_until_whole,
)
from short_datum import STEP, datum

from planish import EngineClosedError, ModelInput, SamplingParams, ServiceClient, UserError
from planish.engine.replication import ExportWeights
from planish.fleet.accepted import AcceptedSamples
from planish.fleet.fleet import Fleet
from planish.fleet.link import ReplicaLostError
from planish.fleet.plan import FleetPlan
from planish.fleet.ray_link import RayLink, ReplicaActor, Resources
from planish.fleet.remote_engine import RemoteEngine
from planish.fleet.replica import Replica
from planish.processes.ray_cluster import import_ray, leave_cluster, start_cluster
from planish.service import UnloadModel

pytestmark = [
    pytest.mark.slow,
    # Ray leaves its processes to the garbage collector when their start takes too long. Then
    # `start_cluster` tries again.
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]

NUM_STEPS, FEW_STEPS = 20, 8
PARAMS = SamplingParams(max_tokens=200, seed=1, stop=[])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_cluster(num_cpus=6, num_gpus=0, object_store_bytes=100 << 20)
    yield
    leave_cluster()


@pytest.fixture(scope="module")
def fleet_of_two(model_dir, tmp_path_factory) -> Iterator[Fleet]:
    fleet = ray_fleet(model_dir, tmp_path_factory.mktemp("data"), 2, silent_seconds=20.0)
    yield fleet
    fleet.close(finish=False)


@pytest.fixture
def two_replicas(fleet_of_two) -> Iterator[Fleet]:
    """Two replicas. Those that a test ends are replaced before the next test."""
    yield fleet_of_two
    wait_until_whole(fleet_of_two)


@pytest.fixture
def shared_service(two_replicas):
    return two_replicas


@pytest.fixture(scope="module")
def undisturbed(model_dir, tmp_path_factory) -> list:
    """The run on an engine in this process."""
    models, data = {"tiny": str(model_dir)}, tmp_path_factory.mktemp("own")
    with ServiceClient(models=models, data_dir=data, **SETTINGS) as client:
        return run_grpo(client, NUM_STEPS)


def test_three_replicas_two_and_one_have_the_bits_of_one_engine(model_dir, tmp_path, undisturbed):
    fleet = ray_fleet(model_dir, tmp_path, 3)
    client = ServiceClient(service=fleet)
    homes: list[Replica] = []
    try:
        while True:
            replicas = fleet.replicas.live()
            before = {replica.number: replica.num_micro_batches for replica in replicas}
            steps = run_grpo(client, NUM_STEPS, lambda step: homes.append(home_of(fleet)))
            assert steps == undisturbed
            assert all(replica.num_samples for replica in replicas)
            # The home's own micro-batches are not counted.
            others = [r for r in replicas if r is not homes[-1]]
            assert all(replica.num_micro_batches > before[replica.number] for replica in others)
            if not others:
                break
            end_for_good(fleet, others[0])
    finally:
        fleet.close(finish=False)


def end_for_good(fleet: Fleet, replica: Replica) -> None:
    """End a replica that is not replaced."""
    fleet.replicas.drain(replica.number)
    replica.link.kill()
    fleet.replicas.wait_until_lost(replica)
    assert replica.is_lost


def test_two_replicas_have_the_bits_of_one_engine(two_replicas, undisturbed):
    assert run_grpo(ServiceClient(service=two_replicas), NUM_STEPS) == undisturbed


def test_a_killed_replica_and_a_stopped_one_that_returns_change_no_result(
    two_replicas, undisturbed
):
    stopped = []

    def disturb(step: int) -> None:
        (other,) = (r for r in two_replicas.replicas.replicas if r is not home_of(two_replicas))
        if step == 2:
            os.kill(pid_of(other), signal.SIGKILL)
        elif step == 4:
            wait_until_whole(two_replicas)
        elif step == 5:
            # As on another machine: Ray is asked to end the process, which cannot answer yet.
            stopped.append(pid_of(other))
            other.link.machine = replace(other.link.machine, host="another machine")
            os.kill(pid_of(other), signal.SIGSTOP)
        elif step == 6:
            # Its micro-batches were computed again meanwhile. It computes them too.
            assert other.is_lost or pid_of(other) != stopped[0]
            os.kill(stopped[0], signal.SIGCONT)

    client = ServiceClient(service=two_replicas)
    assert run_grpo(client, FEW_STEPS, disturb) == undisturbed[:FEW_STEPS]
    wait_until_ended(stopped[0])


def wait_until_ended(pid: int) -> None:
    """Wait until a process has ended, or is a zombie."""
    deadline = time.monotonic() + WAIT
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_the_loss_of_a_home_names_the_checkpoint_from_which_training_continues(
    two_replicas, undisturbed
):
    client = ServiceClient(service=two_replicas)
    saved = {}

    def kill_home(step: int) -> None:
        if step == 5:
            os.kill(pid_of(home_of(two_replicas)), signal.SIGKILL)

    with pytest.raises(EngineClosedError, match="load the last checkpoint, tinker://") as info:
        run_grpo(client, FEW_STEPS, kill_home, save_every=4, on_save=saved.__setitem__)
    assert saved[4] in str(info.value)
    rest = run_grpo(client, FEW_STEPS, state=saved[4], first_step=4)
    assert rest == undisturbed[4:FEW_STEPS]


def test_samples_of_a_lost_replica_are_sampled_again_with_the_same_tokens(two_replicas):
    sampler = ServiceClient(service=two_replicas).create_sampling_client(base_model="tiny")
    prompts = [ModelInput.from_ints([1, 2, number]) for number in range(8)]
    expected = [sampler.sample(p, 4, PARAMS).result(WAIT) for p in prompts]
    futures = [sampler.sample(p, 4, PARAMS).future() for p in prompts]
    os.kill(pid_of(two_replicas.replicas.replicas[1]), signal.SIGKILL)
    assert not wait(futures, WAIT).not_done
    again = [future.result() for future in futures]
    for response, response_again in zip(expected, again, strict=True):
        for sequence, other in zip(response.sequences, response_again.sequences, strict=True):
            assert (sequence.tokens, sequence.logprobs) == (other.tokens, other.logprobs)


def test_samples_that_are_sent_without_an_answer_behave_like_others(two_replicas, monkeypatch):
    """An invalid one raises at once, a cancelled one ends, and an error is that of one alone."""
    sampler = ServiceClient(service=two_replicas).create_sampling_client(base_model="tiny")
    prompts = [ModelInput.from_ints([3, 2, number % 3]) for number in range(12)]
    expected = [
        [s.tokens for s in sampler.sample(p, 2, PARAMS).result().sequences] for p in prompts
    ]
    requested, request = [], RayLink.request
    monkeypatch.setattr(RayLink, "request", lambda *a: requested.append(a[1]) or request(*a))
    futures = [sampler.sample(p, 2, PARAMS) for p in prompts]
    assert [[s.tokens for s in future.result(WAIT).sequences] for future in futures] == expected
    assert "submit" not in requested
    outside = ModelInput.from_ints([1 << 20])
    with pytest.raises(UserError, match="outside the vocabulary"):
        sampler.sample(outside, 2, PARAMS)
    monkeypatch.setattr(AcceptedSamples, "covers", lambda *_: True)
    invalid, *futures = [sampler.sample(p, 2, PARAMS) for p in [outside, *prompts]]
    is_cancelled = [future.cancel() for future in futures[6:]]
    with pytest.raises(UserError, match="outside the vocabulary"):
        invalid.result(WAIT)
    found = [[s.tokens for s in future.result(WAIT).sequences] for future in futures[:6]]
    assert found == expected[:6]
    assert [future.future().cancelled() for future in futures[6:]] == is_cancelled


def train(client: ServiceClient) -> tuple[Any, list[Any]]:
    """Submit steps of several micro-batches each. Return the client and the futures."""
    training_client = client.create_lora_training_client("tiny", rank=4, seed=1)
    futures: list[Any] = []
    for step in range(4):
        futures.append(training_client.forward_backward(training_data(step), "cross_entropy"))
        futures.append(training_client.optim_step(STEP))
    return training_client, futures


def test_steps_that_are_queued_when_a_model_is_unloaded_finish(two_replicas):
    client = ServiceClient(service=two_replicas)
    kept, futures = train(client)
    expected = [future.result(WAIT).metrics for future in futures]
    training_client, futures = train(client)
    unloaded = two_replicas.submit(UnloadModel(training_client.model_id))
    assert [future.result(WAIT).metrics for future in futures] == expected
    unloaded.result(WAIT)
    with pytest.raises(UserError, match="there is no such model, or it was unloaded"):
        training_client.forward_backward([datum()], "cross_entropy")
    assert kept.model_id != training_client.model_id


def test_a_step_exports_its_weights_once_and_reads_its_data_once_at_home(two_replicas, monkeypatch):
    submitted, called = [], []
    submit, call = RemoteEngine.submit, RemoteEngine.call

    def recorded_submit(engine: RemoteEngine, operation: Any) -> Any:
        submitted.append(type(operation))
        return submit(engine, operation)

    def recorded_call(engine: RemoteEngine, name: str, *args: Any) -> Any:
        called.append(name)
        return call(engine, name, *args)

    training_client = ServiceClient(service=two_replicas).create_lora_training_client("tiny", 4)
    monkeypatch.setattr(RemoteEngine, "submit", recorded_submit)
    monkeypatch.setattr(RemoteEngine, "call", recorded_call)
    for step in range(2):
        training_client.save_weights_and_get_sampling_client()
        backward = training_client.forward_backward(training_data(step), "cross_entropy")
        training_client.optim_step(STEP).result(WAIT)
        assert backward.result(WAIT).metrics["micro_batches:sum"] > 1
    assert submitted.count(ExportWeights) == 2
    assert called.count("preparation.micro_batches") == 2


def test_a_program_joins_a_running_cluster_and_saves_when_it_ends(model_dir, tmp_path, undisturbed):
    """It uses the free devices. More replicas than those are an error, not a wait."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from fleet_runs import SETTINGS, run_grpo, training_data
from planish import ServiceClient, UserError
arguments = dict(models={{"tiny": {str(model_dir)!r}}}, data_dir={str(tmp_path)!r}, **SETTINGS)
try:
    ServiceClient(ray="auto", replicas=7, **arguments)
except UserError as error:
    print(error)
client = ServiceClient(ray="auto", replicas=2, **arguments)
print(run_grpo(client, 1)[0])
training_client = client.create_lora_training_client("tiny", rank=4, seed=1)
for step in range(8):  # the checkpoint waits for these steps when the program ends
    training_client.forward_backward(training_data(step), "cross_entropy")
training_client.save_state("last")
"""
    )
    address = import_ray().get_runtime_context().gcs_address
    result = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
        env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    error, first_step = result.stdout.splitlines()
    assert "replicas=7: each replica needs a device of its own, and free in the cluster" in error
    assert first_step == repr(undisturbed[0])
    assert len(list(tmp_path.glob("*/weights/last"))) == 1


def test_bad_input_is_an_error_before_a_replica_starts(model_dir, tmp_path):
    def start(**arguments):
        return ServiceClient(models={"tiny": str(model_dir)}, data_dir=tmp_path, **arguments)

    with pytest.raises(UserError, match=r"replicas=4096: each replica needs a device of its own"):
        start(replicas=4096)
    with pytest.raises(UserError, match=r"replicas=0: give a whole number of at least 1"):
        start(replicas=0)
    with pytest.raises(UserError, match=r"device='cuda:0' is one GPU"):
        start(replicas=2, device="cuda:0")
    with pytest.raises(UserError, match="engine='process' is for one engine"):
        start(replicas=2, engine="process")
    with pytest.raises(UserError, match="dtype='float16'"):
        start(replicas=2, dtype="float16")
    with pytest.raises(UserError, match="names a server, but replicas, ray configures"):
        ServiceClient(base_url="http://127.0.0.1:1", replicas=2, ray="auto")


def test_no_replica_is_added_without_a_free_device():
    plan = FleetPlan(1, Resources(num_gpus=0, num_cpus=7), 6, 0, False, True)
    with pytest.raises(
        UserError, match=r"each replica occupies 7 CPUs, and \d are free .*add a mac"
    ):
        plan.check_free()


def test_a_base_model_that_no_replica_can_hold_is_an_error_before_it_is_loaded(model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path / "large")
    config = json.loads((model_dir / "config.json").read_text())
    config |= {"num_hidden_layers": 1024, "intermediate_size": 1 << 24}  # 12 TiB
    (tmp_path / "large" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not fit into main memory.*use a smaller base model"):
        ray_fleet(tmp_path / "large", tmp_path / "data", 1)


def test_a_program_waits_for_the_devices_of_one_that_was_killed(monkeypatch):
    from planish.processes import ray_cluster

    ray = import_ray()
    killed = ray.remote(num_cpus=3)(ReplicaActor).remote()
    ray.get(killed.machine.remote(), timeout=WAIT)
    free_devices, found = ray_cluster.free_devices, []

    def kill_after_look(kind: str) -> int:
        found.append(free_devices(kind))
        if len(found) == 2:
            ray.kill(killed)
        return found[-1]

    occupied = 6 - free_devices("CPU")
    monkeypatch.setattr(ray_cluster, "free_devices", kill_after_look)
    monkeypatch.setattr(ray_cluster, "_FREE_SECONDS", WAIT)
    assert ray_cluster.wait_for_devices("CPU", 9 - occupied) == 9 - occupied
    assert found[0] == 6 - occupied


def test_an_address_where_no_ray_answers_is_an_error(monkeypatch):
    from planish.processes import ray_cluster

    # Ray itself stays as it is: the replicas of other tests use it.
    no_cluster = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: no_cluster)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(UserError, match=f"ray='{address}': no Ray cluster answers"):
            ray_cluster.join_cluster(address)
    with pytest.raises(UserError, match="ray='here': give 'auto' or HOST:PORT"):
        ray_cluster.join_cluster("here")


def test_a_call_after_the_end_of_the_cluster_starts_no_other_cluster():
    link = RayLink.__new__(RayLink)
    link._ray = SimpleNamespace(exceptions=import_ray().exceptions, is_initialized=lambda: False)
    with pytest.raises(ReplicaLostError, match="the connection to the Ray cluster has ended"):
        link._call(None)


TWO_CLUSTERS = """
from planish.fleet.ray_link import RayLink, ReplicaActor
from planish.processes.ray_cluster import import_ray, leave_cluster, start_cluster
import threading

start_cluster(num_cpus=1, num_gpus=0, object_store_bytes=100 << 20)
link = RayLink.__new__(RayLink)
link._ray, link.machine, link._was_killed = import_ray(), None, threading.Event()
link._actor = import_ray().remote(num_cpus=1)(ReplicaActor).remote()
leave_cluster()
start_cluster(num_cpus=1, num_gpus=0, object_store_bytes=100 << 20)
link.end()
link.kill()
leave_cluster()
print("ended")
"""


def test_a_replica_can_be_ended_when_another_cluster_is_in_use():
    """The garbage collector may end it late."""
    ended = subprocess.run(
        [sys.executable, "-c", TWO_CLUSTERS], capture_output=True, text=True, timeout=WAIT
    )
    assert ended.stdout.endswith("ended\n"), ended.stderr
