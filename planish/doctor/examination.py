"""All probes of `planish doctor`, in one report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from planish.doctor.acceleration import device_findings, kernel_findings
from planish.doctor.busy import measure_load
from planish.doctor.findings import Report, Section
from planish.doctor.models import local_directory, memory_findings, model_findings
from planish.doctor.numerics import numerics_findings
from planish.doctor.preparation import Preparation
from planish.doctor.processors import processor_findings
from planish.doctor.sandbox import sandbox_findings
from planish.doctor.software import extra_findings, version_findings
from planish.doctor.storage import HubProbe, directory_findings
from planish.engine.settings import EngineSettings

TIME_LIMIT_SECONDS = 15.0
"""The time limit of the preparation. Kernels that need longer are reported as pending."""


@dataclass(frozen=True)
class ExaminationOptions:
    """The options of an examination."""

    server_data: Path
    """Data directory of `planish serve`."""
    model: str | None = None
    """Base model of the memory plan; None: the default model."""
    settings: EngineSettings = field(default_factory=EngineSettings)


def examine(options: ExaminationOptions, seconds: float = TIME_LIMIT_SECONDS) -> Report:
    """Run every probe. `seconds` bounds the wait for kernels that are still being compiled."""
    start_time = time.monotonic()
    load = measure_load()  # first, because the other probes keep the processors busy too
    settings = options.settings
    directory = local_directory(options.model)
    preparation, hub = Preparation(settings.device, directory), HubProbe()
    # The preparation is slow and runs in the background. So the two sections that need its result
    # are filled last, and inserted at their place in the report.
    sections = [
        Section.gather("versions", version_findings),
        Section.gather("device", lambda: device_findings(settings)),
        Section.gather("processors", lambda: processor_findings(load)),
        Section.gather("models", model_findings),
        Section.gather("memory", lambda: memory_findings(options.model, settings)),
        Section.gather("sandbox", sandbox_findings),
        Section.gather("extras", extra_findings),
        Section.gather("directories", lambda: directory_findings(options.server_data)),
        Section.gather("network", hub.findings),
    ]
    preparation_result = preparation.result(start_time + seconds)
    sections[2:2] = [
        Section.gather("kernels", lambda: kernel_findings(settings, preparation_result)),
        Section.gather("numerics", lambda: numerics_findings(preparation_result)),
    ]
    return Report(tuple(sections), time.monotonic() - start_time)
