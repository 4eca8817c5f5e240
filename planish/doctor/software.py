"""Findings of `planish doctor` about the versions of libraries and the installed extras."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import metadata

import torch

from planish.doctor.findings import Finding

_LIBRARIES = ("planish", "torch", "transformers", "tokenizers", "huggingface_hub", "numpy")
EXTRAS = {
    "wandb": "loggers=wandb: metrics to Weights & Biases",
    "trackio": "loggers=trackio: metrics to Trackio",
    "tensorboard": "loggers=tensorboard: metrics to TensorBoard",
    "age": "encrypted downloads from a server",
    "reasoning-gym": "the tasks of reasoning-gym in math_rl",
    "inspect": "evaluation with Inspect",
    "notebooks": "the tutorial as a notebook",
    "verifiers": "environments of the verifiers library",
    "images": "models that read images",
    "ray": "several devices, or a cluster",
    "dev": "planish's own tests",
}
"""The purpose of each extra of the package."""


def version_findings() -> Iterator[Finding]:
    """Yield the versions of planish, its main libraries, Python and the system."""
    for name in _LIBRARIES:
        yield Finding(name, metadata.version(name))
    yield Finding("triton", _version("triton") or "not installed")
    yield Finding("python", platform.python_version())
    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.version.hip:
        built_for = f"ROCm {torch.version.hip}"
    yield Finding("torch_built_for", built_for)


def extra_findings() -> Iterator[Finding]:
    """Yield which extras are installed. Extras are optional, so a missing one has no remedy."""
    requirements_by_extra: dict[str, list[str]] = {name: [] for name in EXTRAS}
    for requirement in metadata.requires("planish") or ():
        text, _, marker = requirement.partition(";")
        for name in EXTRAS:
            if f'extra == "{name}"' in marker:
                requirements_by_extra[name].append(text)
    for name, requirements in requirements_by_extra.items():
        missing = [text for text in requirements if _version(_package_name(text)) is None]
        if not missing:
            state = "installed"
        elif len(missing) == len(requirements) == 1:
            state = f"not installed (pip install 'planish[{name}]')"
        else:
            missing_names = ", ".join(map(_package_name, missing))
            state = f"without {missing_names} (pip install 'planish[{name}]')"
        value = {"installed": not missing, "missing": missing, "for": EXTRAS[name]}
        yield Finding(name, f"{state}; {EXTRAS[name]}", value)


def _package_name(requirement: str) -> str:
    """Return the name in a requirement such as "wandb>=0.31" or "planish[age]"."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
