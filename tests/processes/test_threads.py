"""The number of threads by control groups, affinity and user settings, the spinning of OpenMP
threads, and the interpreter's switch interval while an engine runs.
"""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from planish.processes import threads

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def groups(directory: Path, memberships: str, files: dict[str, str]) -> float | None:
    """Return the quota of simulated control groups."""
    (directory / "cgroup").write_text(memberships)
    for name, text in files.items():
        path = directory / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return threads.cpu_quota(directory / "cgroup", directory / "groups")


V2, V1 = "0::/a/b\n", "9:name=systemd:/x\n4:cpu,cpuacct:/a/b\n0::/\n"


@pytest.mark.parametrize(
    ("memberships", "files", "quota"),
    [
        (V2, {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"a/b/cpu.max": "max 100000\n"}, None),
        (V2, {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        (V2, {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        # a container in which the path of the host is visible
        (V2, {"cpu.max": "400000 100000\n"}, 4.0),
        (V2, {"a/b/cpu.max": "what is this"}, None),
        (V2, {"a/b/cpu.max": "1 0\n"}, None),
        (V2, {}, None),
        ("", {}, None),
        (
            V1,
            {
                "cpu,cpuacct/a/b/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.0),
        (V1, {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        ("4:cpuset:/a\n", {"cpuset/a/cpu.cfs_quota_us": "1\n"}, None),
    ],
)
def test_the_smallest_quota_of_a_group_and_its_parents_counts(memberships, files, quota, tmp_path):
    assert groups(tmp_path, memberships, files) == quota


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert threads.cpu_quota(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "cpus"), [(None, CPUS), (0.2, 1), (1.0, 1), (1.01, min(CPUS, 2)), (1e6, CPUS)]
)
def test_a_quota_is_rounded_up_and_limited_by_affinity(quota, cpus, monkeypatch):
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    assert threads.usable_cpus() == cpus


@pytest.fixture(name="default_threads")
def _default_threads(monkeypatch):
    """Give torch 4 threads without environment variables, and restore the number afterwards."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_affinity", lambda: 4)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("default_threads")
def test_a_quota_limits_torch_threads_with_a_log_line(monkeypatch, caplog):
    monkeypatch.setattr(threads, "cpu_quota", lambda: 1.2)
    with caplog.at_level(logging.INFO):
        threads.limit_threads()
    assert torch.get_num_threads() == 2
    assert "2 threads instead of 4" in caplog.text


@pytest.mark.usefixtures("default_threads")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_an_explicit_number_of_threads_is_kept(name, monkeypatch):
    monkeypatch.setattr(threads, "cpu_quota", lambda: 1.0)
    with monkeypatch.context() as patch:
        patch.setenv(name, "4")
        threads.limit_threads()
    assert torch.get_num_threads() == 4
    torch.set_num_threads(3)
    threads.limit_threads()
    assert torch.get_num_threads() == 3


def environment_after(program: str, **variables: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in threads._WAITING
    }
    program += "; import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_openmp_threads_spin_briefly_unless_configured():
    assert environment_after("import planish") == threads.SPINS
    assert environment_after("import planish", GOMP_SPINCOUNT="7") == "7"
    assert environment_after("import planish", OMP_WAIT_POLICY="active") == "None"


@pytest.mark.slow
def test_the_environment_is_unchanged_if_torch_was_imported_first():
    assert environment_after("import torch, planish") == "None"


@pytest.fixture
def python_s_own_interval(monkeypatch):
    monkeypatch.setattr(threads, "_holders", 0)  # engines that other tests left open
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-3)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("python_s_own_interval")
def test_the_last_engine_restores_the_switch_interval():
    with threads.short_switch_interval():
        with threads.short_switch_interval():
            assert sys.getswitchinterval() == pytest.approx(threads.SWITCH_SECONDS)
        assert sys.getswitchinterval() == pytest.approx(threads.SWITCH_SECONDS)
    assert sys.getswitchinterval() == pytest.approx(5e-3)


@pytest.mark.usefixtures("python_s_own_interval")
def test_an_explicit_switch_interval_is_kept():
    sys.setswitchinterval(1e-3)
    with threads.short_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(1e-3)
    assert sys.getswitchinterval() == pytest.approx(1e-3)
    sys.setswitchinterval(5e-3)
    with threads.short_switch_interval():
        sys.setswitchinterval(7e-3)
    assert sys.getswitchinterval() == pytest.approx(7e-3)


@pytest.mark.usefixtures("python_s_own_interval")
def test_the_switch_interval_is_set_while_an_engine_runs(tmp_path):
    from planish.engine.engine import Engine

    before = set(threading.enumerate())  # engines that other tests of this process left open
    engine = Engine(data_dir=tmp_path)
    [thread] = [one for one in set(threading.enumerate()) - before if one.name == "planish-engine"]
    for _ in range(6000):
        if sys.getswitchinterval() < 1e-3:
            break
        thread.join(0.01)
    assert sys.getswitchinterval() == pytest.approx(threads.SWITCH_SECONDS)
    engine.close()
    thread.join()
    assert sys.getswitchinterval() == pytest.approx(5e-3)
