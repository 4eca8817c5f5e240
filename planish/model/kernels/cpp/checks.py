"""The self-test of the C++ kernels: a program that compares each kernel family with torch.

self_test.py runs this program once per machine, in a separate process, because a faulty kernel may
crash its process.

Shapes: T rows, H heads, E head_dim.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.kernels.cpp import head as head_ops
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.decode_pass import DecodeLayer, DecodePass
from planish.model.kernels.cpp.delta_net import SegmentTables, scan
from planish.model.kernels.cpp.matmul import (
    CppAdapterBatch,
    CppPackedAdapter,
    CppPackedWeight,
    WeightArena,
    supports_bf16_matmul,
)
from planish.model.kernels.cpp.quantized_matmul import CppQuantizedWeight
from planish.model.kernels.verdicts import Verdict
from planish.model.quantization import Mxfp4Weight, QuantizedWeight, dequantized, quantize
from planish.model.weight_sizes import SCHEMES

_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""The maximum error compared with torch in float64, relative to the largest value."""


class Mismatch(Exception):
    """The result of a kernel differs from torch's."""


def main(library: str, tiles: str, *families: str) -> None:
    """Test the families and print the verdict of each as one line of JSON.

    `library`: the path of the compiled kernels. `tiles`: "1" to use AMX, else "0".
    """
    under_test = ops.Library(library)
    under_test.use_amx(int(tiles))
    torch.set_num_threads(2)
    with _serving(under_test):
        for family in families:
            print(json.dumps(asdict(verdict_of(family))), flush=True)


@contextmanager
def _serving(library: ops.Library) -> Iterator[None]:
    """Make the functions of ops.py call this untested library while the block runs."""
    ops.under_test = library
    ops.load_library.cache_clear()
    try:
        yield
    finally:
        ops.under_test = None
        ops.load_library.cache_clear()


def verdict_of(family: str) -> Verdict:
    """Test one family in this process with the kernels that `ops.load_library` returns."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            CHECKS[family]()
    except Mismatch as error:
        return Verdict(family, False, str(error))
    except Exception as error:  # The cause may be a missing function or lack of memory.
        return Verdict(family, False, f"{type(error).__name__}: {error}")
    return Verdict(family, True)


def _close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((found.double() - expected.double()).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise Mismatch(f"{name} differs from torch by {error:.2g} of the largest value")


def _same(name: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        raise Mismatch(f"{name}: a row's bits depend on the other rows")


def _equal(name: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        raise Mismatch(f"{name} differ from torch's")


def _for_dtypes(test: Callable[[torch.dtype, float], None]) -> Callable[[], None]:
    def run() -> None:
        for dtype, tolerance in _TOLERANCES.items():
            test(dtype, tolerance)

    return run


def _for_matmul_dtypes(test: Callable[[torch.dtype, float], None]) -> Callable[[], None]:
    """Return a check that runs `test` for each dtype that this CPU's matmul kernels support."""

    def run() -> None:
        for dtype, tolerance in _TOLERANCES.items():
            if dtype == torch.float32 or supports_bf16_matmul():
                test(dtype, tolerance)

    return run


def _amx() -> None:
    library = ops.load_library()
    assert library is not None
    if not library.amx_self_test():
        raise Mismatch("matmuls with tiles differ from those without")
    library.use_amx(1)  # The checks of the other families then use AMX.


def _matmul(dtype: torch.dtype, tolerance: float) -> None:
    for rows, fan_out, fan_in in ((1, 16, 34), (5, 333, 64), (70, 640, 576)):
        weight, x = torch.randn(fan_out, fan_in).to(dtype), torch.randn(rows, fan_in).to(dtype)
        bias = torch.randn(fan_out).to(dtype)
        panels = CppPackedWeight(weight, WeightArena(0))
        found = panels.matmul(x, bias)
        _close("the product", found, x.double() @ weight.double().t() + bias.double(), tolerance)
        part = slice(rows // 2, rows // 2 + 1)
        _same("the product", panels.matmul(x[part], bias), found[part])
        if fan_out % 2 == 0:
            grad = torch.randn(rows, fan_out).to(dtype)
            back = CppPackedWeight(weight, WeightArena(0), transposed=True).matmul(grad, None)
            _close("the gradient", back, grad.double() @ weight.double(), tolerance)
    _quantized_matmul(dtype)


def _quantized_matmul(dtype: torch.dtype) -> None:
    """Check that quantized matmuls equal matmuls of the dequantized weights.

    `_matmul` compares matmuls of ordinary weights with torch.
    """
    for rows, sizes, fan_in in ((1, (16,), 64), (5, (144, 32), 128), (37, (320,), 192)):
        given = [torch.randn(size, fan_in).to(dtype) for size in sizes]
        x, grad = torch.randn(rows, fan_in).to(dtype), torch.randn(rows, sum(sizes)).to(dtype)
        for scheme in (*SCHEMES, "mxfp4"):
            weights: list[QuantizedWeight]
            if scheme == "mxfp4":
                weights = [
                    Mxfp4Weight(
                        torch.randint(256, (size, fan_in // 2)).to(torch.uint8),
                        torch.randint(110, 130, (size, fan_in // 32)).to(torch.uint8),
                    )
                    for size in sizes
                ]
            else:
                weights = [quantize(weight, scheme) for weight in given]
            whole = dequantized(weights, dtype)
            panels = CppQuantizedWeight(weights, WeightArena(0))
            expected = CppPackedWeight(whole, WeightArena(0)).matmul(x, None)
            _equal(f"the products with {scheme}", panels.matmul(x, None), expected)
            expected = CppPackedWeight(whole, WeightArena(0), transposed=True).matmul(grad, None)
            _equal(f"the gradients with {scheme}", panels.matmul_backward(grad), expected)


def _lora(dtype: torch.dtype, tolerance: float) -> None:
    fan_in, sizes, rows = 96, (64, 32, 32), 37
    x, grad = torch.randn(rows, fan_in).to(dtype), torch.randn(rows, sum(sizes)).to(dtype)
    adapters = []
    for rank in (3, 16):
        a = torch.randn(len(sizes) * rank, fan_in).to(dtype)
        b_matrices = [torch.randn(size, rank).to(dtype) for size in sizes]
        adapters.append((a, b_matrices, CppPackedAdapter([(a, b_matrices)])))
        module = adapters[-1][2].target(0)
        if module is None or not module.has_backward:
            raise Mismatch("the kernel does not serve the test's shapes")
        out = torch.randn(rows, sum(sizes)).to(dtype)
        added = out.clone()
        lora_hidden = module.add_(x, added, sizes)
        _close("x A", lora_hidden, x.double() @ a.double().t(), tolerance)
        expected = torch.cat(
            [
                p @ b.double().t()
                for p, b in zip(lora_hidden.double().chunk(3, 1), b_matrices, strict=True)
            ],
            1,
        )
        _close("x A B", added, out.double() + expected, tolerance)
        few = out[5:9].clone()
        module.add_(x[5:9], few, sizes)
        _same("x A B", few, added[5:9])
        back = torch.zeros(rows, fan_in, dtype=dtype)
        hidden_grad = module.backward_(grad, back, sizes)
        parts = zip(grad.double().split(sizes, 1), b_matrices, strict=True)
        _close(
            "the gradient of x A",
            hidden_grad,
            torch.cat([part @ b.double() for part, b in parts], 1),
            tolerance,
        )
        _close("the gradient of x", back, hidden_grad.double() @ a.double(), tolerance)
        grad_a, b_grads = module.gradients(x, lora_hidden, grad, hidden_grad, sizes)
        _close("the gradient of A", grad_a, hidden_grad.double().t() @ x.double(), 2e-5)
        lora_hiddens, grads = lora_hidden.double().chunk(3, 1), grad.double().split(sizes, 1)
        for found, part, upstream in zip(b_grads, lora_hiddens, grads, strict=True):
            _close("the gradient of B", found, upstream.t() @ part, 2e-5)
    out = torch.zeros(rows, sum(sizes), dtype=dtype)
    adapter_ranges = [(2, 10, adapters[0][2]), (10, 30, adapters[1][2])]
    CppAdapterBatch(adapter_ranges, ["attn_in"]).add_(x, out, sizes, 0, "attn_in")
    for start, stop, panels in adapter_ranges:
        alone, module = torch.zeros(stop - start, sum(sizes), dtype=dtype), panels.target(0)
        assert module is not None
        module.add_(x[start:stop], alone, sizes)
        _same("a batch of adapters", out[start:stop], alone)
    _lora_of_head(dtype, tolerance)


def _lora_of_head(dtype: torch.dtype, tolerance: float) -> None:
    vocab, d, rank = 272, 64, 5
    hidden, a, b = (torch.randn(*n).to(dtype) for n in ((9, d), (rank, d), (vocab, rank)))
    table = head_ops.HeadTable([(2, 8, b, CppPackedAdapter([(a, (b,))]).target(0))])
    lora_hidden = table.lora_hidden(hidden)
    logits = torch.zeros(9, vocab, dtype=dtype)
    table.add_(lora_hidden, logits)
    expected = lora_hidden[2:8, :rank].double() @ b.double().t()
    _close(
        "the head's x A", lora_hidden[2:8, :rank], hidden[2:8].double() @ a.double().t(), tolerance
    )
    _close("the head's x A B", logits[2:8], expected, tolerance)


def _norms(dtype: torch.dtype, tolerance: float) -> None:
    for d in (67, 576):
        x, residual, weight = torch.randn(9, d), torch.randn(9, d).to(dtype), torch.rand(d) + 0.5
        total, out, scale = ops.rms_norm(x, residual, weight, 1e-5, dtype)
        total64 = x.double() + residual.double()
        factor = (total64.square().mean(1, keepdim=True) + 1e-5).rsqrt()
        _close("the sum", total, total64, 2e-5)
        _close("the norm", out, total64 * factor * weight, tolerance)
        _close("the factor", scale, factor.squeeze(1), 2e-5)
        _same("the norm", ops.rms_norm(x[4:6], residual[4:6], weight, 1e-5, dtype)[1], out[4:6])
        grad, other = torch.randn(9, d).to(dtype), torch.randn(9, d)
        found = ops.rms_norm_backward(grad, total, weight, scale, other)
        weighted = grad.double() * weight
        inner = (weighted * total64).mean(1, keepdim=True) * factor.square()
        _close("the gradient", found, (weighted - total64 * inner) * factor + other, 1e-4)


def _rope(dtype: torch.dtype, tolerance: float) -> None:
    for heads, e in ((3, 64), (2, 20)):
        x = torch.randn(7, heads + 2, e).to(dtype)[:, :heads]
        angles = torch.randn(7, 1, e // 2)
        cos, sin = angles.cos(), angles.sin()
        first, second = x.double().chunk(2, -1)
        for back in (False, True):
            s = -sin if back else sin
            expected = torch.cat((first * cos - second * s, second * cos + first * s), -1)
            _close("the rotated heads", ops.rope(x, cos, sin, inverse=back), expected, tolerance)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _swiglu(dtype: torch.dtype, tolerance: float) -> None:
    _gated(dtype, tolerance, "SwiGLU", F.silu, ops.swiglu, ops.swiglu_backward)
    _gated(dtype, tolerance, "GeGLU", _gelu, ops.geglu, ops.geglu_backward)
    alpha, limit = 1.702, 5.0
    for width in (33, 640):
        given, grad = torch.randn(70, 2 * width).to(dtype) * 4, torch.randn(70, width).to(dtype)
        inputs64 = given.double().requires_grad_()
        gate, up = inputs64[:, ::2].clamp(max=limit), inputs64[:, 1::2].clamp(-limit, limit)
        expected = (up + 1) * gate * (gate * alpha).sigmoid()
        expected.backward(grad.double())
        assert inputs64.grad is not None
        found = ops.clamped_swiglu(given, alpha, limit)
        _close("clamped SwiGLU", found, expected.detach(), tolerance)
        _same("clamped SwiGLU", ops.clamped_swiglu(given[30:31], alpha, limit), found[30:31])
        found = ops.clamped_swiglu_backward(grad, given, alpha, limit)
        _close("the gradient", found, inputs64.grad, tolerance)


def _gated(
    dtype: torch.dtype,
    tolerance: float,
    name: str,
    activation: Callable[[Tensor], Tensor],
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], Tensor],
) -> None:
    for width in (33, 640):
        given, grad = torch.randn(70, 2 * width).to(dtype) * 4, torch.randn(70, width).to(dtype)
        inputs64 = given.double().requires_grad_()
        gate, up = inputs64.chunk(2, 1)
        expected = activation(gate) * up
        expected.backward(grad.double())
        assert inputs64.grad is not None
        found = forward(given)
        _close(name, found, expected.detach(), tolerance)
        _same(name, forward(given[30:31]), found[30:31])
        _close("the gradient", backward(grad, given), inputs64.grad, tolerance)


def _log_sum_exp(dtype: torch.dtype, tolerance: float) -> None:
    for vocab in (7, 3001):
        logits, temperature = torch.randn(9, vocab).to(dtype) * 3, torch.linspace(0.5, 2, 9)
        exact = torch.randint(vocab, (9, 1)), torch.randn(9, 1)
        logits64 = logits.double().scatter(1, exact[0], exact[1].double())
        scaled = logits64 / temperature.double()[:, None]
        weights = torch.empty(9, vocab)
        found = ops.log_sum_exp(logits, temperature, exact, weights)
        _close("log-sum-exp", found, scaled.logsumexp(1), 2e-5)
        max_logit = scaled.amax(1, keepdim=True)
        _close("the softmax's terms", weights, (scaled - max_logit).exp(), 2e-5)
        part = exact[0][3:4], exact[1][3:4]
        _same("log-sum-exp", ops.log_sum_exp(logits[3:4], temperature[3:4], part), found[3:4])
        totals = (logits64 / 0.7).logsumexp(1)
        first, targets = torch.arange(10) * 2, torch.randint(vocab, (18,))
        grads, softmax = torch.randn(18), (logits64 / 0.7 - totals[:, None]).exp()
        expected = -softmax * grads.double().view(9, 2).sum(1, keepdim=True)
        expected.view(-1).index_add_(
            0, torch.arange(9).repeat_interleave(2) * vocab + targets, grads.double()
        )
        given = logits.clone()
        ops.log_sum_exp_backward_(given, 0.7, totals.float(), first, targets, grads, exact)
        _close("the gradient", given, expected, tolerance)
        rows = torch.tensor([1, 2, 8])
        found = ops.log_sum_exp_backward(
            logits,
            rows,
            0.7,
            totals.float()[rows],
            first[:4],
            targets.view(9, 2)[rows].flatten(),
            grads.view(9, 2)[rows].flatten(),
            exact,
        )
        _same("the gradient", found, given[rows])


def _sampling() -> None:
    vocab, rows = 1003, 6
    logits, temperatures = torch.randn(rows, vocab) * 3, torch.linspace(0.6, 1.4, rows)
    scaled = logits.double() / temperatures.double()[:, None]
    ends = scaled.softmax(1).cumsum(1)
    tokens = scaled.topk(8).indices
    starts = torch.cat((torch.zeros(rows, 1).double(), ends), 1).gather(1, tokens)
    uniforms = (starts + ends.gather(1, tokens)) / 2
    at = torch.arange(rows)
    for column in range(tokens.shape[1]):
        sampled, normalizer = head_ops.sample(
            logits, at, temperatures, uniforms[:, column].contiguous()
        )
        _equal("the sampled tokens", sampled, tokens[:, column])
        _close("the sampler's log-sum-exp", normalizer, scaled.logsumexp(1), 2e-5)
    kept = torch.rand(rows, vocab) < 0.1
    kept[:2] = False
    kept[1, 5] = True
    logits[1, 5] = -100  # The weight of this row's only allowed token is below MIN_WEIGHT.
    scaled = logits.double() / temperatures.double()[:, None]
    words = np.packbits(F.pad(kept, (0, -vocab % 32)).numpy(), axis=1, bitorder="little")
    ends = torch.where(kept, scaled, -torch.inf)[2:].softmax(1).cumsum(1)
    middle = F.pad(torch.full((rows - 2,), 0.37).double(), (2, 0))
    sampled, normalizer = head_ops.sample(
        logits, at, temperatures, middle, torch.from_numpy(words.view(np.int32))
    )
    expected = torch.searchsorted(ends, middle[2:, None], right=True)[:, 0]
    _equal("the allowed tokens", sampled, torch.cat((torch.tensor([-1, -1]), expected)))
    _close("their log-sum-exp", normalizer, scaled.logsumexp(1), 2e-5)
    weights = (scaled - scaled.amax(1, keepdim=True)).exp().float()
    _equal("the tokens of weights", head_ops.sample_from_weights(weights, uniforms), tokens)
    hidden, weight = torch.randn(rows, 100).bfloat16(), torch.randn(vocab, 100).bfloat16()
    exact = hidden.double() @ weight.double().t()
    single = head_ops.Float32Logits(hidden, weight, head_ops.HeadTable(()), None)
    narrow = exact.bfloat16()
    float32_logits = torch.empty(rows, vocab)
    largest, values = single.top_k(narrow, 16, float32_logits)
    order = narrow.float().sort(dim=1, descending=True, stable=True).indices[:, :16]
    _equal("the likeliest tokens", largest, order)
    _close("their logits", values, exact.gather(1, order), 2e-5)
    _close(
        "the widened logits",
        float32_logits,
        narrow.double().scatter(1, order, exact.gather(1, order)),
        2e-5,
    )
    pairs, chosen = at.repeat_interleave(3), torch.randint(vocab, (3 * rows,))
    _close("single logits", single.pair_logits(pairs, chosen), exact[pairs, chosen], 2e-5)


def _attention(dtype: torch.dtype, tolerance: float) -> None:
    for heads, of_keys, e in ((6, 2, 64), (4, 4, 16)):
        for window in (None, 9):
            _tree_attention(dtype, tolerance, heads, of_keys, e, window)
            _decode_attention(dtype, tolerance, heads, of_keys, e, window)


def _tree_attention(
    dtype: torch.dtype, tolerance: float, heads: int, of_keys: int, e: int, window: int | None
) -> None:
    """Check a prefix of 24 positions with two continuations of 8, forward and backward."""
    rows = 40
    q, k, v = (torch.randn(rows, n, e).to(dtype) for n in (heads, of_keys, of_keys))
    spans = [(0, 16), (0, 24), (0, 24), (24, 32), (0, 24), (32, 40)]
    ranges = np.zeros((1, len(spans)), ops.Range)
    for place, (start, stop) in zip(ranges[0], spans, strict=True):
        offset = start * of_keys * e * k.itemsize
        place["k"], place["v"] = k.data_ptr() + offset, v.data_ptr() + offset
        place["count"], place["row"], place["head"] = stop - start, of_keys * e, e
    visible = torch.cat((torch.arange(24), torch.arange(24, 32), torch.arange(24, 32))) + 1
    blocks = [(0, 16, 0, 1), (16, 8, 1, 1), (24, 8, 2, 2), (32, 8, 4, 2)]
    plan = ops.AttentionPlan(
        np.array(blocks, ops.Block),
        ranges,
        np.arange(rows),
        visible.numpy().astype(np.int64),
        windows=(window,),
    )
    lse = torch.empty(rows, heads)
    # Sinks and windows are independent features, so the cases with a window also check sinks.
    sinks = None if window is None else torch.randn(heads)
    found = ops.attend(plan, 0, q, of_keys, lse, sinks)
    mask = torch.arange(rows)[:, None] >= torch.arange(rows)
    mask[32:, 24:32] = False
    mask &= visible[:, None] - visible < (window or rows)
    inputs64 = [x.double().requires_grad_() for x in (q, k, v)]
    group = heads // of_keys
    keys, values = (x.repeat_interleave(group, 1) for x in inputs64[1:])
    scores = torch.einsum("qhe,khe->hqk", inputs64[0], keys) * e**-0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, rows, 1)), 2)
    expected = torch.einsum("hqk,khe->qhe", scores.softmax(-1)[..., :rows], values)
    _close("attention", found, expected.detach(), tolerance)
    _close(
        "its log-sum-exp",
        lse,
        scores.logsumexp(-1).t().detach(),
        1e-2 if dtype == torch.bfloat16 else 2e-5,
    )
    grad = torch.randn(rows, heads, e).to(dtype)
    gradients = torch.autograd.grad(expected, inputs64, grad.double())
    ends = np.array([2, 4], np.int64)
    sums = torch.empty(len(ends), 2, rows, of_keys, e)
    ours = ops.attend_backward(plan, ends, grad, q, found, lse, k, sums)
    for name, x, reference in zip(("q", "k", "v"), ours, gradients, strict=True):
        _close(f"the gradient of {name}", x, reference, 2 * tolerance)


def _decode_attention(
    dtype: torch.dtype, tolerance: float, heads: int, of_keys: int, e: int, window: int | None
) -> None:
    """Check five samples of one prompt of 32 positions, each with some positions of its own."""
    step = _DecodeStep(dtype, layers=1, heads=of_keys, e=e, windows=(window,))
    q, k, v = (torch.randn(step.samples, n, e).to(dtype) for n in (heads, of_keys, of_keys))
    sinks = None if window is None else torch.randn(heads)
    found = ops.StoringAttention(step.plan)(0, q, k, v, sinks)
    _close("attention of one row", found, step.attend(0, q, k, v, sinks), tolerance)


class _DecodeStep:
    """The keys and values of a decoding step: a shared prompt, and a slot for each sample."""

    samples, prompt, capacity = 5, 32, 32

    def __init__(
        self,
        dtype: torch.dtype,
        layers: int,
        heads: int,
        e: int,
        windows: tuple[int | None, ...],
    ) -> None:
        self.windows = windows
        self.shared = torch.randn(layers, 2, heads, self.prompt, e).to(dtype)
        self.own = torch.randn(layers, 2, self.samples, heads, self.capacity, e).to(dtype)
        self.stored = [0, 3, 16, 17, 30]
        shared = np.zeros((layers, 1), ops.Range)
        own = np.zeros((layers, self.samples), ops.Range)
        for layer in range(layers):
            for place, name in enumerate(("k", "v")):
                shared[name][layer, 0] = self.shared[layer, place].data_ptr()
                own[name][layer] = [x.data_ptr() for x in self.own[layer, place]]
        shared["count"], shared["row"], shared["head"] = self.prompt, e, self.prompt * e
        own["count"] = np.array(self.stored) + 1
        own["row"], own["head"] = e, self.capacity * e
        self.plan = ops.AttentionPlan(
            np.array([(0, self.samples, 0, 1)], ops.Block),
            shared,
            np.arange(self.samples),
            np.full(self.samples, self.prompt, np.int64),
            own,
            windows,
        )

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output, computed by torch in float64: [samples, H, E].

        `q`, `k`, `v`: the new rows, [samples, heads, E]. `sinks`: see `Attend`.
        """
        out = []
        for sample, stored in enumerate(self.stored):
            keys, values = (
                torch.cat(
                    (
                        self.shared[layer, place].double(),
                        self.own[layer, place, sample, :, :stored].double(),
                        new[sample].double()[:, None],
                    ),
                    1,
                ).repeat_interleave(q.shape[1] // k.shape[1], 0)
                for place, new in enumerate((k, v))
            )
            window = self.windows[layer] or keys.shape[1]
            keys, values = keys[:, -window:], values[:, -window:]
            scores = torch.einsum("he,hpe->hp", q[sample].double(), keys) * q.shape[2] ** -0.5
            if sinks is not None:
                scores = torch.cat((sinks.double()[:, None], scores), 1)
            weights = scores.softmax(-1)[:, -keys.shape[1] :]
            out.append(torch.einsum("hp,hpe->he", weights, values))
        return torch.stack(out)


def _decode(dtype: torch.dtype, tolerance: float) -> None:
    """Check a decoding step through two layers with query and key norms, biases and adapters.

    A second check uses a model with the features of Gemma 3: norms of outputs, GELU, scaled
    embeddings, and a layer with a window and another RoPE.
    """
    _decode_model(dtype, tolerance, is_gemma=False)
    _decode_model(dtype, tolerance, is_gemma=True)


def _decode_model(dtype: torch.dtype, tolerance: float, *, is_gemma: bool) -> None:
    d, e, heads, of_keys, inner, layers, rank = 64, 32, 4, 2, 96, 2, 4
    windows = (9, None) if is_gemma else ()
    step = _DecodeStep(dtype, layers, of_keys, e, windows or (None,) * layers)
    rows, arena = step.samples, WeightArena(0)
    sizes = {
        "attn_in": ((heads * e, of_keys * e, of_keys * e), d),
        "attn_out": ((d,), heads * e),
        "mlp_in": ((inner, inner), d),
        "mlp_out": ((d,), inner),
    }
    weights = [
        {
            module: (
                torch.randn(sum(out), fan_in).div(fan_in**0.5).to(dtype),
                torch.randn(sum(out)).to(dtype),
            )
            for module, (out, fan_in) in sizes.items()
        }
        for _ in range(layers)
    ]
    norms = [[torch.rand(n) + 0.5 for n in (d, d, e, e, d, d)] for _ in range(layers)]
    adapters = [
        (
            torch.randn(len(out) * rank, fan_in).div(fan_in**0.5).to(dtype),
            [torch.randn(size, rank).div(rank**0.5).to(dtype) for size in out],
        )
        for _ in range(layers)
        for out, fan_in in sizes.values()
    ]
    embedding, final_norm = torch.randn(50, d).to(dtype), torch.rand(d) + 0.5
    angles = torch.randn(layers if is_gemma else 1, 80, e // 2).expand(layers, -1, -1)
    cos, sin = angles.cos(), angles.sin()
    panels = []
    for number, (layer, norm_weights) in enumerate(zip(weights, norms, strict=True)):
        parts: list[Any] = [*norm_weights[:4], *(norm_weights[4:] if is_gemma else (None, None))]
        parts += [cos[number], sin[number], step.windows[number] or 0]
        for weight, bias in layer.values():
            parts += [CppPackedWeight(weight, arena), bias]
        panels.append(DecodeLayer(*parts))
    scale = 1.5 if is_gemma else 1.0
    given = (panels, embedding, final_norm, 1e-5, (heads, of_keys), inner, is_gemma, scale)
    whole = DecodePass(*given)
    tokens, positions = torch.arange(rows) * 7, torch.arange(rows) + step.prompt
    table = CppAdapterBatch([(0, 3, CppPackedAdapter(adapters))], list(sizes))
    found = whole.forward(tokens, positions, step.plan, table)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def rotated(x: Tensor, layer: int) -> Tensor:
        c, s = (table[layer][positions, None].double() for table in (cos, sin))
        first, second = x.chunk(2, -1)
        return torch.cat((first * c - second * s, second * c + first * s), -1)

    x = embedding[tokens].double() * scale
    for layer in range(layers):

        def linear(given: Tensor, module: str, layer: int = layer) -> Tensor:
            weight, bias = weights[layer][module]
            out = given @ weight.double().t() + bias.double()
            a, b_matrices = adapters[layer * len(sizes) + list(sizes).index(module)]
            lora_hiddens = (given[:3] @ a.double().t()).chunk(len(b_matrices), 1)
            out[:3] += torch.cat(
                [
                    lora_hidden @ b.double().t()
                    for lora_hidden, b in zip(lora_hiddens, b_matrices, strict=True)
                ],
                1,
            )
            return out

        attn_norm, mlp_norm, q_norm, k_norm, *outputs = (w.double() for w in norms[layer])
        qkv = linear(norm(x, attn_norm), "attn_in").unflatten(1, (-1, e))
        q, k, v = qkv.split((heads, of_keys, of_keys), 1)
        q, k = rotated(norm(q, q_norm), layer), rotated(norm(k, k_norm), layer)
        out = linear(step.attend(layer, q, k, v).flatten(1), "attn_out")
        x = x + (norm(out, outputs[0]) if is_gemma else out)
        gate, up = linear(norm(x, mlp_norm), "mlp_in").chunk(2, 1)
        out = linear((_gelu if is_gemma else F.silu)(gate) * up, "mlp_out")
        x = x + (norm(out, outputs[1]) if is_gemma else out)
    # Two layers round to bf16 about twenty times, so the tolerance is larger.
    _close("the hidden states", found, norm(x, final_norm.double()), 3 * tolerance)
    fresh = whole.forward(tokens, positions, step.plan, table)
    _same("the repeated decode pass", fresh, found)


def _delta_net() -> None:
    """Check a tree whose root has two children and one grandchild, and a tree of one segment."""
    spans, parents = ((0, 37), (37, 70), (70, 71), (71, 75), (75, 80)), (-1, 0, 1, 0, -1)
    tree = SegmentTables(spans, parents)
    for values in (16, 48, 80):
        q, k = (F.normalize(torch.randn(80, 2, 20), dim=-1) for _ in range(2))
        inputs = [q, k, torch.randn(80, 2, values), torch.rand(80, 2), torch.rand(80, 2)]
        grad = torch.randn(80, 2, values)
        exact_inputs = [x.double().requires_grad_() for x in inputs]
        expected = _recurrence(exact_inputs, spans, parents)
        leaves = [x.requires_grad_() for x in inputs]
        found = scan(leaves, tree)
        _close("the recurrence", found.detach(), expected.detach(), 2e-5)
        grads = torch.autograd.grad(found, leaves, grad)
        expected_grads = torch.autograd.grad(expected, exact_inputs, grad.double())
        for name, grad_found, expected_grad in zip(
            ("q", "k", "v", "decay", "beta"), grads, expected_grads, strict=True
        ):
            _close(f"the recurrence's gradient of {name}", grad_found, expected_grad, 1e-4)
        alone = scan([x.detach()[75:] for x in inputs], SegmentTables(((0, 5),), (-1,)))
        _same("the recurrence", alone, found.detach()[75:])


def _recurrence(
    scan_inputs: Sequence[Tensor], spans: Sequence[tuple[int, int]], parents: Sequence[int]
) -> Tensor:
    """Return the outputs [T, H, values] of a gated delta net (see delta_net.py)."""
    final_states: list[Tensor] = []
    outputs = []
    for (start, stop), parent in zip(spans, parents, strict=True):
        size = (scan_inputs[0].shape[1], scan_inputs[0].shape[2], scan_inputs[2].shape[2])
        state = scan_inputs[0].new_zeros(size) if parent < 0 else final_states[parent]
        for row in range(start, stop):
            q, k, v, decay, beta = (x[row] for x in scan_inputs)
            state = state * decay[:, None, None]
            delta = (v - (state * k[..., None]).sum(1)) * beta[:, None]
            state = state + k[..., None] * delta[:, None]
            outputs.append((state * q[..., None]).sum(1))
        final_states.append(state)
    return torch.stack(outputs)


CHECKS: dict[str, Callable[[], None]] = {
    "amx": _amx,  # Must be first: it decides whether the other families use AMX.
    "matmul": _for_matmul_dtypes(_matmul),
    "lora": _for_matmul_dtypes(_lora),
    "attention": _for_dtypes(_attention),
    "norms": _for_dtypes(_norms),
    "rope": _for_dtypes(_rope),
    "swiglu": _for_dtypes(_swiglu),
    "log_sum_exp": _for_dtypes(_log_sum_exp),
    "sampling": _sampling,
    "decode": _for_matmul_dtypes(_decode),
    "delta_net": _delta_net,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
