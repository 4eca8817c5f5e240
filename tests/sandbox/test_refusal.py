"""No program runs if the sandbox is missing or fails its self-test."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from planish.errors import UserError
from planish.recipes import code_env, code_rl
from planish.sandbox import (
    Limits,
    Sandbox,
    SandboxError,
    SandboxUnavailableError,
    python_runtime,
    sandbox as sandbox_module,
    system_calls,
)

START = Path(sandbox_module.__file__).with_name("start.py")


@pytest.fixture
def no_bubblewrap(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def test_without_bubblewrap(no_bubblewrap):
    with pytest.raises(SandboxUnavailableError, match="apt-get install bubblewrap"):
        Sandbox()


def test_without_libseccomp(monkeypatch):
    def nothing(name):
        raise OSError

    monkeypatch.setattr(system_calls.ctypes, "CDLL", nothing)
    for function in (system_calls.seccomp_library, system_calls.compiled_filter):
        function.cache_clear()
    try:
        with pytest.raises(SandboxUnavailableError, match="install libseccomp2|bubblewrap"):
            Sandbox()
    finally:
        system_calls.compiled_filter.cache_clear()


@pytest.mark.parametrize("function", ["seccomp_rule_add_array", "seccomp_export_bpf"])
def test_a_filter_that_lacks_a_rule_is_not_used(monkeypatch, function):
    """This holds under `python -O` too, which removes assertions."""
    library = SimpleNamespace(
        seccomp_init=lambda action: 1,
        seccomp_release=lambda context: None,
        seccomp_syscall_resolve_name=lambda name: 1,
        seccomp_rule_add_array=lambda *rule: 0,
        seccomp_export_bpf=lambda context, descriptor: 0,
    )
    setattr(library, function, lambda *arguments: -errno.EINVAL)
    monkeypatch.setattr(system_calls, "seccomp_library", lambda: library)
    with pytest.raises(
        SandboxUnavailableError, match=r"libseccomp .* \(Invalid argument\); update libseccomp"
    ):
        system_calls.compiled_filter.__wrapped__(False)


def test_elsewhere_than_on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match="which darwin lacks"):
        Sandbox()


def test_a_recipe_without_a_sandbox_is_rejected_at_the_start(no_bubblewrap, tmp_path):
    code_env.process_sandbox.cache_clear()
    with pytest.raises(SandboxUnavailableError, match="bubblewrap"):
        code_rl.main(code_rl.Options(log_path=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_machine_that_makes_no_sandbox(sandbox):
    box = sandbox()
    box._bwrap = "/bin/false"
    with pytest.raises(SandboxError, match="could not create the sandbox"):
        asyncio.run(box.run("print(1)"))
    with pytest.raises(SandboxUnavailableError, match="user.max_user_namespaces"):
        asyncio.run(box.check())
    box._bwrap = "/nowhere/bwrap"
    with pytest.raises(SandboxUnavailableError, match="did not start"):
        asyncio.run(box.check())


def weakened(command, *, without=(), extra=()):
    """Return a command line without an option and its values, or with others added."""
    if without:
        first = next(
            index
            for index in range(len(command))
            if tuple(command[index : index + len(without)]) == without
        )
        command = command[:first] + command[first + len(without) + (without == ("--seccomp",)) :]
    return [command[0], *extra, *command[1:]]


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"without": ("--seccomp",)}, "a pair of sockets, a second process"),
        ({"without": ("--remount-ro", "/")}, "a file in /"),
        ({"extra": ("--proc", "/proc")}, "/proc"),
        ({"extra": ("--ro-bind", "/etc", "/etc")}, "/etc"),
    ],
)
def test_a_sandbox_with_a_hole_is_found_out(sandbox, monkeypatch, change, got):
    box = sandbox()
    made = sandbox_module.sandbox_command
    monkeypatch.setattr(
        sandbox_module, "sandbox_command", lambda *a, **k: weakened(made(*a, **k), **change)
    )
    with pytest.raises(SandboxUnavailableError, match=f"does not isolate programs .*{got}"):
        asyncio.run(box.check())


@pytest.mark.slow
def test_a_whole_sandbox_passes_its_check(sandbox):
    for limits in ({}, {"processes": 4}, {"scratch_bytes": 1 << 20}):
        asyncio.run(sandbox(**limits).check())


def test_an_interpreter_that_others_cannot_read(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "python").write_text("")
    assert not python_runtime.is_world_readable(str(closed / "python"))
    assert python_runtime.is_world_readable("/usr") or not Path("/usr").stat().st_mode & 0o001


@pytest.mark.slow
def test_root_needs_an_interpreter_for_nobody(monkeypatch):
    monkeypatch.setattr(python_runtime, "is_world_readable", lambda path: False)
    with pytest.raises(SandboxUnavailableError, match="run planish as an ordinary user"):
        python_runtime.find_runtime.__wrapped__(sys.executable, True)


def test_an_interpreter_that_is_none(sandbox):
    with pytest.raises(UserError, match="python=/nowhere/python"):
        Sandbox(python="/nowhere/python")
    with pytest.raises(UserError, match="python=/bin/true is no Python"):
        Sandbox(python="/bin/true")


def test_arguments_that_cannot_be_right(sandbox):
    for name in ("", "..", "a/b"):
        with pytest.raises(UserError, match="files:"):
            asyncio.run(sandbox().run("", files={name: ""}))
    with pytest.raises(UserError, match="NUL"):
        asyncio.run(sandbox().run("", arguments=["a\0b"]))
    with pytest.raises(UserError, match="concurrency=0"):
        Sandbox(concurrency=0)


def test_a_program_does_not_begin_when_nobody_waits_for_it(tmp_path):
    """It runs start.py outside of a sandbox."""
    mark = tmp_path / "mark"
    program = [sys.executable, "-c", f"open({str(mark)!r}, 'w')"]
    read, write = os.pipe()
    with open(read), open(write, "w") as output:
        subprocess.run([sys.executable, str(START), "{}", *program], stdout=output, check=True)
        assert mark.exists()
        mark.unlink()
    read, write = os.pipe()
    with open(write, "w") as output:
        os.close(read)
        subprocess.run([sys.executable, str(START), "{}", *program], stdout=output, check=True)
    assert not mark.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"cpu_seconds": 0},
        {"cpu_seconds": 0.5},
        {"wall_seconds": 0},
        {"processes": 0},
        {"processes": 1.5},
        {"memory_bytes": 1},
        {"memory_bytes": 512e6},
        {"output_bytes": 1e6},
        {"scratch_bytes": 1e6},
    ],
)
def test_limits_that_no_run_can_have(wrong):
    with pytest.raises(UserError, match=f"Limits.{next(iter(wrong))}="):
        Limits(**wrong)


def test_each_process_needs_memory():
    with pytest.raises(UserError, match="64 MiB per process"):
        Limits(processes=16)
