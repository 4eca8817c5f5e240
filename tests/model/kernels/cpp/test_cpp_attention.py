"""The CPU attention kernels equal attention with the T x T mask, and agree bitwise in training,
prefill and decoding.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dense_attention import dense_mask_attention
from torch import Tensor
from variants import slow_after

from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.attention import (
    CppDecodeAttention,
    CppPrefillAttention,
    CppTreeAttention,
)
from planish.model.sequences.kv_cache import KVPools, KVSpec, PrefillSpan, SeparateKVPool, SlotOwner
from planish.model.sequences.positions import SPAN, capacity_for
from planish.model.sequences.prefix_tree import MicroBatch, pack

CPU = torch.device("cpu")
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def here():
    if ops.load_library() is None:
        pytest.skip("this machine has no AVX2 or no C++ compiler")


def forest(seed: int, prompts: int = 3, samples: int = 5, longest: int = 90) -> MicroBatch:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 50, 37)
    sequences = [rng.integers(50, 60, longest)]
    for _ in range(prompts):
        prompt = np.concatenate([shared, rng.integers(0, 50, rng.integers(1, longest))])
        # With few token values, completions share their first tokens too, and segments of one row
        # occur.
        completions = [rng.integers(0, 2, rng.integers(1, longest)) for _ in range(samples)]
        sequences += [np.concatenate([prompt, completion]) for completion in completions]
    (micro_batch,) = pack(sequences, 100_000)
    return micro_batch


def tensors(rows: int, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    generator, (heads, kv_heads, size) = torch.Generator().manual_seed(rows), shape
    return [
        torch.randn(rows, n, size, generator=generator).to(dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def gradients(
    attend, qkv: list[Tensor], upstream: Tensor, sinks: Tensor | None = None
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = attend(0, *leaves, sinks)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize(
    "shape",
    [(4, 4, 16), *(pytest.param(x, marks=SLOW) for x in ((9, 3, 64), (8, 2, 128), (6, 2, 80)))],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("window", slow_after(2, [None, 20, 2, 70]))
def test_prefix_tree_attention_equals_dense_masked_attention(shape, dtype, tolerance, window):
    for seed in range(2):
        micro_batch = forest(seed)
        *qkv, upstream = tensors(len(micro_batch), shape, dtype)
        fast = gradients(CppTreeAttention(micro_batch, (window,)), qkv, upstream)
        slow = gradients(dense_mask_attention(micro_batch, CPU, (window,)), qkv, upstream)
        for ours, theirs in zip(fast, slow, strict=True):
            assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("window", [None, 20, 70])
def test_images_attend_to_later_positions(dtype, tolerance, window):
    """In training and in prefill, equal to each other bit for bit."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 50, 90)
    sequences = [np.concatenate([shared, rng.integers(0, 50, n)]) for n in (40, 7)]
    (causal,) = pack(sequences, 1000)
    blocks = ((5, 33), (40, 85))  # one image within a range of 16 rows, and longer ones
    micro_batch = causal.with_blocks([blocks, blocks])
    *qkv, upstream = tensors(len(micro_batch), (6, 2, 64), dtype)
    fast = gradients(CppTreeAttention(micro_batch, (window,)), qkv, upstream)
    slow = gradients(dense_mask_attention(micro_batch, CPU, (window,)), qkv, upstream)
    for ours, theirs in zip(fast, slow, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    pools = KVPools(KVSpec(1, 2, 64, dtype, CPU), SeparateKVPool)
    pool, owner = pools.pool_for(capacity_for(130)), Prompt(130)
    pool.allocate(owner)
    rows = torch.from_numpy(micro_batch.datum_rows[0])
    whole = CppTreeAttention(micro_batch, (window,))(0, *qkv)
    found = []
    for start, stop in ((0, 40), (40, 130)):
        span = PrefillSpan(pool, owner.slot, 0, start, stop - start, blocks)
        prefill = CppPrefillAttention([span], (window,))
        found.append(prefill(0, *(x[rows[start:stop]] for x in qkv)))
    assert torch.equal(torch.cat(found), whole[rows])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("window", [None, 20])
def test_attention_with_sinks_equals_dense_masked_attention(dtype, tolerance, window):
    micro_batch = forest(1)
    *qkv, upstream = tensors(len(micro_batch), (9, 3, 64), dtype)
    # The first head's sink takes nearly the whole weight, and the last one's nearly nothing.
    sinks = torch.linspace(30, -30, 9)
    fast = gradients(CppTreeAttention(micro_batch, (window,)), qkv, upstream, sinks)
    slow = gradients(dense_mask_attention(micro_batch, CPU, (window,)), qkv, upstream, sinks)
    for ours, theirs in zip(fast, slow, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(9, 3, 64), (5, 5, 16)])
def test_bf16_errors_are_as_small_as_rounding_the_exact_result(shape):
    micro_batch = forest(3)
    *qkv, upstream = tensors(len(micro_batch), shape, torch.bfloat16)
    found = gradients(CppTreeAttention(micro_batch), qkv, upstream)
    exact = gradients(
        dense_mask_attention(micro_batch, CPU), [x.double() for x in qkv], upstream.double()
    )
    # The tolerances are for the output, whose attention weights are rounded too; for the gradients
    # of queries and keys, likewise; and for the gradient of values, whose weights are not rounded.
    for ours, truth, most in zip(found, exact, (1.4, 1.7, 1.7, 1.1), strict=True):
        assert (ours - truth).norm() < most * (truth.bfloat16() - truth).norm()


@pytest.mark.parametrize("shape", [(6, 2, 64), (3, 3, 80)])
def test_results_do_not_depend_on_the_number_of_threads(shape):
    micro_batch = forest(5)
    *qkv, upstream = tensors(len(micro_batch), shape, torch.bfloat16)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(gradients(CppTreeAttention(micro_batch), qkv, upstream))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_gradients_of_a_layer_do_not_depend_on_the_previous_layer():
    """All layers accumulate gradients in the same buffer."""
    micro_batch = forest(6)
    *first, upstream = tensors(len(micro_batch), (6, 2, 64), torch.float32)
    second = [x.flip(0) for x in first]
    attend = CppTreeAttention(micro_batch)
    gradients(attend, first, upstream)
    for found, alone in zip(
        gradients(attend, second, upstream),
        gradients(CppTreeAttention(micro_batch), second, upstream),
        strict=True,
    ):
        assert torch.equal(found, alone)


@dataclass(eq=False)
class Prompt:
    length: int
    slot: int = -1


@dataclass(eq=False)
class Sample:
    prompt: Prompt
    num_stored: int
    slot: int = -1


@pytest.mark.parametrize("prompt_tokens", slow_after(2, [1, 150, 40, 64]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "shape"),
    slow_after(2, [(2, (3, 1, 80)), (11, (6, 2, 32)), (1, (6, 2, 64)), (2, (8, 1, 16))]),
)
@pytest.mark.parametrize(
    ("window", "has_sinks"),
    slow_after(2, [(None, False), (65, True), (3, False), (65, False)]),
)
def test_prefill_and_decode_equal_training_attention_bitwise(
    prompt_tokens, dtype, count, shape, window, has_sinks
):
    """One sequence is computed as a path of a prefix tree, as a prefill in two chunks, and row by
    row after its prompt, each time in a batch with other sequences.

    Tiles with few and with many queries read keys and values differently; both occur in each form.
    """
    total, (_, kv_heads, size) = prompt_tokens + 70, shape
    (micro_batch,) = pack([np.arange(total)], total)
    q, k, v, _ = tensors(total, shape, dtype)
    # Scores are sums of large terms that nearly cancel, so a different summation order would change
    # them.
    half = size // 2
    q[..., :half] *= 512
    q[..., half:] = q[..., :half] + 4 * q[..., half:]
    k[..., half:] = -k[..., :half]
    sinks = torch.linspace(-2, 2, shape[0]) if has_sinks else None
    with torch.no_grad():
        whole = CppTreeAttention(micro_batch, (window,))(0, q, k, v, sinks)
    shape = KVSpec(num_layers=1, num_heads=kv_heads, head_dim=size, dtype=dtype, device=CPU)
    prompts, samples = KVPools(shape), KVPools(shape)
    prompt = Prompt(prompt_tokens)
    home = prompts.pool_for(capacity_for(prompt_tokens))
    home.allocate(Prompt(3))
    home.allocate(prompt)
    for first, stop in ((0, prompt_tokens // 3), (prompt_tokens // 3, prompt_tokens)):
        part = slice(first, stop)
        span = PrefillSpan(home, prompt.slot, 0, first, stop - first)
        if stop > first:
            prefill = CppPrefillAttention([span], (window,))
            assert torch.equal(prefill(0, q[part], k[part], v[part], sinks), whole[part])
    running = [Sample(prompt, prompt_tokens % SPAN) for _ in range(count)]
    pool = samples.pool_for(256)
    for sample in running:
        pool.allocate(sample)
        begin = prompt_tokens - prompt_tokens % SPAN
        pool.copy_from(home, [prompt.slot], [begin], [sample.slot], prompt_tokens % SPAN)
    for position in range(prompt_tokens, total):
        # row 0 is padding
        rows: dict[SlotOwner, int] = {
            sample: len(running) - number for number, sample in enumerate(running)
        }
        qs, ks, vs = (
            torch.cat([torch.zeros_like(x[:1]), x[position].expand(len(running), -1, -1)])
            for x in (q, k, v)
        )
        found = CppDecodeAttention(rows, prompts, samples, (window,))(0, qs, ks, vs, sinks)
        assert not found[0].any()
        assert all(torch.equal(row, whole[position]) for row in found[1:])
        for sample in running:
            sample.num_stored += 1


def test_non_finite_values_stay_in_their_own_rows():
    micro_batch = forest(7)
    q, k, v, _ = tensors(len(micro_batch), (4, 2, 16), torch.float32)
    clean = CppTreeAttention(micro_batch)(0, q, k, v)
    bad = len(micro_batch) - 40
    q[bad] = torch.nan
    found = CppTreeAttention(micro_batch)(0, q, k, v)
    assert found[bad].isnan().all()
    others = torch.arange(len(micro_batch)) != bad
    assert torch.equal(found[others], clean[others])
