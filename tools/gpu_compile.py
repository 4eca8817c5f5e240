"""Compile the Triton kernels for all supported architectures, and compare with the limits.

    python tools/gpu_compile.py                 compile for all architectures
    python tools/gpu_compile.py 89 90           compile for some
    python tools/gpu_compile.py --processes 4   compile in 4 processes; the default is one per core
    python tools/gpu_compile.py --sample        compile the small selection that a test compiles
    python tools/gpu_compile.py --write         also record the numbers

Another version of Triton needs no GPU and no other torch. Its limits are those of the newest
recorded version, until --write records its own:

    pip install --no-deps --target /tmp/triton triton==3.6.0
    PYTHONPATH=/tmp/triton python tools/gpu_compile.py --sample

No GPU is used. A pretended GPU (tests/engine/pretended_gpu.py) samples and trains with small models
whose layers have the sizes of real models. Each launch is recorded with the types and constants of
its arguments, so exactly the specializations that a GPU would run are compiled. A kernel must need
no more shared memory than a program may use. It must spill at most MAX_SPILLED bytes, and a
multiprocessor must run at least MIN_WARPS of its warps. On sm_90, kernels with large tiles must use
the matmul instruction wgmma. A kernel that misses one of these bars has its number in
tools/gpu_compile.json as its limit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_suffix(".json")
MAX_SPILLED = 32
"""Bytes of local memory for each thread."""
MIN_WARPS = 8
"""Warps of a kernel that a multiprocessor runs at the same time."""
WGMMA = (
    "tree.forward",
    "tree.backward_queries",
    "tree.backward_keys",
    "decode._prefill_kernel",
)
"""Kernels whose tiles have at least 64 rows, so that their matmuls should use wgmma on sm_90."""
REGISTERS = 65_536
"""Registers of a multiprocessor."""
SHARED_RESERVE = 1024
"""Bytes of shared memory that each program takes in addition, since sm_80."""


@dataclass(frozen=True)
class Architecture:
    """The limits of a compute capability."""

    shared: int
    """Bytes of shared memory that a program may use."""
    shared_total: int
    """Bytes of shared memory of a multiprocessor."""
    threads: int
    """Threads of a multiprocessor."""
    programs: int
    """Programs of a multiprocessor."""
    dtype: str = "bfloat16"
    """The dtype in which planish uses this architecture."""


ARCHITECTURES = {
    75: Architecture(65_536, 65_536, 1024, 16, "float32"),
    80: Architecture(166_912, 167_936, 2048, 32),
    86: Architecture(101_376, 102_400, 1536, 16),
    89: Architecture(101_376, 102_400, 1536, 24),
    90: Architecture(232_448, 233_472, 2048, 32),
    100: Architecture(232_448, 233_472, 2048, 32),
    120: Architecture(101_376, 102_400, 1536, 24),
}
SAMPLED_ARCHITECTURES = (89, 90)
SAMPLED_MODELS = 2
"""The number of MODELS whose kernels the sample compiles for sm_90. For others it compiles those of
the first one.
"""
SAMPLED_MODULES = ("tree", "decode", "expert", "quantized_expert")
"""The modules that the sample compiles."""


@dataclass(frozen=True)
class Model:
    """A small model whose layers have the sizes of a known model."""

    family: str
    """A family of `tiny_model`, or a model type whose layers transformers' code computes."""
    sizes: dict[str, Any]
    schemes: tuple[str | None, ...] = (None,)
    stored: str | None = None
    """The format in which the checkpoint stores quantized weights: "mxfp4" (the experts of gpt-oss),
    "fp8" with one scale for each block of 128 x 128 weights, or None.
    """

    def write(self, directory: Path) -> Path:
        """Write the model into `directory`, and return it."""
        from planish.testing import CONFIGS, tiny_model, tiny_transformers_model
        from planish.testing_quantized import use_fp8, use_mxfp4

        if self.family not in CONFIGS:
            return tiny_transformers_model(directory, self.family, dtype="bfloat16", **self.sizes)
        sizes: dict[str, Any] = {"layers": 1} | self.sizes
        tiny_model(directory, self.family, dtype="bfloat16", **sizes)
        if self.stored == "fp8":
            config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
            return use_fp8(directory, config, (128, 128), "weight_scale_inv")
        return directory if self.stored is None else use_mxfp4(directory)


MODELS = {
    "the heads of Qwen3-8B": Model(
        "qwen3", {"hidden_size": 128, "heads": 32, "kv_heads": 8, "head_dim": 128}
    ),
    # Each row uses all experts, so that training has the largest tiles.
    "experts": Model(
        "qwen3_moe",
        {"hidden_size": 128, "experts": 8, "experts_per_token": 8, "expert_size": 64},
        (None, "int8", "nf4"),
    ),
    "experts in mxfp4": Model(
        "gpt_oss",
        {"hidden_size": 128, "experts": 8, "experts_per_token": 8, "expert_size": 64},
        stored="mxfp4",
    ),
    "experts in fp8": Model(
        "qwen3_moe",
        {"hidden_size": 128, "experts": 8, "experts_per_token": 8, "expert_size": 128},
        stored="fp8",
    ),
    "the layers of Qwen3-8B": Model(
        "qwen3",
        {"hidden_size": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 4096},
        (None, "int8", "nf4"),
    ),
    "layers in fp8": Model(
        "qwen3",
        {"hidden_size": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 4096},
        stored="fp8",
    ),
    "the vocabulary of Qwen3-8B": Model(
        "qwen3", {"hidden_size": 128, "vocab_size": 151_936, "intermediate": 128}
    ),
    "the heads of Llama-3.2-3B": Model(
        "llama", {"hidden_size": 384, "heads": 24, "kv_heads": 8, "head_dim": 128}
    ),
    "the heads of Qwen2.5-7B": Model(
        "qwen2", {"hidden_size": 448, "heads": 28, "kv_heads": 4, "head_dim": 128}
    ),
    "the heads of Gemma 3": Model(
        "gemma3", {"hidden_size": 128, "heads": 8, "kv_heads": 4, "head_dim": 256, "window": 64}
    ),
    "the heads of gpt-oss": Model(
        "gpt_oss", {"hidden_size": 128, "heads": 64, "kv_heads": 8, "head_dim": 64, "window": 64}
    ),
    "the heads of Mistral-7B": Model(
        "mistral", {"hidden_size": 128, "heads": 32, "kv_heads": 8, "head_dim": 128}
    ),
    "the heads of Ministral-3-8B": Model(
        "ministral3", {"hidden_size": 128, "heads": 32, "kv_heads": 8, "head_dim": 128}
    ),
    "the heads of SmolLM3-3B": Model(
        "smollm3", {"hidden_size": 128, "heads": 16, "kv_heads": 4, "head_dim": 128}
    ),
    "the heads of Phi-3-mini": Model(
        "phi3", {"hidden_size": 128, "heads": 32, "kv_heads": 32, "head_dim": 96}
    ),
    "the heads of Olmo-3-7B": Model(
        "olmo3", {"hidden_size": 128, "heads": 32, "kv_heads": 32, "head_dim": 128, "window": 64}
    ),
    # One of two layers has attention.
    "the heads of Qwen3.5-9B": Model(
        "qwen3_5", {"hidden_size": 128, "layers": 2, "heads": 16, "kv_heads": 4, "head_dim": 256}
    ),
    "experts of Qwen3.5": Model(
        "qwen3_5_moe",
        {"hidden_size": 128, "layers": 2, "experts": 8, "experts_per_token": 8, "expert_size": 64},
    ),
    # The code of transformers computes the layers of the others. Of these, the trainer's attention,
    # the experts and the head are planish's kernels.
    "LFM2-8B-A1B": Model(
        "lfm2_moe",
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_experts": 8,
            "num_experts_per_tok": 8,
        },
        (None, "int8"),
    ),
    "the heads of GLM-4.5": Model(
        "glm4_moe",
        {
            "hidden_size": 96,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
}
"""Every family that planish has a decoder for, and models that the code of transformers runs. Other
models differ in sizes only.
"""


class LaunchRecorder:
    """Records the specializations of all launches on a pretended GPU (see `Observer`)."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, Any]] = {}
        """For each module, the cases by their text."""

    def operation(self, func: Any, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Ignore the operations of torch."""

    def launch(self, kernel: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        module = kernel.fn.__module__
        case = case_of(kernel, args, kwargs)
        self.cases.setdefault(module, {}).setdefault(repr(case), case)


def case_of(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the specialization that Triton would compile for these arguments of a launch."""
    from hopper import Case

    arguments = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    arguments |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    unspecialized = kernel.kwargs.get("do_not_specialize") or ()
    annotations = kernel.fn.__annotations__
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    multiples = []
    for name, value in arguments.items():
        is_specialized = name not in unspecialized
        kind = triton_type(value, is_specialized=is_specialized)
        if kind is None or "constexpr" in str(annotations.get(name)):
            constants[name] = value
            continue
        types[name] = kind
        if is_specialized and kind in ("i32", "i64") and value % 16 == 0:
            multiples.append(name)
    return Case(
        kernel.fn.__name__,
        types,
        constants,
        options.get("num_warps", 4),
        options.get("num_stages", 3),
        tuple(multiples),
        options.get("enable_fp_fusion", True),
    )


def triton_type(value: Any, *, is_specialized: bool = True) -> str | None:
    """Return the type of an argument in Triton's notation, or None for a constant."""
    import torch

    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        short = {"bfloat16": "bf16", "uint8": "u8", "bool": "i1"}
        return f"*{short.get(name) or name.replace('float', 'fp').replace('int', 'i')}"
    if value is None:
        return None
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        if value == 1 and is_specialized:
            return None  # Triton compiles 1 as a constant.
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def record(architecture: Architecture, models: Sequence[Path], marks: Any) -> LaunchRecorder:
    """Return the launches on a GPU with these limits, for the models of MODELS."""
    previous, marks.observer = marks.observer, LaunchRecorder()
    try:
        for directory, model in zip(models, MODELS.values(), strict=False):
            for scheme in model.schemes:
                sample_and_train(directory, scheme, architecture.dtype)
        return marks.observer
    finally:
        marks.observer = previous


def sample_and_train(directory: Path, scheme: str | None, dtype: str) -> None:
    """Prefill and decode with an adapter and top_p, and train."""
    import numpy as np
    from gpu_counts import random_adapter

    from planish.engine.base_models import BaseModel
    from planish.engine.memory import DeviceMemory
    from planish.engine.settings import EngineSettings
    from planish.service import Sample
    from planish.types import Datum, ModelInput, SamplingParams

    settings = EngineSettings(
        device="cuda",
        dtype=dtype,
        max_batch=4,
        kv_cache_bytes=1 << 26,
        prefix_cache_bytes=1 << 20,
        micro_batch_tokens=256,
        quantize=scheme,
    )
    base = BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    adapter = random_adapter(base, rank=32)
    prompt = ModelInput.from_ints(list(range(70)))
    params = SamplingParams(max_tokens=3, stop=[], seed=0, top_p=0.9)
    base.sampler.submit(Sample("compile", prompt, 2, params), adapter.snapshot(), "", Future())
    while base.sampler.busy:
        base.sampler.step()
    inputs = {
        "target_tokens": np.arange(1, 101),
        "logprobs": np.full(100, -5.0, np.float32),
        "advantages": np.ones(100, np.float32),
    }
    datum = Datum(ModelInput.from_ints(list(range(100))), inputs)
    for _ in base.trainer.forward_backward(adapter, [datum], "importance_sampling"):
        raise AssertionError("the datum is one micro-batch")


def warps_at_once(architecture: Architecture, registers: int, shared: int, warps: int) -> int:
    """Return how many warps of a kernel a multiprocessor runs at the same time."""
    per_warp = max(256, math.ceil(registers * 32 / 256) * 256)
    reserve = min(SHARED_RESERVE, architecture.shared_total - architecture.shared)
    programs = min(
        REGISTERS // (per_warp * warps),
        architecture.shared_total // (shared + reserve),
        architecture.threads // (32 * warps),
        architecture.programs,
    )
    return programs * warps


def measure(
    capability: int, cases: Mapping[str, Mapping[str, Any]], num_processes: int
) -> dict[str, dict[str, int]]:
    """Compile the cases of each module, and return the worst numbers of each kernel.

    Raises RuntimeError if a kernel does not compile.
    """
    from hopper import compile_all

    architecture, target = ARCHITECTURES[capability], ("cuda", capability, 32)
    pairs = [(module, case) for module, by_text in cases.items() for case in by_text.values()]
    # Neighbours in the list are cases of one kernel, which take about the same time.
    parts = [pairs[first::num_processes] for first in range(min(num_processes, len(pairs)))]
    with ThreadPoolExecutor(num_processes) as pool:
        tasks = ([(module, target, case) for module, case in part] for part in parts)
        results_of_parts = list(pool.map(compile_all, tasks))
    found: dict[str, dict[str, int]] = {}
    for part, results in zip(parts, results_of_parts, strict=True):
        for (module, case), result in zip(part, results, strict=True):
            warps = warps_at_once(architecture, result.registers, result.shared, case.warps)
            numbers = {"spilled": result.spilled, "shared": result.shared, "warps": warps}
            numbers |= {"registers": result.registers, "wgmma": result.wgmma}
            worst = found.setdefault(f"{short_name(module)}.{case.kernel}", dict(numbers))
            for key, value in numbers.items():
                is_better_if_large = key in ("warps", "wgmma")
                worst[key] = (min if is_better_if_large else max)(worst[key], value)
    return dict(sorted(found.items()))


def short_name(module: str) -> str:
    """Return the name of a module of kernels, such as "tree"."""
    return module.rpartition(".")[2].removesuffix("_kernels")


def violations(
    capability: int,
    found: Mapping[str, Mapping[str, int]],
    recorded: Mapping[str, Mapping[str, int]],
) -> Iterator[str]:
    """Yield what misses a bar, and is also worse than the recorded number of the kernel."""
    for kernel, numbers in found.items():
        known = recorded.get(kernel, {})
        if numbers["shared"] > max(ARCHITECTURES[capability].shared, known.get("shared", 0)):
            yield f"{kernel}: {numbers['shared']:,} bytes of shared memory"
        if numbers["spilled"] > max(MAX_SPILLED, known.get("spilled", 0)):
            yield f"{kernel}: spills {numbers['spilled']} bytes"
        if numbers["warps"] < min(MIN_WARPS, known.get("warps", MIN_WARPS)):
            yield f"{kernel}: {numbers['warps']} warps of a multiprocessor"
        if capability == 90 and kernel in WGMMA and not numbers["wgmma"]:
            yield f"{kernel}: no wgmma"


def recorded_numbers() -> dict[str, Any]:
    """Return the recorded numbers by Triton version, architecture and kernel."""
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def recorded_text(recorded: Mapping[str, Any]) -> str:
    """Return the recorded numbers as JSON with one line for each kernel."""
    versions = []
    for version, by_architecture in recorded.items():
        architectures = []
        for capability, kernels in by_architecture.items():
            lines = [f"   {json.dumps(name)}: {json.dumps(own)}" for name, own in kernels.items()]
            architectures.append(f'  "{capability}": {{\n' + ",\n".join(lines) + "\n  }")
        versions.append(f' "{version}": {{\n' + ",\n".join(architectures) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}\n"


def triton_version() -> str:
    """Return the first two parts of Triton's version, such as "3.7"."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def limits_of(recorded: Mapping[str, Any], version: str, capability: int) -> dict[str, Any]:
    """Return the recorded numbers for a version of Triton, or else those of the newest one."""
    newest = max(recorded, key=lambda name: [int(part) for part in name.split(".")], default="")
    found: dict[str, Any] = recorded.get(version if version in recorded else newest, {})
    return found.get(str(capability), {})  # type: ignore[no-any-return]


def recorded_cases(
    capabilities: Sequence[int], *, sample: bool
) -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:
    """Yield each architecture with the cases of its launches. `sample`: only those of a test."""
    import pytest
    import torch
    from gpu_counts import on_pretended_gpu

    from planish.model.kernels.triton import common

    models = list(MODELS.items())[: SAMPLED_MODELS if sample else None]
    known: dict[tuple[int, str, int], dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        directories = [model.write(Path(folder) / name.replace(" ", "-")) for name, model in models]
        with on_pretended_gpu() as marks:
            for capability in capabilities:
                architecture = ARCHITECTURES[capability]
                number = (capability // 10, capability % 10)
                patch.setattr(common, "shared_memory", lambda _, own=architecture: own.shared)
                patch.setattr(torch.cuda, "get_device_capability", lambda _=None, own=number: own)
                used = directories[:1] if sample and capability != 90 else directories
                # The launches depend on nothing else of an architecture.
                key = (architecture.shared, architecture.dtype, len(used))
                if key not in known:
                    known[key] = record(architecture, used, marks).cases
                cases = known[key]
                if sample:
                    cases = {m: c for m, c in cases.items() if short_name(m) in SAMPLED_MODULES}
                yield capability, cases


def main() -> int:
    """Compile, compare and perhaps write. Return 1 if a kernel misses its limit."""
    parser = argparse.ArgumentParser(description="registers, memory and warps of the GPU kernels")
    parser.add_argument("architectures", nargs="*", type=int, choices=[*ARCHITECTURES, []])
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: the cores")
    parser.add_argument("--sample", action="store_true", help="compile what a test compiles")
    parser.add_argument("--write", action="store_true", help="record the numbers")
    arguments = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    folders = ("", "tests", "tests/engine", "tests/model/kernels/triton")
    sys.path += [str(ROOT / folder) for folder in folders]
    recorded, version, wrong = recorded_numbers(), triton_version(), []
    default = SAMPLED_ARCHITECTURES if arguments.sample else tuple(ARCHITECTURES)
    capabilities = tuple(arguments.architectures) or default
    for capability, cases in recorded_cases(capabilities, sample=arguments.sample):
        found = measure(capability, cases, arguments.processes)
        limits = limits_of(recorded, version, capability)
        wrong += [f"sm_{capability} {line}" for line in violations(capability, found, limits)]
        for kernel, numbers in found.items():
            print(f"sm_{capability}", kernel, json.dumps(numbers), flush=True)
        if arguments.write:
            recorded.setdefault(version, {}).setdefault(str(capability), {}).update(found)
            RECORDED.write_text(recorded_text(recorded))
    print("\n".join(wrong) or "every kernel is within its limits")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
