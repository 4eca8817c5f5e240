"""A round beside a busy process is bounded, and the table names the rounds that were abandoned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from busy import busy_process, round_seconds, summarize, variables
from peer_process import PeerProcess
from report import busy_table

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
SLOW_PEER = """
import sys, time
sys.path.insert(0, {peers!r})
from serving import Peer, serve

def load(model):
    def run(seconds):
        time.sleep(seconds)
        return {{}}
    return Peer({{"W1": run}}, {{"slow": "1.0"}})

serve(load)
"""


@pytest.fixture(name="peer_process")
def _peer_process(tmp_path):
    script, rounds_file = tmp_path / "slow.py", tmp_path / "rounds.json"
    script.write_text(SLOW_PEER.format(peers=str(PEERS)))
    rounds_file.write_text('{"W1": [0, 0.01, 60]}')
    peer_process = PeerProcess("slow", [sys.executable, script], rounds_file)
    yield peer_process.start(tmp_path, tmp_path / "log")
    peer_process.end()


def test_a_round_that_takes_too_long_is_given_up_and_so_are_those_after_it(peer_process):
    assert round_seconds(peer_process, "W1", 1, "idle", limit=60) == pytest.approx(0.01, abs=5)
    assert round_seconds(peer_process, "W1", 2, "idle", limit=0.3) is None
    assert round_seconds(peer_process, "W1", 1, "idle", limit=60) is None


def test_the_busy_process_ends_with_what_it_is_beside():
    def children() -> list[str]:
        command = ["ps", "--ppid", str(os.getpid()), "-o", "args="]
        listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
        return [line for line in listed.splitlines() if "while True: pass" in line]

    with busy_process("busy"):
        assert len(children()) == 1
    with busy_process("idle"):
        assert not children()


def test_the_table_has_the_speed_that_is_kept():
    loads = {"idle": summarize([2.0, 1.0, 3.0]), "busy": summarize([8.0, 4.0, 4.0])}
    slow = {"idle": summarize([2.0]), "busy": summarize([None])}
    machine = {"cpu": "CPU", "cores": 2, "flags": [], "memory_gib": 8.0}
    given = {"machine": machine, "date": "D", "commit": "C", "load_average_before": 0.0}
    table = busy_table({**given, "works": {"W1": {"default": loads, "300000": slow}}})
    assert "| W1 | default | 2.00 | 4.00 | 50% |" in table
    assert "| W1 | 300000 | 2.00 | given up |  |" in table


def test_a_spin_is_a_variable_and_the_default_is_none():
    assert variables("default") == {}
    assert variables("0") == {"GOMP_SPINCOUNT": "0"}
