"""Make the files of a release, and check them in clean environments.

    python tools/release.py dist                       sdist and wheel, and SHA256SUMS: `make dist`
    python tools/release.py release python3.12 ...     also the rest: `make release`

`release` installs the wheel with each given Python in a new environment, as a user would, and runs
the demo there in its quick form. In the environment of the Python that runs this program, every
package is installed by its hash, from the requirements.txt that it writes first. It lists the
packages of that environment as a software bill of materials (CycloneDX). If buildah is installed, it
builds the image of deploy/Containerfile, and runs planish in it.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from planish.model.kernels.cpp.build import PREBUILT, build_prebuilt

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}({out!r}))"
QUICK_DEMO = ("steps=2", "batch_size=2", "group_size=2", "held_out=4", "lora_rank=4")


def build_dist(dist: Path = DIST) -> Path:
    """Build the sdist from the tracked files, and the wheel from the sdist and compiled kernels.
    Return the wheel.

    The wheel is for every platform, because only CPUs with AVX2 load the kernels in it. Raise
    BuildError without a C++ compiler, and SystemExit if the wheel lacks a file or has another.
    """
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        tree = Path(work, "tree")
        for name in tracked_files():
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
        sdist = dist / _build("sdist", tree, dist)
        with tarfile.open(sdist) as archive:
            archive.extractall(Path(work, "sdist"), filter="data")
        [unpacked] = Path(work, "sdist").iterdir()
        kernels = build_prebuilt(unpacked / PREBUILT.relative_to(ROOT))
        wheel = dist / _build("wheel", unpacked, dist)
    expected = {name for name in tracked_files() if name.startswith("planish/")}
    expected |= {(PREBUILT / path.name).relative_to(ROOT).as_posix() for path in kernels}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("planish/")}
    if expected != found:
        raise SystemExit(
            f"{wheel.name} lacks {sorted(expected - found)} and has {sorted(found - expected)}; "
            "see package-data in pyproject.toml"
        )
    return wheel


def tracked_files() -> list[str]:
    """Return the files of the repository that an sdist may have, as paths below its root."""
    command = ["git", "ls-files", "planish", "pyproject.toml", "README.md", "LICENSE"]
    return subprocess.check_output(command, cwd=ROOT, text=True).split()


def _build(kind: str, tree: Path, dist: Path) -> str:
    program = BUILD.format(kind=kind, out=str(dist))
    done = subprocess.run([sys.executable, "-c", program], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the {kind} could not be built:\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()[-1]


def write_checksums(dist: Path) -> None:
    """Write SHA256SUMS, which `sha256sum -c` reads."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(dist.iterdir())
        if path.name != "SHA256SUMS"
    ]
    (dist / "SHA256SUMS").write_text("".join(lines))


def write_requirements(wheel: Path, python: Path) -> Path:
    """Write what `pip install` takes for the wheel, each package with its version and hash.

    The hashes are those of the files for this Python and platform.
    """
    report = _pip(
        python, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-",
        "-c", str(ROOT / "constraints.txt"), str(wheel),
    )  # fmt: skip
    lines = []
    for package in json.loads(report)["install"]:
        metadata, source = package["metadata"], package["download_info"]
        if metadata["name"] != "planish":
            hashed = f"--hash=sha256:{source['archive_info']['hashes']['sha256']}"
            lines.append(f"{metadata['name'].lower()}=={metadata['version']} {hashed}\n")
    requirements = wheel.parent / "requirements.txt"
    requirements.write_text("".join(sorted(lines)))
    return requirements


def check_install(wheel: Path, python: str, work: Path, requirements: Path | None) -> Path:
    """Install the wheel in a new environment, and run the demo there in its quick form. Return the
    Python of the environment.
    """
    environment = work / Path(python).name
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    installed = environment / "bin" / "python"
    if requirements is None:
        _pip(installed, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel))
    else:
        _pip(installed, "install", "--quiet", "--require-hashes", "-r", str(requirements))
        _pip(installed, "install", "--quiet", "--no-deps", str(wheel))
    run_demo(installed, work)
    return installed


def run_demo(python: Path, directory: Path) -> None:
    """Run the demo in its quick form in a directory, with an installed planish."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (["planish", "--version"], ["planish.recipes.demo", *QUICK_DEMO]):
        subprocess.run([python, "-m", *command], cwd=directory, env=variables, check=True)


def write_bill_of_materials(wheel: Path, python: Path, work: Path) -> None:
    """Write the packages of an environment as a software bill of materials."""
    tool = work / "cyclonedx"
    subprocess.run([sys.executable, "-m", "venv", str(tool)], check=True)
    _pip(tool / "bin" / "python", "install", "--quiet", "cyclonedx-bom==7.5.0")
    bill = wheel.parent / f"{wheel.name.split('-py3')[0]}.cdx.json"
    command = [tool / "bin" / "cyclonedx-py", "environment", "--output-reproducible"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-file", str(bill)]
    subprocess.run([*command, str(python)], check=True)


def run_in_container(containerfile: Path, context: Path, command: Sequence[str]) -> str:
    """Build an image with buildah, run a command in it, and return what the command printed. The
    image is removed. Raise SystemExit with the output of buildah if a step fails.

    chroot isolation needs no more rights than root in a container has.
    """
    image = f"localhost/planish-check-{os.getpid()}"

    def buildah(*words: str) -> str:
        program = ["buildah", "--storage-driver", "vfs", *words]
        done = subprocess.run(program, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(program)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    isolated = ("--isolation", "chroot")
    buildah("build", *isolated, "-f", str(containerfile), "-t", image, str(context))
    container = buildah("from", image).strip()
    try:
        return buildah("run", *isolated, container, "--", *command)
    finally:
        buildah("rm", container)
        buildah("rmi", image)


def release(pythons: list[str]) -> None:
    """Make and check all files of a release. `pythons` are further Pythons to check with."""
    wheel = build_dist()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        requirements = write_requirements(wheel, Path(sys.executable))
        installed = check_install(wheel, sys.executable, work, requirements)
        write_bill_of_materials(wheel, installed, work)
        for python in pythons:
            if shutil.which(python) is None:
                print(f"{python} is not installed: the release is not checked with it")
            else:
                check_install(wheel, python, work, None)
                shutil.rmtree(work / Path(python).name)
    if shutil.which("buildah") is None:
        print("buildah is not installed: deploy/Containerfile is not built")
    else:
        containerfile = ROOT / "deploy" / "Containerfile"
        print(run_in_container(containerfile, ROOT, ("planish", "--version")), end="")
    write_checksums(DIST)


def _pip(python: Path, *arguments: str) -> str:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(arguments: list[str]) -> None:
    """Run the command line."""
    if arguments == ["dist"]:
        build_dist()
        write_checksums(DIST)
    elif arguments[:1] == ["release"]:
        release(arguments[1:])
    else:
        raise SystemExit("give `dist`, or `release` and further Pythons")
    print(*sorted(path.name for path in DIST.iterdir()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
