"""The files of a release: what they contain, and that an installed wheel trains."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePath

import pytest
import torch
import yaml
from release import build_dist, run_demo, run_in_container, write_checksums

from planish.model.kernels.cpp.build import INSTRUCTIONS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_dist(tmp_path_factory.mktemp("release") / "dist")


@pytest.mark.slow
def test_wheel_and_sdist_have_every_file_of_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    parts = {
        "planish/console/static/uplot/uPlot.iife.min.js",
        "planish/model/kernels/cpp/src/kernels.cpp",
        "planish/model/kernels/cpp/src/avx512.h",
        "planish/logtree/trace.html",
        "planish/py.typed",
    }
    assert parts <= set(names)
    kernels = [PurePath(name) for name in names if name.endswith(".so")]
    assert {path.name.partition("-")[0] for path in kernels} == set(INSTRUCTIONS)
    for path in kernels:
        content = zipfile.ZipFile(wheel).read(str(path))
        assert path.stem.endswith(f"-{hashlib.sha256(content).hexdigest()[:16]}")
    assert not [name for name in names if name.startswith(("tests", "tools", "benchmarks"))]
    [sdist] = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert parts | {"LICENSE", "README.md", "pyproject.toml"} <= packed


@pytest.mark.slow
def test_the_checksums_are_those_of_the_files(wheel):
    write_checksums(wheel.parent)
    lines = (wheel.parent / "SHA256SUMS").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((wheel.parent / name).read_bytes()).hexdigest() == digest


@pytest.mark.slow
def test_the_demo_runs_from_an_installed_wheel(wheel, tmp_path):
    """The environment has the packages of this one, and planish from the wheel alone."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    [packages] = environment.glob("lib/python*/site-packages")
    # Directories in a .pth file are searched after the wheel, and their own .pth files are not read.
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*install, "--quiet", str(wheel)], check=True)
    where = "import planish; print(planish.__file__)"
    found = subprocess.check_output([python, "-I", "-c", where], text=True)
    assert Path(found.strip()).is_relative_to(environment)
    run_demo(python, tmp_path)
    assert (tmp_path / "runs" / "demo" / "metrics.jsonl").exists()
    assert_kernels_need_no_compiler(python, tmp_path)


def assert_kernels_need_no_compiler(python: Path, directory: Path) -> None:
    """Check that the wheel's kernels load and pass their self-test in an empty cache."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AMX", "AVX2"):
        return
    variables = os.environ | {"PLANISH_HOME": str(directory / "home"), "PATH": str(python.parent)}
    variables = {name: variables[name] for name in variables.keys() - {"CXX", "PYTHONPATH"}}
    program = (
        "from planish.model.kernels.cpp import build, ops; assert build.find_compiler() is None; "
        "library = ops.load_library(); print(library and library._name, library.torch_families)"
    )
    # Not in the repository, whose planish Python would import instead.
    printed = subprocess.check_output(
        [python, "-c", program], cwd=directory, env=variables, text=True
    )
    name, families = printed.split(maxsplit=1)
    assert Path(name).name.startswith(("AVX2-", "AVX512_BF16-"))
    assert families == "frozenset()\n"


def test_the_citation_has_the_version_and_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for field in ("version", "license"):
        assert citation[field] == project[field]


def test_an_issue_about_a_fault_asks_for_the_report_of_the_doctor():
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/*/*.yml")}
    labels = {
        item["attributes"]["label"]: item.get("validations", {}).get("required", False)
        for item in forms["fault"]["body"]
    }
    assert labels["The output of `planish doctor --json`"]


def test_the_container_file_copies_files_that_are_there():
    text = (ROOT / "deploy" / "Containerfile").read_text()
    sources = [words.split()[:-1] for words in re.findall(r"^COPY (.+)$", text, re.MULTILINE)]
    names = [name for line in sources for name in line]
    assert "planish" in names
    assert [name for name in names if not (ROOT / name).exists()] == []
    [base] = re.findall(r"^ARG BASE_IMAGE=(.+)$", text, re.MULTILINE)
    assert re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", base), "a digest pins the base image"
    assert re.findall(r"^FROM (.+)$", text, re.MULTILINE) == ["${BASE_IMAGE}"]


CONTAINER = """
FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "mkdir", "/data"]
"""


@pytest.mark.slow
def test_a_container_file_is_built_and_run(tmp_path):
    """`make release` does this with deploy/Containerfile, which downloads its base image."""
    busybox = shutil.which("busybox")
    if busybox is None or shutil.which("buildah") is None or os.geteuid() != 0:
        pytest.skip("needs buildah, busybox-static, and root")
    shutil.copy(busybox, tmp_path / "busybox")
    (tmp_path / "Containerfile").write_text(CONTAINER)
    printed = run_in_container(tmp_path / "Containerfile", tmp_path, ("/bin/busybox", "ls", "/"))
    assert {"bin", "data"} <= set(printed.split())
    with pytest.raises(SystemExit, match="Containerfile failed|no-such-program"):
        run_in_container(tmp_path / "Containerfile", tmp_path, ("/no-such-program",))
