"""Compare the planned memory of training on a GPU with the live tensors of a pretended GPU.

    python tools/gpu_memory.py              all families
    python tools/gpu_memory.py qwen3 phi3   some

For each family, a small model trains one sequence with all activations stored, one with activation
checkpointing, and one with the inputs of the layers in main memory. Printed are the ratios of the peak of the live tensors to the estimate of
`TrainerSettings.activation_bytes`, at the longest measured length and scaled to LONG tokens. The
command fails if a ratio is outside of LIMITS. The pretended GPU has no fragmentation, and kernels
need no memory but their arguments. The vocabulary is small, so the ratios are those of the layers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LENGTHS = (512, 1024)
LONG = 32_768
"""The length to which the two measured ones are scaled."""
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 768,
    "vocab_size": 320,
    "layers": 4,
    "dtype": "bfloat16",
    "max_context": LONG,
    "experts": 8,
    "experts_per_token": 4,
    "expert_size": 256,
}
"""Sizes of a model in which the activations of layers are larger than everything else."""
RANK = 8
LIMITS = (0.85, 1.15)


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
        for pointer in islice(known, self._seen, None):
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
    model: Path, marks: Any, *, recompute: bool, offload: bool
) -> tuple[Any, list[int]]:
    """Return the backend, and the peak of training one sequence of each of LENGTHS.

    The weights, the adapter and its gradient are not part of the peak.
    """
    import numpy as np

    from planish.engine.base_models import BaseModel
    from planish.engine.memory import DeviceMemory
    from planish.engine.settings import EngineSettings
    from planish.engine.training.adapters import Adapter
    from planish.model.layers.lora import LoraLayout
    from planish.types import Datum, LoraConfig, ModelInput

    settings = EngineSettings(
        device="cuda",
        dtype="bfloat16",
        max_batch=2,
        kv_cache_bytes=1 << 22,
        prefix_cache_bytes=0,
        micro_batch_tokens=1 if recompute else 2 * max(LENGTHS),
    )
    base = BaseModel(model, settings, DeviceMemory(settings).claim(model))
    base.trainer.settings = replace(base.trainer.settings, offload_above=0 if offload else None)
    layout = LoraLayout(base.config, LoraConfig(rank=RANK, seed=0))
    adapter, rng, peaks = (
        Adapter(layout, base.backend, layout.init(0)),
        np.random.default_rng(0),
        [],
    )
    for length in LENGTHS:
        tokens = rng.integers(0, 250, length + 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": np.full(length, -5.0, np.float32),
            "advantages": np.ones(length, np.float32),
        }
        datum = Datum(ModelInput.from_ints(tokens[:-1].tolist()), inputs)
        previous, counter = marks.observer, MemoryCounter(marks)
        before = counter.live_bytes()
        marks.observer = counter
        for _ in base.trainer.forward_backward(adapter, [datum], "importance_sampling"):
            pass
        marks.observer = previous
        peaks.append(counter.peak - before - 4 * layout.size)
        adapter.grad = None
    return base, peaks


def ratios(model: Path, marks: Any) -> dict[str, tuple[float, float]]:
    """Return the ratios of the simulated peak to the planned activations.

    One is that of the longest measured sequence, and the other is scaled to LONG tokens. Activations
    are stored, recomputed, or recomputed from inputs in main memory.
    """
    from planish.engine.training.trainer_settings import TrainerSettings

    found = {}
    modes = (("stored", False, False), ("recomputed", True, False), ("offloaded", True, True))
    for name, recompute, offload in modes:
        base, (short, long) = training_peaks(model, marks, recompute=recompute, offload=offload)
        scaled = long + (long - short) / (LENGTHS[1] - LENGTHS[0]) * (LONG - LENGTHS[1])
        settings = base.trainer.settings
        if not recompute:
            settings = TrainerSettings(LONG)
        planned = [settings.activation_bytes(base.backend, n, RANK) for n in (LENGTHS[1], LONG)]
        found[name] = (long / planned[0], scaled / planned[1])
    return found


def measure(families: Sequence[str]) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
    """Yield each family with its ratios."""
    import pytest
    from gpu_counts import on_pretended_gpu
    from torch.utils import checkpoint

    from planish.testing import tiny_model

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        models = {family: tiny_model(Path(folder) / family, family, **SIZES) for family in families}
        # The check compares devices, which the pretended GPU returns to some functions only.
        checks = checkpoint._allowed_determinism_checks_to_fns
        patch.setitem(checks, "default", checks["none"])
        with on_pretended_gpu() as marks:
            for family, model in models.items():
                marks.observer = MemoryCounter(marks)
                yield family, ratios(model, marks)


def main() -> int:
    """Print the ratios of the families of the command line. Return 1 if one is outside of LIMITS."""
    from gpu_counts import FAMILIES

    os.environ["TRITON_INTERPRET"] = "1"
    sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "engine")]
    wrong = []
    for family, found in measure(sys.argv[1:] or FAMILIES):
        for name, ratios_by_length in found.items():
            for length, ratio in zip((LENGTHS[1], LONG), ratios_by_length, strict=True):
                print(f"{family}, {name}, {length:,} tokens: {ratio:.2f}", flush=True)
                if not LIMITS[0] <= ratio <= LIMITS[1]:
                    wrong.append(family)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
