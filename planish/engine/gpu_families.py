"""Checks of the GPU kernels: each kernel family is compared with torch at one model's shapes.

kernels/triton/self_test.py runs this module in a subprocess, because an illegal memory access ends
the CUDA context of its process. The module reads a `Request` from its standard input. For each
family it writes one line before the check and one line with the verdict.

The inputs make mistakes visible. With ordinary attention scores, one key among a thousand changes
the output by less than a bf16 rounding error. So each query here points at one key: the first or
last key of a block, a key that the row must not attend to, or a random key. A kernel that misses
its key, or attends to a hidden one, then has an error as large as the output itself.

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
from planish.engine.sampling.model_runner import InputBatch
from planish.engine.sampling.sampling_head import RowLayout
from planish.engine.settings import DTYPES
from planish.model.config import ModelConfig
from planish.model.decoder import Decoder
from planish.model.kernels.backend import Backend
from planish.model.kernels.choose import choose_backend
from planish.model.kernels.device import Device, accumulate_in_float32
from planish.model.kernels.reference.attention import dense_mask_attention
from planish.model.kernels.reference.backend import TorchBackend
from planish.model.kernels.reference.sampling_attention import PrefillSpan
from planish.model.kernels.triton.adapters import AdapterTables
from planish.model.kernels.triton.families import FAMILIES
from planish.model.kernels.triton.sampling_attention import DecodeTables, GpuPrefill, PoolBases
from planish.model.kernels.triton.self_test import Request
from planish.model.kernels.triton.tree_attention import TritonTreeAttention
from planish.model.kernels.verdicts import Verdict
from planish.model.kv_cache import GappedKVPool, KVPool, KVPools, KVSpec, SlotOwner
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
_MEAN_SHARE = 6
"""The root mean square of all differences may be at most TOLERANCE / _MEAN_SHARE.

It is relative to the root mean square of the reference. For comparison: rounding the output to bf16
gives 0.0017, and two more roundings of intermediate results give 0.003.
"""
_VOCABULARY = 8192
"""The maximum vocabulary size in `check_graphs`.

The LM head is torch's own matmul there, so its full size need not be checked.
"""
_SPLIT_VOCABULARY = 9001
"""A vocabulary size that the sampling kernel reads in more than one block."""
_RANKS = (32, 5)
"""The LoRA ranks of the two adapters in the checks."""
_POINTED = 24.0
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

    rows: int = 37
    """The number of rows for norms, RoPE, SwiGLU, log-sum-exp and sampling.

    It is not a multiple of the kernels' tile sizes.
    """
    prompts: tuple[int, ...] = (1500, 130, 3)
    """The number of positions of each prompt in the KV cache."""
    samples: tuple[int, ...] = (9, 2, 1)
    """The number of samples of each prompt."""
    sampled: int = 300
    """The maximum number of sampled tokens of a sample."""
    tree: tuple[int, ...] = (150, 80, 60)
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
        made = torch.randn(shape, generator=self.generator) * scale
        return made.to(dtype or self.dtype).to(self.device)

    @cached_property
    def backend(self) -> Backend:
        """The backend of a model with these shapes."""
        return choose_backend(self.config, self.dtype, self.device, deterministic=False)

    @cached_property
    def reference(self) -> TorchBackend:
        """The reference implementation of the elementwise kernels, in float64."""
        return TorchBackend(self.config, torch.float64, self.device)

    def choices(self, high: int, *shape: int) -> Tensor:
        """Return random integers from 0 to `high` - 1, int64, on the CPU."""
        return torch.randint(high, shape, generator=self.generator)


def compare(what: str, found: Tensor, reference: Tensor, tolerance: float | None = None) -> None:
    """Raise WrongResultError if `found` and `reference` differ by more than rounding errors.

    `what` names the result in the error message. `tolerance` is TOLERANCE[found.dtype] by default.
    """
    if found.shape != reference.shape:
        raise WrongResultError(f"{what}: {tuple(found.shape)} for {tuple(reference.shape)}")
    tolerance = TOLERANCE[found.dtype] if tolerance is None else tolerance
    expected = reference.detach().double()
    difference = found.detach().double() - expected
    scale = max(float(expected.square().mean().sqrt()), 1e-30)
    largest = float(difference.abs().max()) / scale
    mean = float(difference.square().mean().sqrt()) / scale
    if not (largest <= tolerance * max(1.0, float(expected.abs().max()) / scale) and
            mean <= tolerance / _MEAN_SHARE):  # fmt: skip
        raise WrongResultError(
            f"{what}: the largest difference is {largest:.2g} and the mean one {mean:.2g} "
            f"of the root mean square; {tolerance:.2g} and {tolerance / _MEAN_SHARE:.2g} are allowed"
        )


# Families


def check_norms(case: Case) -> None:
    """Check RMSNorm of hidden states and, if the model has it, of query heads."""
    config, rows = case.config, case.sizes.rows
    _check_norm(case, (rows, config.hidden_size), True)
    if config.qk_norm:
        _check_norm(case, (rows, config.num_heads, config.head_dim), False)


def _check_norm(case: Case, shape: tuple[int, ...], adds: bool) -> None:
    """Check RMSNorm and its gradient. `adds`: the kernel first adds a second input."""
    own, reference, eps = _elementwise(), case.reference, case.config.rms_norm_eps
    x = case.random(*shape, dtype=torch.float32, scale=3.0)
    added = case.random(*shape) if adds else None
    weight = 1 + case.random(shape[-1], dtype=torch.float32, scale=0.2)
    grad, residual = case.random(*shape), case.random(*shape, dtype=torch.float32)
    wide = None if added is None else added.double()
    total, normed, factor = reference.rms_norm(x.double(), wide, weight.double(), eps)
    wanted = reference.rms_norm_backward(
        grad.double(), total, weight.double(), factor, residual.double()
    )
    factor = factor.squeeze(-1)
    for in_place in (False, True):
        found = own.rms_norm(x.clone(), added, weight, eps, case.dtype, in_place=in_place)
        for what, ours, theirs in zip(
            ("sum", "norm", "factor"), found, (total, normed, factor), strict=True
        ):
            compare(f"{what} of {shape}", ours, theirs)
    back = own.rms_norm_backward(grad, total.float(), weight, factor.float(), residual)
    compare(f"gradient of the norm of {shape}", back, wanted, 1e-3)


def check_rope(case: Case) -> None:
    """Check RoPE, its inverse, and the fused kernel that also normalizes queries and keys."""
    config, rows = case.config, case.sizes.rows
    own, e = _elementwise(), config.head_dim
    heads = (config.num_heads, config.num_kv_heads)
    angles = case.random(rows, 1, e // 2, dtype=torch.float32, scale=2.0)
    cos, sin = angles.cos(), angles.sin()
    joint = case.random(rows, (heads[0] + 2 * heads[1]) * e)
    q, k, _ = joint.unflatten(1, (-1, e)).split([heads[0], heads[1], heads[1]], 1)
    for name, x in (("q", q), ("k", k)):
        for back in (False, True):
            found = own.rope(x, cos, sin, inverse=back)
            compare(
                f"rotated {name}", found, case.reference.rope(x.double(), cos, sin, inverse=back)
            )
    norms = 1 + case.random(2, e, dtype=torch.float32, scale=0.2)
    for weights in (None, (norms[0], norms[1])) if config.qk_norm else (None,):
        ours = own.qk_norm_rope(joint, heads, weights, config.rms_norm_eps, cos, sin)
        for index, x in enumerate((q, k)):
            x = x.double()
            if weights is not None:
                factor = (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
                x = (x * factor * weights[index]).to(case.dtype).double()
            compare("rotated and normed heads", ours[index], case.reference.rope(x, cos, sin))


def check_swiglu(case: Case) -> None:
    """Check SwiGLU and its gradient."""
    own, width = _elementwise(), case.config.intermediate_size
    gate_up = case.random(case.sizes.rows, 2 * width, scale=3.0)
    grad = case.random(case.sizes.rows, width)
    wide = gate_up.double()
    compare("SwiGLU", own.swiglu(gate_up), case.reference.swiglu(wide))
    wanted = case.reference.swiglu_backward(grad.double(), wide)
    compare("gradient of SwiGLU", own.swiglu_backward(grad, gate_up), wanted)


def check_log_sum_exp(case: Case) -> None:
    """Check the log-sum-exp of logits, the weights exp(logit - max), and the gradient."""
    own, vocab = _elementwise(), case.config.vocab_size
    rows = max(2, case.sizes.rows // 4)
    logits = case.random(rows, vocab, dtype=torch.float32, scale=4.0)
    # A kernel with a wrong bound misses the last logit of row 0, or reads the first one of row 1.
    logits[0, -1], logits[1, 0] = 40.0, 40.0
    temperature = 0.5 + torch.rand(rows, generator=case.generator).to(case.device)
    weights, wide = logits.clone(), logits.double()
    found = own.log_sum_exp(logits, temperature, weights=weights)
    wanted = case.reference.log_sum_exp(wide, temperature.double(), weights=wide)
    compare("log-sum-exp", found, wanted, 1e-6)
    compare("weights", weights, wide, 1e-4)
    logits[0, 0] = float("nan")
    if math.isfinite(float(own.log_sum_exp(logits, temperature)[0])):
        raise WrongResultError("log-sum-exp of a row with a NaN is finite")
    logits[0, 0] = 0.0
    counts = torch.arange(rows) % 3
    first = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(case.device)
    row = torch.arange(rows).repeat_interleave(counts).to(case.device)
    targets = case.choices(vocab, len(row)).to(case.device)
    grads = case.random(len(row), dtype=torch.float32)
    wide = logits.double()
    total = case.reference.log_sum_exp(wide, wide.new_full((rows,), 0.7))
    own.log_sum_exp_backward_(logits, 0.7, total.float(), first, targets, grads)
    case.reference.log_sum_exp_backward_(wide, 0.7, total, first, targets, grads.double())
    compare("gradient of the logits", logits, wide, 1e-3)


def check_sampling(case: Case) -> None:
    """Check sampling at the model's vocabulary size, and at one of several blocks."""
    for vocab in (case.config.vocab_size, _SPLIT_VOCABULARY):
        _check_sampling(case, vocab)


def _check_sampling(case: Case, vocab: int) -> None:
    """Check that each uniform number gives the token of the cumulative distribution.

    The weights are powers of two. Their sums are exact, so exactly one token is correct.
    """
    rows = max(4, case.sizes.rows)
    weights = torch.exp2(-case.choices(12, rows, vocab).float()).to(case.device)
    weights[:, -1] = 0.0
    weights[0] = 0.0
    weights[0, vocab // 2] = 1.0
    uniforms = torch.rand(rows, generator=case.generator, dtype=torch.float64)
    # These two numbers must give the first and the last token with a nonzero weight.
    uniforms[1], uniforms[2] = 0.0, 1 - 2.0**-53
    ends = weights.double().cumsum(1)
    goals = uniforms.to(case.device).unsqueeze(1) * ends[:, -1:]
    expected = (ends > goals).int().argmax(1)
    found = _elementwise().sample(weights, uniforms.to(case.device))
    wrong = int((found != expected).sum())
    if wrong:
        raise WrongResultError(f"{wrong} of {rows} tokens are not those of their uniform numbers")


def check_attention(case: Case) -> None:
    """Check attention and KV cache writes, first of a decoding step, then of a prefill.

    The decoding step has key ranges so long that the kernel cuts them into several pieces. Three of
    its rows have no sample.
    """
    shape = KVSpec(1, case.config.num_kv_heads, case.config.head_dim, case.dtype, case.device)
    bases = PoolBases(shape, case.config.max_context)
    batch = _Batch(case, shape)
    rows: dict[SlotOwner, int] = {sample: row for row, sample in enumerate(batch.running[::-1])}
    attention = DecodeTables(bases, len(rows) + 3, case.config.num_heads)
    attention.fill(rows, batch.prompts, batch.samples)
    total = len(rows) + 3
    k, v = (case.random(total, shape.heads, shape.head_dim) for _ in range(2))
    seen = {}
    for sample in batch.running:
        row = rows[sample]
        hidden = batch.kept(sample, 1)
        keys, values = batch.seen(sample)
        seen[row] = (torch.cat([keys, k[row, :, None]], 1), torch.cat([values, v[row, :, None]], 1))
        seen[row] = (*seen[row], hidden)
    q = case.random(total, case.config.num_heads, shape.head_dim, scale=0.3)
    for row, (keys, _, hidden) in seen.items():
        q[row] += _pointers(case, keys, hidden, row)
    found = attention(0, q, k, v)
    for row, (keys, values, _) in seen.items():
        compare(f"decode of row {row}", found[row], _attended(q[row, None], keys, values, None)[0])
    for row in set(range(total)).difference(seen):
        if bool(found[row].any()):
            raise WrongResultError("decode of a row without a sample is not zero")
    for sample in batch.running:
        kept = batch.kept(sample, 0)
        row = rows[sample]
        if not torch.equal(kept[0][:, -1], k[row]) or not torch.equal(kept[1][:, -1], v[row]):
            raise WrongResultError("decode keeps the new key and value in a wrong place")
    _check_prefill(case, shape, bases)


def _check_prefill(case: Case, shape: KVSpec, bases: PoolBases) -> None:
    """Check the prefill of prompts whose first third is already in the KV cache."""
    pools = KVPools(shape, GappedKVPool)
    prompts = [_Prompt(length) for length in case.sizes.prompts]
    spans, row = [], 2
    for prompt in prompts:
        pool = pools.pool_for(capacity_for(prompt.length))
        pool.allocate(prompt)
        _fill(case, pool)
        begun = prompt.length // 3
        spans.append(PrefillSpan(pool, prompt.slot, row, begun, prompt.length - begun))
        row += prompt.length - begun + 1
    k, v = (case.random(row, shape.heads, shape.head_dim) for _ in range(2))
    q = case.random(row, case.config.num_heads, shape.head_dim, scale=0.3)
    expected = []
    for span in spans:
        keys, values = (kept[0][span.slot].clone() for kept in (span.pool.keys, span.pool.values))
        rows = slice(span.row, span.row + span.count)
        places = slice(span.start, span.start + span.count)
        keys[:, places], values[:, places] = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
        for offset in range(span.count):
            end = span.start + offset + 1
            q[span.row + offset] += _pointers(
                case, keys[:, :end], keys[:, end : end + 1], span.row + offset
            )
        expected.append((keys, values))
    found = GpuPrefill(spans, bases, case.config.num_heads)(0, q, k, v)
    for span, (keys, values) in zip(spans, expected, strict=True):
        rows = slice(span.row, span.row + span.count)
        visible = torch.arange(span.start + 1, span.start + span.count + 1, device=case.device)
        hidden = torch.arange(keys.shape[1], device=case.device) >= visible.unsqueeze(1)
        reference = _attended(q[rows], keys, values, hidden)
        compare(f"prefill from position {span.start}", found[rows], reference)
        if not torch.equal(span.pool.keys[0][span.slot], keys):
            raise WrongResultError("prefill keeps keys in a wrong place")


def check_tree_attention(case: Case) -> None:
    """Check the training attention over a prefix tree, and its gradients."""
    config, sizes = case.config, case.sizes
    heads, e = (config.num_heads, config.num_kv_heads), config.head_dim
    (micro_batch,) = pack([np.array(sequence) for sequence in _tree(sizes)], 1 << 20)
    rows = len(micro_batch)
    joint = case.random(rows, (heads[0] + 2 * heads[1]) * e)
    q, k, v = joint.unflatten(1, (-1, e)).split([heads[0], heads[1], heads[1]], 1)
    # Scale the queries, so that the attention weights are peaked. Each row then depends on only a
    # few keys, and a missed key changes its output visibly.
    q = (q * 4).contiguous()
    grad = case.random(rows, heads[0], e)
    ours = [x.detach().requires_grad_() for x in (q, k, v)]
    theirs = [x.detach().float().requires_grad_() for x in (q, k, v)]
    found = TritonTreeAttention(micro_batch, case.device)(0, *ours)
    reference = dense_mask_attention(micro_batch, case.device)(0, *theirs)
    compare(f"attention over {rows} rows", found, reference)
    found_grads = torch.autograd.grad(found, ours, grad)
    wanted = torch.autograd.grad(reference, theirs, grad.float())
    for name, mine, other in zip("qkv", found_grads, wanted, strict=True):
        # In bf16 the attention weights and their gradients are rounded too, so allow twice as much.
        compare(f"gradient of {name} over {rows} rows", mine, other, 2 * TOLERANCE[mine.dtype])


def _tree(sizes: Sizes) -> Iterator[list[int]]:
    """Return token sequences that share prefixes, one per leaf of the tree in `sizes`."""
    token = iter(range(1, 1 << 30))

    def grown(level: int, before: list[int]) -> Iterator[list[int]]:
        for _ in range(sizes.branches[level]):
            path = before + [next(token) for _ in range(sizes.tree[level])]
            if level + 1 == len(sizes.tree):
                yield path
            else:
                yield from grown(level + 1, path)

    return grown(0, [])


def check_lora(case: Case) -> None:
    """Check the LoRA matmuls of all target modules and the LM head, with several adapters."""
    config = case.config
    adapters = [_adapter(case, rank) for rank in _RANKS]
    for rows in case.sizes.lora_rows:
        tables = AdapterTables(config, case.dtype, case.device, rows, len(adapters))
        cut = [rows // 3, rows // 3 + 1, rows]
        members = [
            AdapterRange(0, cut[0], adapters[0]),
            AdapterRange(cut[0], cut[1], None),
            AdapterRange(cut[1], cut[2], adapters[1]),
        ]
        tables.fill(members)
        sites = list(zip(FUSED_MODULE_NAMES, fused_modules(config, 0), strict=True))
        for name, linears in sites if rows == min(case.sizes.lora_rows) else sites[:1]:
            found = getattr(adapters[0].layers[0], name)
            sizes = [len(b) for b in found.bs]
            x = case.random(rows, found.a.shape[1])
            out = case.random(rows, sum(sizes))
            expected = _with_lora(out, x, members, lambda w, name=name: getattr(w.layers[0], name))
            tables.add_(x, out, sizes, 0, name)
            compare(f"LoRA of {'+'.join(linears)}, {rows} rows", out, expected)
    tables = AdapterTables(config, case.dtype, case.device, 20, len(adapters))
    members = [AdapterRange(0, 9, adapters[1]), AdapterRange(9, 20, adapters[0])]
    tables.fill(members)
    hidden = case.random(20, config.hidden_size)
    logits = case.random(20, config.vocab_size, dtype=torch.float32)
    expected = _with_lora(logits, hidden, members, lambda weights: weights.head)
    tables.add_head_(hidden, logits)
    # The product with A is rounded to the weights' dtype before it is multiplied by B.
    compare("LoRA of the head", logits, expected, TOLERANCE[case.dtype])


def _with_lora(
    out: Tensor,
    x: Tensor,
    members: list[AdapterRange],
    site_of: Callable[[LoraWeights], Any],
) -> Tensor:
    out = out.float()
    for rows in members:
        if rows.weights is None:
            continue
        site, part = site_of(rows.weights), slice(rows.start, rows.stop)
        low = (x[part].float() @ site.a.float().t()).to(x.dtype).float()
        lows = low.chunk(len(site.bs), 1)
        out[part] += torch.cat(
            [mine @ b.float().t() for mine, b in zip(lows, site.bs, strict=True)], 1
        )
    return out


def _adapter(case: Case, rank: int) -> LoraWeights:
    """Return an adapter with random A and B.

    The outputs that it adds have the magnitude of the base model's outputs.
    """
    layout = LoraLayout(case.config, LoraConfig(rank=rank))
    flat = torch.empty(layout.size)
    for entry in layout.entries:
        scale = 1 / math.sqrt(rank) / layout.scaling if entry.is_b else entry.shape[1] ** -0.5
        made = torch.randn(entry.size, generator=case.generator) * scale
        flat[entry.offset : entry.offset + entry.size] = made
    return LoraWeights(layout, flat, case.backend)


def check_quantized(case: Case) -> None:
    """Check the matmuls of decoding steps with weights of each quantization scheme."""
    kernels: Any = import_module("planish.model.kernels.triton.quantized_kernels")
    config = case.config
    # nf4 has blocks of 64 inputs.
    fan_in = -(-config.hidden_size // 64) * 64
    sizes = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
    given = [case.random(size, fan_in, scale=fan_in**-0.5) for size in sizes]
    bias = case.random(sum(sizes))
    for scheme, weights in _quantized(case, given).items():
        dense = dequantized(weights, case.dtype)
        linear = kernels.QuantizedCodes(weights, case.dtype)
        for rows in (1, 5, case.sizes.rows):
            x = case.random(rows, fan_in)
            for own in (None, bias):
                expected = x.double() @ dense.double().t() + (0 if own is None else own.double())
                compare(f"{scheme} matmul of {rows} rows", linear.matmul(x, own), expected)


def _quantized(case: Case, given: list[Tensor]) -> dict[str, list[QuantizedWeight]]:
    """Return the weights [out_i, in] in each scheme, by the name of the scheme."""
    fan_in = given[0].shape[1]
    found = {scheme: [quantize(weight, scheme) for weight in given] for scheme in SCHEMES}
    found["fp8"] = []
    found["mxfp4"] = []
    for weight in given:
        fan_out = len(weight)
        codes = (weight * fan_in**0.5 * 30).to(torch.float8_e4m3fn)
        grid = (-(-fan_out // 128), -(-fan_in // 128))
        scales = 0.01 + 0.1 * torch.rand(grid, generator=case.generator)
        found["fp8"].append(Fp8Weight.from_stored(codes, scales.to(case.device), (128, 128)))
        found["mxfp4"].append(
            Mxfp4Weight(
                case.choices(256, fan_out, fan_in // 2).to(case.device, torch.uint8),
                (118 + case.choices(6, fan_out, fan_in // 32)).to(case.device, torch.uint8),
            )
        )
    return found


def check_graphs(case: Case) -> None:
    """Compare steps of recorded CUDA graphs with the same steps run eagerly.

    Adapters, samples and the number of rows change from step to step.
    """
    config = replace(
        case.config, vocab_size=min(case.config.vocab_size, _VOCABULARY), eos_token_ids=()
    )
    case = replace(case, config=config)
    weights = {
        name: case.random(*shape, scale=(shape[-1] if len(shape) > 1 else 1) ** -0.5).cpu()
        for name, shape in expected_shapes(config).items()
    }
    decoder = Decoder(weights, case.backend)
    shape = KVSpec.from_backend(case.backend)
    recorded = CudaGraphRunner(decoder, shape, max_batch=4, max_prefill_tokens_per_step=64)
    eager = CudaGraphRunner(decoder, shape, max_batch=4, max_prefill_tokens_per_step=64)
    if recorded.recorder is None:
        raise WrongResultError("no graph can be recorded on this device")
    eager.recorder = None
    adapters = [_adapter(case, rank) for rank in _RANKS]
    batch = _Batch(
        replace(case, sizes=replace(case.sizes, prompts=(130, 3), samples=(3, 1), sampled=80)),
        shape,
    )
    for count, own in ((4, adapters), (3, [None, adapters[1]]), (4, adapters[::-1]), (3, [None])):
        while len(batch.running) > count:
            batch.end(batch.running[0])
        if len(batch.running) < count:
            batch.begin(40, [5])
        members = [(own[index % len(own)], 1) for index in range(count)]
        members.sort(key=lambda member: id(member[0]))
        rows = InputBatch(
            case.choices(config.vocab_size, count).tolist(),
            [sample.stored for sample in batch.running],
            RowLayout(members),
        )
        row_of: dict[SlotOwner, int] = {sample: row for row, sample in enumerate(batch.running)}
        with torch.inference_mode():
            ours = recorded.decode(rows, row_of, batch.prompts, batch.samples)
            ours = tuple(x.clone() for x in ours)
            theirs = eager.decode(rows, row_of, batch.prompts, batch.samples)
        for what, mine, other in zip(("hidden states", "logits"), ours, theirs, strict=True):
            compare(f"{what} of a recorded step", mine, other, TOLERANCE[case.dtype])
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


def _elementwise() -> Any:
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

    def __init__(self, case: Case, shape: KVSpec) -> None:
        self._case = case
        self.prompts = KVPools(shape, GappedKVPool)
        self.samples = KVPools(shape, GappedKVPool)
        self.running: list[_Sample] = []
        for length, count in zip(case.sizes.prompts, case.sizes.samples, strict=True):
            sampled = case.choices(case.sizes.sampled, count).tolist()
            self.begin(length, [case.sizes.sampled, *sampled][:count])

    def begin(self, length: int, sampled: list[int]) -> None:
        """Add a prompt of `length` tokens, and one sample for each token count in `sampled`."""
        prompt = _Prompt(length)
        pool = self.prompts.pool_for(capacity_for(length))
        pool.allocate(prompt)
        _fill(self._case, pool)
        for count in sampled:
            stored = length % SPAN + count
            sample = _Sample(prompt, stored, capacity_for(stored + SPAN))
            pool = self.samples.pool_for(sample.capacity)
            pool.allocate(sample)
            _fill(self._case, pool)
            self.running.append(sample)

    def end(self, sample: _Sample) -> None:
        """Free the slot of a sample and remove the sample."""
        self.samples.pool_for(sample.capacity).free(sample)
        self.running.remove(sample)

    def kept(self, sample: _Sample, more: int) -> tuple[Tensor, Tensor]:
        """Return the key and value at position `stored` + `more` of the sample's slot.

        Both are [Hkv, 1, E]. The next decoding step writes position `stored`.
        """
        pool = self.samples.pool_for(sample.capacity)
        places = slice(sample.stored + more, sample.stored + more + 1)
        keys, values = (kept[0][sample.slot, :, places] for kept in (pool.keys, pool.values))
        return keys, values

    def seen(self, sample: _Sample) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values that the sample's next row attends to: [Hkv, n, E]."""
        prompt, own = (
            self.prompts.pool_for(capacity_for(sample.prompt.length)),
            self.samples.pool_for(sample.capacity),
        )
        whole = sample.prompt.length // SPAN * SPAN
        keys, values = (
            torch.cat(
                [
                    theirs[0][sample.prompt.slot, :, :whole],
                    mine[0][sample.slot, :, : sample.stored],
                ],
                1,
            )
            for theirs, mine in ((prompt.keys, own.keys), (prompt.values, own.values))
        )
        return keys, values


def _fill(case: Case, pool: KVPool) -> None:
    """Write random numbers to every slot of the pool that contains only zeros."""
    for kept in (*pool.keys, *pool.values):
        new = ~kept.flatten(1).any(1)
        kept[new] = case.random(*kept.shape)[new]


def _pointers(case: Case, keys: Tensor, hidden: Any, row: int) -> Tensor:
    """Return queries [Hq, E] of one row, each of which points at one key.

    Most heads point at a key of `keys` [Hkv, n, E]. The others point at a key of `hidden`, to which
    the row must not attend. `hidden` has keys [Hkv, m, E], or is a pair of such keys and values.
    """
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    heads, (kv_heads, count, e) = case.config.num_heads, keys.shape
    ends = [0, count - 1, *(edge - side for edge in range(SPAN, count, SPAN) for side in (0, 1))]
    chosen = case.choices(count, heads).tolist()
    of = torch.empty(heads, e, dtype=torch.float32, device=keys.device)
    for head in range(heads):
        kv_head, turn = head // (heads // kv_heads), head + row
        if turn % 4 == 0 and hidden.shape[1]:
            of[head] = hidden[kv_head, 0].float()
        elif turn % 4 == 1:
            of[head] = keys[kv_head, ends[turn // 4 % len(ends)]].float()
        else:
            of[head] = keys[kv_head, chosen[head]].float()
    return (of * (_POINTED / math.sqrt(e))).to(keys.dtype)


def _attended(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """Return the attention output [T, Hq, E] of rows q [T, Hq, E], in float32.

    All rows share keys and values [Hkv, n, E]. `hidden` [T, n] is true where a row must not attend
    to a key; None hides nothing.
    """
    rows, heads, e = q.shape
    grouped = q.float().view(rows, keys.shape[0], -1, e)
    scores = torch.einsum("thge,hne->thgn", grouped, keys.float()) * e**-0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    found = torch.einsum("thgn,hne->thge", scores.softmax(-1), values.float())
    return found.reshape(rows, heads, e)


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
