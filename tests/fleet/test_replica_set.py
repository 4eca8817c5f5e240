"""The replicas of a fleet: which are started, rejected, replaced, drained and added."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import pytest

from planish import EngineClosedError, UserError
from planish.fleet.drained import read_drained, write_drained
from planish.fleet.fleet import Fleet
from planish.fleet.link import EngineStatus, ReplicaLostError
from planish.fleet.ray_link import Machine
from planish.fleet.replica import Replica
from planish.fleet.replica_set import ReplicaSet

WAIT = 60.0
MACHINE = Machine((("planish", "0.1"), ("torch", "2.13")), "a CPU with AVX2", "here", 1)
OTHER_TORCH = replace(MACHINE, versions=(("planish", "0.1"), ("torch", "2.11")))


class QuietLink:
    """A link to a process that does nothing, and ends when it is killed."""

    def __init__(self, machine: Machine = MACHINE, weights: str = "a") -> None:
        self.machine, self._weights = machine, weights
        self.has_ended = threading.Event()

    def request(self, name: str, *args: Any) -> Any:
        if self.has_ended.is_set():
            raise ReplicaLostError("the process has ended")
        if name == "ping":
            return EngineStatus()
        return self._weights if args[:1] == ("load_base_model",) else None

    def send(self, name: str, *args: Any) -> None:
        self.request(name, *args)

    def poll(self) -> list[Any]:
        self.has_ended.wait()
        raise ReplicaLostError("the process has ended")

    def end(self) -> None:
        self.has_ended.set()

    def kill(self) -> None:
        self.has_ended.set()


class Processes:
    """Starts links, in the given order and then equal ones."""

    def __init__(self, *links: QuietLink | Exception) -> None:
        self._given = list(links)
        self.links: list[QuietLink] = []
        self._lock = threading.Lock()

    def start(self) -> QuietLink:
        with self._lock:
            link = self._given.pop(0) if self._given else QuietLink()
            if isinstance(link, Exception):
                raise link
            self.links.append(link)
            return link


@pytest.fixture
def replica_set() -> Iterator[Callable[..., ReplicaSet]]:
    made: list[ReplicaSet] = []

    def make(processes: Processes, count: int = 2, **arguments: Any) -> ReplicaSet:
        made.append(
            ReplicaSet(processes.start, count, lambda operation, error: str(error), **arguments)
        )
        return made[-1]

    yield make
    for replicas in made:
        replicas.close(finish=False)


def wait_for(replicas: ReplicaSet, is_true: Callable[[], bool]) -> None:
    with replicas._changed:
        assert replicas._changed.wait_for(is_true, WAIT)


def is_replaced(replicas: ReplicaSet) -> bool:
    """Return whether all replicas run, and one of them in the place of a lost one. Before a loss is
    known, all seem to run too.
    """
    num_lost = sum(replica.num_lost_processes for replica in replicas.replicas)
    return num_lost == 1 and not any(replica.is_lost for replica in replicas.replicas)


def lose(replicas: ReplicaSet, number: int) -> Replica:
    """End the process of a replica."""
    lost = replicas.replicas[number]
    lost.link.kill()
    wait_for(replicas, lambda: lost.is_lost)
    return lost


def test_nodes_with_other_versions_or_devices_are_rejected_before_anything_runs(replica_set):
    for other, message in (
        (OTHER_TORCH, "the versions of packages differ between replicas.*2.11"),
        (replace(MACHINE, device="an H100"), "the devices differ between replicas.*an H100"),
    ):
        processes = Processes(QuietLink(), QuietLink(other))
        with pytest.raises(UserError, match=message):
            replica_set(processes)
        assert all(link.has_ended.is_set() for link in processes.links)


def test_nodes_with_other_weights_are_rejected_when_a_base_model_is_loaded(replica_set):
    replicas = replica_set(Processes(QuietLink(), QuietLink(weights="b")))
    with pytest.raises(UserError, match="the weights of base_model='m' differ.*Give all machines"):
        replicas.load_base_model("m")


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (QuietLink(OTHER_TORCH), "the versions of packages differ"),
        (QuietLink(weights="b"), "the weights of base_model='m' differ"),
    ],
)
def test_a_replacement_with_other_versions_or_weights_is_rejected_and_ended(
    link, message, replica_set
):
    replicas = replica_set(Processes(QuietLink(), QuietLink(), link))
    replicas.load_base_model("m")
    lost = lose(replicas, 1)
    wait_for(replicas, lambda: not replicas.is_starting)
    assert message in str(lost.failure)
    assert (lost.state, link.has_ended.is_set()) == ("failed", True)
    assert [replica.number for replica in replicas.live()] == [0]


def test_a_replica_that_is_lost_while_it_starts_is_started_again(replica_set):
    died = ReplicaLostError("the process has ended")
    replicas = replica_set(Processes(QuietLink(), QuietLink(), died, died))
    lose(replicas, 1)
    wait_for(replicas, lambda: not replicas.replicas[1].is_lost)
    always = replica_set(Processes(QuietLink(), QuietLink(), *[died] * 9))
    lost = lose(always, 1)
    wait_for(always, lambda: not always.is_starting)
    assert (lost.state, lost.failure) == ("failed", "the process has ended")


def test_a_loss_that_is_not_yet_reported_does_not_seem_to_be_final(replica_set, monkeypatch):
    replicas = replica_set(Processes(), 1)
    is_reported = threading.Event()
    report = replicas._handle_loss

    def report_later(replica: Replica, error: ReplicaLostError) -> None:
        is_reported.wait()
        report(replica, error)

    monkeypatch.setattr(replicas, "_handle_loss", report_later)
    lost = replicas.replicas[0]
    lost.link.kill()
    while not lost.is_lost:
        time.sleep(0.01)
    with ThreadPoolExecutor(1) as thread:
        live = thread.submit(replicas.live)
        assert not wait([live], 0.2).done
        is_reported.set()
        assert [replica is not lost for replica in live.result(WAIT)] == [True]


def test_a_replica_that_is_lost_while_the_others_start_is_replaced(replica_set):
    ended = QuietLink()
    ended.kill()
    replicas = replica_set(Processes(ended))
    wait_for(replicas, lambda: is_replaced(replicas))


def test_a_replica_that_is_lost_while_a_fleet_starts_is_replaced():
    links = [QuietLink(), QuietLink()]
    links[0].kill()

    def start() -> QuietLink:
        link = links.pop(0) if links else QuietLink()
        if not link.has_ended.is_set():
            time.sleep(0.5)  # the loss of the other one is reported
        return link

    fleet = Fleet(start, 2)
    wait_for(fleet.replicas, lambda: is_replaced(fleet.replicas))
    assert [replica.state for replica in fleet.replicas.replicas] == ["running"] * 2
    fleet.close(finish=False)


def test_the_end_of_the_cluster_ends_all_replicas_for_good(replica_set):
    fault: list[str] = []
    replicas = replica_set(Processes(), cluster_fault=lambda: fault[0] if fault else None)
    fault.append("the head of the Ray cluster, h:1, has ended")
    with replicas._changed:
        assert replicas._changed.wait_for(lambda: all(r.is_lost for r in replicas.replicas), WAIT)
    message = "the head of the Ray cluster, h:1, has ended; make a new ServiceClient, and load"
    with pytest.raises(EngineClosedError, match=message):
        replicas.live()


def test_a_drained_replica_is_not_started_until_one_is_added(replica_set):
    processes = Processes()
    replicas = replica_set(processes, 3, drained={1})
    wait_for(replicas, lambda: replicas.replicas[1].is_lost)
    assert [replica.state for replica in replicas.replicas] == ["running", "drained", "running"]
    assert len(processes.links) == 2
    replicas.load_base_model("m")
    for _ in range(2):
        replicas.add()
        wait_for(replicas, lambda: not replicas.is_starting)
    assert [replica.state for replica in replicas.replicas] == ["running"] * 4
    assert all(replica.fingerprints == {"m": "a"} for replica in replicas.replicas)
    assert not any(replica.num_lost_processes for replica in replicas.replicas)


def test_the_numbers_of_drained_replicas_are_kept_in_a_file(tmp_path):
    assert read_drained(tmp_path) == frozenset()
    write_drained(tmp_path, {3, 1})
    assert read_drained(tmp_path) == {1, 3}
    (tmp_path / "drained_replicas.json").write_text('["1"]')
    with pytest.raises(UserError, match=r"drained_replicas.json: it is no list of integers"):
        read_drained(tmp_path)
