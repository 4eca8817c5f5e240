"""Measure at which numbers of rows torch's matmuls are batch-invariant on this machine.

A matrix library chooses its kernel by the number of rows, and each kernel has its own order of
additions. So the last bits of a sample's logits depend on the batch size. To prevent this, matmuls
are padded to row counts that agree bit for bit.

`probe` runs matmuls of the model's own shapes at many row counts. It looks for the cheapest rule of
this form: pad to at least `min_rows` rows and to a multiple of `multiple`. A rule is valid if all
tested row counts that it allows agree bit for bit. If no rule is valid, matmuls can run in tiles of
a fixed number of rows. All tiles use the same kernel, so they are batch-invariant, but slower.

LoRA matmuls are probed in the form in which the decoder runs them. A few common ranks are probed
when the model is loaded. Each rank that is used is probed at its first use.

The C++ matmuls (cpp/matmul.py) are not probed, because their order of additions does not depend on
the number of rows. The probe covers the matmuls that torch computes. Those are all matmuls if the
C++ kernels are not in use, and otherwise the matmuls with unsupported shapes. One example is the
LoRA of a head whose vocabulary size is not a multiple of 16.

In practice only small row counts differ. oneDNN uses another kernel for one row of more than 1024
columns. torch uses its own loops for matmuls of up to 16 ** 3 multiplications, for example for a
few rows of a low-rank LoRA.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from planish.model.architecture.config import ModelConfig
from planish.model.architecture.linears import distinct_group_shapes
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference.lora import add_lora_stack_, add_outputs_
from planish.model.layers.lora import LORA_COLUMNS, LoraMatrices
from planish.model.layers.row_tiling import QUERY_ROWS, LoraRowRule, RowTiling
from planish.model.sequences.positions import SPAN

_MULTIPLES = (1, 4, 16)
_MIN_ROWS_CHOICES = (1, 2, 4, 8, 16, 32)
_ROWS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 20, 28, 31, 32, 33, 48, 63, 64, 65),
    *(80, 96, 112, 128, 150, 160, 191, 192, 200, 240, 255, 256, 301, 384, 500, 511, 512),
)
_PROBE_COLUMNS = 4096
_QUERY_ROWS = (1, 2, 4, 8)
_LORA_RANKS = (8, 16, 32)
"""The LoRA ranks that are probed when a model is loaded.

`RowTiling.multiple` is chosen so that it suits all of these ranks. Each rank in use is also probed
separately, at its first use.
"""
_LORA_MIN_ROWS_CHOICES = (*_MIN_ROWS_CHOICES, 64, 128, 256)
"""Candidates for the minimum number of rows of LoRA matmuls.

A low rank may need more rows, because torch uses its own loops for matmuls of up to 16 ** 3
multiplications. In a narrow model, a rank-1 matmul is that small up to about a hundred rows.
"""
_LORA_ROWS = 32
"""The minimum number of rows that a probe of LoRA matmuls compares.

A row count below this number is probed with several matmuls, on successive groups of rows. A sum
over a low rank is short, so a different order of additions changes only a few entries. A single
small matmul may contain none of them.
"""
_LOW_RANK = 16
_LOW_RANK_INPUTS = 6
"""Number of random inputs with which the B matmuls of ranks below _LOW_RANK are probed.

Two orders of addition of a short sum can give equal results for one input and different results
for another.
"""
_STACKED = 3
"""Number of adapters in a probed stack, which is one batched matmul of several adapters."""
_STACK_ROWS = (4, 8, 12, 16, 32, 64)
"""Rows per adapter in a probed stack."""


@torch.inference_mode()
def probe(backend: Backend, *, at_any_cost: bool = False) -> RowTiling | None:
    """Return the cheapest padding that makes this machine's matmuls batch-invariant; None if no
    tested padding does.

    Low ranks may need padding to a hundred rows or more. They get it only with `at_any_cost`.
    """
    config, dtype, device = backend.config, backend.dtype, backend.device
    shapes = {shape for shape in _base_shapes(config) if not backend.can_pack(*shape)}
    base = _prober(dtype, device).agreeing(shapes, backend)
    if config.num_experts:  # The router is float32, whatever the dtype of the model.
        router_shapes = [(config.num_experts, config.hidden_size)]
        if config.has_shared_expert:
            router_shapes.append((1, config.hidden_size))
        base &= _prober(torch.float32, device).agreeing(router_shapes, backend)
    modules = _torch_lora_modules(backend)
    by_rank = {
        rank: _agreeing_lora_row_counts(modules, rank, dtype, device) for rank in _LORA_RANKS
    }
    for multiple in _MULTIPLES:
        min_rows = _smallest_valid_minimum(base, multiple, _MIN_ROWS_CHOICES)
        if min_rows and all(
            _smallest_valid_minimum(base & rows, multiple, _MIN_ROWS_CHOICES)
            for rows in by_rank.values()
        ):
            choices = _LORA_MIN_ROWS_CHOICES if at_any_cost else _MIN_ROWS_CHOICES
            rule = partial(_lora_rule, modules, base, multiple, choices, dtype, device)
            return RowTiling(
                multiple,
                query_rows=QUERY_ROWS
                if backend.attention_is_batch_invariant
                else _probe_query_rows(config, device),
                min_rows=min_rows,
                lora=cache(rule) if modules else None,
            )
    return None


@torch.inference_mode()
def _lora_rule(
    modules: tuple[_TorchLoraModule, ...],
    base: set[int],
    multiple: int,
    choices: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
) -> LoraRowRule:
    agreeing = base & _agreeing_lora_row_counts(modules, rank, dtype, device)
    multiples = [each for each in _MULTIPLES if each >= multiple]
    found = [(_smallest_valid_minimum(agreeing, each, choices), each) for each in multiples]
    valid = [(min_rows, each) for min_rows, each in found if min_rows is not None]
    min_rows, multiple = min(valid, key=max, default=(None, multiple))
    if min_rows is None:
        logging.getLogger(__name__).warning(
            "LoRA adapters of rank %d are not batch-invariant on this machine: torch's matmuls "
            "depend on the batch even if padded to %d rows; deterministic=True pads to up to %d",
            rank,
            max(choices),
            max(_LORA_MIN_ROWS_CHOICES),
        )
    layer_modules = [module for module in modules if not module.is_head]
    can_stack = bool(layer_modules) and min_rows is not None and min_rows <= max(_STACK_ROWS)
    return LoraRowRule(
        min_rows, multiple, can_stack and _stacks_agree(layer_modules, rank, dtype, device)
    )


def cancelling_inputs(
    num_rows: int, fan_out: int, fan_in: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, fan_in] and weight [fan_out, fan_in], float32, whose matmul is nearly 0.

    The terms of each sum are pairs a and -a, and one or two terms that are 2 ** 18 times smaller.
    So a rounding error of the large terms changes the leading bits of the result, and a different
    order of additions changes a large part of all entries. With ordinary inputs, rounding to bf16
    hides the difference in all but one of thousands of entries.

    Pairs alone are not enough. The product of two bf16 numbers has only 16 significant bits, so
    float32 adds a few such products without rounding. The pairs would then sum to exactly 0 in
    every order. The smaller terms have bits below those of the pairs, so the additions round.

    Sums of one or two terms have only one order; their inputs are ordinary random numbers.
    """
    pairs = max(0, fan_in - 1) // 2
    x, weight = (torch.randn(n, fan_in - pairs, generator=generator) for n in (num_rows, fan_out))
    if pairs:
        x[:, pairs:] *= 2.0**-18
    order = torch.randperm(fan_in, generator=generator)
    x = torch.cat([x, -x[:, :pairs]], 1)
    weight = torch.cat([weight, weight[:, :pairs]], 1)
    return x[:, order], weight[:, order]


@dataclass(frozen=True)
class _Prober:
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def cancelling_inputs(self, fan_out: int, fan_in: int) -> list[torch.Tensor]:
        """Return `cancelling_inputs` inputs in this dtype on this device, with max(_ROWS) rows."""
        pair = cancelling_inputs(max(_ROWS), fan_out, fan_in, self.generator)
        return [tensor.to(self.device, self.dtype) for tensor in pair]

    def agreeing(self, shapes: Iterable[tuple[int, int]], backend: Backend) -> set[int]:
        """Return the row counts of _ROWS at which matmuls with all of these weights agree.

        A row count agrees if its result is bit-identical to the same rows of a matmul with
        max(_ROWS) rows. `shapes`: (out, in) of each frozen weight.
        """
        agreeing: set[int] = set(_ROWS)
        for fan_out, fan_in in sorted(set(shapes)):
            x, weight = self.cancelling_inputs(fan_out, fan_in)
            agreeing &= _agreeing_row_counts(backend.pack([weight]).matmul, x, 1)
        return agreeing


def _prober(dtype: torch.dtype, device: torch.device) -> _Prober:
    return _Prober(dtype, device, torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class _TorchLoraModule:
    """Linears that read the same input and whose adapters torch computes.

    `sizes`: the output size of each linear. `fan_in`: their input size.
    """

    sizes: tuple[int, ...]
    fan_in: int
    is_head: bool = False


def _torch_lora_modules(backend: Backend) -> tuple[_TorchLoraModule, ...]:
    config, found = backend.config, set()
    if not backend.packs_layer_adapters:
        for shapes in distinct_group_shapes(config):
            found.add(_TorchLoraModule(tuple(fan_out for fan_out, _ in shapes), shapes[0][1]))
    if not backend.packs_head_adapters:
        vocab, hidden = _head_shape(config)
        found.add(_TorchLoraModule((vocab,), hidden, is_head=True))
    return tuple(sorted(found, key=str))


def _agreeing_lora_row_counts(
    modules: Iterable[_TorchLoraModule], rank: int, dtype: torch.dtype, device: torch.device
) -> set[int]:
    """Return the row counts of _ROWS at which the matmuls of an adapter of this rank agree.

    The matmuls have the same form as in the decoder. The linears that read the same input share
    one A, and the B of each linear multiplies its slice of the LoRA hidden states.
    """
    prober, agreeing = _prober(dtype, device), set(_ROWS)
    for module in modules:
        x, a = prober.cancelling_inputs(len(module.sizes) * rank, module.fan_in)
        agreeing &= _agreeing_row_counts(lambda x, a=a: x @ a.t(), x, _LORA_ROWS)
        for _ in range(_LOW_RANK_INPUTS if rank < _LOW_RANK else 1):
            pairs = [prober.cancelling_inputs(size, rank) for size in module.sizes]
            lora_hidden = torch.cat([hidden for hidden, _ in pairs], 1)
            if module.is_head:  # the head pads its LoRA hidden states to whole SIMD vectors
                lora_hidden = F.pad(lora_hidden, (0, -rank % LORA_COLUMNS))[:, :rank]
            add = partial(_lora_outputs, sizes=module.sizes, b_matrices=[b for _, b in pairs])
            agreeing &= _agreeing_row_counts(add, lora_hidden, _LORA_ROWS)
    return agreeing


def _lora_outputs(
    lora_hidden: torch.Tensor, sizes: tuple[int, ...], b_matrices: Sequence[torch.Tensor]
) -> torch.Tensor:
    out = lora_hidden.new_zeros(len(lora_hidden), sum(sizes))
    add_outputs_(lora_hidden, out, sizes, b_matrices)
    return out


def _agreeing_row_counts(
    matmul: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, min_compared_rows: int
) -> set[int]:
    """Return the row counts of _ROWS at which `matmul` is bit-identical to the rows of matmul(x).

    A row count below `min_compared_rows` is tested on several groups of rows: the first
    `min_compared_rows` rows are divided into groups of this size. It agrees if the results of all
    groups agree.
    """
    full = matmul(x)
    return {rows for rows in _ROWS if _agrees(matmul, x, full, rows, min_compared_rows)}


def _agrees(
    matmul: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    full: torch.Tensor,
    num_rows: int,
    min_compared_rows: int,
) -> bool:
    starts = range(0, max(1, min_compared_rows - num_rows + 1), num_rows)
    return all(torch.equal(matmul(x[a : a + num_rows]), full[a : a + num_rows]) for a in starts)


def _stacks_agree(
    modules: Iterable[_TorchLoraModule], rank: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether batched matmuls of several adapters of this rank are bit-identical to separate
    ones.
    """
    prober = _prober(dtype, device)
    for module in modules:
        for cancels_in_a in (True, False):
            inputs = [_probe_inputs(prober, module, rank, cancels_in_a) for _ in range(_STACKED)]
            xs, adapters = [x for x, _ in inputs], [adapter for _, adapter in inputs]
            full = [
                _lora_outputs(x @ adapter.a.t(), module.sizes, adapter.b_matrices)
                for x, adapter in zip(xs, adapters, strict=True)
            ]
            b_matrices = zip(*(adapter.b_matrices for adapter in adapters), strict=True)
            stack = LoraMatrices(
                torch.stack([adapter.a for adapter in adapters]),
                tuple(map(torch.stack, b_matrices)),
            )
            for num_rows in _STACK_ROWS:
                x = torch.cat([part[:num_rows] for part in xs])
                out = x.new_zeros(len(x), sum(module.sizes))
                add_lora_stack_(x, out, module.sizes, stack)
                if not torch.equal(out, torch.cat([part[:num_rows] for part in full])):
                    return False
    return True


def _probe_inputs(
    prober: _Prober, module: _TorchLoraModule, rank: int, cancels_in_a: bool
) -> tuple[torch.Tensor, LoraMatrices]:
    """Return an input x and an adapter with cancelling sums.

    The terms cancel in the matmul of x and A if `cancels_in_a`, else in the matmuls with the Bs.
    """
    columns = len(module.sizes) * rank
    pairs = [prober.cancelling_inputs(size, rank) for size in module.sizes]
    b_matrices = tuple(b for _, b in pairs)
    if cancels_in_a:
        x, a = prober.cancelling_inputs(columns, module.fan_in)
        return x, LoraMatrices(a, b_matrices)
    # Here the matrix A is an identity: it selects columns of x without rounding. So the LoRA hidden
    # states are exactly the cancelling inputs of the Bs.
    lora_hidden = torch.cat([hidden for hidden, _ in pairs], 1)[:, : module.fan_in]
    x = F.pad(lora_hidden, (0, module.fan_in - lora_hidden.shape[1]))
    return x, LoraMatrices(
        torch.eye(columns, module.fan_in, dtype=x.dtype, device=x.device), b_matrices
    )


def _smallest_valid_minimum(
    agreeing: set[int], multiple: int, choices: Iterable[int]
) -> int | None:
    """Return the first of `choices` that is a valid minimum number of rows, or None.

    A minimum is valid if `agreeing` contains every row count of _ROWS that the padding allows.
    Those are the multiples of `multiple` that are not below the minimum.
    """
    for min_rows in choices:
        if all(rows in agreeing for rows in _ROWS if rows >= min_rows and rows % multiple == 0):
            return min_rows
    return None


def _probe_query_rows(config: ModelConfig, device: torch.device) -> int:
    """Return the minimum number of rows for batch-invariant float32 matmuls in the attention."""
    generator = torch.Generator().manual_seed(0)
    # The attention runs batched matmuls, and the smallest batch has one matmul per key-value head.
    # A single matmul is no substitute, because its rows would be divided among threads.
    heads = config.num_kv_heads
    q = torch.randn(heads, QUERY_ROWS * 2, config.head_dim, generator=generator).to(device)
    keys = (
        torch.randn(heads, SPAN * 2, config.head_dim, generator=generator)
        .to(device)
        .transpose(1, 2)
    )
    weights = torch.rand(heads, QUERY_ROWS * 2, SPAN, generator=generator).to(device)
    values = keys.transpose(1, 2)[:, :SPAN]
    for rows in _QUERY_ROWS:
        pairs = ((q, keys), (weights, values))
        if all(
            torch.equal(torch.matmul(x[:, :n], y), torch.matmul(x, y)[:, :n])
            for x, y in pairs
            for n in range(rows, QUERY_ROWS)
        ):
            return rows
    return QUERY_ROWS


def _base_shapes(config: ModelConfig) -> set[tuple[int, int]]:
    """Return (out, in) of each matmul with base weights; linears with the same input share one."""
    groups = distinct_group_shapes(config)
    shapes = {(sum(fan_out for fan_out, _ in group), group[0][1]) for group in groups}
    if config.delta_net is not None:  # in_proj_b and in_proj_a
        shapes.add((2 * config.delta_net.num_value_heads, config.hidden_size))
    return shapes | {_head_shape(config)}


def _head_shape(config: ModelConfig) -> tuple[int, int]:
    """Return (out, in) of a smaller head for the probe.

    Its output size keeps the remainder modulo LORA_COLUMNS. So the native kernel supports its
    adapters if and only if it supports those of the real head.
    """
    return min(
        config.vocab_size, _PROBE_COLUMNS + config.vocab_size % LORA_COLUMNS
    ), config.hidden_size
