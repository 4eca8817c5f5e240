"""One part of the GPU report, in a process of its own.

    python -m planish.doctor.gpu.measurements

A crash or a hang of the GPU then ends this part only. The process reads a `Request` from its
standard input as JSON, and prints one JSON object for each line of the report as soon as it is
measured, {"line": ...}, and others for the rest: {"details": ...}, or {"not_run": REASON}.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from planish.doctor.gpu.cards import CARDS
from planish.doctor.gpu.facts import device_facts
from planish.doctor.gpu.machine_limits import (
    SMALL_SQUARE_SIZE,
    SQUARE_SIZE,
    read_bandwidth,
    square_rate,
)
from planish.doctor.gpu.report_file import Line
from planish.doctor.gpu.request import Request, models_home
from planish.engine.base_models import checked_backend
from planish.engine.memory import DeviceMemory, gib
from planish.engine.settings import EngineSettings, choose_dtype
from planish.errors import PlanishError
from planish.model.architecture.config import ModelConfig
from planish.model.device import Device, accumulate_in_float32
from planish.model.kernels.self_test.process import end_with_parent

BANDWIDTH_BYTES, SMALL_BANDWIDTH_BYTES = 1 << 32, 1 << 24
"""More than any cache holds."""


class NotRunError(Exception):
    """A part that this machine cannot run, with the reason."""


Write = Callable[..., None]


def write(**fields: Any) -> None:
    """Write one JSON object to the reading process."""
    print(json.dumps(fields), flush=True)


def measure_machine(request: Request, write: Write) -> None:
    """Report the facts about the device and its software."""
    write(details=device_facts(request.torch_device))


def measure_limits(request: Request, write: Write) -> None:
    """Report the speeds of memory and matmuls, which later parts need."""
    device = request.torch_device
    accumulate_in_float32()
    name = torch.cuda.get_device_name(device) if Device(device).is_gpu else ""
    known = next((card for card in CARDS.values() if _words(card.name) <= _words(name)), None)
    size = SMALL_BANDWIDTH_BYTES if request.small else BANDWIDTH_BYTES
    bandwidth = read_bandwidth(device, size)
    published = known and known.bandwidth / 1e9
    write(line=asdict(Line("memory bandwidth, reading", bandwidth / 1e9, "GB/s", published)))
    dtype = choose_dtype("auto", device)
    rate = square_rate(device, dtype, SMALL_SQUARE_SIZE if request.small else SQUARE_SIZE)
    published = known and known.matmul_rate / 1e12
    kind = str(dtype).removeprefix("torch.")
    write(line=asdict(Line(f"{kind} matmul of large squares", rate / 1e12, "TFLOP/s", published)))
    write(details={"bandwidth": bandwidth, "matmul_rate": rate})


def _words(name: str) -> set[str]:
    """Return the words of a GPU's name that tell it from others."""
    ignored = {"nvidia", "geforce", "tesla", "gb", "sxm", "80", "40"}
    return set(name.lower().replace("-", " ").split()) - ignored


def measure_self_test(request: Request, write: Write) -> None:
    """Report the verdicts of the kernels' self-test with their whole errors."""
    if not Device(request.torch_device).is_gpu:
        raise NotRunError("no GPU")
    from planish.doctor.gpu.random_model import config_directory

    settings = EngineSettings(device=request.device, quantize="nf4")  # all families of kernels
    with config_directory(request.model) as directory:
        _, verdicts = checked_backend(directory, ModelConfig.from_directory(directory), settings)
    for verdict in verdicts:
        got = "passed" if verdict.passed else "failed"
        write(line=asdict(Line(verdict.family, got, expected="passed")))
    if not verdicts:
        raise NotRunError("PLANISH_KERNELS turns the self-test off")
    write(details={"verdicts": [asdict(verdict) for verdict in verdicts]})


def measure_model(request: Request, write: Write) -> None:
    """Report decoding, training, memory, the gap and the slowest kernels of one model."""
    # The import of transformers takes seconds, which parts without a model need not spend.
    from planish.doctor.gpu.model_part import SMALL, ModelPart, Sizes
    from planish.doctor.gpu.random_model import config_directory, num_bytes, random_model

    device, home = request.torch_device, models_home()
    size = num_bytes(request.model)
    home.mkdir(parents=True, exist_ok=True)
    if not (home / request.model).is_dir() and shutil.disk_usage(home).free < 2 * size:
        raise NotRunError(f"the weights need {gib(2 * size)} of free space in PLANISH_HOME")
    settings = EngineSettings(device=request.device, quantize=request.scheme)
    with config_directory(request.model) as directory:
        try:
            plan = DeviceMemory(settings).claim(directory)
        except PlanishError as error:
            raise NotRunError(str(error)) from error
    directory = random_model(request.model, home, device)
    sizes = SMALL if request.small else Sizes()
    part = ModelPart(
        device, request.scheme, request.card(), lambda line: write(line=asdict(line)), sizes
    )
    part.run(directory, settings, plan, lambda details: write(details=details))


PARTS: Mapping[str, Callable[[Request, Write], None]] = {
    "machine": measure_machine,
    "limits": measure_limits,
    "self-test": measure_self_test,
    "model": measure_model,
}


def main() -> None:
    """Run the part of the request on standard input."""
    fields = json.load(sys.stdin)
    limits = fields.pop("limits")
    request = Request(**fields, limits=None if limits is None else tuple(limits))
    end_with_parent(request.parent)
    try:
        PARTS[request.part](request, write)
    except NotRunError as error:
        write(not_run=str(error))


if __name__ == "__main__":
    main()
