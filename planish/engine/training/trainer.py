"""The trainer runs forward and backward passes over datums, one micro-batch at a time.

The gradient of a call is the gradient of the sum of its datums' losses. The datums are packed into
prefix trees (sequences/prefix_tree.py) under a token budget, so the peak memory is known in
advance. A shared prefix is computed once, and its gradient is exact. Micro-batches depend only on
the datums of the call and on the settings, never on other calls or training models.

The adapter receives a gradient only after the whole call has succeeded. A non-finite loss or
gradient fails the call, and also the optimizer step that may already be queued after the call.

`forward_backward` is a generator. It yields between micro-batches, so the engine can interleave
other work on the device.

Shapes of one micro-batch: a row is one token of the packed prefix trees. M is the total number of
targets of all datums. P is the number of distinct (row, target) pairs that are scored. P is smaller
than M if several datums have the same target after a shared prefix, or with the option
`skip_unweighted` of the loss.
"""

# pyright: reportUnnecessaryIsInstance=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from planish.engine.release_memory import trim_heap
from planish.engine.training.adapters import Adapter, is_finite
from planish.engine.training.datums import Example, read_examples
from planish.engine.training.gradient_tree import GradientTree, TreeNode
from planish.engine.training.losses import Loss, find_loss
from planish.engine.training.trainer_settings import TrainerSettings
from planish.errors import NonFiniteError
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.decoder.head import scored_logprobs
from planish.model.device import Device, copy_async
from planish.model.layers.lora import LoraWeights
from planish.model.sequences.prefix_tree import MicroBatch, pack
from planish.service import complete_config
from planish.types import Datum, ForwardBackwardOutput, TensorData

LOSS_FN_OUTPUT_TYPE = "ArrayRecord"
"""The `loss_fn_output_type` of every result."""


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """The datums of one forward_backward call, checked and converted to arrays."""

    examples: Mapping[int, Example]
    """The datums by their index in the call; those of some micro-batches, or all."""
    loss_fn: str
    """The name of the loss."""
    loss: Loss
    config: Mapping[str, float]
    """The options of the loss, including the defaults."""

    def scored_mask(self, datum: int) -> np.ndarray:
        """Return which targets of a datum are scored: bool, in the shape of its target_tokens."""
        example = self.examples[datum]
        if not self.config["skip_unweighted"]:
            return np.ones(example.targets.shape, dtype=bool)
        return self.loss.contributing_mask(example.inputs, example.targets.shape)


@dataclass(frozen=True, eq=False)
class _TrainerCall:
    """The inputs that all micro-batches of one call share."""

    batch: TrainingBatch
    weights: LoraWeights
    needs_gradient: bool


@dataclass(frozen=True, eq=False)
class MicroBatchResult:
    """The results of one micro-batch, except its gradient."""

    num_rows: int
    """The number of computed tokens."""
    losses: dict[int, float]
    """The loss of each datum, keyed by the datum's index in the call."""
    logprobs: dict[int, np.ndarray]
    """The logprobs of each datum, keyed by the datum's index in the call."""
    ratio_range: tuple[float, float] | None
    """Smallest and largest importance ratio exp(logprob - sampling logprob) over all tokens with a
    nonzero advantage.
    """


@dataclass(frozen=True, eq=False)
class PartialResult:
    """The results of a range of the micro-batches of one call."""

    num_micro_batches: int
    """The number of micro-batches of the whole call."""
    results: list[MicroBatchResult]
    nodes: dict[TreeNode, Tensor]
    """The sums of gradients, float32 [size] each; empty for a forward pass alone."""


class Trainer:
    """Runs `forward_backward` calls of LoRA adapters on one frozen base model."""

    def __init__(self, decoder: BaseDecoder, settings: TrainerSettings | None = None) -> None:
        """Create a trainer for the adapters of one base model.

        If the backend is batch-invariant, the trainer reproduces the sampler's logprobs. With the
        C++ kernels they are equal bit for bit. With torch the last bit may differ.

        Some backends run the sampler's matmuls in tiles of a fixed number of rows. The trainer does
        not use tiles, because they are too slow for its many rows. So its logprobs differ more from
        the sampler's (see `describe_numerics` in engine/numerics.py).
        """
        self._decoder = decoder
        self.settings = settings or TrainerSettings()
        self._max_cached_heap_bytes = self.settings.reserved_bytes(decoder.backend)

    def read_batch(
        self,
        data: Sequence[Datum] | Mapping[int, Datum],
        loss_fn: str,
        config: Mapping[str, float] | None = None,
        forward_only: bool = False,
    ) -> TrainingBatch:
        """Return the datums as a batch for `run`. The method may be called from any thread. A
        mapping has the datums of some micro-batches, by their index in the call.

        Raise UserError (or a subclass) that names the first invalid argument or datum. Unless
        `forward_only`, a sequence that does not fit into memory is invalid.
        """
        loss = find_loss(loss_fn)
        loss_config = complete_config(loss_fn, config)
        model_config = self._decoder.config
        max_trainable_tokens = None if forward_only else self.settings.max_sequence_tokens
        sizes = (model_config.vocab_size, model_config.max_context, max_trainable_tokens)
        numbered = data if isinstance(data, Mapping) else dict(enumerate(data))
        examples = read_examples(numbered, loss, loss_fn, *sizes, self._decoder.images)
        return TrainingBatch(examples, loss_fn, loss, loss_config)

    def forward_backward(
        self,
        adapter: Adapter,
        data: Sequence[Datum],
        loss_fn: str,
        config: Mapping[str, float] | None = None,
        forward_only: bool = False,
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Call `read_batch`, then `run`.

        If `read_batch` raises an error, the adapter also rejects its next optimizer step, unless
        `forward_only`.
        """
        try:
            batch = self.read_batch(data, loss_fn, config, forward_only)
        except BaseException as error:
            if not forward_only:
                adapter.reject_next_step(error)
            raise
        return (yield from self.run(adapter, batch, forward_only))

    def run(
        self, adapter: Adapter, batch: TrainingBatch, forward_only: bool = False
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Compute losses, logprobs and gradients of a batch; yield between micro-batches.

        The gradient is added to the adapter's accumulated gradient. With `forward_only` no
        gradient is computed and the adapter does not change.

        Raises NonFiniteError if a loss or gradient is not finite. After any error the adapter's
        accumulated gradient is unchanged. Unless `forward_only`, the adapter then rejects its next
        optimizer step.
        """
        try:
            part = yield from self.run_part(adapter.weights, batch, forward_only)
        except BaseException as error:
            if not forward_only:
                adapter.reject_next_step(error)
            raise
        num_tokens = sum(len(example.tokens) for example in batch.examples.values())
        return finish_call(adapter, [part], num_tokens)

    def micro_batches(self, batch: TrainingBatch) -> list[tuple[int, tuple[int, ...]]]:
        """Return the number of computed tokens and the datums of each micro-batch of a call."""
        return [
            (len(micro_batch), micro_batch.datums) for micro_batch in self._pack(batch.examples)
        ]

    def run_part(
        self,
        weights: LoraWeights,
        batch: TrainingBatch,
        forward_only: bool = False,
        datums: Mapping[int, Sequence[int]] | None = None,
        num_micro_batches: int = 0,
    ) -> Generator[None, None, PartialResult]:
        """Run some micro-batches of a call, by default all; yield between them. `datums`: the
        datums of each of them, by its index among the `num_micro_batches` of the call.

        Raises NonFiniteError if a loss or its gradient is not finite.
        """
        try:
            call = _TrainerCall(batch, weights, needs_gradient=not forward_only)
            if datums is None:
                micro_batches = dict(enumerate(self._pack(batch.examples)))
                num_micro_batches = len(micro_batches)
            else:
                # The datums of a micro-batch alone are packed into the same one.
                micro_batches = {
                    index: self._pack({i: batch.examples[i] for i in chosen}, sys.maxsize)[0]
                    for index, chosen in datums.items()
                }
            tree = GradientTree(num_micro_batches)
            results: list[MicroBatchResult] = []
            for index, micro_batch in micro_batches.items():
                if results:
                    yield
                result, grad = self._run_micro_batch(call, micro_batch)
                if grad is not None:
                    tree.add_leaf(index, grad)
                results.append(result)
        finally:
            if not Device(self._decoder.device).is_gpu:
                trim_heap(self._max_cached_heap_bytes)
        return PartialResult(num_micro_batches, results, tree.nodes)

    def _pack(self, examples: Mapping[int, Example], budget: int | None = None) -> list[MicroBatch]:
        """Pack the examples into micro-batches of at most `budget` rows, by default the settings'."""
        numbers, tokens = list(examples), [example.tokens for example in examples.values()]
        packed = pack(tokens, budget or self.settings.micro_batch_tokens)
        numbered = (replace(m, datums=tuple(numbers[i] for i in m.datums)) for m in packed)
        return [m.with_blocks([examples[i].input.blocks for i in m.datums]) for m in numbered]

    def _run_micro_batch(
        self, call: _TrainerCall, micro_batch: MicroBatch
    ) -> tuple[MicroBatchResult, Tensor | None]:
        """Run one micro-batch; return its results, and its gradient unless `forward_only`."""
        pairs = _Pairs.from_micro_batch(micro_batch, call.batch, self._decoder.config.vocab_size)
        try:
            with torch.set_grad_enabled(call.needs_gradient):
                pair_logprobs = self._score_pairs(call, micro_batch, pairs)
            # Compute the losses on the CPU: they are small sums, and on a GPU the check for finite
            # values would synchronize once per datum. This way the GPU synchronizes once.
            padded_logprobs = torch.cat(
                [pair_logprobs.detach().cpu(), torch.zeros(1, dtype=pair_logprobs.dtype)]
            )
            logprobs = padded_logprobs[pairs.pair_index].requires_grad_(call.needs_gradient)
            with torch.set_grad_enabled(call.needs_gradient):
                losses = _compute_losses(call, micro_batch, logprobs)
            grad = (
                self._backward(call, micro_batch, pairs, pair_logprobs, logprobs, losses)
                if call.needs_gradient
                else None
            )
        except BaseException:
            call.weights.drop_grad()
            raise
        flat_logprobs = logprobs.detach()
        logprob_arrays = {
            datum: datum_logprobs.view(call.batch.examples[datum].targets.shape).numpy().copy()
            for datum, datum_logprobs in zip(
                micro_batch.datums,
                flat_logprobs.split(_num_targets(call, micro_batch)),
                strict=True,
            )
        }
        loss_by_datum = dict(zip(micro_batch.datums, losses.tolist(), strict=True))
        return MicroBatchResult(
            len(micro_batch), loss_by_datum, logprob_arrays, _ratio_range(call, logprob_arrays)
        ), grad

    def _score_pairs(self, call: _TrainerCall, micro_batch: MicroBatch, pairs: _Pairs) -> Tensor:
        """Return the logprobs [P] of the distinct pairs."""
        device = self._decoder.device
        if not len(pairs.rows):
            return torch.zeros(0, device=device)
        backend = self._decoder.backend
        layers_per_checkpoint = self.settings.layers_per_checkpoint(backend, len(micro_batch))
        # The layers' checkpoints keep what is within a layer, so only the inputs are copied.
        offloads = self.settings.offloads(len(micro_batch))
        with save_on_cpu(pin_memory=True) if offloads else nullcontext():
            hidden = self._decoder.forward(
                copy_async(torch.from_numpy(micro_batch.tokens), device),
                copy_async(torch.from_numpy(_rope_positions(call, micro_batch)), device),
                backend.tree_attention(micro_batch),
                call.weights,
                layers_per_checkpoint=layers_per_checkpoint,
                recurrence=backend.tree_recurrence(micro_batch),
            )
        scored_rows, row_index = torch.unique_consecutive(pairs.rows, return_inverse=True)
        if len(scored_rows) < len(micro_batch):
            hidden = hidden[copy_async(scored_rows, device)]
        rows, targets = copy_async(row_index, device), copy_async(pairs.targets, device)
        return scored_logprobs(
            backend,
            hidden,
            self._decoder.head,
            call.weights.head,
            rows,
            targets,
            call.batch.config["temperature"],
            recompute=layers_per_checkpoint > 0,
        )

    def _backward(
        self,
        call: _TrainerCall,
        micro_batch: MicroBatch,
        pairs: _Pairs,
        pair_logprobs: Tensor,
        logprobs: Tensor,
        losses: Tensor,
    ) -> Tensor:
        """Return the gradient with respect to the adapter's flat master weight vector.

        The gradient of the loss with respect to the logprobs is checked first, before the costly
        backward pass through the model.
        """
        (logprob_grads,) = torch.autograd.grad(losses.sum(), logprobs)
        for datum, datum_grads in zip(
            micro_batch.datums, logprob_grads.split(_num_targets(call, micro_batch)), strict=True
        ):
            if not bool(torch.isfinite(datum_grads).all()):
                raise NonFiniteError(
                    f"the gradient of the loss of data[{datum}] is not finite; check its logprobs "
                    "and advantages"
                )
        grads = torch.zeros(len(pair_logprobs) + 1, dtype=logprob_grads.dtype)
        pair_grads = grads.index_add_(0, pairs.pair_index, logprob_grads)[:-1]
        if pair_logprobs.requires_grad and bool(pair_grads.any()):
            pair_logprobs.backward(copy_async(pair_grads, pair_logprobs.device))
        return call.weights.collect_grad()


def _rope_positions(call: _TrainerCall, micro_batch: MicroBatch) -> np.ndarray:
    """Return the RoPE positions of the rows: int64 [T], or [3, T] if a datum has images."""
    examples = [call.batch.examples[datum] for datum in micro_batch.datums]
    if not any(example.input.images for example in examples):
        return micro_batch.positions
    positions = np.tile(micro_batch.positions, (3, 1))
    for example, rows in zip(examples, micro_batch.datum_rows, strict=True):
        if example.input.rope_positions is not None:
            positions[:, rows] = example.input.rope_positions
    return positions


@dataclass(frozen=True, eq=False)
class _Pairs:
    """The distinct (row, target) pairs of a micro-batch, sorted by row.

    Datums with a common prefix share pairs, so each pair is scored once.
    """

    rows: Tensor
    """int64 [P]: row of each pair."""
    targets: Tensor
    """int64 [P]: target token of each pair."""
    pair_index: Tensor
    """int64 [M]: for each target of the concatenated datums, the index of its pair, or P if the
    target is not scored.
    """

    @classmethod
    def from_micro_batch(
        cls, micro_batch: MicroBatch, batch: TrainingBatch, vocab_size: int
    ) -> _Pairs:
        """Collect the pairs of all datums of a micro-batch and remove duplicates."""
        pair_keys: list[np.ndarray] = []
        scored_masks: list[np.ndarray] = []
        for datum, rows in zip(micro_batch.datums, micro_batch.datum_rows, strict=True):
            targets = batch.examples[datum].targets
            pair_keys.append(
                (rows.reshape(-1, *[1] * (targets.ndim - 1)) * vocab_size + targets).reshape(-1)
            )
            scored_masks.append(batch.scored_mask(datum).reshape(-1))
        is_scored = np.concatenate(scored_masks)
        distinct_keys, pairs = np.unique(np.concatenate(pair_keys)[is_scored], return_inverse=True)
        pair_index = np.full(is_scored.shape, len(distinct_keys))
        pair_index[is_scored] = pairs.reshape(-1)
        rows, targets = np.divmod(distinct_keys, vocab_size)
        return cls(torch.from_numpy(rows), torch.from_numpy(targets), torch.from_numpy(pair_index))


def _num_targets(call: _TrainerCall, micro_batch: MicroBatch) -> list[int]:
    """Return the number of targets of each datum of the micro-batch."""
    return [call.batch.examples[datum].targets.size for datum in micro_batch.datums]


def _compute_losses(call: _TrainerCall, micro_batch: MicroBatch, logprobs: Tensor) -> Tensor:
    """Return the loss of each datum.

    Raises NonFiniteError that names the first datum whose loss is not finite.
    """
    losses: list[Tensor] = []
    for datum, datum_logprobs in zip(
        micro_batch.datums, logprobs.split(_num_targets(call, micro_batch)), strict=True
    ):
        example = call.batch.examples[datum]
        inputs = {name: torch.tensor(values) for name, values in example.inputs.items()}
        losses.append(
            call.batch.loss.fn(
                datum_logprobs.view(example.targets.shape), inputs, call.batch.config
            )
        )
    stacked = torch.stack(losses)
    finite = torch.isfinite(stacked).tolist()
    if not all(finite):
        datum = micro_batch.datums[finite.index(False)]
        raise NonFiniteError(
            f"the loss of data[{datum}] is not finite; check that its logprobs belong to its "
            "target_tokens and that its advantages are not too large"
        )
    return stacked


def _ratio_range(
    call: _TrainerCall, logprobs: Mapping[int, np.ndarray]
) -> tuple[float, float] | None:
    """Return the smallest and largest importance ratio over unmasked tokens with a nonzero
    advantage.

    Return None if the loss has no ratio or there is no such token.
    """
    if not call.batch.loss.has_ratio:
        return None
    log_ratios_of_datums: list[np.ndarray] = []
    for datum, values in logprobs.items():
        inputs = call.batch.examples[datum].inputs
        is_counted = (inputs["advantages"] != 0) & (inputs.get("mask", np.ones(1)) != 0)
        log_ratios_of_datums.append((values - inputs["logprobs"])[is_counted])
    log_ratios = np.concatenate(log_ratios_of_datums)
    # math.exp raises OverflowError beyond 709, so `_capped_exp` clips the logprob difference at
    # 700. The check for finite losses does not exclude larger differences: ppo clips the ratio,
    # and dro squares the difference instead of computing a ratio.
    return (
        (_capped_exp(log_ratios.min()), _capped_exp(log_ratios.max())) if log_ratios.size else None
    )


def _capped_exp(value: float) -> float:
    return math.exp(min(700.0, float(value)))


def finish_call(
    adapter: Adapter, parts: Sequence[PartialResult], num_tokens: int
) -> ForwardBackwardOutput:
    """Add the gradients of all parts of a call to the adapter, and return the results of the call.

    `parts` are in the order of their micro-batches. `num_tokens`: the number of tokens of all
    datums. Raises NonFiniteError if the gradient is not finite. The adapter's accumulated gradient
    is unchanged then, and the adapter rejects its next optimizer step.
    """
    tree = GradientTree(parts[0].num_micro_batches)
    for part in parts:
        for node, node_grad in part.nodes.items():
            tree.add(node, node_grad)
    grad = tree.total()
    if grad is not None:
        if not is_finite(grad):
            error = NonFiniteError(
                "the gradient is not finite; check the advantages and weights of data, or "
                "lower the learning rate"
            )
            adapter.reject_next_step(error)
            raise error
        adapter.add_grad(grad)
    return _combine_results([result for part in parts for result in part.results], num_tokens)


def _combine_results(results: Sequence[MicroBatchResult], num_tokens: int) -> ForwardBackwardOutput:
    losses = {datum: value for result in results for datum, value in result.losses.items()}
    logprobs = {datum: value for result in results for datum, value in result.logprobs.items()}
    metrics = {
        # Sum in the order of the data, so that the packing cannot change the result.
        "loss:sum": math.fsum(losses[datum] for datum in range(len(losses))),
        "tokens:sum": float(num_tokens),
        "computed_tokens:sum": float(sum(result.num_rows for result in results)),
        "micro_batches:sum": float(len(results)),
    }
    ratios = [result.ratio_range for result in results if result.ratio_range is not None]
    if ratios:
        metrics["ratio:min"] = min(smallest for smallest, _ in ratios)
        metrics["ratio:max"] = max(largest for _, largest in ratios)
    outputs = [{"logprobs": TensorData.from_numpy(logprobs[datum])} for datum in range(len(losses))]
    return ForwardBackwardOutput(LOSS_FN_OUTPUT_TYPE, outputs, metrics)
