"""Rules for every process that runs tests; conftest.py loads them.

Without a GPU, Triton kernels are interpreted on the CPU. CPU kernels are compiled once, also for
tests with a cache of their own. Every test starts from the same random seed, PLANISH_TEST_SEED
(default 0).
"""

import asyncio
import gc
import inspect
import logging
import os
import random
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import hypothesis.core
import numpy as np
import pytest
import torch

from planish.files import cache_home
from planish.model.kernels.cpp import ops
from planish.sandbox import Sandbox, SandboxUnavailableError

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before their first import
    import interpreted_faster

    interpreted_faster.install()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets background jobs ignore SIGINT, which some tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Collection makes more than a million objects, all of which last to the end. The garbage collector
# would search them again and again, in collection and in the tests.
gc.disable()


def pytest_collection_finish() -> None:
    """Turn the garbage collector on and let it ignore the objects that collection made. Let torch's
    loggers propagate: six times per test, pytest attaches a handler to each logger that does not.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.enable()


SEED = int(os.environ.get("PLANISH_TEST_SEED", "0"))

# A busy machine can pause a test for seconds, so examples have no deadline.
hypothesis.settings.register_profile("planish", deadline=None)
hypothesis.settings.load_profile("planish")
hypothesis.core.global_force_seed = SEED  # pytest's option --hypothesis-seed overrides it


@cache
def why_no_sandbox() -> str | None:
    """Return why this machine cannot run model-written programs; None if it can."""
    try:
        asyncio.run(Sandbox().check())
    except SandboxUnavailableError as error:
        return str(error)
    return None


def _seed_random_numbers(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    # torch.manual_seed also defers the seeding of absent devices, with a stack trace for each. That
    # takes a millisecond.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


# The first test that needs a fixture of a module or session sets it up. Seeding before the fixtures
# and again before the test makes the numbers of both independent of which other tests run.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    """Skip a test whose requirement this machine lacks, and seed the global random number
    generators before the fixtures of the others.
    """
    needs_sandbox = item.get_closest_marker("sandbox") or "sandbox" in item.fixturenames
    if needs_sandbox and (reason := why_no_sandbox()):
        pytest.skip(reason)
    _seed_random_numbers(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Seed the global random number generators before a test.

    The seed differs from that of the fixtures, so that their tensors are independent.
    """
    _seed_random_numbers(SEED + 1_000_003)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def planish_home() -> Callable[[Path], Path]:
    """Return a function that makes a PLANISH_HOME directory, empty except for the kernels.

    The kernels are linked because their compilation takes twenty seconds.
    """
    kernels = cache_home() / "kernels"

    def made(directory: Path) -> Path:
        directory.mkdir(parents=True)
        if ops.load_library() is not None:
            (directory / "kernels").symlink_to(kernels)
        return directory

    return made


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_loaded() -> None:
    """Load the CPU kernels before a test gives this process another cache."""
    ops.load_library()
