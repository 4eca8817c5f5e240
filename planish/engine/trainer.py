"""The trainer: forward and backward passes over datums, micro-batch by micro-batch, gradients by
the sum of losses.

A call's datums are packed into prefix forests (packing.py) under a token budget, so memory is
bounded and known in advance; a shared prefix is computed once, with exact gradients. Micro-batches
are a function of one call's datums and the settings alone, never of other calls or tenants. A
gradient reaches the adapter only when the whole call has succeeded; a loss or gradient that is not
finite refuses the call, and the optimizer step that may already be queued behind it.

`forward_backward` is a generator: between micro-batches it hands the device back, so the engine can
interleave other work. Shapes: T rows of a forest, P distinct (row, target) pairs, M scores of all
datums of a micro-batch (pairs counted as often as used).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.engine.adapters import Adapter, is_finite
from planish.engine.attention import ForestAttention
from planish.engine.datums import Example, read_examples
from planish.engine.gpu_forest import GpuForest
from planish.engine.heap import give_back
from planish.engine.losses import Loss, find_loss
from planish.engine.native_attention import NativeForest
from planish.engine.packing import Packed, pack
from planish.engine.row_tiling import RowTiling
from planish.engine.sending import sent
from planish.engine.settings import head_shape
from planish.errors import NonFiniteError
from planish.model.config import ModelConfig
from planish.model.decoder import Attend, Decoder
from planish.model.head import logits_dtype, rows_at_once, scored_logprobs
from planish.model.lora import LAYER_SITES, AdapterRows, LoraWeights
from planish.native import cpu, kernels
from planish.native.cpu_products import low_columns
from planish.service import complete_config
from planish.types import Datum, ForwardBackwardOutput, TensorData

OUTPUT_TYPE = "ArrayRecord"


@dataclass(frozen=True)
class TrainerSettings:
    micro_batch_tokens: int = 4096
    """Most rows of one forest. A single longer sequence runs alone, keeping each layer's input
    only.
    """
    recompute: bool = False
    """Whether all keep each layer's input only, and compute the rest again for their backward pass.
    """

    def __post_init__(self) -> None:
        value = self.micro_batch_tokens
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"micro_batch_tokens={value!r}: give a whole number of at least 1")

    def recomputes(self, rows: int) -> bool:
        return self.recompute or rows > self.micro_batch_tokens

    def activation_bytes(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int | None = None,
        rank: int = 32,
    ) -> int:
        """Estimate of the memory that a micro-batch of `tokens` rows (default: a full one) keeps
        for its backward pass, by the dtype of products.
        """
        tokens = self.micro_batch_tokens if tokens is None else tokens
        itemsize, logit_itemsize = dtype.itemsize, logits_dtype(dtype, device).itemsize
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # Two residual states and the attention's log-sum-exp are float32; the rest is in the
        # products' dtype: normed inputs, rotated q and k, v, attention output, gate, up, their
        # product, and the LoRA's low-rank states.
        wide = 4 * (2 * config.hidden_size + config.num_heads)
        low = sum(low_columns(len(site) * rank) for site in LAYER_SITES)
        narrow = (
            2 * config.hidden_size + 2 * queries + 2 * keys + 3 * config.intermediate_size + low
        )
        if config.qk_norm:
            narrow += queries + keys
        layer = wide + itemsize * narrow
        if self.recomputes(tokens):
            # Two layers are there at a time, and the logits of some rows with their gradient.
            logits = (
                min(tokens, rows_at_once(device)) * config.vocab_size * (logit_itemsize + itemsize)
            )
            return (
                tokens * (config.num_layers * (4 + itemsize) * config.hidden_size + 2 * layer)
                + logits
            )
        return tokens * (config.num_layers * layer + logit_itemsize * config.vocab_size)

    def held_bytes(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
        """Estimate of the memory that passes hold, freed for the next one or in use: gaps between
        blocks, and what is alive for a moment, come on top.
        """
        return self.activation_bytes(config, dtype, device) * 3 // 2


@dataclass(frozen=True, eq=False)
class _Job:
    """What all micro-batches of one call share."""

    examples: list[Example]
    loss: Loss
    config: Mapping[str, float]
    weights: LoraWeights
    backward: bool


@dataclass(frozen=True, eq=False)
class _Part:
    """The outcome of one micro-batch, besides its gradient."""

    losses: dict[int, float]
    logprobs: dict[int, np.ndarray]
    """By datum."""
    ratios: tuple[float, float] | None
    """Smallest and largest exp(l - q) where the advantage is not 0."""


class Trainer:
    def __init__(
        self,
        decoder: Decoder,
        settings: TrainerSettings = TrainerSettings(),
        tiling: RowTiling | None = None,
    ) -> None:
        """`tiling`: that of the sampler whose logprobs are to be found again."""
        self._decoder = decoder
        self._tiling = tiling or RowTiling()
        self._is_deterministic = tiling is not None
        self.settings = settings
        self._kept_bytes = settings.held_bytes(decoder.config, decoder.dtype, decoder.device)

    def validate(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> None:
        """UserError, or a subclass of it, if `forward_backward` would refuse this input."""
        self._read(data, loss_fn, loss_fn_config)

    def forward_backward(
        self,
        adapter: Adapter,
        data: Sequence[Datum],
        loss_fn: str,
        config: Mapping[str, float] | None = None,
        forward_only: bool = False,
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Yields between micro-batches; returns losses and logprobs, having added the gradient to
        the adapter's.

        NonFiniteError: a loss or gradient is not finite. After any error the adapter's gradient is
        as before, and its next optimizer step is refused (not if `forward_only`, which changes
        nothing).
        """
        try:
            loss, complete, examples = self._read(data, loss_fn, config)
            job = _Job(examples, loss, complete, adapter.weights, backward=not forward_only)
            packed = pack(
                [example.tokens for example in examples], self.settings.micro_batch_tokens
            )
            parts = []
            grad: Tensor | None = None
            for number, micro_batch in enumerate(packed):
                if number:
                    yield
                part, part_grad = self._run(job, micro_batch)
                if part_grad is not None:
                    grad = part_grad if grad is None else grad.add_(part_grad)
                parts.append(part)
            if grad is not None and not is_finite(grad):
                raise NonFiniteError(
                    "the gradient is not finite; check advantages and weights, or lower the learning rate"
                )
        except BaseException as error:
            if not forward_only:
                adapter.refuse_step(error)
            raise
        finally:
            if self._decoder.device.type == "cpu":
                give_back(self._kept_bytes)
        if grad is not None:
            adapter.add_grad(grad)
        return _output(examples, packed, parts)

    def _read(
        self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None
    ) -> tuple[Loss, dict[str, float], list[Example]]:
        loss = find_loss(loss_fn)
        complete = complete_config(loss_fn, config)
        model = self._decoder.config
        return (
            loss,
            complete,
            read_examples(data, loss, loss_fn, model.vocab_size, model.max_context),
        )

    def _run(self, job: _Job, packed: Packed) -> tuple[_Part, Tensor | None]:
        pairs = _Pairs.of(packed, job.examples, self._decoder.config.vocab_size)
        try:
            with torch.set_grad_enabled(job.backward):
                unique = self._score(job, packed, pairs)
            # Losses are sums over a few numbers a datum: on the CPU, so that a GPU waits once and
            # not for each datum.
            logprobs = unique.detach().cpu()[pairs.place].requires_grad_(job.backward)
            with torch.set_grad_enabled(job.backward):
                losses = _losses(job, packed, logprobs)
            grad = (
                self._backward(job, packed, pairs, unique, logprobs, losses)
                if job.backward
                else None
            )
        except BaseException:
            job.weights.collect_grad()
            raise
        flat = logprobs.detach()
        arrays = {
            datum: part.view(job.examples[datum].targets.shape).numpy().copy()
            for datum, part in zip(packed.datums, flat.split(_sizes(job, packed)), strict=True)
        }
        amounts = dict(zip(packed.datums, losses.tolist(), strict=True))
        return _Part(amounts, arrays, _ratio_range(job, arrays)), grad

    def _score(self, job: _Job, packed: Packed, pairs: _Pairs) -> Tensor:
        """Logprobs [P] of the distinct pairs."""
        device = self._decoder.device
        recompute = self.settings.recomputes(len(packed))
        packed = packed.padded(self._tiling.padded(len(packed), job.weights))
        hidden = self._decoder.hidden(
            sent(torch.from_numpy(packed.tokens), device),
            sent(torch.from_numpy(packed.positions), device),
            self._attention(packed),
            [AdapterRows(0, len(packed), job.weights)],
            recompute=recompute,
        )
        rows, targets = sent(pairs.rows, device), sent(pairs.targets, device)
        head, temperature = self._decoder.head, job.config["temperature"]
        return scored_logprobs(
            hidden, head, job.weights.head, rows, targets, temperature, recompute=recompute
        )

    def _attention(self, packed: Packed) -> Attend:
        config, dtype, device = self._decoder.config, self._decoder.dtype, self._decoder.device
        # Not in deterministic mode: the Triton kernel's order of sums depends on the batch, and the
        # sampler uses another kernel.
        if not self._is_deterministic and kernels.triton_attends(
            "tree attention", head_shape(config, dtype), device
        ):
            return GpuForest(packed, device)
        if cpu.attends(config.head_dim, dtype, device):
            return NativeForest(packed)
        return ForestAttention(packed, device)

    def _backward(
        self,
        job: _Job,
        packed: Packed,
        pairs: _Pairs,
        unique: Tensor,
        logprobs: Tensor,
        losses: Tensor,
    ) -> Tensor:
        """The gradient with respect to the master vector. What the loss asks for is checked before
        the costly part.
        """
        (wanted,) = torch.autograd.grad(losses.sum(), logprobs)
        for datum, part in zip(packed.datums, wanted.split(_sizes(job, packed)), strict=True):
            if not bool(torch.isfinite(part).all()):
                raise NonFiniteError(
                    f"the gradient of data[{datum}]'s loss is not finite; check its logprobs and advantages"
                )
        at_pairs = torch.zeros(unique.shape, dtype=wanted.dtype).index_add_(0, pairs.place, wanted)
        if unique.requires_grad and bool(at_pairs.any()):
            unique.backward(sent(at_pairs, unique.device))
        return job.weights.collect_grad()


@dataclass(frozen=True, eq=False)
class _Pairs:
    """The distinct (row, target) pairs of a micro-batch, by rising row, and where each datum's
    scores lie among them.
    """

    rows: Tensor
    """int64 [P]"""
    targets: Tensor
    """int64 [P]"""
    place: Tensor
    """int64 [M]: index among the pairs, datum after datum."""

    @classmethod
    def of(cls, packed: Packed, examples: list[Example], vocab_size: int) -> _Pairs:
        keys = []
        for datum, rows in zip(packed.datums, packed.rows, strict=True):
            targets = examples[datum].targets
            keys.append(
                (rows.reshape(-1, *[1] * (targets.ndim - 1)) * vocab_size + targets).reshape(-1)
            )
        distinct, place = np.unique(np.concatenate(keys), return_inverse=True)
        rows, targets = np.divmod(distinct, vocab_size)
        return cls(
            torch.from_numpy(rows), torch.from_numpy(targets), torch.from_numpy(place.reshape(-1))
        )


def _sizes(job: _Job, packed: Packed) -> list[int]:
    return [job.examples[datum].targets.size for datum in packed.datums]


def _losses(job: _Job, packed: Packed, logprobs: Tensor) -> Tensor:
    """The loss of each datum; NonFiniteError names the first that is not finite."""
    losses = []
    for datum, part in zip(packed.datums, logprobs.split(_sizes(job, packed)), strict=True):
        example = job.examples[datum]
        inputs = {name: torch.tensor(values) for name, values in example.inputs.items()}
        losses.append(job.loss.fn(part.view(example.targets.shape), inputs, job.config))
    stacked = torch.stack(losses)
    finite = torch.isfinite(stacked).tolist()
    if not all(finite):
        datum = packed.datums[finite.index(False)]
        raise NonFiniteError(
            f"the loss of data[{datum}] is not finite; check that its logprobs are those of its target_tokens, and its advantages"
        )
    return stacked


def _ratio_range(job: _Job, logprobs: Mapping[int, np.ndarray]) -> tuple[float, float] | None:
    if not job.loss.has_ratio:
        return None
    gaps = []
    for datum, values in logprobs.items():
        inputs = job.examples[datum].inputs
        gaps.append((values - inputs["logprobs"])[inputs["advantages"] != 0])
    joined = np.concatenate(gaps)
    # Gaps beyond 700 overflow; only cispo and dro, which clip or square them, get here with such
    # ones.
    return (_exp(joined.min()), _exp(joined.max())) if joined.size else None


def _exp(value: float) -> float:
    return math.exp(min(700.0, float(value)))


def _output(
    examples: list[Example], packed: list[Packed], parts: list[_Part]
) -> ForwardBackwardOutput:
    losses = {datum: value for part in parts for datum, value in part.losses.items()}
    logprobs = {datum: value for part in parts for datum, value in part.logprobs.items()}
    metrics = {
        # In the order of the data, so that the sum does not depend on how they were packed.
        "loss:sum": math.fsum(losses[datum] for datum in range(len(examples))),
        "tokens:sum": float(sum(len(example.tokens) for example in examples)),
        "forest_tokens:sum": float(sum(len(micro_batch) for micro_batch in packed)),
        "micro_batches:sum": float(len(packed)),
    }
    ratios = [part.ratios for part in parts if part.ratios is not None]
    if ratios:
        metrics["ratio:min"] = min(low for low, _ in ratios)
        metrics["ratio:max"] = max(high for _, high in ratios)
    outputs = [
        {"logprobs": TensorData.from_numpy(logprobs[datum])} for datum in range(len(examples))
    ]
    return ForwardBackwardOutput(OUTPUT_TYPE, outputs, metrics)
