"""The GPU's decoding and prefill attention over KV slots equal their torch references and a dense
softmax. The kernels are interpreted on a CPU.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from backends import backend_of
from hypothesis import given, settings, strategies as st
from test_cpp_attention import Prompt, Sample
from torch import Tensor
from variants import slow_after

from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.attention import CppDecodeAttention
from planish.model.kernels.interface.parts import Attend
from planish.model.kernels.reference.sampling_attention import DecodeAttention, PrefillAttention
from planish.model.kernels.triton.sampling_attention import DecodeTables, GpuPrefill, PoolBases
from planish.model.sequences.kv_cache import (
    GappedKVPool,
    KVPool,
    KVPools,
    KVSpec,
    PrefillSpan,
    SlotOwner,
)
from planish.model.sequences.positions import SPAN, capacity_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@dataclass
class Batch:
    """Running prompts and samples, in KV pools with random contents."""

    shape: KVSpec
    q_heads: int
    running: list[Sample] = field(default_factory=list)
    kind: type[KVPool] = KVPool
    windows: tuple[int | None, ...] = (None, None)
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        self.prompts, self.samples = KVPools(self.shape, self.kind), KVPools(self.shape, self.kind)
        self.generator = torch.Generator().manual_seed(0)

    def begin(self, length: int, drawn: list[int]) -> None:
        """Add a prompt of `length` tokens with len(drawn) samples of `drawn[i]` tokens."""
        prompt = Prompt(length)
        self.prompts.pool_for(capacity_for(length)).allocate(prompt)
        samples = [Sample(prompt, length % SPAN + count) for count in drawn]
        for sample in samples:
            self.samples.pool_for(capacity_for(sample.num_stored + 1)).allocate(sample)
        self.running += samples

    def end(self, sample: Sample) -> None:
        self.samples.pool_for(capacity_for(sample.num_stored + 1)).free(sample)
        self.running.remove(sample)

    def store(self, sample: Sample) -> None:
        """Count one more stored position, and move the sample to a larger slot if it is full."""
        pool, more = (
            self.samples.pool_for(capacity_for(sample.num_stored + 1)),
            capacity_for(sample.num_stored + 2),
        )
        sample.num_stored += 1
        if more > pool.capacity:
            pool.move([sample], self.samples.pool_for(more))

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(self.shape.dtype).to(DEVICE)

    def redraw(self) -> None:
        for pool in (*self.prompts.pools_in_use(), *self.samples.pools_in_use()):
            for tensor in (*pool.keys, *pool.values):
                tensor.copy_(self.random(*tensor.shape))

    def spoil(self) -> None:
        """Overwrite every position that no row may attend to, including the keys that the next step
        will store.
        """
        for pool in self.prompts.pools_in_use():
            _spoil(
                pool,
                {
                    prompt.slot: prompt.length // SPAN * SPAN
                    for prompt in cast(list[Prompt], pool.owners)
                },
            )
        for pool in self.samples.pools_in_use():
            _spoil(
                pool, {sample.slot: sample.num_stored for sample in cast(list[Sample], pool.owners)}
            )

    def tables(self, max_rows: int) -> DecodeTables:
        return DecodeTables(PoolBases(self.shape, 4096), max_rows, self.q_heads, self.windows)

    def check(self, tables: DecodeTables, padding: int, layer: int = 1) -> None:
        """Compare one layer of a step, with `padding` rows before the samples' rows, with both
        references. Pools with gaps are compared with the dense reference only.
        """
        self.redraw()
        order = torch.randperm(len(self.running), generator=self.generator).tolist()
        rows: dict[SlotOwner, int] = {
            sample: padding + place for sample, place in zip(self.running, order, strict=True)
        }
        total, size = padding + len(rows), self.shape.head_dim
        q = self.random(total, self.q_heads, size)
        # In the decoder, the values are also part of a wider tensor.
        k, v = (
            self.random(total, self.shape.num_heads, size),
            self.random(total, 3 * self.shape.num_heads, size),
        )
        v = v[:, -self.shape.num_heads :]
        reference = None
        if self.kind is KVPool:
            given = (rows, self.prompts, self.samples, 1, DEVICE, self.windows)
            reference = DecodeAttention(*given)(layer, q, k, v, self.sinks)
        for sample in self.running if reference is None else ():
            own, row = self.samples.pool_for(capacity_for(sample.num_stored + 1)), rows[sample]
            (
                own.keys[layer][sample.slot, :, sample.num_stored],
                own.values[layer][sample.slot, :, sample.num_stored],
            ) = (
                k[row],
                v[row],
            )
        dense = torch.stack([self.dense(sample, layer, q[rows[sample]]) for sample in self.running])
        self.spoil()
        tables.fill(rows, self.prompts, self.samples)
        found = tables(layer, q, k, v, self.sinks)
        assert found.dtype == q.dtype
        assert not found[:padding].any()
        tolerance = TOLERANCE[self.shape.dtype]
        if reference is not None:
            torch.testing.assert_close(found, reference, rtol=tolerance, atol=tolerance)
        of_samples = found[[rows[sample] for sample in self.running]]
        torch.testing.assert_close(of_samples.double(), dense, rtol=tolerance, atol=tolerance)

    def dense(self, sample: Sample, layer: int, q: Tensor) -> Tensor:
        """Return softmax attention in float64 over the keys of one sample."""
        prompt, seen = sample.prompt, sample.prompt.length // SPAN * SPAN
        home, own = (
            self.prompts.pool_for(capacity_for(prompt.length)),
            self.samples.pool_for(capacity_for(sample.num_stored + 1)),
        )
        keys, values = (
            torch.cat(
                [
                    theirs[layer][prompt.slot, :, :seen],
                    ours[layer][sample.slot, :, : sample.num_stored + 1],
                ],
                1,
            )
            .double()
            .repeat_interleave(self.q_heads // self.shape.num_heads, 0)
            for theirs, ours in ((home.keys, own.keys), (home.values, own.values))
        )
        scores = (keys @ q.double().unsqueeze(-1)).squeeze(-1) * self.shape.head_dim**-0.5
        window = self.windows[layer]
        if window is not None:
            scores[:, :-window] = -torch.inf
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double().unsqueeze(1)], 1)
        weights = scores.softmax(-1)[:, : values.shape[1]]
        return (weights.unsqueeze(1) @ values).squeeze(1)


def _spoil(pool: KVPool, ends: dict[int, int]) -> None:
    """Overwrite all positions from `ends[slot]` on, and all slots without an entry in `ends`."""
    for tensor in (*pool.keys, *pool.values):
        for slot in range(len(tensor)):
            tensor[slot, :, ends.get(slot, 0) :] = torch.nan


def batch(
    heads: int = 1,
    group: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    **options,
) -> Batch:
    return Batch(KVSpec(2, heads, head_dim, dtype, DEVICE), heads * group, **options)


@pytest.mark.parametrize("window", slow_after(1, [70, 1, 64, 129, 5000]))
def test_windows_and_sinks_of_decoding_equal_both_references(window: int):
    """Prompts are before, in and across the window of their samples, which differ in length."""
    running = batch(windows=(window, None), sinks=torch.tensor([-1.0, 2.0], device=DEVICE))
    running.begin(64, [3, 70])
    running.begin(201, [0, 1, 130])
    running.begin(5, [0])
    tables = running.tables(16)
    running.check(tables, padding=2, layer=0)
    if window == 64:
        running.check(tables, padding=0, layer=1)


@pytest.mark.slow
def test_windows_without_sinks_use_several_blocks_and_pieces():
    """The 20 samples are two blocks. Those of the second begin their window after the prompt."""
    running = batch(group=4, windows=(300, 300), dtype=torch.bfloat16)
    running.begin(1200, [*range(0, 100, 10), *range(290, 390, 10)])
    tables = running.tables(20)
    running.check(tables, padding=0)
    assert tables._tables["rows0"]["parts"].max() < 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "group", "head_dim", "dtype"),
    [(2, 1, 16, torch.float32), (1, 3, 48, torch.float32), (1, 4, 16, torch.bfloat16)],
)
def test_a_new_row_attends_to_its_prompt_then_its_own_slot(heads, group, head_dim, dtype):
    running = batch(heads, group, head_dim, dtype)
    running.begin(5, [0])
    running.begin(64, [3, 70])
    running.begin(201, [0, 1, 130])
    running.check(running.tables(16), padding=2)


@pytest.mark.slow
def test_many_samples_of_one_prompt_use_several_blocks():
    running = batch(group=4)
    running.begin(130, [1] * 20)
    running.check(running.tables(20), padding=0)


@pytest.mark.slow
def test_long_key_ranges_are_split():
    running = batch(group=1)
    running.begin(1200, [0, 170])
    tables = running.tables(2)
    running.check(tables, padding=0)
    assert tables._tables["rows0"]["parts"].min() > 8  # more parts than one program adds at a time


@pytest.mark.slow
def test_attention_tables_are_reused_step_after_step():
    running = batch(heads=1, group=2)
    running.begin(70, [0, 3])
    running.begin(20, [43, 4])
    tables = running.tables(8)
    where = [tensor.data_ptr() for tensor in tables._tables.on_device.values()]
    running.check(tables, padding=1)
    first, *others = running.running
    running.end(first)
    for sample in others:
        running.store(sample)  # one moves to a larger slot
    pools = {id(pool): pool.reallocations for pool in running.samples.pools_in_use()}
    running.begin(150, [1, 2, 3])
    assert any(
        pool.reallocations > pools.get(id(pool), 0) for pool in running.samples.pools_in_use()
    )
    running.check(tables, padding=2)
    assert where == [tensor.data_ptr() for tensor in tables._tables.on_device.values()]


@pytest.mark.parametrize(
    "kernel", ["native", "reference", pytest.param("triton", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("window", [None, 20])
def test_several_rows_of_a_sample_equal_one_row_per_step(kernel, window):
    if kernel == "native" and ops.load_library() is None:
        pytest.skip("this machine has no AVX2 or no C++ compiler")
    running = batch(heads=2, group=2, windows=(window, window))
    running.begin(70, [1, 3, 5])
    running.begin(20, [0, 9])
    tables = running.tables(16)
    windows = (window, window)

    def attention(rows: dict[SlotOwner, int], counts: dict[SlotOwner, int] | None) -> Attend:
        given = (rows, running.prompts, running.samples)
        if kernel == "triton":
            tables.fill(*given, counts)
            return tables
        if kernel == "native":
            return CppDecodeAttention(*given, windows, counts)
        return DecodeAttention(*given, 1, DEVICE, windows, counts)

    counts: dict[SlotOwner, int] = dict(zip(running.running, (4, 1, 2, 1, 5), strict=True))
    rows: dict[SlotOwner, int] = {}
    row = 1
    for sample in running.running[::-1]:
        rows[sample] = row
        row += counts[sample]
    q, k, v = running.random(row, 4, 16), running.random(row, 2, 16), running.random(row, 2, 16)
    before = {sample: sample.num_stored for sample in running.running}
    running.redraw()
    if kernel != "reference":  # which multiplies the values of unseen keys by 0
        running.spoil()
    together = attention(rows, counts)(1, q, k, v)
    assert not together[0].any()
    for number in range(5):
        chosen = {sample: rows[sample] + min(number, counts[sample] - 1) for sample in rows}
        for sample in running.running:
            sample.num_stored = before[sample] + chosen[sample] - rows[sample]
        alone = attention(chosen, None)(1, q, k, v)
        some = list(chosen.values())
        if kernel == "triton":
            torch.testing.assert_close(together[some], alone[some], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(together[some], alone[some])


@pytest.mark.parametrize(
    "kernel", ["native", "reference", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_a_step_of_some_samples_leaves_the_others_alone(kernel):
    if kernel == "native" and ops.load_library() is None:
        pytest.skip("this machine has no AVX2 or no C++ compiler")
    running = batch(heads=2, group=2)
    running.begin(70, [1, 3, 5])
    running.begin(20, [0, 9])
    running.begin(150, [2])
    tables = running.tables(16)
    running.redraw()
    q, k, v = (running.random(6, heads, 16) for heads in (4, 2, 2))

    def step(samples: list[Sample]) -> Tensor:
        """Return the attention of these samples; each has its own row in every step."""
        rows: dict[SlotOwner, int] = {sample: running.running.index(sample) for sample in samples}
        given = (rows, running.prompts, running.samples)
        if kernel == "triton":
            tables.fill(*given)
            return tables(1, q, k, v)[list(rows.values())]
        attend = (
            CppDecodeAttention(*given) if kernel == "native" else DecodeAttention(*given, 1, DEVICE)
        )
        return attend(1, q, k, v)[list(rows.values())]

    def contents() -> list[Tensor]:
        """Return the keys and values of each sample's slot."""
        found = []
        for sample in running.running:
            pool = running.samples.pool_for(capacity_for(sample.num_stored + 1))
            found.append(torch.stack([pool.keys[1][sample.slot], pool.values[1][sample.slot]]))
        return found

    some, others = [1, 3, 5], [0, 2, 4]
    before = contents()
    alone = step([running.running[index] for index in some])
    after = contents()
    assert all(torch.equal(before[index], after[index]) for index in others)
    assert not any(torch.equal(before[index], after[index]) for index in some)
    together = step(running.running)
    if kernel == "triton":
        torch.testing.assert_close(together[some], alone, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(together[some], alone)


@pytest.mark.slow
def test_attention_accepts_gaps_between_slots():
    running = Batch(KVSpec(2, 1, 16, torch.float32, DEVICE), 2, kind=GappedKVPool)
    running.begin(70, [0, 3, 1, 2])
    running.begin(20, [20, 4])
    tables = running.tables(8)
    running.check(tables, padding=1)
    for sample in running.running[:3:2]:
        running.end(sample)
    assert sorted(sample.slot for sample in running.running) == [1, 3, 4, 5]
    running.check(tables, padding=0)
    running.begin(150, [1, 2])
    running.check(tables, padding=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns about the NaN row
def test_non_finite_values_stay_in_their_own_row():
    running = batch()
    running.begin(70, [0, 1, 2])
    running.redraw()
    tables = running.tables(3)
    rows: dict[SlotOwner, int] = {sample: row for row, sample in enumerate(running.running)}
    q, k, v = running.random(3, 2, 16), running.random(3, 1, 16), running.random(3, 1, 16)
    tables.fill(rows, running.prompts, running.samples)
    clean = tables(0, q, k, v)
    q[1] = torch.nan
    found = tables(0, q, k, v)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], clean[::2])


def test_a_step_without_samples_is_valid():
    running = batch()
    tables = running.tables(2)
    tables.fill({}, running.prompts, running.samples)
    q, kv = running.random(2, 2, 16), running.random(2, 1, 16)
    assert not tables(0, q, kv, kv).any()


lengths = st.one_of(st.integers(1, 300), st.integers(1, 131_072))
drawn = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 131_000)), min_size=1, max_size=40)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    groups=st.lists(st.tuples(lengths, drawn), max_size=8),
    heads=st.sampled_from([1, 3, 8]),
    group=st.integers(1, 5),
)
def test_pieces_cover_all_positions_exactly_once(groups, heads, group):
    shape = KVSpec(1, heads, 16, torch.float32, torch.device("cpu"))
    prompts, samples, rows = KVPools(shape), KVPools(shape), {}
    running = []
    for length, counts in groups:
        prompt = Prompt(length)
        # only the capacities of the pools matter here
        prompts.pool_for(capacity_for(length)).owners.append(prompt)
        for count in counts:
            running.append(Sample(prompt, length % SPAN + count))
            samples.pool_for(capacity_for(length % SPAN + count + 1)).owners.append(running[-1])
    for pools in (prompts, samples):
        for pool in pools.pools_in_use():
            for slot, owner in enumerate(pool.owners):
                owner.slot = slot
    rows: dict[SlotOwner, int] = {sample: row for row, sample in enumerate(reversed(running))}
    tables = DecodeTables(PoolBases(shape, 4096), max(1, len(running)), heads * group)
    tables.fill(rows, prompts, samples)
    wide, every = tables._tables["counts0"]
    written: Counter[int] = Counter()
    seen: dict[int, list[tuple[int, int, int]]] = {row: [] for row in rows.values()}
    entries = tables._tables["entries0"]
    for piece in tables._tables["pieces0"][:every]:
        assert piece["first"] < piece["stop"] <= piece["capacity"]
        for entry in entries[piece["entry"] : piece["entry"] + piece["entries"]]:
            written[int(entry["part"] + piece["number"])] += 1
            seen[int(entry["row"])].append(
                (int(piece["number"]), int(piece["first"]), int(piece["stop"]))
            )
    assert (tables._tables["pieces0"]["entries"][wide:every] == 1).all()
    assert set(written.values()) <= {1}
    assert max(written, default=0) < len(tables._work[None].values)
    for sample in running:
        shared, own = sample.prompt.length // SPAN * SPAN, sample.num_stored + 1
        found = sorted(seen[rows[sample]])
        assert [number for number, _, _ in found] == list(range(len(found)))
        ends = [0]
        for _, first, stop in found:
            # After the prompt's last whole span, the range continues in the sample's own slot.
            assert first == ends[-1] or (ends[-1] == shared and first == 0)
            ends.append(stop)
        assert sum(stop - first for _, first, stop in found) == shared + own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "group", "head_dim", "dtype"),
    [(2, 1, 16, torch.float32), (1, 3, 48, torch.float32), (1, 4, 32, torch.bfloat16)],
)
@pytest.mark.parametrize("window", [None, 1, 50])
def test_prompt_rows_are_assigned_to_blocks_and_slots(heads, group, head_dim, dtype, window):
    shape = KVSpec(2, heads, head_dim, dtype, DEVICE)
    running = Batch(shape, heads * group)
    for length in (3, 64, 200, 130):
        running.begin(length, [])
    small, middle = running.prompts.pool_for(64), running.prompts.pool_for(256)
    running.redraw()
    spans = [
        PrefillSpan(small, 0, row=2, start=0, count=3),
        PrefillSpan(middle, 1, row=5, start=63, count=66),
        PrefillSpan(small, 1, row=80, start=63, count=1),
        PrefillSpan(middle, 0, row=72, start=128, count=7),
    ]
    q, k, v = (
        running.random(83, heads * group, head_dim),
        *(running.random(83, heads, head_dim) for _ in range(2)),
    )
    windows = (None, window)
    sinks = None if window is None else torch.linspace(-2, 3, heads * group, device=DEVICE)
    reference = PrefillAttention(spans, windows)(1, q, k, v, sinks)
    for span in spans:
        for tensor in (span.pool.keys[1], span.pool.values[1]):
            tensor[span.slot, :, span.start :] = torch.nan
    attention = GpuPrefill(spans, PoolBases(shape, 4096), heads * group, windows)
    found = attention(1, q, k, v, sinks)
    torch.testing.assert_close(found, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    covered = [row for span in spans for row in range(span.row, span.row + span.count)]
    assert not found[[row for row in range(83) if row not in covered]].any()


def test_pool_addresses_follow_reallocation():
    shape = KVSpec(2, 1, 16, torch.float32, DEVICE)
    bases, pools = PoolBases(shape, 4096), [KVPool(shape, 64), KVPool(shape, 128)]
    assert bases.numbers(pools) == [0, 1]
    for pool in pools:
        pool.allocate(Sample(Prompt(1), 0))
    assert bases.numbers(pools[::-1]) == [1, 0]
    addresses = [
        [
            [keys.data_ptr(), values.data_ptr()]
            for keys, values in zip(p.keys, p.values, strict=True)
        ]
        for p in pools
    ]
    assert bases.table[:, :2].transpose(0, 1).tolist() == addresses
    del pool, pools[0]  # pyright: ignore[reportPossiblyUnboundVariable]
    assert bases.numbers([*pools, KVPool(shape, 64)]) == [1, 0]


@pytest.mark.slow
def test_the_address_table_has_room_for_all_pools_of_a_long_context():
    shape = KVSpec(2, 1, 16, torch.float32, DEVICE)
    bases, pools = PoolBases(shape, 40_960), [KVPool(shape, 64 * n) for n in range(1, 1281)]
    assert bases.numbers(pools) == list(range(1280))
    pools[700].allocate(Sample(Prompt(1), 0))
    assert bases.numbers([pools[700]]) == [700]
    assert bases.table[1, 700].tolist() == [
        pools[700].keys[1].data_ptr(),
        pools[700].values[1].data_ptr(),
    ]


def test_torch_computes_the_attention_of_unsupported_heads(monkeypatch):
    monkeypatch.setenv("PLANISH_KERNELS", "triton")
    for head_dim, dtype in ((128, torch.bfloat16), (80, torch.float32)):
        assert "attention" in backend_of(dtype, head_dim=head_dim).families
    for head_dim, dtype in ((100, torch.bfloat16), (512, torch.bfloat16), (128, torch.float16)):
        assert "attention" not in backend_of(dtype, head_dim=head_dim).families


@pytest.mark.gpu
def test_a_captured_decoding_step_serves_other_samples():
    shape = KVSpec(2, 8, 128, torch.bfloat16, torch.device("cuda"))
    running = Batch(shape, 32)
    running.begin(300, [5] * 20)
    running.begin(5000, [400])
    running.redraw()
    tables = running.tables(32)
    q, k, v = running.random(32, 32, 128), running.random(32, 8, 128), running.random(32, 8, 128)
    tables.fill(
        {sample: row for row, sample in enumerate(running.running)},
        running.prompts,
        running.samples,
    )
    tables(1, q, k, v)  # compile before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tables(1, q, k, v)
    for sample in running.running[:7]:
        running.end(sample)
    running.begin(900, [100, 3])
    running.redraw()
    rows: dict[SlotOwner, int] = {sample: row + 3 for row, sample in enumerate(running.running)}
    tables.fill(rows, running.prompts, running.samples)
    graph.replay()
    reference = DecodeAttention(rows, running.prompts, running.samples, 1, shape.device)(1, q, k, v)
    torch.testing.assert_close(out, reference, rtol=0.02, atol=0.02)
