"""Compare the planned memory on a GPU with the live tensors of a pretended GPU.

    python tools/gpu_memory.py                                     all families
    python tools/gpu_memory.py qwen3 phi3 --modes stored prefill   some of MODES for some families

For each family, a small model prefills a prompt, and trains one sequence in each other mode. Printed
are the ratios of the peak of the live tensors to the estimates of `TrainerSettings.activation_bytes`
and `SamplerSettings.workspace_bytes`, at the longest measured length and scaled to LONG tokens. The
command fails if a ratio is outside of LIMITS. The pretended GPU has no fragmentation, and kernels
need no memory but their arguments. The vocabulary is small, so the ratios are those of the layers.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LENGTHS = (512, 1024)
RECURRENT_LENGTHS = (96, 192)
"""Those of gated delta nets, whose positions are computed one after another."""
LONG = 32_768
"""The length to which the two measured ones are scaled."""
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 768,
    "vocab_size": 320,
    "dtype": "bfloat16",
    "max_context": LONG,
    "experts": 8,
    "experts_per_token": 4,
    "expert_size": 256,
}
"""Sizes of a model in which the activations of layers are larger than everything else."""
DELTA_NET = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Gated delta nets with many channels, and with states that fit into one block at LONG tokens."""
SEGMENT = 32
"""The tokens of each sequence of a micro-batch of a recurrent model. For longer sequences, a
backward pass has fewer states at a time than the plan, which is for any micro-batch.
"""
TRANSFORMERS_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 320,
    "dtype": "bfloat16",
    "max_position_embeddings": LONG,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}
"""The same sizes, for models whose layers transformers' code computes."""
TRANSFORMERS_FAMILIES = ("lfm2", "glm4_moe", "gemma2")
"""Some of these models."""


@dataclass(frozen=True)
class Mode:
    """A way to train a sequence."""

    layers: int = 4
    recompute: bool = False
    """Whether activation checkpointing is used."""
    offload: bool = False
    """Whether the inputs of layers are in main memory."""
    shares: bool = False
    """Whether several layers share a checkpoint, as the plan chooses for so many layers."""


MODES = {
    "stored": Mode(),
    "prefill": Mode(),
    "recomputed": Mode(recompute=True),
    "in groups": Mode(layers=48, recompute=True, shares=True),
    "offloaded": Mode(recompute=True, offload=True),
}
RANK = 8
LIMITS = (0.85, 1.15)
WIDE_LIMITS = (0.75, 1.15)
"""Those of layers in groups, and of a prefill by planish's decoder, whose plans are up to a quarter
too large.
"""


class MemoryCounter:
    """Counts the bytes of the live tensors on a pretended GPU (see `Observer`)."""

    def __init__(self, marks: Any) -> None:
        self._marks = marks
        self._live: dict[int, int] = {}
        self._seen = 0
        self.peak = 0

    def operation(self, func: Any, given: Sequence[Any], made: Sequence[Any]) -> None:
        self.live_bytes()

    def launch(self, kernel: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.live_bytes()

    def live_bytes(self) -> int:
        """Return the bytes of the storages that are alive now, and remember the peak."""
        known = self._marks.known_storages
        # Skipping all earlier storages would take longer with each operation.
        for pointer in islice(reversed(known), len(known) - self._seen):
            self._live[pointer] = self._bytes(pointer)
        self._seen = len(known)
        ended = [pointer for pointer in self._live if known[pointer].expired()]
        for pointer in ended:
            del self._live[pointer]
        total = sum(self._live.values())
        self.peak = max(self.peak, total)
        return total

    def _bytes(self, pointer: int) -> int:
        import torch

        storage = torch.UntypedStorage._new_with_weak_ptr(self._marks.known_storages[pointer].cdata)
        return 0 if storage is None else storage.nbytes()


def training_peaks(
    model: Path, marks: Any, mode: Mode, lengths: Sequence[int]
) -> tuple[Any, list[int]]:
    """Return the base model, and the peak of training one sequence of each of `lengths`.

    The weights, the adapter and its gradient are not part of the peak.
    """
    import numpy as np

    from planish.engine.training.adapters import Adapter
    from planish.model.layers.lora import LoraLayout
    from planish.types import Datum, LoraConfig, ModelInput

    base = load(model, recompute=mode.recompute)
    base.trainer.settings = replace(
        base.trainer.settings, offload_above=0 if mode.offload else None
    )
    layout = LoraLayout(base.config, LoraConfig(rank=RANK, seed=0))
    adapter = Adapter(layout, base.backend, layout.init(0))
    rng, peaks = np.random.default_rng(0), []
    is_split = base.config.delta_net is not None and not mode.recompute
    for num_tokens in lengths:
        length = SEGMENT if is_split else num_tokens
        data = []
        for first in range(num_tokens // length):
            # Different first tokens, since a common beginning is computed once.
            tokens = np.array([first, *rng.integers(0, 250, length)])
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": np.full(length, -5.0, np.float32),
                "advantages": np.ones(length, np.float32),
            }
            data.append(Datum(ModelInput.from_ints(tokens[:-1].tolist()), inputs))
        previous, counter = marks.observer, MemoryCounter(marks)
        before = counter.live_bytes()
        marks.observer = counter
        for _ in base.trainer.forward_backward(adapter, data, "importance_sampling"):
            pass
        marks.observer = previous
        peaks.append(counter.peak - before - 4 * layout.size)
        adapter.grad = None
    return base, peaks


def load(model: Path, *, recompute: bool) -> Any:
    """Return the base model, which keeps no prefixes."""
    # Otherwise the tensors of earlier models might be freed during a measurement.
    gc.collect()
    from planish.engine.base_models import BaseModel
    from planish.engine.memory import DeviceMemory
    from planish.engine.settings import EngineSettings

    settings = EngineSettings(
        device="cuda",
        dtype="bfloat16",
        max_batch=2,
        kv_cache_bytes=1 << 24,
        prefix_cache_bytes=0,
        micro_batch_tokens=1 if recompute else 2 * max(LENGTHS),
    )
    return BaseModel(model, settings, DeviceMemory(settings).claim(model))


def prefill_ratio(model: Path, marks: Any, lengths: Sequence[int]) -> float:
    """Return the ratio of the simulated workspace of each further token of a prompt to the plan.

    The workspace is what the step has freed at its end, so keys and values are no part of it.
    """
    import numpy as np

    from planish.engine.training.adapters import Adapter
    from planish.model.layers.lora import LoraLayout
    from planish.service import Sample
    from planish.types import LoraConfig, ModelInput, SamplingParams

    base, rng = load(model, recompute=False), np.random.default_rng(0)
    layout = LoraLayout(base.config, LoraConfig(rank=RANK, seed=0))
    weights = Adapter(layout, base.backend, layout.init(0)).snapshot()
    found, planned = [], []
    for length in lengths:
        prompt = ModelInput.from_ints(rng.integers(0, 250, length).tolist())
        params = SamplingParams(max_tokens=2, stop=[], seed=0)
        base.sampler.submit(Sample("memory", prompt, 1, params), weights, "", Future())
        previous, counter = marks.observer, MemoryCounter(marks)
        marks.observer = counter
        base.sampler.step()
        found.append(counter.peak - counter.live_bytes())
        marks.observer = previous
        while base.sampler.busy:
            base.sampler.step()
        settings = replace(base.sampler.settings, max_prefill_tokens_per_step=length)
        planned.append(settings.workspace_bytes(base.backend))
    return (found[1] - found[0]) / (planned[1] - planned[0])


def training_ratios(
    model: Path, marks: Any, mode: Mode, lengths: Sequence[int]
) -> tuple[float, ...]:
    """Return the ratios of the simulated peak to the planned activations.

    One is that of the longest measured sequence. The other is scaled to LONG tokens, unless the
    scores of the attention have a limit: torch's blocks of scores grow in another way.
    """
    from planish.engine.training.trainer_settings import TrainerSettings

    base, (short, long) = training_peaks(model, marks, mode, lengths)
    settings = base.trainer.settings if mode.recompute else TrainerSettings(LONG)
    sizes = [settings.layers_per_checkpoint(base.backend, n) for n in (lengths[1], LONG)]
    if (sizes[0] > 1) != mode.shares or sizes[0] != sizes[1]:
        raise AssertionError(f"{mode} has groups of {sizes} layers")
    scaled = long + (long - short) / (lengths[1] - lengths[0]) * (LONG - lengths[1])
    planned = [settings.activation_bytes(base.backend, n, RANK) for n in (lengths[1], LONG)]
    ratios = (long / planned[0], scaled / planned[1])
    return ratios[:1] if base.config.score_cap else ratios


def measure(
    families: Sequence[str], modes: Sequence[str]
) -> Iterator[tuple[str, str, Sequence[float]]]:
    """Yield each family with the name of each mode and its ratios."""
    import pytest
    from gpu_counts import on_pretended_gpu
    from torch.utils import checkpoint

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        models = {
            (family, name): write_model(
                Path(folder) / f"{family}-{MODES[name].layers}", family, MODES[name]
            )
            for family in families
            for name in modes
            # Layers of transformers' code never share a checkpoint. The pretended GPU does not see
            # what torch's attention creates in a recomputation.
            if (family not in TRANSFORMERS_FAMILIES or not MODES[name].shares)
            and (family != "gemma2" or name == "stored")
        }
        # The check compares devices, which the pretended GPU returns to some functions only.
        checks = checkpoint._allowed_determinism_checks_to_fns
        patch.setitem(checks, "default", checks["none"])
        with on_pretended_gpu() as marks:
            for (family, name), model in models.items():
                marks.observer, lengths = MemoryCounter(marks), lengths_of(family)
                if name == "prefill":
                    yield family, name, [prefill_ratio(model, marks, lengths)]
                else:
                    yield family, name, training_ratios(model, marks, MODES[name], lengths)


def lengths_of(family: str) -> tuple[int, int]:
    """Return the two measured lengths of a family."""
    return RECURRENT_LENGTHS if is_recurrent(family) else LENGTHS


def is_recurrent(family: str) -> bool:
    """Return whether a family has gated delta nets."""
    return family.startswith("qwen3_5")


def write_model(directory: Path, family: str, mode: Mode) -> Path:
    """Write a model with the layers of a mode, unless it exists, and return its directory."""
    from planish.testing import tiny_model, tiny_transformers_model

    if directory.exists():
        return directory
    if family in TRANSFORMERS_FAMILIES:
        return tiny_transformers_model(directory, family, **TRANSFORMERS_SIZES)
    # The choice of experts is interpreted, which is slow.
    layers = 2 if "moe" in family and not mode.shares else mode.layers
    delta_net = DELTA_NET if is_recurrent(family) else None
    return tiny_model(directory, family, layers=layers, delta_net=delta_net, **SIZES)


def main() -> int:
    """Print the ratios of the families of the command line. Return 1 if one is outside of LIMITS."""
    from gpu_counts import FAMILIES

    parser = argparse.ArgumentParser(description="planned and simulated memory on a GPU")
    parser.add_argument("families", nargs="*", default=[*FAMILIES, *TRANSFORMERS_FAMILIES])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    arguments = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "engine")]
    wrong = []
    for family, name, ratios_by_length in measure(arguments.families, arguments.modes):
        for length, ratio in zip((lengths_of(family)[1], LONG), ratios_by_length, strict=False):
            print(f"{family}, {name}, {length:,} tokens: {ratio:.3f}", flush=True)
            is_wide = name == "in groups" or (name == "prefill" and family in FAMILIES)
            limits = WIDE_LIMITS if is_wide else LIMITS
            if not limits[0] <= ratio <= limits[1]:
                wrong.append(family)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
