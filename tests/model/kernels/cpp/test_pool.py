"""The thread pool of the CPU kernels (cpp/pool.h), tested by pool_check.cpp, and kernels called
from several Python threads, after a fork, and at exit.
"""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from planish.model.kernels.cpp import build, ops

HERE = Path(__file__).parent
WAYS = (
    "cover",
    "share",
    "many_callers",
    "fork",
    "fork_meanwhile",
    "shortage",
    "nested",
    "sleep_between",
    "exit_meanwhile",
)


@pytest.fixture(scope="module", name="program")
def _program(tmp_path_factory):
    if ops.load_library() is None:
        pytest.skip("this machine has no AVX2 or no C++ compiler")
    path = tmp_path_factory.mktemp("pool") / "pool_check"
    flags = ["-std=c++17", "-O1", "-pthread", *build.INSTRUCTIONS["AVX2"]]
    source = [f"-I{build.SOURCE.parent}", str(HERE / "pool_check.cpp")]
    subprocess.run(["g++", *flags, *source, "-o", str(path)], check=True)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_thread_pool_runs_each_item_once(way, program):
    done = subprocess.run([program, way], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def inputs() -> tuple[torch.Tensor, ...]:
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(0))
    return x, x.bfloat16(), torch.ones(512), torch.ones(300)


def kernel_results(given: tuple[torch.Tensor, ...]) -> list[bytes]:
    """Return results of kernels that split rows and items among threads.

    torch must compute nothing here, because its OpenMP threads hang in a forked child.
    """
    x, narrow, weight, temperature = given
    found = (
        ops.rms_norm(x, None, weight, 1e-5, torch.float32)[1],
        ops.swiglu(narrow).view(torch.int16),
        ops.log_sum_exp(x, temperature),
    )
    return [tensor.numpy().tobytes() for tensor in found]


@pytest.mark.usefixtures("cpu_kernels", "three_threads")
def test_kernels_can_be_called_by_many_threads_concurrently():
    given, right = inputs(), []
    expected = kernel_results(given)

    def call():
        right.append(all(kernel_results(given) == expected for _ in range(30)))

    callers = [threading.Thread(target=call) for _ in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 5


PROGRAM = """
import os, sys, threading, time
sys.path.insert(0, {directory!r})
import torch
torch.set_num_threads(3)
from test_pool import inputs, kernel_results
given = inputs()
expected = kernel_results(given)
if {fork}:
    child = os.fork()
    if not child:
        os._exit(0 if kernel_results(given) == expected else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert kernel_results(given) == expected
else:
    def compute():
        while True:
            kernel_results(given)
    threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.05)
    os._exit(7)  # static objects are not destroyed, threads are ended where they are
"""


@pytest.mark.slow
@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(("fork", "status"), [(True, 0), (False, 7)])
def test_kernels_work_after_a_fork_and_do_not_delay_exit(fork, status):
    program = PROGRAM.format(directory=str(HERE), fork=fork)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (status, "")
