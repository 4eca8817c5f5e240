"""The part of the GPU report that loads a model, decodes and trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planish.doctor.gpu.cards import Card
from planish.doctor.gpu.kernel_profile import profile_run
from planish.doctor.gpu.report_file import Line
from planish.doctor.gpu.roofline import RANK, decode_estimate, training_estimate
from planish.engine.agreement import ROUNDING_DIFFERENCES, measure_difference
from planish.engine.base_models import BaseModel
from planish.engine.memory import ModelMemory
from planish.engine.settings import EngineSettings
from planish.engine.training.adapters import Adapter
from planish.model.device import Device
from planish.model.layers.lora import LoraLayout
from planish.service import Sample
from planish.types import AdamParams, Datum, LoraConfig, ModelInput, SampleResponse, SamplingParams

WARM_UP_STEPS, SPARE_TOKENS = 4, 8
"""Decoding steps before a timing, and tokens that each sample has left after it."""
SLOWEST = 10
_GROUPS = {
    "matmuls": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "_bit_kernel", "dequant", "mm"),
    "attention": ("_pieces_kernel", "_combine_kernel", "_prefill_kernel", "_keep_kernel"),
    "adapters": ("shrink_kernel", "expand_kernel"),
    "logits": ("_split_sums", "_row_sums", "_sample", "softmax", "filter_kernel", "token_logits"),
}
"""Parts of kernels' names, by the part of `decode_estimate` that bounds their sum."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements."""

    rows: tuple[int, ...] = (1, 16, 64, 65, 128, 512)
    """Rows of decoding steps."""
    compared_rows: int = 128
    """Rows of the steps with top_p, without CUDA graphs, and of the profile."""
    lengths: tuple[int, ...] = (1024, 8192)
    """Tokens of the trained sequences."""
    prompt_tokens: int = 128
    steps: int = 24
    """Decoding steps in one timing."""


SMALL = Sizes(rows=(1, 9, 512), compared_rows=9, lengths=(32, 64), prompt_tokens=8, steps=2)
"""Sizes for tests."""


class ModelPart:
    """The measurements of one model with one scheme. Each line is reported when it is there."""

    def __init__(
        self,
        device: torch.device,
        scheme: str | None,
        card: Card | None,
        report: Callable[[Line], None],
        sizes: Sizes = Sizes(),
    ) -> None:
        """`card`: the speeds from which times are expected, or None."""
        self._sizes = sizes
        self._device, self._scheme, self._card, self._report = device, scheme, card, report
        self._rng = np.random.default_rng(0)

    def run(
        self,
        directory: Path,
        settings: EngineSettings,
        plan: ModelMemory,
        write_details: Callable[[dict[str, Any]], None],
    ) -> None:
        """Load the model in `directory` with this plan of the memory, and measure everything."""
        start_time = time.perf_counter()
        base = BaseModel(directory, settings, plan)
        base.synchronize()
        self._report(Line("load", time.perf_counter() - start_time, "s"))
        self._report_memory("weights, after the load", plan.weight_bytes)
        self._report(
            Line(
                "largest difference of sampled and trained logprobs",
                measure_difference(base.decoder, base.sampler, base.trainer),
                "nats",
                f"at most {ROUNDING_DIFFERENCES[base.backend.dtype]}",
            )
        )
        adapter = self._adapter(base)
        write_details({"kernels": base.numerics().summary, "plan": _plan_details(plan)})
        self._decode_all(base, adapter)
        self._profile(base, adapter, write_details)
        self._decode_without_graphs(base, adapter)
        self._train_all(base, adapter)
        self._report_memory("peak of everything", plan.total_bytes, is_peak=True)

    def _adapter(self, base: BaseModel) -> Adapter:
        """Return an adapter of the default rank and modules."""
        layout = LoraLayout(base.config, LoraConfig(rank=RANK, seed=0))
        return Adapter(layout, base.backend, layout.init(0) + 0.001)

    def _report_memory(self, what: str, planned: int, *, is_peak: bool = False) -> None:
        what = f"memory: {what}"
        if not Device(self._device).is_gpu:
            self._report(Line(what, "not run here: no GPU", expected=planned / 1e9))
            return
        statistic = torch.cuda.max_memory_allocated if is_peak else torch.cuda.memory_allocated
        self._report(Line(what, statistic(self._device) / 1e9, "GB", planned / 1e9))

    # Decoding

    def _decode_all(self, base: BaseModel, adapter: Adapter) -> None:
        most = base.sampler.settings.max_batch
        for rows in self._sizes.rows:
            if rows > most:
                reason = f"not run here: at most {most} samples run at once"
                self._report(Line(f"decode, {rows} rows", reason))
                continue
            self._decode(base, adapter, rows, f"decode, {rows} rows")
        rows = min(self._sizes.compared_rows, most)
        self._decode(base, adapter, rows, f"decode, {rows} rows, top_p 0.9", top_p=0.9)

    def _decode_without_graphs(self, base: BaseModel, adapter: Adapter) -> None:
        rows = min(self._sizes.compared_rows, base.sampler.settings.max_batch)
        what = f"decode, {rows} rows, without CUDA graphs"
        if base.sampler.disable_cuda_graphs():
            self._decode(base, adapter, rows, what)
        else:
            self._report(Line(what, "not run here: decoding steps are no CUDA graphs"))

    def _decode(
        self, base: BaseModel, adapter: Adapter, rows: int, what: str, top_p: float = 1.0
    ) -> None:
        """Report the milliseconds of a step."""
        with self._decoding(base, adapter, rows, self._sizes.steps, top_p):
            start_time = time.perf_counter()
            for _ in range(self._sizes.steps):
                base.sampler.step()
            base.synchronize()
            seconds = (time.perf_counter() - start_time) / self._sizes.steps
        self._report(Line(what, 1e3 * seconds, "ms a step", self._expected_step(base, rows)))

    def _expected_step(self, base: BaseModel, rows: int) -> float | None:
        if self._card is None:
            return None
        context = self._sizes.prompt_tokens + WARM_UP_STEPS + self._sizes.steps // 2
        return 1e3 * decode_estimate(base.config, self._card, rows, context, self._scheme).seconds

    @contextmanager
    def _decoding(
        self, base: BaseModel, adapter: Adapter, rows: int, steps: int, top_p: float = 1.0
    ) -> Iterator[None]:
        """Run `steps` decoding steps in the block, in which all samples run."""
        sampler, samples = base.sampler, max(n for n in range(1, 9) if rows % n == 0)
        prompts, weights = rows // samples, adapter.snapshot()
        # A step computes at most this many tokens of prompts.
        prompt_steps = (
            1 + prompts * self._sizes.prompt_tokens // sampler.settings.max_prefill_tokens_per_step
        )
        warm_up = 2 * prompt_steps + WARM_UP_STEPS
        options = SamplingParams(
            max_tokens=warm_up + steps + SPARE_TOKENS, stop=[], seed=0, top_p=top_p
        )
        futures: list[Future[SampleResponse]] = []
        for _ in range(prompts):
            tokens = self._rng.integers(0, 250, self._sizes.prompt_tokens).tolist()
            op = Sample("report", ModelInput.from_ints(tokens), samples, options)
            sampler.validate(op)
            futures.append(Future())
            sampler.submit(op, weights, "report", futures[-1])
        for _ in range(warm_up):
            sampler.step()
        base.synchronize()
        yield
        if any(future.done() for future in futures):
            raise RuntimeError("samples ended before the measurement")
        while sampler.busy:
            sampler.step()
        for future in futures:
            future.result(timeout=0)

    def _profile(
        self, base: BaseModel, adapter: Adapter, write_details: Callable[[dict[str, Any]], None]
    ) -> None:
        """Report the slowest kernels of a step, with the bounds of their groups."""
        rows = min(self._sizes.compared_rows, base.sampler.settings.max_batch)
        steps = 4

        def run() -> None:
            for _ in range(steps):
                base.sampler.step()

        title = f"a step of {rows} rows"
        with self._decoding(base, adapter, rows, 3 * steps):
            found = profile_run(title, run, steps, self._device)
        bounds: dict[str, float] = {}
        if self._card is not None:
            context, scheme = self._sizes.prompt_tokens + WARM_UP_STEPS, self._scheme
            bounds = dict(decode_estimate(base.config, self._card, rows, context, scheme).parts)
        if found.idle is not None:
            self._report(Line(f"{title}: share without a running kernel", found.idle))
        sums: dict[str, float] = {}
        for name, _, seconds in found.kernels:
            sums[group_of(name)] = sums.get(group_of(name), 0.0) + seconds
        for group, seconds in sums.items():
            bound = bounds.get(group)
            expected = None if bound is None else 1e3 * bound
            self._report(Line(f"{title}: all {group}", 1e3 * seconds, "ms", expected))
        slowest = [
            {"kernel": name[:200], "group": group_of(name), "calls": calls, "ms": 1e3 * seconds}
            for name, calls, seconds in found.kernels[:SLOWEST]
        ]
        write_details({"slowest_kernels": slowest})

    # Training

    def _train_all(self, base: BaseModel, adapter: Adapter) -> None:
        longest = base.trainer.settings.max_sequence_tokens or base.config.max_context
        for length in self._sizes.lengths:
            what = f"train, sequences of {length:,} tokens"
            if length > min(longest, base.config.max_context):
                reason = f"not run here: the longest trainable sequence has {longest:,} tokens"
                self._report(Line(what, reason))
                continue
            self._train(base, adapter, length, what)

    def _train(self, base: BaseModel, adapter: Adapter, length: int, what: str) -> None:
        settings = base.trainer.settings
        count = max(1, settings.micro_batch_tokens // length)
        data = [self._datum(length) for _ in range(count)]
        seconds = []
        for _ in range(2):  # the first time compiles kernels
            start_time = time.perf_counter()
            for _ in base.trainer.forward_backward(adapter, data, "importance_sampling"):
                pass
            adapter.optim_step(AdamParams(learning_rate=1e-6))
            base.synchronize()
            seconds.append(time.perf_counter() - start_time)
        expected = None
        if self._card is not None:
            estimate = training_estimate(
                base.config,
                self._card,
                count * length,
                length,
                settings.micro_batch_tokens,
                self._scheme,
                recompute=settings.recomputes(length),
            )
            expected = count * length / estimate.seconds
        self._report(Line(what, count * length / seconds[-1], "tokens/s", expected))

    def _datum(self, length: int) -> Datum:
        tokens = self._rng.integers(0, 250, length + 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": np.full(length, -8.0, np.float32),
            "advantages": np.ones(length, np.float32),
        }
        return Datum(ModelInput.from_ints(tokens[:-1].tolist()), inputs)


def group_of(kernel: str) -> str:
    """Return the group of a kernel of a decoding step, by its name; "other" for small kernels."""
    name = kernel.lower()
    return next(
        (group for group, words in _GROUPS.items() if any(word in name for word in words)), "other"
    )


def _plan_details(plan: ModelMemory) -> dict[str, Any]:
    return {
        "max_batch": plan.sampler.max_batch,
        "kv_cache_bytes": plan.sampler.kv_cache_bytes,
        "micro_batch_tokens": plan.trainer.micro_batch_tokens,
        "recompute": plan.trainer.recompute,
        "max_sequence_tokens": plan.trainer.max_sequence_tokens,
    }
