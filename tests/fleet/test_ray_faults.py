"""Faults of a Ray cluster that were reported for other systems: a full object store, a machine
without memory, machines of different sizes, processes that do not start, and data that cannot be
sent.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs planish[ray]; run by make test-extras")

from fleet_runs import WAIT, options, pid_of, run_grpo, wait_until_whole
from test_ray_fleet import wait_until_ended

from planish import ServiceClient
from planish.fleet.fleet import Fleet
from planish.fleet.link import EngineStatus, ReplicaLostError
from planish.fleet.plan import _cpus_per_replica
from planish.fleet.ray_link import RayLink, Resources, TransferError
from planish.processes.ray_cluster import leave_cluster, start_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]

ONE_CPU = Resources(num_gpus=0, num_cpus=1)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_cluster(num_cpus=4, num_gpus=0, object_store_bytes=100 << 20)
    yield
    leave_cluster()


@pytest.fixture
def link(model_dir, tmp_path) -> Iterator[RayLink]:
    link = RayLink(options(model_dir, tmp_path), ONE_CPU)
    yield link
    link.kill()


class Unreadable:
    """An object that cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_data_that_a_replica_cannot_read_are_an_error_and_no_loss(link):
    with pytest.raises(TransferError, match="data of a replica cannot be transferred.*no number"):
        link.request("call", Unreadable())
    assert isinstance(link.request("ping"), EngineStatus)


def test_a_replica_whose_results_are_lost_is_ended_and_frees_its_device(link, monkeypatch):
    def fail(*_: object) -> None:
        raise TransferError("the object store is full")

    monkeypatch.setattr(link, "_call", fail)
    with pytest.raises(ReplicaLostError, match="the object store is full"):
        link.poll()
    assert link.machine is not None
    wait_until_ended(link.machine.pid)


def test_a_replica_whose_calls_all_wait_gives_a_sign_of_life(link):
    def wait_for_events() -> None:
        with pytest.raises(ReplicaLostError):
            link.request("poll")  # for ever, because nothing was submitted

    threads = [threading.Thread(target=wait_for_events) for _ in range(40)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    answers: list[Any] = []
    ping = threading.Thread(target=lambda: answers.append(link.request("ping")), daemon=True)
    ping.start()
    ping.join(WAIT)
    assert [type(answer) for answer in answers] == [EngineStatus]
    link.kill()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_a_replica_that_does_not_start_is_given_up(model_dir, tmp_path):
    with pytest.raises(ReplicaLostError, match="not started for 2 s: it waits for a free device"):
        RayLink(options(model_dir, tmp_path), Resources(0, 64), max_start_seconds=2.0)


def test_a_replacement_that_stops_while_it_loads_is_replaced_too(model_dir, tmp_path):
    engine_options = options(model_dir, tmp_path)
    stopped: list[int] = []

    def start_link() -> RayLink:
        link = RayLink(engine_options, ONE_CPU)
        if num_started and not stopped:
            assert link.machine is not None
            stopped.append(link.machine.pid)
            os.kill(stopped[0], signal.SIGSTOP)
        return link

    num_started = 0
    fleet = Fleet(start_link, 1, silent_seconds=3.0)
    try:
        num_started = 1
        client = ServiceClient(service=fleet)
        expected = run_grpo(client, 1)
        (lost,) = fleet.replicas.replicas
        os.kill(pid_of(lost), signal.SIGKILL)
        deadline = time.monotonic() + WAIT
        while not lost.is_lost:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        wait_until_whole(fleet)
        assert stopped
        assert run_grpo(client, 1) == expected
        wait_until_ended(stopped[0])
    finally:
        fleet.close(finish=False)


def run_program(text: str, *arguments: str, **environment: str) -> str:
    """Run a program with a cluster of its own, and return its output."""
    path = [str(Path(__file__).parent), *sys.path]
    result = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


FULL_STORE = """
import sys
from pathlib import Path
import numpy as np
from fleet_runs import options, ray_fleet, run_grpo
from planish import ServiceClient, StorageError
from planish.fleet.ray_link import put
from planish.processes.ray_cluster import leave_cluster, start_cluster

start_cluster(num_cpus=2, num_gpus=0, object_store_bytes=80 << 20)
fleet = ray_fleet(Path(sys.argv[1]), Path(sys.argv[2]), 2)
client = ServiceClient(service=fleet)
expected = run_grpo(client, 1)
objects = []
try:
    while True:
        objects.append(put(np.zeros(1 << 20)))
except StorageError as error:
    print(error)
objects.clear()
assert run_grpo(client, 1) == expected
fleet.close(finish=False)
leave_cluster()
"""


def test_a_full_object_store_is_an_error_until_it_has_room(model_dir, tmp_path):
    output = run_program(
        FULL_STORE, str(model_dir), str(tmp_path), RAY_local_fs_capacity_threshold="0.001"
    )
    (line,) = output.splitlines()
    assert "Ray's object store on" in line
    assert "free space in" in line


NO_MEMORY = """
import sys
from pathlib import Path
from fleet_runs import ray_fleet
from planish import EngineClosedError
from planish.processes.ray_cluster import leave_cluster, start_cluster

start_cluster(num_cpus=2, num_gpus=0, object_store_bytes=80 << 20)
try:
    ray_fleet(Path(sys.argv[1]), Path(sys.argv[2]), 1).replicas.load_base_model("tiny")
except EngineClosedError as error:
    print(error)
leave_cluster()
"""


def test_a_replica_that_ray_ends_for_lack_of_memory_says_so(model_dir, tmp_path):
    output = run_program(
        NO_MEMORY,
        str(model_dir),
        str(tmp_path),
        RAY_memory_usage_threshold="0.001",
        RAY_memory_monitor_refresh_ms="50",
    )
    assert "the memory of its machine is nearly full; start fewer replicas" in output


UNEVEN = """
import sys
import ray
from ray.cluster_utils import Cluster
from planish import ServiceClient
from planish.processes.ray_cluster import import_ray

import_ray()
store = {"object_store_memory": 80 << 20}
for attempt in range(4):
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=1, **store)
        cluster.add_node(num_cpus=3, **store)
        break
    except Exception as error:  # on a busy machine, Ray's 30 s are too short
        assert "timed out during startup" in str(error), error
        cluster.shutdown()
cluster.wait_for_nodes()
with ServiceClient(models={"tiny": sys.argv[1]}, data_dir=sys.argv[2], ray=cluster.address) as client:
    client.create_sampling_client(base_model="tiny")
    fleet = client._session.service
    print(sorted(len(r.link.machine.versions) > 0 for r in fleet.replicas.live()))
    nodes = {actor["Address"]["NodeID"] for actor in ray._private.state.actors().values()}
    print(len(nodes))
ray.shutdown()
cluster.shutdown()
"""


def test_replicas_fit_on_machines_of_different_sizes(model_dir, tmp_path):
    """One for each machine: half of all CPUs each would not fit on the smaller one."""
    output = run_program(UNEVEN, str(model_dir), str(tmp_path))
    assert output.splitlines() == ["[True, True]", "2"]


@pytest.mark.parametrize(
    ("free", "needed", "share", "size"),
    [
        ([8, 8], 2, 2, 8),
        ([1, 3], 2, 2, 1),
        ([6, 10], 4, 4, 3),
        ([16], 3, 3, 5),
        ([16], 2, 4, 4),
        ([1, 1, 1], 3, 3, 1),
    ],
)
def test_the_cpus_of_a_replica_are_on_one_machine(free, needed, share, size):
    assert _cpus_per_replica(free, needed, share) == size
