"""The kernel library is compiled once, atomically; without it, torch does the work."""

import hashlib
import logging
import os
import shutil
import tempfile

import pytest
import torch

from planish.errors import UserError
from planish.files import cache_home
from planish.model.kernels.cpp import build, ops
from planish.model.kernels.self_test.verdicts import Verdict


@pytest.fixture
def asked_anew():
    ops.load_library.cache_clear()
    yield
    ops.load_library.cache_clear()


def test_a_missing_compiler_is_named_in_the_log_and_torch_does_the_work(
    tmp_path, monkeypatch, caplog, asked_anew
):
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with caplog.at_level(logging.WARNING):
        assert ops.load_library() is None
    assert "no-such-compiler" in caplog.text
    assert not ops.is_supported("norms")
    assert list((tmp_path / "kernels").iterdir()) == []


@pytest.mark.parametrize(
    ("wanted", "message"), [("native", "no AVX2"), ("fast", "'auto', 'native' or 'torch'")]
)
def test_requesting_unavailable_kernels_is_rejected(wanted, message, monkeypatch, asked_anew):
    monkeypatch.setenv("PLANISH_KERNELS", wanted)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(UserError, match=message):
        ops.load_library()


def test_kernels_load_on_every_machine_that_can_compile_them():
    """Otherwise all tests of the kernels would be skipped."""
    if shutil.which("g++") is None or torch.backends.cpu.get_cpu_capability() not in (
        "AVX512",
        "AMX",
        "AVX2",
    ):
        pytest.skip("this machine has no AVX2 or no C++ compiler")
    assert build.compiled_library(cache_home() / "kernels", ops.instructions()).exists()


@pytest.fixture
def small_source(tmp_path, monkeypatch):
    """Use a small source that compiles quickly, and a compiler with an argument."""
    source = tmp_path / "kernels.cpp"
    source.write_text(
        'extern "C" __attribute__((visibility("default"))) int has_amx() { return 0; }'
        'extern "C" __attribute__((visibility("default"))) void use_amx(int) {}'
    )
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "g++ -m64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(ops, "verdicts_of", lambda *_: [Verdict("norms", True)])


@pytest.mark.usefixtures("small_source")
def test_a_library_that_cannot_be_loaded_is_compiled_again(tmp_path, asked_anew):
    path = build.compiled_library(tmp_path / "kernels", "AVX2")
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    assert ops.load_library() is not None
    assert path.read_bytes() == whole


@pytest.mark.usefixtures("small_source")
def test_a_cache_that_cannot_be_written_to_is_replaced_by_a_private_directory(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("a file, not a directory")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        path = build.compiled_library(tmp_path / "file" / "kernels", "AVX2")
    assert path.parent == tmp_path / f"planish-{os.getuid()}"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len(caplog.records) == 1
    assert "set PLANISH_HOME" in caplog.text
    path.parent.chmod(0o755)
    with pytest.raises(build.BuildError, match="others can change"):
        build.compiled_library(tmp_path / "file" / "kernels", "AVX2")


@pytest.fixture
def wheel(small_source, tmp_path, monkeypatch):
    """The directory with the libraries of a wheel, on a machine without a compiler."""
    directory = tmp_path / "prebuilt"
    build.build_prebuilt(directory)
    monkeypatch.setattr(build, "PREBUILT", directory)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    return directory


def test_the_library_of_a_wheel_needs_no_compiler(wheel, tmp_path, asked_anew):
    assert ops.load_library() is not None
    [copied] = (tmp_path / "kernels").glob("*.so")
    [original] = wheel.glob("AVX2-*.so")
    assert copied.name == original.name
    assert copied.read_bytes() == original.read_bytes()
    assert {path.name.partition("-")[0] for path in wheel.iterdir()} == set(build.INSTRUCTIONS)


def test_a_damaged_library_of_a_wheel_is_not_used(wheel, tmp_path, caplog):
    [path] = wheel.glob("AVX2-*.so")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.compiled_library(tmp_path / "kernels", "AVX2")
    assert f"{path.name} is damaged" in caplog.text


def test_a_library_of_other_sources_is_not_used(wheel, tmp_path):
    build.SOURCE.write_text(build.SOURCE.read_text() + "// changed\n")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.compiled_library(tmp_path / "kernels", "AVX2")


@pytest.mark.usefixtures("small_source")
def test_a_library_of_a_wheel_that_this_system_cannot_load_is_compiled(
    tmp_path, monkeypatch, asked_anew
):
    content = b"a library of another system"
    name = f"{build._prebuilt_name('AVX2')}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    (tmp_path / "prebuilt").mkdir()
    (tmp_path / "prebuilt" / name).write_bytes(content)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.delenv("CXX")
    assert ops.load_library() is not None
    assert [path.name[:8] for path in (tmp_path / "kernels").glob("*.so")] == ["kernels-"]


def test_planish_kernels_torch_disables_the_kernels(monkeypatch, asked_anew):
    monkeypatch.setenv("PLANISH_KERNELS", "torch")
    assert ops.load_library() is None


def test_a_failed_compilation_leaves_no_files(tmp_path, monkeypatch):
    source = tmp_path / "kernels.cpp"
    source.write_text("this is no C++")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(
        build.BuildError, match=r"could not (compile|be compiled)|no C\+\+ compiler"
    ):
        build.compiled_library(tmp_path / "cache", "AVX2")
    assert not list(tmp_path.glob("cache/*"))
