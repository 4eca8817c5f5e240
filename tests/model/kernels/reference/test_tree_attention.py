"""Prefix-tree attention equals attention with the T x T mask, in values and gradients, on each
kernel.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_attention import attention_mask, dense_mask_attention

from planish.model.kernels.reference.attention import (
    TorchTreeAttention,
    block_backward,
    fused_cpu_backward,
    rectangles,
    triangles,
)
from planish.model.sequences.prefix_tree import MicroBatch, pack

CPU = torch.device("cpu")


def forest(seed: int, prompts: int = 3, samples: int = 4, longest: int = 40) -> MicroBatch:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 50, 17)
    sequences = []
    for _ in range(prompts):
        prompt = np.concatenate([shared, rng.integers(0, 50, rng.integers(1, longest))])
        # With few token values, completions share their first tokens too, and segments of one row
        # occur.
        completions = [rng.integers(0, 2, rng.integers(1, longest)) for _ in range(samples)]
        sequences += [np.concatenate([prompt, completion]) for completion in completions]
    sequences.append(rng.integers(50, 60, longest))
    (micro_batch,) = pack(sequences, 100_000)
    return micro_batch


def attention_gradients(attend, inputs, weight, sinks=None):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(0, *leaves, sinks)
    (out.double() * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def inputs(rows: int, heads: int, kv_heads: int, dtype: torch.dtype, scale: float = 1.5):
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, heads, 16), (rows, kv_heads, 16), (rows, kv_heads, 16)]
    qkv = [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]
    return qkv, torch.randn(shapes[0], generator=generator).double()


@pytest.mark.parametrize("backward", [fused_cpu_backward, block_backward], ids=["fused", "blocks"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4)])
def test_prefix_tree_attention_equals_dense_masked_attention(backward, heads: int, kv_heads: int):
    for seed in range(3):
        micro_batch = forest(seed)
        qkv, weight = inputs(len(micro_batch), heads, kv_heads, torch.float64)
        fast = attention_gradients(TorchTreeAttention(micro_batch, CPU, backward), qkv, weight)
        slow = attention_gradients(dense_mask_attention(micro_batch, CPU), qkv, weight)
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backward", [fused_cpu_backward, block_backward], ids=["fused", "blocks"])
@pytest.mark.parametrize("window", [1, 9, 40, 1000])
def test_windowed_prefix_tree_attention_equals_dense_masked_attention(backward, window: int):
    micro_batch = forest(4)
    qkv, weight = inputs(len(micro_batch), 6, 2, torch.float64)
    fast = attention_gradients(
        TorchTreeAttention(micro_batch, CPU, backward, (window,)), qkv, weight
    )
    slow = attention_gradients(dense_mask_attention(micro_batch, CPU, (window,)), qkv, weight)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    unlimited = dense_mask_attention(micro_batch, CPU)(0, *qkv)
    assert torch.equal(slow[0], unlimited) == (window == 1000)


def with_blocks(micro_batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with an image in each long segment."""
    long = [s for s in micro_batch.segments if s.end - s.start > 12]
    return replace(micro_batch, blocks=tuple((s.start + 3, s.end - 1) for s in long))


@pytest.mark.parametrize("backward", [fused_cpu_backward, block_backward], ids=["fused", "blocks"])
@pytest.mark.parametrize("window", [None, 9, 200])
def test_images_in_a_prefix_tree_attend_to_later_positions(backward, window):
    causal = forest(4, prompts=1, longest=300)
    micro_batch = with_blocks(causal)
    assert max(stop - start for start, stop in micro_batch.blocks) > 256
    qkv, weight = inputs(len(micro_batch), 2, 1, torch.float64)
    fast = attention_gradients(
        TorchTreeAttention(micro_batch, CPU, backward, (window,)), qkv, weight
    )
    slow = attention_gradients(dense_mask_attention(micro_batch, CPU, (window,)), qkv, weight)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(slow[0], dense_mask_attention(causal, CPU, (window,))(0, *qkv))


@pytest.mark.parametrize("backward", [fused_cpu_backward, block_backward], ids=["fused", "blocks"])
@pytest.mark.parametrize("window", [None, 9])
def test_prefix_tree_attention_with_sinks_equals_dense_masked_attention(backward, window):
    micro_batch = forest(4)
    qkv, weight = inputs(len(micro_batch), 6, 2, torch.float64)
    # The first head's sink takes nearly the whole weight, and the last one's nearly nothing.
    sinks = torch.linspace(30, -30, 6).double()
    fast = attention_gradients(
        TorchTreeAttention(micro_batch, CPU, backward, (window,)), qkv, weight, sinks
    )
    slow = attention_gradients(
        dense_mask_attention(micro_batch, CPU, (window,)), qkv, weight, sinks
    )
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    plain = dense_mask_attention(micro_batch, CPU, (window,))(0, *qkv)
    assert not torch.allclose(slow[0], plain)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [fused_cpu_backward, block_backward], ids=["fused", "blocks"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
def test_low_precision_prefix_tree_attention_is_close_to_float64(
    backward, dtype: torch.dtype, tolerance: float
):
    micro_batch = forest(5, longest=200)
    qkv, weight = inputs(len(micro_batch), 6, 2, dtype)
    fast = attention_gradients(TorchTreeAttention(micro_batch, CPU, backward), qkv, weight)
    slow = attention_gradients(
        dense_mask_attention(micro_batch, CPU), [x.double() for x in qkv], weight
    )
    for a, b in zip(fast, slow, strict=True):
        assert a.dtype == dtype
        assert float((a.double() - b).norm() / b.norm()) < tolerance


def test_splitting_queries_into_blocks_does_not_change_the_result(monkeypatch):
    micro_batch = forest(2)
    qkv, weight = inputs(len(micro_batch), 4, 2, torch.float64)
    whole = attention_gradients(TorchTreeAttention(micro_batch, CPU, block_backward), qkv, weight)
    monkeypatch.setattr("planish.model.kernels.reference.attention.SCORE_ENTRIES", 1)
    for a, b in zip(
        attention_gradients(TorchTreeAttention(micro_batch, CPU, block_backward), qkv, weight),
        whole,
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_pieces_cover_each_visible_pair_exactly_once():
    micro_batch = forest(3)
    count = np.zeros((len(micro_batch), len(micro_batch)), int)
    for piece in rectangles(micro_batch):
        count[piece.q_start : piece.q_end, piece.k_start : piece.k_end] += 1
    batches = triangles(micro_batch)
    for start, end in (span for batch in batches for span in batch.spans):
        count[start:end, start:end] += np.tril(np.ones((end - start, end - start), int))
    assert np.array_equal(count, attention_mask(micro_batch).astype(int))
    assert len(batches) < len(micro_batch.segments) / 2


def test_thousands_of_rows_need_no_quadratic_memory():
    (micro_batch,) = pack([np.arange(6000) % 97], 10_000)
    qkv, weight = inputs(6000, 2, 1, torch.float32)
    out, *grads = attention_gradients(TorchTreeAttention(micro_batch, CPU), qkv, weight)
    last = torch.softmax((qkv[0][-1] @ qkv[1][:, 0].T) * 16**-0.5, -1) @ qkv[2][:, 0]
    torch.testing.assert_close(out[-1], last, rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(grad).all() for grad in grads)
