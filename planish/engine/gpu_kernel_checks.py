"""Checks of the GPU kernels: each kernel family is compared with torch at one model's shapes.

kernels/triton/self_test.py runs this module in a subprocess, because an illegal memory access ends
the CUDA context of its process. The module reads a `Request` from its standard input. For each
family it writes one line before the check and one line with the verdict.

The inputs make mistakes visible. With ordinary attention scores, one key among a thousand changes
the output by less than a bf16 rounding error. So each query here *points at* one key: its attention
score is high for this key only. The key is the first or last of a block, a random key, or a
*masked* key, to which the row must not attend. If a kernel misses the key, or attends to a masked
one, its error is as large as the output itself.

Error messages give differences relative to the root mean square of the reference. torch computes
the reference in float32 or float64.

Shapes: T rows, D hidden, Hq and Hkv heads, E head_dim, V vocabulary.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.engine.sampling.cuda_graph_runner import CudaGraphRunner
from planish.engine.sampling.plan import RowLayout, StepPlan
from planish.engine.sampling.slots import SampleSlots
from planish.engine.settings import DTYPES
from planish.model.config import ModelConfig
from planish.model.decoder import Decoder
from planish.model.kernels.backend import Backend
from planish.model.kernels.choose import choose_backend, reference_backend
from planish.model.kernels.device import Device, accumulate_in_float32
from planish.model.kernels.reference.attention import dense_mask_attention
from planish.model.kernels.triton.adapters import AdapterTables
from planish.model.kernels.triton.families import FAMILIES
from planish.model.kernels.triton.sampling_attention import DecodeTables, GpuPrefill, PoolBases
from planish.model.kernels.triton.self_test import Request
from planish.model.kernels.triton.tree_attention import TritonTreeAttention
from planish.model.kernels.verdicts import Verdict
from planish.model.kv_cache import GappedKVPool, KVPool, KVPools, KVSpec, PrefillSpan, SlotOwner
from planish.model.linears import fused_modules
from planish.model.lora import (
    FUSED_MODULE_NAMES,
    AdapterRange,
    LoraLayout,
    LoraWeights,
)
from planish.model.positions import SPAN, capacity_for
from planish.model.prefix_tree import pack
from planish.model.quantization import (
    Fp8Weight,
    Mxfp4Weight,
    QuantizedWeight,
    dequantized,
    quantize,
)
from planish.model.weight_sizes import SCHEMES
from planish.model.weights import expected_shapes
from planish.types import LoraConfig

TOLERANCE = {torch.bfloat16: 0.04, torch.float32: 2e-4}
"""The maximum difference of one element, by the dtype of the output.

It is relative to the largest magnitude in the reference.
"""
_MEAN_TOLERANCE_DIVISOR = 6
"""The root mean square of all differences may be at most TOLERANCE / _MEAN_TOLERANCE_DIVISOR.

It is relative to the root mean square of the reference. For comparison: rounding the output to bf16
gives 0.0017, and two more roundings of intermediate results give 0.003.
"""
_MAX_GRAPH_VOCAB_SIZE = 8192
"""The maximum vocabulary size in `check_graphs`.

The LM head is torch's own matmul there, so its full size need not be checked.
"""
_MULTI_BLOCK_VOCAB_SIZE = 9001
"""A vocabulary size that the sampling kernel reads in more than one block."""
_LORA_RANKS = (32, 5)
"""The LoRA ranks of the two adapters in the checks."""
_POINTER_SCORE = 24.0
"""The approximate attention score of the key that a query points at.

The scores of other keys are spread around 0.
"""


class WrongResultError(Exception):
    """A kernel and torch disagree."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the checks' inputs.

    The defaults are for a GPU. Tests use smaller sizes, because they interpret kernels on a CPU.
    """

    num_rows: int = 37
    """The number of rows for norms, RoPE, SwiGLU, log-sum-exp and sampling.

    It is not a multiple of the kernels' tile sizes.
    """
    prompt_lengths: tuple[int, ...] = (1500, 130, 3)
    """The number of positions of each prompt in the KV cache."""
    samples_per_prompt: tuple[int, ...] = (9, 2, 1)
    """The number of samples of each prompt."""
    max_sampled_tokens: int = 300
    """The maximum number of sampled tokens of a sample."""
    segment_lengths: tuple[int, ...] = (150, 80, 60)
    """The number of tokens of each segment in the prefix tree, by level."""
    branches: tuple[int, ...] = (2, 3, 2)
    """The number of branches at each node of the prefix tree, by level."""
    lora_rows: tuple[int, ...] = (70, 600)
    """Two batch sizes for LoRA.

    In the smaller batch, several programs of the kernel share one sum (split-K). In the larger one,
    each sum belongs to one program.
    """


@dataclass(frozen=True)
class Case:
    """The model shapes, the device and the random generator of a check."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    sizes: Sizes = Sizes()
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def random(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Return normally distributed numbers, times `scale`.

        They are generated on the CPU, so that a failure can be reproduced on any machine.
        """
        values = torch.randn(shape, generator=self.generator) * scale
        return values.to(dtype or self.dtype).to(self.device)

    @cached_property
    def backend(self) -> Backend:
        """The backend of a model with these shapes."""
        return choose_backend(self.config, self.dtype, self.device, deterministic=False)

    @cached_property
    def reference(self) -> Backend:
        """The reference implementation of the elementwise kernels, in float64."""
        return reference_backend(self.config, torch.float64, self.device)

    def random_ints(self, high: int, *shape: int) -> Tensor:
        """Return random integers from 0 to `high` - 1, int64, on the CPU."""
        return torch.randint(high, shape, generator=self.generator)


def compare(what: str, actual: Tensor, reference: Tensor, tolerance: float | None = None) -> None:
    """Raise WrongResultError if `actual` and `reference` differ by more than rounding errors.

    `what` names the result in the error message. `tolerance` is TOLERANCE[actual.dtype] by default.
    """
    if actual.shape != reference.shape:
        raise WrongResultError(f"{what}: {tuple(actual.shape)} for {tuple(reference.shape)}")
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    expected = reference.detach().double()
    difference = actual.detach().double() - expected
    scale = max(float(expected.square().mean().sqrt()), 1e-30)
    largest = float(difference.abs().max()) / scale
    rms = float(difference.square().mean().sqrt()) / scale
    if not (largest <= tolerance * max(1.0, float(expected.abs().max()) / scale) and
            rms <= tolerance / _MEAN_TOLERANCE_DIVISOR):  # fmt: skip
        raise WrongResultError(
            f"{what}: the largest difference is {largest:.2g} and the mean one {rms:.2g} "
            f"of the root mean square; {tolerance:.2g} and "
            f"{tolerance / _MEAN_TOLERANCE_DIVISOR:.2g} are allowed"
        )


# Families


def check_norms(case: Case) -> None:
    """Check RMSNorm of hidden states and, if the model has it, of query heads."""
    config, rows = case.config, case.sizes.num_rows
    _check_norm(case, (rows, config.hidden_size), True)
    if config.qk_norm:
        _check_norm(case, (rows, config.num_heads, config.head_dim), False)


def _check_norm(case: Case, shape: tuple[int, ...], with_residual: bool) -> None:
    """Check RMSNorm and its gradient. `with_residual`: the kernel first adds a second input."""
    kernels, reference, eps = _elementwise_kernels(), case.reference, case.config.rms_norm_eps
    x = case.random(*shape, dtype=torch.float32, scale=3.0)
    delta = case.random(*shape) if with_residual else None
    weight = 1 + case.random(shape[-1], dtype=torch.float32, scale=0.2)
    grad, residual = case.random(*shape), case.random(*shape, dtype=torch.float32)
    float64_delta = None if delta is None else delta.double()
    residual_sum, norm, factor = reference.rms_norm(x.double(), float64_delta, weight.double(), eps)
    expected_grad = reference.rms_norm_backward(
        grad.double(), residual_sum, weight.double(), factor, residual.double()
    )
    factor = factor.squeeze(-1)
    for in_place in (False, True):
        found = kernels.rms_norm(x.clone(), delta, weight, eps, case.dtype, in_place=in_place)
        for what, actual, expected in zip(
            ("sum", "norm", "factor"), found, (residual_sum, norm, factor), strict=True
        ):
            compare(f"{what} of {shape}", actual, expected)
    found_grad = kernels.rms_norm_backward(
        grad, residual_sum.float(), weight, factor.float(), residual
    )
    compare(f"gradient of the norm of {shape}", found_grad, expected_grad, 1e-3)


def check_rope(case: Case) -> None:
    """Check RoPE, its inverse, and the fused kernel that also normalizes queries and keys."""
    config, rows = case.config, case.sizes.num_rows
    kernels, head_dim = _elementwise_kernels(), config.head_dim
    heads = (config.num_heads, config.num_kv_heads)
    angles = case.random(rows, 1, head_dim // 2, dtype=torch.float32, scale=2.0)
    cos, sin = angles.cos(), angles.sin()
    fused_qkv = case.random(rows, (heads[0] + 2 * heads[1]) * head_dim)
    q, k, _ = fused_qkv.unflatten(1, (-1, head_dim)).split([heads[0], heads[1], heads[1]], 1)
    for name, x in (("q", q), ("k", k)):
        for inverse in (False, True):
            actual = kernels.rope(x, cos, sin, inverse=inverse)
            compare(
                f"rotated {name}",
                actual,
                case.reference.rope(x.double(), cos, sin, inverse=inverse),
            )
    norm_weights = 1 + case.random(2, head_dim, dtype=torch.float32, scale=0.2)
    for weights in (None, (norm_weights[0], norm_weights[1])) if config.qk_norm else (None,):
        actual_heads = kernels.qk_norm_rope(
            fused_qkv, heads, weights, config.rms_norm_eps, cos, sin
        )
        for index, x in enumerate((q, k)):
            x = x.double()
            if weights is not None:
                factor = (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
                x = (x * factor * weights[index]).to(case.dtype).double()
            compare(
                "rotated and normed heads", actual_heads[index], case.reference.rope(x, cos, sin)
            )


def check_swiglu(case: Case) -> None:
    """Check SwiGLU and its gradient."""
    kernels, intermediate_size = _elementwise_kernels(), case.config.intermediate_size
    gate_up = case.random(case.sizes.num_rows, 2 * intermediate_size, scale=3.0)
    grad = case.random(case.sizes.num_rows, intermediate_size)
    float64_gate_up = gate_up.double()
    compare("SwiGLU", kernels.swiglu(gate_up), case.reference.swiglu(float64_gate_up))
    expected_grad = case.reference.swiglu_backward(grad.double(), float64_gate_up)
    compare("gradient of SwiGLU", kernels.swiglu_backward(grad, gate_up), expected_grad)


def check_log_sum_exp(case: Case) -> None:
    """Check the log-sum-exp of logits, the weights exp(logit - max), and the gradient."""
    kernels, vocab_size = _elementwise_kernels(), case.config.vocab_size
    rows = max(2, case.sizes.num_rows // 4)
    logits = case.random(rows, vocab_size, dtype=torch.float32, scale=4.0)
    # A kernel with a wrong bound misses the last logit of row 0, or reads the first one of row 1.
    logits[0, -1], logits[1, 0] = 40.0, 40.0
    temperature = 0.5 + torch.rand(rows, generator=case.generator).to(case.device)
    weights, float64_logits = logits.clone(), logits.double()
    actual = kernels.log_sum_exp(logits, temperature, weights=weights)
    expected = case.reference.log_sum_exp(
        float64_logits, temperature.double(), weights=float64_logits
    )
    compare("log-sum-exp", actual, expected, 1e-6)
    compare("weights", weights, float64_logits, 1e-4)
    logits[0, 0] = float("nan")
    if math.isfinite(float(kernels.log_sum_exp(logits, temperature)[0])):
        raise WrongResultError("log-sum-exp of a row with a NaN is finite")
    logits[0, 0] = 0.0
    pair_counts = torch.arange(rows) % 3
    first_pairs = torch.cat([torch.zeros(1, dtype=torch.int64), pair_counts.cumsum(0)]).to(
        case.device
    )
    pair_rows = torch.arange(rows).repeat_interleave(pair_counts).to(case.device)
    targets = case.random_ints(vocab_size, len(pair_rows)).to(case.device)
    grads = case.random(len(pair_rows), dtype=torch.float32)
    float64_logits = logits.double()
    log_sum_exp = case.reference.log_sum_exp(float64_logits, float64_logits.new_full((rows,), 0.7))
    kernels.log_sum_exp_backward_(logits, 0.7, log_sum_exp.float(), first_pairs, targets, grads)
    case.reference.log_sum_exp_backward_(
        float64_logits, 0.7, log_sum_exp, first_pairs, targets, grads.double()
    )
    compare("gradient of the logits", logits, float64_logits, 1e-3)


def check_sampling(case: Case) -> None:
    """Check sampling at the model's vocabulary size, and at a size that takes several blocks."""
    for vocab_size in (case.config.vocab_size, _MULTI_BLOCK_VOCAB_SIZE):
        _check_sampling(case, vocab_size)


def _check_sampling(case: Case, vocab_size: int) -> None:
    """Check that each uniform number gives the token of the cumulative distribution.

    The weights are powers of two. Their sums are exact, so exactly one token is correct.
    """
    rows = max(4, case.sizes.num_rows)
    weights = torch.exp2(-case.random_ints(12, rows, vocab_size).float()).to(case.device)
    weights[:, -1] = 0.0
    weights[0] = 0.0
    weights[0, vocab_size // 2] = 1.0
    uniforms = torch.rand(rows, generator=case.generator, dtype=torch.float64)
    # These two numbers must give the first and the last token with a nonzero weight.
    uniforms[1], uniforms[2] = 0.0, 1 - 2.0**-53
    cumulative = weights.double().cumsum(1)
    thresholds = uniforms.to(case.device).unsqueeze(1) * cumulative[:, -1:]
    expected = (cumulative > thresholds).int().argmax(1)
    actual = _elementwise_kernels().sample(weights, uniforms.to(case.device))
    num_wrong = int((actual != expected).sum())
    if num_wrong:
        raise WrongResultError(
            f"{num_wrong} of {rows} tokens are not those of their uniform numbers"
        )


def check_attention(case: Case) -> None:
    """Check attention and KV cache writes, first of a decoding step, then of a prefill.

    The decoding step has key ranges so long that the kernel cuts them into several pieces. Three of
    its rows have no sample.
    """
    kv_spec = KVSpec(1, case.config.num_kv_heads, case.config.head_dim, case.dtype, case.device)
    pool_bases = PoolBases(kv_spec, case.config.max_context)
    batch = _Batch(case, kv_spec)
    row_of: dict[SlotOwner, int] = {sample: row for row, sample in enumerate(batch.running[::-1])}
    attention = DecodeTables(pool_bases, len(row_of) + 3, case.config.num_heads)
    attention.fill(row_of, batch.prompt_pools, batch.sample_pools)
    num_rows = len(row_of) + 3
    k, v = (case.random(num_rows, kv_spec.num_heads, kv_spec.head_dim) for _ in range(2))
    attended_keys_values = {}
    for sample in batch.running:
        row = row_of[sample]
        masked_key_value = batch.cached_at(sample, 1)
        keys, values = batch.cached_keys_values(sample)
        attended_keys_values[row] = (
            torch.cat([keys, k[row, :, None]], 1),
            torch.cat([values, v[row, :, None]], 1),
        )
        attended_keys_values[row] = (*attended_keys_values[row], masked_key_value)
    q = case.random(num_rows, case.config.num_heads, kv_spec.head_dim, scale=0.3)
    for row, (keys, _, masked_key_value) in attended_keys_values.items():
        q[row] += _pointing_queries(case, keys, masked_key_value, row)
    actual = attention(0, q, k, v)
    for row, (keys, values, _) in attended_keys_values.items():
        compare(
            f"decode of row {row}",
            actual[row],
            _reference_attention(q[row, None], keys, values, None)[0],
        )
    for row in set(range(num_rows)).difference(attended_keys_values):
        if bool(actual[row].any()):
            raise WrongResultError("decode of a row without a sample is not zero")
    for sample in batch.running:
        written = batch.cached_at(sample, 0)
        row = row_of[sample]
        if not torch.equal(written[0][:, -1], k[row]) or not torch.equal(written[1][:, -1], v[row]):
            raise WrongResultError("decode keeps the new key and value in a wrong place")
    _check_prefill(case, kv_spec, pool_bases)


def _check_prefill(case: Case, kv_spec: KVSpec, pool_bases: PoolBases) -> None:
    """Check the prefill of prompts whose first third is already in the KV cache."""
    pools = KVPools(kv_spec, GappedKVPool)
    prompts = [_Prompt(length) for length in case.sizes.prompt_lengths]
    spans, row = [], 2
    for prompt in prompts:
        pool = pools.pool_for(capacity_for(prompt.length))
        pool.allocate(prompt)
        _fill_empty_slots(case, pool)
        num_cached = prompt.length // 3
        spans.append(PrefillSpan(pool, prompt.slot, row, num_cached, prompt.length - num_cached))
        row += prompt.length - num_cached + 1
    k, v = (case.random(row, kv_spec.num_heads, kv_spec.head_dim) for _ in range(2))
    q = case.random(row, case.config.num_heads, kv_spec.head_dim, scale=0.3)
    expected = []
    for span in spans:
        keys, values = (
            tensors[0][span.slot].clone() for tensors in (span.pool.keys, span.pool.values)
        )
        rows = slice(span.row, span.row + span.count)
        positions = slice(span.start, span.start + span.count)
        keys[:, positions], values[:, positions] = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
        for offset in range(span.count):
            end = span.start + offset + 1
            q[span.row + offset] += _pointing_queries(
                case, keys[:, :end], keys[:, end : end + 1], span.row + offset
            )
        expected.append((keys, values))
    actual = GpuPrefill(spans, pool_bases, case.config.num_heads)(0, q, k, v)
    for span, (keys, values) in zip(spans, expected, strict=True):
        rows = slice(span.row, span.row + span.count)
        num_visible = torch.arange(span.start + 1, span.start + span.count + 1, device=case.device)
        mask = torch.arange(keys.shape[1], device=case.device) >= num_visible.unsqueeze(1)
        reference = _reference_attention(q[rows], keys, values, mask)
        compare(f"prefill from position {span.start}", actual[rows], reference)
        if not torch.equal(span.pool.keys[0][span.slot], keys):
            raise WrongResultError("prefill keeps keys in a wrong place")


def check_tree_attention(case: Case) -> None:
    """Check the training attention over a prefix tree, and its gradients."""
    config, sizes = case.config, case.sizes
    heads, head_dim = (config.num_heads, config.num_kv_heads), config.head_dim
    (micro_batch,) = pack([np.array(sequence) for sequence in _tree_sequences(sizes)], 1 << 20)
    rows = len(micro_batch)
    fused_qkv = case.random(rows, (heads[0] + 2 * heads[1]) * head_dim)
    q, k, v = fused_qkv.unflatten(1, (-1, head_dim)).split([heads[0], heads[1], heads[1]], 1)
    # Scale the queries, so that the attention weights are peaked. Each row then depends on only a
    # few keys, and a missed key changes its output visibly.
    q = (q * 4).contiguous()
    grad = case.random(rows, heads[0], head_dim)
    actual_inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    reference_inputs = [x.detach().float().requires_grad_() for x in (q, k, v)]
    actual = TritonTreeAttention(micro_batch, case.device)(0, *actual_inputs)
    reference = dense_mask_attention(micro_batch, case.device)(0, *reference_inputs)
    compare(f"attention over {rows} rows", actual, reference)
    actual_grads = torch.autograd.grad(actual, actual_inputs, grad)
    expected_grads = torch.autograd.grad(reference, reference_inputs, grad.float())
    for name, actual_grad, expected_grad in zip("qkv", actual_grads, expected_grads, strict=True):
        # In bf16 the attention weights and their gradients are rounded too, so allow twice as much.
        compare(
            f"gradient of {name} over {rows} rows",
            actual_grad,
            expected_grad,
            2 * TOLERANCE[actual_grad.dtype],
        )


def _tree_sequences(sizes: Sizes) -> Iterator[list[int]]:
    """Return token sequences that share prefixes, one per leaf of the tree in `sizes`."""
    tokens = iter(range(1, 1 << 30))

    def extend_prefix(level: int, prefix: list[int]) -> Iterator[list[int]]:
        for _ in range(sizes.branches[level]):
            path = prefix + [next(tokens) for _ in range(sizes.segment_lengths[level])]
            if level + 1 == len(sizes.segment_lengths):
                yield path
            else:
                yield from extend_prefix(level + 1, path)

    return extend_prefix(0, [])


def check_lora(case: Case) -> None:
    """Check the LoRA matmuls of all target modules and the LM head, with several adapters."""
    config = case.config
    adapters = [_random_adapter(case, rank) for rank in _LORA_RANKS]
    for rows in case.sizes.lora_rows:
        tables = AdapterTables(config, case.dtype, case.device, rows, len(adapters))
        bounds = [rows // 3, rows // 3 + 1, rows]
        members = [
            AdapterRange(0, bounds[0], adapters[0]),
            AdapterRange(bounds[0], bounds[1], None),
            AdapterRange(bounds[1], bounds[2], adapters[1]),
        ]
        tables.fill(members)
        modules = list(zip(FUSED_MODULE_NAMES, fused_modules(config, 0), strict=True))
        for name, linears in modules if rows == min(case.sizes.lora_rows) else modules[:1]:
            lora_module = getattr(adapters[0].layers[0], name)
            out_sizes = [len(b) for b in lora_module.b_matrices]
            x = case.random(rows, lora_module.a.shape[1])
            out = case.random(rows, sum(out_sizes))
            expected = _reference_lora(
                out, x, members, lambda w, name=name: getattr(w.layers[0], name)
            )
            tables.add_(x, out, out_sizes, 0, name)
            compare(f"LoRA of {'+'.join(linears)}, {rows} rows", out, expected)
    tables = AdapterTables(config, case.dtype, case.device, 20, len(adapters))
    members = [AdapterRange(0, 9, adapters[1]), AdapterRange(9, 20, adapters[0])]
    tables.fill(members)
    hidden = case.random(20, config.hidden_size)
    logits = case.random(20, config.vocab_size, dtype=torch.float32)
    expected = _reference_lora(logits, hidden, members, lambda weights: weights.head)
    tables.add_head_(hidden, logits)
    # The product with A is rounded to the weights' dtype before it is multiplied by B.
    compare("LoRA of the head", logits, expected, TOLERANCE[case.dtype])


def _reference_lora(
    out: Tensor,
    x: Tensor,
    members: list[AdapterRange],
    module_of: Callable[[LoraWeights], Any],
) -> Tensor:
    out = out.float()
    for member in members:
        if member.weights is None:
            continue
        module, member_rows = module_of(member.weights), slice(member.start, member.stop)
        lora_hidden = (x[member_rows].float() @ module.a.float().t()).to(x.dtype).float()
        lora_hiddens = lora_hidden.chunk(len(module.b_matrices), 1)
        out[member_rows] += torch.cat(
            [
                hidden @ b.float().t()
                for hidden, b in zip(lora_hiddens, module.b_matrices, strict=True)
            ],
            1,
        )
    return out


def _random_adapter(case: Case, rank: int) -> LoraWeights:
    """Return an adapter with random A and B.

    The outputs that it adds have the magnitude of the base model's outputs.
    """
    layout = LoraLayout(case.config, LoraConfig(rank=rank))
    flat = torch.empty(layout.size)
    for entry in layout.entries:
        scale = 1 / math.sqrt(rank) / layout.scaling if entry.is_b else entry.shape[1] ** -0.5
        values = torch.randn(entry.size, generator=case.generator) * scale
        flat[entry.offset : entry.offset + entry.size] = values
    return LoraWeights(layout, flat, case.backend)


def check_quantized(case: Case) -> None:
    """Check the matmuls of decoding steps with weights of each quantization scheme."""
    kernels: Any = import_module("planish.model.kernels.triton.quantized_kernels")
    config = case.config
    # nf4 has blocks of 64 inputs.
    in_features = -(-config.hidden_size // 64) * 64
    fan_outs = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
    dense_weights = [case.random(size, in_features, scale=in_features**-0.5) for size in fan_outs]
    bias = case.random(sum(fan_outs))
    for scheme, weights in _quantized_weights(case, dense_weights).items():
        dense = dequantized(weights, case.dtype)
        linear = kernels.QuantizedCodes(weights, case.dtype)
        for rows in (1, 5, case.sizes.num_rows):
            x = case.random(rows, in_features)
            for added_bias in (None, bias):
                expected = x.double() @ dense.double().t() + (
                    0 if added_bias is None else added_bias.double()
                )
                compare(f"{scheme} matmul of {rows} rows", linear.matmul(x, added_bias), expected)


def _quantized_weights(case: Case, dense_weights: list[Tensor]) -> dict[str, list[QuantizedWeight]]:
    """Return the weights [out_i, in] in each scheme, by the name of the scheme."""
    in_features = dense_weights[0].shape[1]
    by_scheme = {
        scheme: [quantize(weight, scheme) for weight in dense_weights] for scheme in SCHEMES
    }
    by_scheme["fp8"] = []
    by_scheme["mxfp4"] = []
    for weight in dense_weights:
        out_features = len(weight)
        codes = (weight * in_features**0.5 * 30).to(torch.float8_e4m3fn)
        scale_shape = (-(-out_features // 128), -(-in_features // 128))
        scales = 0.01 + 0.1 * torch.rand(scale_shape, generator=case.generator)
        by_scheme["fp8"].append(Fp8Weight.from_stored(codes, scales.to(case.device), (128, 128)))
        by_scheme["mxfp4"].append(
            Mxfp4Weight(
                case.random_ints(256, out_features, in_features // 2).to(case.device, torch.uint8),
                (118 + case.random_ints(6, out_features, in_features // 32)).to(
                    case.device, torch.uint8
                ),
            )
        )
    return by_scheme


def check_graphs(case: Case) -> None:
    """Compare steps of recorded CUDA graphs with the same steps run eagerly.

    Adapters, samples and the number of rows change from step to step.
    """
    config = replace(
        case.config, vocab_size=min(case.config.vocab_size, _MAX_GRAPH_VOCAB_SIZE), eos_token_ids=()
    )
    case = replace(case, config=config)
    weights = {
        name: case.random(*kv_spec, scale=(kv_spec[-1] if len(kv_spec) > 1 else 1) ** -0.5).cpu()
        for name, kv_spec in expected_shapes(config).items()
    }
    decoder = Decoder(weights, case.backend)
    kv_spec = case.backend.kv_spec
    graph_runner = CudaGraphRunner(decoder, kv_spec, max_batch=4, max_prefill_tokens_per_step=64)
    eager_runner = CudaGraphRunner(decoder, kv_spec, max_batch=4, max_prefill_tokens_per_step=64)
    if graph_runner.recorder is None:
        raise WrongResultError("no graph can be recorded on this device")
    eager_runner.recorder = None
    adapters = [_random_adapter(case, rank) for rank in _LORA_RANKS]
    batch = _Batch(
        replace(
            case,
            sizes=replace(
                case.sizes,
                prompt_lengths=(130, 3),
                samples_per_prompt=(3, 1),
                max_sampled_tokens=80,
            ),
        ),
        kv_spec,
    )
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
            case.random_ints(config.vocab_size, num_samples).tolist(),
            [sample.stored for sample in batch.running],
            RowLayout(members),
            SampleSlots(first_rows, {}, batch.prompt_pools, batch.sample_pools),
        )
        with torch.inference_mode():
            output = graph_runner.run(plan)
            assert output.logits is not None
            actual = output.hidden.clone(), output.logits.clone()
            output = eager_runner.run(plan)
            assert output.logits is not None
            expected = output.hidden, output.logits
        for what, actual_output, expected_output in zip(
            ("hidden states", "logits"), actual, expected, strict=True
        ):
            compare(
                f"{what} of a recorded step", actual_output, expected_output, TOLERANCE[case.dtype]
            )
        for sample in batch.running:
            sample.stored += 1


CHECKS: dict[str, Callable[[Case], None]] = {
    "norms": check_norms,
    "rope": check_rope,
    "swiglu": check_swiglu,
    "log_sum_exp": check_log_sum_exp,
    "sampling": check_sampling,
    "attention": check_attention,
    "tree attention": check_tree_attention,
    "lora": check_lora,
    "quantized": check_quantized,
    "graphs": check_graphs,
}
assert tuple(CHECKS) == FAMILIES


# Helpers of the checks


def _elementwise_kernels() -> Any:
    """Return the module of the kernels, which needs Triton."""
    return import_module("planish.model.kernels.triton.elementwise_kernels")


@dataclass(eq=False)
class _Prompt:
    length: int
    slot: int = -1


@dataclass(eq=False)
class _Sample:
    prompt: _Prompt
    stored: int
    capacity: int
    slot: int = -1


class _Batch:
    """A batch of prompts and samples, whose slots contain random keys and values."""

    def __init__(self, case: Case, kv_spec: KVSpec) -> None:
        self._case = case
        self.prompt_pools = KVPools(kv_spec, GappedKVPool)
        self.sample_pools = KVPools(kv_spec, GappedKVPool)
        self.running: list[_Sample] = []
        for length, count in zip(
            case.sizes.prompt_lengths, case.sizes.samples_per_prompt, strict=True
        ):
            token_counts = case.random_ints(case.sizes.max_sampled_tokens, count).tolist()
            self.add_prompt(length, [case.sizes.max_sampled_tokens, *token_counts][:count])

    def add_prompt(self, length: int, token_counts: list[int]) -> None:
        """Add a prompt of `length` tokens, and one sample for each of `token_counts`."""
        prompt = _Prompt(length)
        pool = self.prompt_pools.pool_for(capacity_for(length))
        pool.allocate(prompt)
        _fill_empty_slots(self._case, pool)
        for count in token_counts:
            stored = length % SPAN + count
            sample = _Sample(prompt, stored, capacity_for(stored + SPAN))
            pool = self.sample_pools.pool_for(sample.capacity)
            pool.allocate(sample)
            _fill_empty_slots(self._case, pool)
            self.running.append(sample)

    def remove_sample(self, sample: _Sample) -> None:
        """Free the slot of a sample and remove the sample."""
        self.sample_pools.pool_for(sample.capacity).free(sample)
        self.running.remove(sample)

    def cached_at(self, sample: _Sample, offset: int) -> tuple[Tensor, Tensor]:
        """Return the key and value at position `stored` + `offset` of the sample's slot.

        Both are [Hkv, 1, E]. The next decoding step writes position `stored`.
        """
        pool = self.sample_pools.pool_for(sample.capacity)
        positions = slice(sample.stored + offset, sample.stored + offset + 1)
        keys, values = (
            tensors[0][sample.slot, :, positions] for tensors in (pool.keys, pool.values)
        )
        return keys, values

    def cached_keys_values(self, sample: _Sample) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values that the sample's next row attends to: [Hkv, n, E]."""
        prompt_pool = self.prompt_pools.pool_for(capacity_for(sample.prompt.length))
        sample_pool = self.sample_pools.pool_for(sample.capacity)
        num_shared = sample.prompt.length // SPAN * SPAN
        keys, values = (
            torch.cat(
                [
                    prompt_tensors[0][sample.prompt.slot, :, :num_shared],
                    sample_tensors[0][sample.slot, :, : sample.stored],
                ],
                1,
            )
            for prompt_tensors, sample_tensors in (
                (prompt_pool.keys, sample_pool.keys),
                (prompt_pool.values, sample_pool.values),
            )
        )
        return keys, values


def _fill_empty_slots(case: Case, pool: KVPool) -> None:
    """Write random numbers to every slot of the pool that contains only zeros."""
    for tensor in (*pool.keys, *pool.values):
        is_empty = ~tensor.flatten(1).any(1)
        tensor[is_empty] = case.random(*tensor.shape)[is_empty]


def _pointing_queries(case: Case, keys: Tensor, masked_keys: Any, row: int) -> Tensor:
    """Return queries [Hq, E] of one row, each of which points at one key.

    Most heads point at a key of `keys` [Hkv, n, E]. The others point at a key of `masked_keys`, to
    which the row must not attend. `masked_keys` has keys [Hkv, m, E], or is a pair of such keys and
    values.
    """
    masked_keys = masked_keys[0] if isinstance(masked_keys, tuple) else masked_keys
    num_heads, (kv_heads, count, head_dim) = case.config.num_heads, keys.shape
    block_ends = [
        0,
        count - 1,
        *(edge - side for edge in range(SPAN, count, SPAN) for side in (0, 1)),
    ]
    random_keys = case.random_ints(count, num_heads).tolist()
    pointed_keys = torch.empty(num_heads, head_dim, dtype=torch.float32, device=keys.device)
    for head in range(num_heads):
        kv_head, target_kind = head // (num_heads // kv_heads), head + row
        if target_kind % 4 == 0 and masked_keys.shape[1]:
            pointed_keys[head] = masked_keys[kv_head, 0].float()
        elif target_kind % 4 == 1:
            pointed_keys[head] = keys[
                kv_head, block_ends[target_kind // 4 % len(block_ends)]
            ].float()
        else:
            pointed_keys[head] = keys[kv_head, random_keys[head]].float()
    return (pointed_keys * (_POINTER_SCORE / math.sqrt(head_dim))).to(keys.dtype)


def _reference_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention output [T, Hq, E] of rows q [T, Hq, E], in float32.

    All rows share keys and values [Hkv, n, E]. `mask` [T, n] is true where a row must not attend
    to a key; None hides nothing.
    """
    num_rows, num_heads, head_dim = q.shape
    grouped = q.float().view(num_rows, keys.shape[0], -1, head_dim)
    scores = torch.einsum("thge,hne->thgn", grouped, keys.float()) * head_dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None], float("-inf"))
    output = torch.einsum("thgn,hne->thge", scores.softmax(-1), values.float())
    return output.reshape(num_rows, num_heads, head_dim)


# The process


def main() -> None:
    """Check the families of the request; write a line before each check, and one with its verdict.

    If a check raises another error than WrongResultError, the process exits with status 1, because
    the CUDA context may be lost.
    """
    request = Request(**json.load(sys.stdin))
    accumulate_in_float32()  # the references rely on it
    device = torch.device(request.device)
    Device(device).make_current()
    case = case_of(Path(request.directory), DTYPES[request.dtype], device)
    for family in request.families:
        print(json.dumps({"begin": family}), flush=True)
        try:
            verdict = check(family, case)
        except Exception as error:
            verdict = Verdict(family, False, f"{type(error).__name__}: {error}"[-2000:])
            print(json.dumps({"verdict": asdict(verdict)}), flush=True)
            sys.exit(1)
        print(json.dumps({"verdict": asdict(verdict)}), flush=True)


def case_of(
    directory: Path, dtype: torch.dtype, device: torch.device, sizes: Sizes = Sizes()
) -> Case:
    """Return a case with one layer of the model in `directory`."""
    # No kernel computes experts, so the checks use a layer without them.
    config = replace(
        ModelConfig.from_directory(directory),
        num_layers=1,
        num_experts=0,
        experts_per_token=0,
        dense_layers=(),
    )
    return Case(config, dtype, device, sizes)


def check(family: str, case: Case) -> Verdict:
    """Check one family and return the verdict. Errors other than WrongResultError are raised."""
    # Each family gets a new generator. So its inputs do not depend on the families checked before.
    case = replace(case, generator=torch.Generator().manual_seed(0))
    try:
        CHECKS[family](case)
        Device(case.device).synchronize(all_streams=True)
    except WrongResultError as error:
        return Verdict(family, False, f"wrong result: {error}")
    return Verdict(family, True)


if __name__ == "__main__":
    main()
