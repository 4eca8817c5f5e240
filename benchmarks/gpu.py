"""planish on one GPU: decoding, training and whole iterations, as shares of the GPU's limits, which
are measured in the same run.

    python benchmarks/gpu.py model=Qwen3-8B kv_cache_gib=32                 limits, decode,
        training, an iteration, tenants
    python benchmarks/gpu.py model=Qwen3-8B kv_cache_gib=48 max_batch=512 parts=grpo-128x16
    python benchmarks/gpu.py model=Qwen3-8B parts=peers                     beside transformers
        and PEFT
    python benchmarks/gpu.py model=Qwen3-8B parts=profile                   where the time goes
    python benchmarks/gpu.py model=tiny small=True directory=/tmp           a quick check, also on a
        CPU

Models are those of planish/doctor/gpu/random_model.py, which have random weights and are created when they are first
used, or any other model by its name. All parts except the profile use the public API. Parts:

* decode: a step of 1, 8 and 128 rows (8 samples per prompt, except for 1 row); the share is
  `gpu_limits.decode_bytes` divided by the bytes that could be read in that time
* training: forward_backward and optim_step on 16 x 8 sequences of 200 + 256 tokens, rank 32; FLOPs
  as in `gpu_limits.training_flops`
* grpo-16x8, grpo-128x16: one iteration with that number of prompts and samples of 256 tokens: new
  weights, sampling, forward_backward, optim_step
* tenants: a step of 128 rows with 1, 8 and 64 adapters
* peers: the workloads of workloads.py with planish and other systems, each in its own process,
  alternating (compare.py)
* profile: kernels of a decode step and of a micro-batch

A part is recorded in NAME.json in `directory` as soon as it is done. Earlier parts for this model
and GPU are kept, from there or from results. After `minutes` no further part or round is begun.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import chz
import torch
from compare import header, parse_names, say
from gpu_limits import MachineLimits, measure_limits
from gpu_parts import SERVED_PARTS, Bench, Options, Row, other_parts
from limits import DEVICE
from report import RESULTS, gpu_table

import planish
from planish.doctor.gpu.random_model import SHAPES, random_model
from planish.files import write_atomically
from planish.model.architecture.config import ModelConfig
from planish.model.sources.resolve import resolve_model

PARTS = (*SERVED_PARTS, "peers", "profile")


def main(options: Options) -> None:
    parts = parse_names(options.parts, PARTS, PARTS)
    deadline = time.monotonic() + 60 * options.minutes
    is_random = options.model in SHAPES
    model = (
        random_model(options.model, options.models, DEVICE)
        if is_random
        else resolve_model(options.model)
    )
    config = ModelConfig.from_directory(model)
    bench = Bench(options, model, config, measure_limits(config, options.small), deadline)
    recording = Recording.begun(bench)
    recording.add("limits", limit_rows(bench.limits))
    served_parts = [name for name in parts if name in SERVED_PARTS]
    if served_parts:
        with planish.ServiceClient(**options.service) as service:
            for name in served_parts:
                recording.run(name, partial(SERVED_PARTS[name], bench, service))
        # Parts with their own processes need the memory.
        gc.collect()
        torch.cuda.empty_cache()
    for name, part in other_parts(bench, parts).items():
        recording.run(name, part)
    print(gpu_table(recording.report))
    if recording.failed:
        raise SystemExit(f"failed, for the reasons above: {', '.join(recording.failed)}")


@dataclass(frozen=True)
class Recording:
    """The results file. It contains the finished parts even if this process is killed."""

    bench: Bench
    file: Path
    report: dict[str, Any]
    failed: list[str] = field(default_factory=list)

    @classmethod
    def begun(cls, bench: Bench) -> Self:
        options = bench.options
        file = (
            options.directory
            / f"{options.name or 'gpu-' + options.model.rpartition('/')[2].lower()}.json"
        )
        report = header(options) | {"model": options.model, "gpu": describe_gpu()}
        del report["works"]
        return cls(bench, file, report | {"parts": earlier_parts(file, report)})

    def run(self, name: str, part: Callable[[], list[Row]]) -> None:
        if self.bench.is_late:
            say(f"{name}: not begun, the {self.bench.options.minutes:g} minutes are over")
            return
        start_time = time.monotonic()
        try:
            self.add(name, part())
        except (Exception, SystemExit):
            # Continue with the other parts, because time on the machine is short.
            traceback.print_exc()
            self.failed.append(name)
        say(f"{name}: ended after {time.monotonic() - start_time:.0f} s")

    def add(self, name: str, rows: Sequence[Row]) -> None:
        self.report["parts"][name] = {
            **{key: self.report[key] for key in ("date", "commit", "options")},
            "limits": asdict(self.bench.limits),
            "rows": [{"value": row.median, **asdict(row)} for row in rows],
        }
        write_atomically(self.file, json.dumps(self.report, indent=1) + "\n")
        for row in rows:
            share = "" if row.share is None else f", {row.share:.0%} of {row.of}"
            say(f"  {row.what}: {row.median:.4g} {row.unit}{share}")


def earlier_parts(file: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that an earlier run recorded for this model, kind of GPU and software."""
    for path in (file, RESULTS / file.name):
        if path.is_file():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            is_same = all(earlier[name] == report[name] for name in ("model", "gpu"))
            return earlier["parts"] if is_same else {}
    return {}


def describe_gpu() -> dict[str, Any]:
    """Return the facts about the GPU."""
    facts = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": version("triton"),
        "transformers": version("transformers"),
        "kernels": os.environ.get("PLANISH_KERNELS", "auto"),
    }
    if DEVICE.type == "cpu":
        return {"name": "no GPU", "memory_gib": 0.0, **facts}
    properties = torch.cuda.get_device_properties(DEVICE)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / (1 << 30), 1),
        **facts,
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def limit_rows(limits: MachineLimits) -> list[Row]:
    return [
        Row("bf16 product of large squares", [limits.product_rate / 1e12], "TFLOP/s"),
        Row(
            "bf16 products of the model's layers",
            [limits.layer_rate / 1e12],
            "TFLOP/s",
        ),
        Row("memory, read", [limits.bandwidth / 1e9], "GB/s"),
    ]


if __name__ == "__main__":
    main(chz.entrypoint(Options))
