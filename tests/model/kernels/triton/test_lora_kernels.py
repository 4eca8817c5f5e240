"""The batched LoRA kernel equals each adapter alone, whatever else is in the batch."""

from dataclasses import dataclass

import pytest
import torch
from hopper import Case, resources
from torch import Tensor

pytest.importorskip("triton")
from planish.model.kernels.triton import lora_kernels

SITES = 2
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Adapter:
    """The matrices of one target module."""

    rank: int
    a: Tensor
    b_matrices: list[Tensor]


def noise(*shape: int, seed: int, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)


def adapter(rank: int, inner: int, sizes: list[int], like: Tensor, seed: int = 0) -> Adapter:
    b_matrices = [
        noise(size, rank, seed=seed + 1 + i, like=like) / rank**0.5 for i, size in enumerate(sizes)
    ]
    return Adapter(
        rank, noise(len(sizes) * rank, inner, seed=seed, like=like) / inner**0.5, b_matrices
    )


Batch = list[tuple[int, int, Adapter | None]]
"""(first row, rows, adapter, or None if the slot has no adapter for this module)."""


def tables(batch: Batch, device: torch.device, module: int) -> tuple[Tensor, Tensor]:
    """Return `tiles` and `pointers` for `add_`. Unused tiles contain invalid values."""
    cut = []
    for slot, (first, rows, own) in enumerate(batch):
        for start in range(first, first + rows, lora_kernels.TILE):
            count = min(lora_kernels.TILE, first + rows - start)
            cut.append([start, count, slot, own.rank if own is not None else 3])
    head = [len(cut), max((own.rank for _, _, own in batch if own is not None), default=1), 0, 0]
    tiles = torch.tensor([head, *cut, [-(1 << 30)] * 4], dtype=torch.int32)
    pointers = torch.zeros(max(1, len(batch)), SITES, 4, dtype=torch.int64)
    for slot, (_, _, own) in enumerate(batch):
        for number, matrix in enumerate([own.a, *own.b_matrices] if own is not None else []):
            pointers[slot, module, number] = matrix.data_ptr()
    return tiles.to(device), pointers.to(device)


def added(
    x: Tensor,
    out: Tensor,
    sizes: list[int],
    batch: Batch,
    *,
    spread: bool = True,
    aligned: bool = False,
) -> Tensor:
    tiles, pointers = tables(batch, x.device, module=1)
    columns = max((own.a.shape[0] for _, _, own in batch if own is not None), default=1)
    parts = lora_kernels.scratch(len(x) if spread else 4096, columns, x.device).fill_(torch.nan)
    found = out.clone()
    lora_kernels.add_(x, found, sizes, 1, tiles, pointers, parts, aligned=aligned)
    return found


def expected(x: Tensor, out: Tensor, sizes: list[int], batch: Batch) -> Tensor:
    found = out.float()
    for first, rows, own in batch:
        if own is None:
            continue
        mine = slice(first, first + rows)
        low = (x[mine].float() @ own.a.float().t()).to(x.dtype).float()
        for part, columns, b in zip(
            low.chunk(len(sizes), 1), found[mine].split(sizes, 1), own.b_matrices, strict=True
        ):
            columns += part @ b.float().t()
    return found.to(out.dtype)


def assert_near(found: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    """Assert equality up to another summation order and intermediate rounding to `dtype`."""
    near = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(found, right, rtol=near, atol=near)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[40], [130, 24, 24], [72, 136]])
def test_each_tile_uses_its_own_adapter(device: torch.device, dtype: torch.dtype, sizes: list[int]):
    inner, rows = 72, 45
    like = torch.empty(0, dtype=dtype, device=device)
    one, two, three, four = (adapter(rank, inner, sizes, like, rank) for rank in (1, 8, 40, 12))
    batch: Batch = [
        (2, 17, one),
        (19, 1, two),
        (20, 5, None),
        (27, 16, three),
        (44, 1, four),
        (44, 0, three),
    ]
    x, out = noise(rows, inner, seed=1, like=like), noise(rows, sum(sizes), seed=2, like=like)
    found = added(x, out, sizes, batch, spread=sizes != [40])
    assert_near(found, expected(x, out, sizes, batch), dtype)
    base = torch.tensor([0, 1, *range(20, 27), 43])
    assert torch.equal(found[base], out[base])
    assert not torch.equal(found, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_are_accepted(device: torch.device, dtype: torch.dtype):
    like = torch.empty(0, dtype=dtype, device=device)
    x = noise(5, 100, seed=1, like=like)[:, 20:68]
    out = noise(5, 200, seed=2, like=like)
    own = adapter(16, 48, [96], like)
    tiles, pointers = tables([(1, 3, own)], device, module=0)
    whole = out.clone()
    lora_kernels.add_(
        x,
        whole[:, 8:104],
        [96],
        0,
        tiles,
        pointers,
        lora_kernels.scratch(5, 16, device),
        aligned=True,
    )
    assert_near(whole[:, 8:104], expected(x, out[:, 8:104], [96], [(1, 3, own)]), dtype)
    assert torch.equal(whole[:, :8], out[:, :8])
    assert torch.equal(whole[:, 104:], out[:, 104:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_accumulate_in_float32(device: torch.device, dtype: torch.dtype):
    like = torch.empty(0, dtype=dtype, device=device)
    own, hidden = adapter(8, 64, [150], like), noise(3, 64, seed=1, like=like)
    logits = noise(3, 150, seed=2, like=like).float() * 100
    found = added(hidden, logits, [150], [(0, 3, own)], aligned=True)
    right = expected(hidden, logits, [150], [(0, 3, own)])
    assert found.dtype == torch.float32
    # bf16 has steps of 0.5 at 100.
    assert (found - right).abs().max() < (1e-4 if dtype == torch.float32 else 5e-2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_parallel_partial_sums_are_bitwise_reproducible(device: torch.device, dtype: torch.dtype):
    """The rows are long enough for several parts, of which the last is short."""
    inner, sizes = 1100, [32, 16]
    like = torch.empty(0, dtype=dtype, device=device)
    batch: Batch = [
        (0, 3, adapter(20, inner, sizes, like)),
        (3, 1, adapter(4, inner, sizes, like, 9)),
    ]
    x, out = noise(4, inner, seed=1, like=like), noise(4, sum(sizes), seed=2, like=like)
    spread = added(x, out, sizes, batch)
    assert torch.equal(spread, added(x, out, sizes, batch, spread=False))
    assert_near(spread, expected(x, out, sizes, batch), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapter_rows_are_batch_invariant(device: torch.device, dtype: torch.dtype):
    inner, sizes = 600, [48, 24]
    like = torch.empty(0, dtype=dtype, device=device)
    own, other = adapter(12, inner, sizes, like), adapter(32, inner, sizes, like, 5)
    x, out = noise(40, inner, seed=1, like=like), noise(40, sum(sizes), seed=2, like=like)
    alone = added(x[18:20], out[18:20], sizes, [(0, 1, own), (1, 1, other)])
    assert torch.equal(added(x, out, sizes, [(0, 19, own), (19, 21, other)])[18:20], alone)


def test_a_batch_without_adapters_is_unchanged(device: torch.device):
    x, out = torch.ones(2, 32, device=device), torch.ones(2, 32, device=device)
    assert torch.equal(added(x, out, [32], []), out)


def test_the_number_of_parts_depends_only_on_the_length():
    assert {
        inner: lora_kernels._segments(inner) for inner in (64, 576, 1024, 4096, 12288, 53248)
    } == {
        64: (1, 256),
        576: (3, 256),
        1024: (4, 256),
        4096: (4, 1024),
        12288: (8, 1536),
        53248: (8, 6656),
    }


# Registers on a Hopper GPU


def shrink(inner: int, linears: int, dtype: str, *, spread: bool) -> Case:
    """Return the case as launched; integers with known divisibility become constants."""
    parts, length = lora_kernels._segments(inner)
    columns = lora_kernels.MAX_FUSED_LINEARS * 256
    return Case(
        "shrink_kernel",
        {"x": f"*{dtype}", "tiles": "*i32", "pointers": "*i64", "module": "i32", "parts": "*fp32"},
        {
            **{
                "x_stride": inner,
                "slot_stride": 580,
                "part_stride": 256 * columns,
                "low_stride": columns,
            },
            **{
                "inner": inner,
                "segment": length,
                "LINEARS": linears,
                "SEGMENTS": parts,
                "SPREAD": spread,
            },
            **{
                "ALIGNED": True,
                "TILE": 16,
                "BLOCK_LOW": 32,
                "BLOCK_IN": 32 if dtype == "fp32" else 128,
            },
        },
        stages=2 if dtype == "fp32" else 4,
    )


def expand(inner: int, sizes: list[int], dtype: str, out: str, *, spread: bool) -> Case:
    columns = lora_kernels.MAX_FUSED_LINEARS * 256
    names = ("size_0", "size_1", "size_2")
    return Case(
        "expand_kernel",
        {
            "x": f"*{dtype}",
            "tiles": "*i32",
            "pointers": "*i64",
            "module": "i32",
            "parts": "*fp32",
            "out": f"*{out}",
        },
        {
            **{
                "slot_stride": 580,
                "part_stride": 256 * columns,
                "low_stride": columns,
                "out_stride": sum(sizes),
            },
            **dict(zip(names, [*sizes, 0, 0], strict=False)),
            **{
                "PARTS": lora_kernels._segments(inner)[0] if spread else 1,
                "ALIGNED": True,
                "TILE": 16,
            },
            **{"BLOCK_OUT": 128, "BLOCK_RANK": 32},
        },
        stages=2 if dtype == "fp32" else 1,
    )


def assert_fits(cases: list[Case]) -> None:
    for found in resources("planish.model.kernels.triton.lora_kernels", cases):
        assert found.spilled <= 8, found  # registers that the compiler reserves
        assert found.shared < 64 << 10, found


@pytest.mark.slow
def test_the_lora_kernel_compiles_for_hopper():
    assert_fits(
        [
            shrink(4096, 2, "bf16", spread=True),
            expand(4096, [12288, 12288], "bf16", "bf16", spread=True),
        ]
    )
