"""The self-test of the GPU kernels: the check of kernels at one model's shapes.

kernels/triton/self_test.py runs this program in a subprocess, because an illegal memory access ends
the CUDA context of its process. It reads a `Request` from its standard input. The check itself is
check.py; the module adds the kernels that only the runner with CUDA graphs uses.
"""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from planish.engine.kernel_check.check import Batch, ModelCheck, Sizes
from planish.engine.kernel_check.comparison import Pair, compare
from planish.engine.kernel_check.expert_check import ExpertCheck
from planish.engine.sampling.cuda_graph_runner import CudaGraphRunner
from planish.engine.sampling.plan import RowLayout, StepPlan
from planish.engine.sampling.slots import SampleSlots
from planish.engine.settings import DTYPES
from planish.model.architecture.config import ModelConfig
from planish.model.device import Device, accumulate_in_float32
from planish.model.kernels.choose import triton_backend
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.interface.parts import AdapterBatch, Lora
from planish.model.kernels.self_test.process import (
    WrongResultError,
    check_families,
    end_with_parent,
)
from planish.model.kernels.triton.adapters import AdapterTables
from planish.model.kernels.triton.families import FAMILIES
from planish.model.layers.lora import AdapterRange
from planish.model.sequences.kv_cache import GappedKVPool, SlotOwner

_MAX_VOCAB_SIZE = 8192
"""The maximum vocabulary size of the model under check.

The LM head is torch's own matmul, so its full size need not be checked. Log-sum-exp and sampling
are also checked at the full size.
"""
_MULTI_BLOCK_VOCAB_SIZE = 9001
"""A vocabulary size that the sampling kernel reads in more than one block."""

_CHECKED_WINDOW = 112
"""The maximum attention window of the model under check, a multiple of 16 like those of models."""
_TRAINED = {"norms", "rope", "swiglu", "tree attention"}
"""The families with kernels in training."""
_SAMPLED = {"norms", "rope", "sampling", "attention", "lora"}
"""The families with other kernels in sampling than in training."""


class _TableLora:
    """The adapters of the sampler in tables, as in the runner with CUDA graphs (see `Lora`)."""

    def __init__(self, backend: Backend) -> None:
        lora: Lora = backend.parts.lora
        self.packs_layer_adapters = self.packs_head_adapters = False
        self.pack_adapter, self.packed_adapter_sizes = lora.pack_adapter, lora.packed_adapter_sizes
        self.can_stack = lora.can_stack
        self.add_lora_, self.lora_backward_ = lora.add_lora_, lora.lora_backward_
        self._backend = backend

    def adapter_batch(self, adapters: Sequence[AdapterRange]) -> AdapterBatch:
        """Return tables for a batch of this size, which decides how sums are divided."""
        backend, num_rows = self._backend, max(rows.stop for rows in adapters)
        model = (backend.config, backend.dtype, backend.device)
        tables = AdapterTables(*model, num_rows, len(adapters))
        tables.fill(adapters)
        return tables


def main() -> None:
    """Check the families of the request.

    If a check raises another error than WrongResultError, the process exits with status 1, because
    the CUDA context may be lost.
    """
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])
    accumulate_in_float32()  # the references rely on it
    device = torch.device(request["device"])
    Device(device).make_current()
    config = ModelConfig.from_directory(Path(request["directory"]))
    dtype = DTYPES[request["dtype"]]

    def check(family: str) -> None:
        check_family(family, config, dtype, device)
        Device(device).synchronize(all_streams=True)

    check_families(request["families"], check, ends_on_error=True)


def checked_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the model under check: without recurrences, which have no kernel,
    without experts, which have a check of their own, and with one layer for each kind of window.
    """
    # Longer windows would hide no key of the check's sequences. The kernels get the window as an
    # argument, so they are not compiled for its size.
    windows = tuple(
        dict.fromkeys(size and min(size, _CHECKED_WINDOW) for size in config.attention_windows)
    )
    vocab_size = config.vocab_size
    if vocab_size > _MAX_VOCAB_SIZE:
        # The remainder decides which loads and stores are masked.
        vocab_size = _MAX_VOCAB_SIZE + vocab_size % 128
    return replace(
        config,
        num_layers=max(1, len(windows)),
        vocab_size=vocab_size,
        eos_token_ids=(),
        windows=windows,
        layers_without_rope=(),
        num_experts=0,
        experts_per_token=0,
        dense_layers=(),
        has_shared_expert=False,
        expert_biases=False,
        mxfp4_experts=False,
        delta_net=None,
        short_conv=None,
        mamba2=None,
        score_cap=None,
        logit_cap=None,
        hf=None,
        fp8=None,
    )


def check_family(
    family: str,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sizes | None = None,
) -> None:
    """Check one family with a backend that uses only this family.

    Raises WrongResultError if kernels and torch disagree. `sizes`: None for those of a GPU.
    """
    sizes = sizes or Sizes()
    config = checked_config(model)
    if "attention" in family:
        config = replace(config, qk_norm=False)
    if family == "graphs":
        _check_graphs(triton_backend(config, dtype, device, FAMILIES), sizes)
        return
    if family == "experts":
        ExpertCheck(model, dtype, device).run()
        return
    backend = triton_backend(config, dtype, device, [family])
    if family == "rope" and config.qk_norm:
        # One kernel normalizes and rotates the heads.
        backend = triton_backend(config, dtype, device, ["rope", "norms"])
    if family == "lora":
        backend = backend.with_parts(replace(backend.parts, lora=_TableLora(backend)))
    check = ModelCheck(backend, family, sizes)
    if family in _TRAINED:
        check.train()
    if family in _SAMPLED:
        check.sample()
    if family == "lora":
        check.adapt(_add_head)
    if family == "quantized":
        check.quantized()
        if model.num_experts:
            ExpertCheck(model, dtype, device).run_quantized()
    if family in ("log_sum_exp", "sampling"):
        check.logits([model.vocab_size, _MULTI_BLOCK_VOCAB_SIZE])


def _add_head(batch: AdapterBatch, hidden: Tensor, logits: Tensor) -> None:
    assert isinstance(batch, Pair)
    batch.tested.add_head_(hidden, logits)


def _check_graphs(backend: Backend, sizes: Sizes) -> None:
    """Compare steps of recorded CUDA graphs with the same steps run eagerly.

    Adapters, samples and the number of rows change from step to step.
    """
    check = ModelCheck(backend, "graphs", sizes)
    decoder, kv_spec = check.tested_decoder(), backend.kv_spec
    runners = [
        CudaGraphRunner(decoder, kv_spec, max_batch=4, max_prefill_tokens_per_step=64)
        for _ in range(2)
    ]
    if runners[0].recorder is None:
        raise WrongResultError("no graph can be recorded on this device")
    runners[1].recorder = None
    batch_sizes = replace(
        sizes, prompt_lengths=(130, 3), samples_per_prompt=(3, 1), max_sampled_tokens=80
    )
    batch = Batch(backend, batch_sizes, check.generator, GappedKVPool)
    adapters = check.adapters
    for num_samples, step_adapters in (
        (4, adapters),
        (3, [None, adapters[1]]),
        (4, adapters[::-1]),
        (3, [None]),
    ):
        while len(batch.running) > num_samples:
            batch.remove_sample(batch.running[0])
        if len(batch.running) < num_samples:
            batch.add_prompt(40, [5])
        members = [(step_adapters[index % len(step_adapters)], 1) for index in range(num_samples)]
        members.sort(key=lambda member: id(member[0]))
        first_rows: dict[SlotOwner, int] = {sample: row for row, sample in enumerate(batch.running)}
        plan = StepPlan(
            check.random_ints(backend.config.vocab_size, num_samples).tolist(),
            [sample.num_stored for sample in batch.running],
            RowLayout(members),
            SampleSlots(first_rows, {}, batch.prompt_pools, batch.sample_pools),
        )
        outputs: list[tuple[Tensor, Tensor]] = []
        with torch.inference_mode():
            for runner in runners:
                output = runner.run(plan)
                assert output.logits is not None
                outputs.append((output.hidden.clone(), output.logits.clone()))
        for what, actual, expected in zip(("hidden states", "logits"), *outputs, strict=True):
            compare(f"{what} of a recorded step", actual.to(backend.dtype), expected)
        for sample in batch.running:
            sample.num_stored += 1


if __name__ == "__main__":
    main()
