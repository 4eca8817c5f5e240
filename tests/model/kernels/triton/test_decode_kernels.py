"""The decoding attention kernels with hand-made tables. test_triton_sampling_attention.py tests
them with KV pools and samples.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from planish.model.kernels.triton import decode_kernels
from planish.model.kernels.triton.decode_kernels import Block, DecodeWork, Entry, Heads, Piece, Row


def table(record: np.dtype, rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, record.itemsize // 4)


def pools(
    device: torch.device, dtype: torch.dtype, *sizes: tuple[int, int, int, int]
) -> tuple[list[Tensor], Tensor]:
    """Return keys and values of pools of these sizes, and their addresses."""
    generator = torch.Generator().manual_seed(0)
    kept = [torch.randn(2, *size, generator=generator).to(dtype).to(device) for size in sizes]
    return kept, torch.tensor(
        [[both[0].data_ptr(), both[1].data_ptr()] for both in kept], device=device
    )


def test_keep_stores_rows_at_their_positions(device):
    kept, bases = pools(device, torch.bfloat16, (2, 3, 64, 16), (3, 3, 128, 16))
    rows = table(Row, [(1, 2, 128, 77, 0, 0), (0, 0, 0, 0, 0, 0), (0, 1, 64, 63, 0, 0)], device)
    wide = torch.randn(4, 9, 16, dtype=torch.bfloat16, device=device)
    k, v = wide[:, 3:6], wide[:, 6:]
    expected = [both.clone() for both in kept]
    for row, pool, slot, position in ((0, 1, 2, 77), (2, 0, 1, 63)):
        expected[pool][0, slot, :, position], expected[pool][1, slot, :, position] = k[row], v[row]
    decode_kernels.keep(Heads(3, 1, 16, torch.bfloat16), rows, bases, k, v)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept, expected, strict=True))


def decode_work(
    device: torch.device, pieces: list[tuple[int, ...]], wide: int, rows: list[tuple[int, ...]]
) -> DecodeWork:
    """Return work in which each row is an entry. The buffers for parts contain NaN."""
    return DecodeWork(
        window=None,
        counts=torch.tensor([wide, len(pieces)], dtype=torch.int32, device=device),
        rows=table(Row, rows, device),
        entries=table(Entry, [(row, record[4], 0) for row, record in enumerate(rows)], device),
        pieces=table(Piece, pieces, device),
        values=torch.full((20, 2, 16), math.nan, device=device),
        stats=torch.full((20, 2, 2), math.nan, device=device),
    )


@pytest.mark.parametrize("programs", [1, 3])
def test_split_attention_of_a_row_is_combined_for_any_number_of_programs(device, programs):
    """Two rows share positions 0 .. 39 of a slot, the first also has positions 0 .. 9 of another
    slot, and the third has no positions.
    """
    kept, bases = pools(device, torch.float32, (2, 2, 64, 16))
    pieces = [(0, 0, 64, 0, 25, 0, 2, 0), (0, 0, 64, 25, 40, 0, 2, 1), (0, 1, 64, 0, 10, 0, 1, 2)]
    work = decode_work(
        device, pieces, 2, [(0, 0, 0, 0, 3, 3), (0, 0, 0, 0, 6, 2), (0, 0, 0, 0, 0, 0)]
    )
    q = torch.randn(3, 2, 16, device=device) * 8
    found = decode_kernels.decode(Heads(2, 1, 16, torch.float32), work, bases, q, programs)
    shared, own = kept[0][:, 0, :, :40], kept[0][:, 1, :, :10]
    for row, (keys, values) in enumerate((torch.cat([shared, own], 2), shared)):
        weights = (torch.einsum("he,hne->hn", q[row], keys) / 4).softmax(-1)
        torch.testing.assert_close(
            found[row], torch.einsum("hn,hne->he", weights, values), rtol=1e-5, atol=1e-5
        )
    assert not found[2].any()


@pytest.mark.parametrize(("head_dim", "kib"), [(16, 227), (80, 227), (80, 163)])
def test_prefill_blocks_attend_causally(device, head_dim, kib):
    kept, bases = pools(device, torch.bfloat16, (2, 1, 128, head_dim))
    blocks = table(Block, [(0, 1, 128, 70, 3, 5), (0, 0, 128, 0, 0, 2)], device)
    q = torch.randn(9, 3, head_dim, dtype=torch.bfloat16, device=device)
    heads = Heads(1, 3, head_dim, torch.bfloat16, kib << 10)
    found = decode_kernels.prefill(heads, blocks, bases, q)
    for row, slot, position in ((0, 0, 0), (1, 0, 1), (3, 1, 70), (7, 1, 74)):
        keys, values = kept[0][:, slot, 0, : position + 1].float()
        expected = (q[row].float() @ keys.T * head_dim**-0.5).softmax(-1) @ values
        torch.testing.assert_close(found[row].float(), expected, rtol=0.02, atol=0.02)
    assert not found[[2, 8]].any()


def test_block_sizes_follow_the_shared_memory_of_a_gpu():
    """The sizes for an H100 must not change when other GPUs are added."""
    found = [
        (heads.prefill_options["BLOCK_M"], heads.prefill_options["BLOCK_N"],
         heads.prefill_options["num_stages"], heads.decode_options["num_stages"],
         heads.decode_options["num_warps"])
        for size in (128, 256)
        for shared in (232_448, 166_912, 101_376, 65_536)
        for heads in [Heads(8, 4, size, torch.bfloat16, shared)]
    ]  # fmt: skip
    assert found == [
        (128, 64, 3, 4, 4), (128, 32, 5, 4, 4), (64, 64, 2, 3, 4), (64, 32, 2, 2, 4),
        (64, 32, 2, 3, 4), (64, 32, 2, 2, 4), (64, 32, 2, 3, 8), (32, 32, 1, 2, 8),
    ]  # fmt: skip


@pytest.mark.parametrize("size", [64, 80, 128, 192, 256])
def test_a_multiprocessor_with_99_kib_decodes_with_eight_warps(size):
    """These are the cards with compute capability 8.6, 8.9 and 12.0."""
    heads = Heads(8, 4, size, torch.bfloat16, 101_376)
    options = heads.decode_options
    tiles = (options["WIDE_M"] + 2 * options["BLOCK_N"] * (options["num_stages"] - 1)) * 2
    programs = 102_400 // (tiles * heads.block_e + 1024)
    assert programs * options["num_warps"] >= 8
    assert options["num_stages"] > 1
