"""All probes of `planish doctor`, in one report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from planish.doctor.acceleration import device, kernel_findings
from planish.doctor.busy import measure_load
from planish.doctor.findings import Report, Section
from planish.doctor.models import directory_of, memory, models
from planish.doctor.numerics import numerics
from planish.doctor.preparation import Preparation
from planish.doctor.processors import processors
from planish.doctor.sandbox import sandbox
from planish.doctor.software import extras, versions
from planish.doctor.storage import HubProbe, directories
from planish.engine.settings import EngineSettings

SECONDS = 15.0
"""The time limit of the preparation. Kernels that need longer are reported as pending."""


@dataclass(frozen=True)
class ExaminationOptions:
    """The options of an examination."""

    server_data: Path
    """Data directory of `planish serve`."""
    model: str | None = None
    """Base model of the memory plan; None: the default model."""
    settings: EngineSettings = field(default_factory=EngineSettings)


def examine(options: ExaminationOptions, seconds: float = SECONDS) -> Report:
    """Run every probe. `seconds` bounds the wait for kernels that are still being compiled."""
    began = time.monotonic()
    load = measure_load()  # first, because the other probes keep the processors busy too
    settings = options.settings
    directory = directory_of(options.model)
    preparation, hub = Preparation(settings.device, directory), HubProbe()
    # The preparation is slow and runs in the background. So the two sections that need its result
    # are filled last, and inserted at their place in the report.
    sections = [
        Section.gather("versions", versions),
        Section.gather("device", lambda: device(settings)),
        Section.gather("processors", lambda: processors(load)),
        Section.gather("models", models),
        Section.gather("memory", lambda: memory(options.model, settings)),
        Section.gather("sandbox", sandbox),
        Section.gather("extras", extras),
        Section.gather("directories", lambda: directories(options.server_data)),
        Section.gather("network", hub.findings),
    ]
    prepared = preparation.result(began + seconds)
    sections[2:2] = [
        Section.gather("kernels", lambda: kernel_findings(settings, prepared)),
        Section.gather("numerics", lambda: numerics(prepared)),
    ]
    return Report(tuple(sections), time.monotonic() - began)
