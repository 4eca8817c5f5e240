"""The benchmark gives peers the same work and runs one at a time."""

import sys
from pathlib import Path
from typing import Any

import pytest
from compare import (
    HERE,
    OPTIONAL_PEERS,
    PEERS,
    PeerMeasurement,
    check_same_work,
    measure_interleaved,
    parse_names,
)
from environments import PEERS as PEER_FILES, names
from peer_process import PeerError, PeerProcess
from workloads import SMALL_WORKLOADS, WORKLOADS

FAKE_PEER = """
import sys
sys.path.insert(0, {peers!r})
from serving import Peer, serve

def load(model):
    print("loading noise")
    def run(work):
        print("noise")
        if work == "bad":
            raise ValueError("no such work")
        return {{"tokens": work}}
    return Peer({{"W1": run}}, {{"fake": "1.0"}})

serve(load)
"""
ROUND = {
    "prompts": [[1, 2], [1, 3]],
    "samples": 2,
    "new_tokens": 5,
    "advantages": [[1.0, -1.0], [0.5, 0.5]],
}


@pytest.fixture
def fake(tmp_path) -> PeerProcess:
    script = tmp_path / "fake.py"
    script.write_text(FAKE_PEER.format(peers=str(PEER_FILES)))
    rounds_file = tmp_path / "rounds.json"
    rounds_file.write_text('{"W1": [10, 20, "bad"]}')
    return PeerProcess("fake", [sys.executable, script], rounds_file)


def state(peer_process: PeerProcess) -> str:
    """Return the state of a process in the system's letters; T is stopped."""
    return Path(f"/proc/{peer_process._process.pid}/stat").read_text().rpartition(") ")[2][0]


def test_a_peer_answers_and_is_stopped_while_it_waits(fake, tmp_path):
    fake.start(tmp_path / "model", tmp_path / "log")
    try:
        assert fake.versions == {"fake": "1.0"}
        assert fake.load_seconds > 0
        assert state(fake) == "T"
        facts = fake.run_round("W1", 1)
        assert facts["tokens"] == 20
        assert facts["seconds"] > 0
        assert facts["peak_gib"] > 0
        assert 0 <= facts["others"] <= 1
        assert state(fake) == "T"
    finally:
        fake.end()
    assert "noise" in (tmp_path / "log").read_text()


def test_a_peer_that_dies_says_why(fake, tmp_path):
    fake.start(tmp_path / "model", tmp_path / "log")
    try:
        with pytest.raises(PeerError, match="(?s)fake ended with status 1:.*no such work"):
            fake.run_round("W1", 2)
    finally:
        fake.end()


def test_the_warm_up_is_not_measured(fake, tmp_path):
    (one,) = measure_interleaved([fake], "W1", 1, tmp_path / "model", tmp_path)
    assert [facts["tokens"] for facts in one.rounds] == [20]
    assert len(one.row()["seconds"]) == 1


def measured(name: str, **facts: Any) -> PeerMeasurement:
    return PeerMeasurement(PeerProcess(name, [], Path()), [facts])


def test_the_same_work_is_accepted():
    check_same_work(
        "W2", [{}, ROUND], [measured("a", loss=1.0), measured("b", loss=1.1), measured("limit")]
    )


def test_another_number_of_tokens_is_rejected():
    with pytest.raises(SystemExit, match="round 1: b made 19 tokens, not 20"):
        check_same_work("W1", [{}, ROUND], [measured("a", tokens=20), measured("b", tokens=19)])


def test_another_loss_is_rejected():
    with pytest.raises(SystemExit, match=r"losses differ by more than 0\.15"):
        check_same_work("W2", [{}, ROUND], [measured("a", loss=1.0), measured("b", loss=1.2)])


def test_an_unknown_peer_is_rejected():
    assert parse_names("all", ["a", "b"], ["a", "b", "c"]) == ["a", "b"]
    assert parse_names("c,a", ["a", "b"], ["a", "b", "c"]) == ["c", "a"]
    with pytest.raises(SystemExit, match="d: give some of a, b, c"):
        parse_names("a,d", ["a", "b"], ["a", "b", "c"])


@pytest.mark.parametrize("spec", [*PEERS.values(), *OPTIONAL_PEERS.values()])
def test_every_peer_can_be_started(spec):
    assert (HERE / spec.script).is_file()
    assert spec.environment in ("planish", *names())
    assert set(spec.workloads) <= set(WORKLOADS)


def test_what_is_tried_is_what_is_measured():
    assert list(SMALL_WORKLOADS) == list(WORKLOADS)


@pytest.mark.parametrize("name", names())
def test_environments_are_pinned_and_name_no_index(name):
    for line in (PEER_FILES / f"requirements-{name}.txt").read_text().splitlines():
        package, pin, version = line.partition("==")
        assert pin, line
        assert package.replace("-", "").replace("_", "").replace(".", "").isalnum(), line
        assert version[0].isdigit(), line
