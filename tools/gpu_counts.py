"""Count the launches, waits and bytes of a pass on a GPU, without a GPU.

    python tools/gpu_counts.py              count, and compare with the recorded numbers
    python tools/gpu_counts.py --write      also record the numbers, and write the table of the docs
    python tools/gpu_counts.py qwen3 phi3   count some families

A pretended GPU (tests/engine/pretended_gpu.py) counts what planish would launch. It interprets no
kernel, and their results are random numbers. The counts are those of tiny models. A launch is a
Triton kernel, or an operation of torch that is no view; some operations of torch, such as a sort,
launch several kernels on a GPU. A wait is an operation for which the host waits for the GPU.

planish/doctor/gpu/counts.json has the recorded numbers, from which `planish doctor --plan` computes
times. A test rejects numbers that grew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "planish" / "doctor" / "gpu" / "counts.json"
PAGE = ROOT / "docs" / "reference" / "gpu-counts.md"
MARK = "<!-- The rest of this page is written by tools/gpu_counts.py. -->\n"
SCHEMES = ("bf16", "int8", "nf4")
PASSES = ("decode", "train")
FAMILIES = (
    *("qwen3", "llama", "mistral", "ministral3", "qwen2", "smollm3", "phi3", "gemma3", "olmo3"),
    *("gpt_oss", "qwen3_moe", "qwen3_5", "qwen3_5_moe"),
)
LAYERS = (2, 4)
"""Two sizes of each model. Kinds of layers alternate, so the sizes are even."""
NUM_EXPERTS, EXPERTS_PER_TOKEN = 16, 8
PROMPTS, SAMPLES, PROMPT_TOKENS = 3, 3, 130
"""A decoding step has 9 rows; its contexts are longer than two blocks of 64 positions."""
TRAINED = (2, 2, 40, 20)
"""Prompts, samples for each, and the tokens of a prompt and of a sample."""
LINEAR_SIZE = 1024
ROWS = {"forward, 15 rows": 15, "forward, 130 rows": 130, "forward, 600 rows": 600}
"""Rows for which the bytes of a weight are counted. No dimension of a weight is as large."""
BACKWARD_ROWS = 600

Counts = dict[str, float]


class LaunchCounter:
    """Counts launches by name, and the bytes of tensors (see `Observer`)."""

    def __init__(self, rows: int = 0) -> None:
        """`rows`: tensors with a dimension of this size are activations, whose bytes do not count."""
        self.launches: Counter[str] = Counter()
        self.bytes = 0
        self._rows = rows

    def operation(self, func: Any, given: Sequence[Any], made: Sequence[Any]) -> None:
        name = getattr(func, "_schema", func)
        name = getattr(name, "name", getattr(func, "__name__", "")).removeprefix("aten::")
        if not _launches(func, name, given, made):
            return
        self.launches[name] += 1
        reads_rows = name in ("index", "index_select", "embedding", "gather")
        self._add([*(made if reads_rows else given), *made])

    def launch(self, kernel: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        import torch

        self.launches[kernel.fn.__name__] += 1
        self._add([x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)])

    def _add(self, tensors: Sequence[Any]) -> None:
        for x in tensors:
            if self._rows not in x.shape:
                self.bytes += min(x.numel() * x.element_size(), _storage(x).nbytes())


def _launches(func: Any, name: str, given: Sequence[Any], made: Sequence[Any]) -> bool:
    """Return whether an operation launches a kernel: whether it is neither a view nor a read."""
    from pretended_gpu import ALLOCATIONS

    if name in (*ALLOCATIONS, "_local_scalar_dense", "resize_", "set_"):
        return False
    schema = getattr(func, "_schema", None)
    if schema is not None and schema.is_mutable:
        return True
    storages = {_storage(x)._cdata for x in given}
    return not made or any(_storage(x)._cdata not in storages for x in made)


def _storage(x: Any) -> Any:
    import torch

    with torch._C.DisableTorchFunction():
        return x.untyped_storage()


@contextmanager
def counting(marks: Any, counter: LaunchCounter) -> Iterator[None]:
    """Count the work of the block."""
    previous, marks.observer = marks.observer, counter
    marks.waited.clear()
    try:
        yield
    finally:
        marks.observer = previous


def model_options(family: str) -> dict[str, Any]:
    """Return the options of `tiny_model` whose sizes suit every scheme."""
    options: dict[str, Any] = {"intermediate": 128, "expert_size": 64, "dtype": "bfloat16"}
    if "moe" in family or family == "gpt_oss":
        options |= {"experts": NUM_EXPERTS, "experts_per_token": EXPERTS_PER_TOKEN}
    if family in ("gemma3", "gpt_oss", "olmo3"):
        options["window"] = 64
    return options


def tiny_models(family: str, directory: Path) -> list[Path]:
    """Write the models of a family, one for each of LAYERS."""
    from planish.testing import tiny_model

    return [
        tiny_model(directory / f"{family}-{layers}", family, layers=layers, **model_options(family))
        for layers in LAYERS
    ]


def count_family(models: Sequence[Path], schemes: Sequence[str], marks: Any) -> dict[str, Any]:
    """Return the counts of a family by scheme and pass.

    Each is {"layer": launches of a layer, "fixed": launches beside the layers, "waits": waits of a
    decoding step or micro-batch}.
    """
    found: dict[str, Any] = {}
    for scheme in schemes:
        sizes = [count_model(model, scheme, marks) for model in models]
        found[scheme] = {kind: _per_layer(*(size[kind] for size in sizes)) for kind in PASSES}
    return found


def _per_layer(small: tuple[int, int], large: tuple[int, int]) -> Counts:
    layer = (large[0] - small[0]) / (LAYERS[1] - LAYERS[0])
    return {"layer": layer, "fixed": small[0] - LAYERS[0] * layer, "waits": large[1]}


def count_model(model: Path, scheme: str, marks: Any) -> dict[str, tuple[int, int]]:
    """Return the launches and waits of a decoding step and of a micro-batch of training."""
    import torch

    from planish.engine.base_models import BaseModel
    from planish.engine.memory import DeviceMemory
    from planish.engine.settings import EngineSettings

    settings = EngineSettings(
        device="cuda",
        dtype="bfloat16",
        max_batch=PROMPTS * SAMPLES,
        kv_cache_bytes=1 << 26,
        prefix_cache_bytes=1 << 20,
        micro_batch_tokens=1 << 12,
        quantize=None if scheme == "bf16" else scheme,
    )
    torch.manual_seed(0)  # the random results of kernels choose the experts
    base = BaseModel(model, settings, DeviceMemory(settings).claim(model))
    return {"decode": count_decode(base, marks), "train": count_train(base, marks)}


@contextmanager
def on_pretended_gpu() -> Iterator[Any]:
    """Use the pretended GPU, without CUDA graphs, whose launches would not be counted.

    From the beginning no kernel is interpreted. Tables of planish are cached for each device, so
    one process should use this context once.
    """
    import pytest
    from pretended_gpu import pretended_gpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANISH_GRAPHS", "0")
        with pretended_gpu(patch) as marks:
            marks.observer = LaunchCounter()
            yield marks


def random_adapter(base: Any, rank: int = 8) -> Any:
    """Return an adapter of the default modules."""
    from planish.engine.training.adapters import Adapter
    from planish.model.layers.lora import LoraLayout
    from planish.types import LoraConfig

    layout = LoraLayout(base.config, LoraConfig(rank=rank, seed=0))
    return Adapter(layout, base.backend, layout.init(0) + 0.01)


def count_decode(base: Any, marks: Any) -> tuple[int, int]:
    """Return the launches and waits of a step that only decodes."""
    import numpy as np

    from planish.service import Sample
    from planish.types import ModelInput, SamplingParams

    weights, rng = random_adapter(base).snapshot(), np.random.default_rng(0)
    for prompt in range(PROMPTS):
        tokens = rng.integers(0, 250, PROMPT_TOKENS).tolist()
        params = SamplingParams(max_tokens=16, stop=[], seed=prompt)
        op = Sample("counts", ModelInput.from_ints(tokens), SAMPLES, params)
        base.sampler.submit(op, weights, "adapter", Future())
    for _ in range(4):
        base.sampler.step()
    counter = LaunchCounter()
    with counting(marks, counter):
        base.sampler.step()
        return counter.launches.total(), len(marks.waited)


def count_train(base: Any, marks: Any) -> tuple[int, int]:
    """Return the launches and waits of one micro-batch, forward and backward."""
    import numpy as np

    from planish.types import Datum, ModelInput

    prompts, samples, prompt_tokens, new_tokens = TRAINED
    rng, data = np.random.default_rng(1), []
    for _ in range(prompts):
        prompt = rng.integers(0, 250, prompt_tokens).tolist()
        for _ in range(samples):
            tokens = prompt + rng.integers(0, 250, new_tokens).tolist()
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": [-5.0] * (len(tokens) - 1),
                "advantages": [0.0] * (prompt_tokens - 1) + [1.0] * new_tokens,
            }
            data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    adapter, counter = random_adapter(base), LaunchCounter()
    with counting(marks, counter):
        for _ in base.trainer.forward_backward(adapter, data, "importance_sampling"):
            raise AssertionError("the data are one micro-batch")
        return counter.launches.total(), len(marks.waited)


def count_bytes(scheme: str, marks: Any) -> Counts:
    """Return the bytes that a matmul reads and writes for each weight, forward and backward.

    A tensor counts once for each operation that has it as an argument or as its result.
    """
    import torch
    from backends import CONFIG
    from pretended_gpu import GPU

    from planish.model.kernels.choose import triton_backend
    from planish.model.kernels.triton.families import FAMILIES as KERNELS
    from planish.model.layers.quantization import quantize

    backend = triton_backend(CONFIG, torch.bfloat16, GPU, KERNELS)
    fused = torch.randn(2 * LINEAR_SIZE, LINEAR_SIZE, device=GPU).bfloat16()
    weights = fused.split(LINEAR_SIZE)
    if scheme == "bf16":
        linear = backend.pack(weights)
    else:
        linear = backend.pack_quantized([quantize(w, scheme) for w in weights], [None, None])
    found: Counts = {}

    def count(name: str, rows: int, columns: int, matmul: Any) -> None:
        x = torch.ones(rows, columns, device=GPU, dtype=torch.bfloat16)
        with counting(marks, counter := LaunchCounter(rows)), torch.no_grad():
            matmul(x, linear)
        found[name] = round(counter.bytes / fused.numel(), 2)

    for name, rows in ROWS.items():
        count(name, rows, LINEAR_SIZE, backend.matmul)
    count("backward", BACKWARD_ROWS, 2 * LINEAR_SIZE, backend.matmul_backward)
    return found


def count_all(schemes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the launches of these families with these schemes, and the bytes of each scheme."""
    found: dict[str, Any] = {"launches": {}}
    with tempfile.TemporaryDirectory() as directory:
        models = {family: tiny_models(family, Path(directory)) for family in schemes}
        with on_pretended_gpu() as marks:
            for family, sizes in models.items():
                found["launches"][family] = count_family(sizes, schemes[family], marks)
                print(family, json.dumps(found["launches"][family]), file=sys.stderr, flush=True)
            found["bytes"] = {scheme: count_bytes(scheme, marks) for scheme in SCHEMES}
    return found


def growth(recorded: Any, found: Any, path: str = "") -> Iterator[str]:
    """Yield the numbers of `found` that are larger than those recorded, or are not recorded."""
    if isinstance(found, Mapping):
        for name, value in found.items():
            yield from growth(recorded.get(name, {}), value, f"{path}/{name}" if path else name)
    elif not isinstance(recorded, int | float) or found > recorded:
        yield f"{path}: {found:g}, recorded {recorded if recorded != {} else 'nothing'}"


def recorded_counts() -> dict[str, Any]:
    """Return the recorded numbers."""
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def table(counts: Mapping[str, Any]) -> str:
    """Return the tables of the docs as Markdown."""

    def lines(heading: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
        return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows)]

    bytes_names = list(counts["bytes"][SCHEMES[0]])
    return "\n".join(
        [
            *lines(
                ("families", "weights", "decode: launches; waits", "train: launches; waits"),
                _launch_rows(counts["launches"]),
            ),
            "",
            *lines(
                ("bytes for each weight", *bytes_names),
                (
                    (scheme, *(f"{counts['bytes'][scheme][name]:g}" for name in bytes_names))
                    for scheme in SCHEMES
                ),
            ),
            "",
        ]
    )


def _launch_rows(launches: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield the rows of the table. Families whose counts are all equal share rows."""
    families_by_rows: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for family, schemes in launches.items():
        schemes_by_cells: dict[tuple[str, ...], list[str]] = {}
        for scheme, kinds in schemes.items():
            cells = tuple(
                f"{kinds[kind]['layer']:g} x layers + {kinds[kind]['fixed']:g}; "
                f"{kinds[kind]['waits']}"
                for kind in PASSES
            )
            schemes_by_cells.setdefault(cells, []).append(scheme)
        rows = tuple((", ".join(names), *cells) for cells, names in schemes_by_cells.items())
        families_by_rows.setdefault(rows, []).append(family)
    for rows, families in families_by_rows.items():
        for row in rows:
            yield ", ".join(families), *row


def page_text(counts: Mapping[str, Any]) -> str:
    """Return the page of the docs with the tables of these counts."""
    return PAGE.read_text().partition(MARK)[0] + MARK + "\n" + table(counts)


def main() -> int:
    """Count, compare or write. Return 1 if a number grew."""
    parser = argparse.ArgumentParser(description="launches, waits and bytes of passes on a GPU")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--write", action="store_true", help="record the numbers")
    arguments = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "engine")]
    found = count_all(dict.fromkeys(arguments.families or FAMILIES, SCHEMES))
    recorded = recorded_counts() if RECORDED.exists() else {"launches": {}}
    grown = list(growth(recorded, found))
    print("\n".join(grown) or "no number grew")
    if arguments.write:
        found["launches"] = recorded["launches"] | found["launches"]
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(page_text(found))
        return 0
    return int(bool(grown))


if __name__ == "__main__":
    raise SystemExit(main())
