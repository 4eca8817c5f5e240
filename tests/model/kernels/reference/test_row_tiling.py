"""The row tiling that `probe` finds makes matmuls batch-invariant, on other inputs and row counts
than it probed.
"""

from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import CONFIG, CPU, load_on
from variants import slow_after

from planish.engine.engine import Engine
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.settings import EngineSettings
from planish.errors import UserError
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.choose import choose_backend, reference_backend
from planish.model.kernels.cpp import ops
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference import probe as probing
from planish.model.kernels.reference.lora import add_outputs_
from planish.model.kernels.reference.probe import cancelling_inputs, probe
from planish.model.layers.linear import onednn_packs_bfloat16
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.model.layers.row_tiling import FIXED, LoraRowRule, RowTiling
from planish.service import CreateModel, Sample
from planish.testing import tiny_model
from planish.types import LoraConfig, ModelInput, SampleResponse, SamplingParams

COUNTS = (*range(1, 70), 100, 150, 239, 240)


def disagreeing(
    backend: Backend, rank: int | None, x: torch.Tensor, weight: torch.Tensor
) -> list[int]:
    """Return the row counts at which a matmul padded by the tiling is not batch-invariant."""
    linear, tiling = backend.pack([weight]), backend.tiling
    assert tiling is not None

    def product(rows: int) -> torch.Tensor:
        if rank is None:
            return backend.matmul(x[:rows], linear)
        return tiling.run(lambda x: F.linear(x, weight), x[:rows], rank=rank)

    whole = product(len(x))
    return [n for n in COUNTS if not torch.equal(product(n), whole[:n])]


@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.bfloat16]))
def test_matmul_rows_are_batch_invariant(tmp_path, dtype):
    """Some machines use another kernel for one row of 1536 columns. Rounding to bf16 hides the
    difference in nearly every entry, so the inputs cancel.
    """
    tiny_model(tmp_path, intermediate=1536, vocab_size=(vocab := 333))
    config = ModelConfig.from_directory(tmp_path)
    backend = choose_backend(config, dtype, CPU, None)
    if backend.tiling is None:
        pytest.skip(
            "this machine's products differ at every multiple; the sampler uses fixed tiles here"
        )
    generator = torch.Generator().manual_seed(1)
    for fan_out, fan_in in ((96, 64), (64, 1536)):
        x, weight = (
            tensor.to(dtype) for tensor in cancelling_inputs(240, fan_out, fan_in, generator)
        )
        assert not disagreeing(backend, None, x, weight)
    # planish's kernels may serve the adapters of the layers, but not those of a head with this
    # vocabulary.
    layers = [] if backend.packs_layer_adapters else [1536]
    for rank in (8, 12, 32):
        for fan_out, fan_in in ((rank, 64), (vocab, rank), *((rank, width) for width in layers)):
            x, weight = (
                tensor.to(dtype) for tensor in cancelling_inputs(240, fan_out, fan_in, generator)
            )
            assert not disagreeing(backend, rank, x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab_size", "sizes"),
    [(4128, []), pytest.param(32001, [(4097,)], marks=pytest.mark.slow)],
)
def test_matmuls_of_planish_kernels_are_not_probed(tmp_path, dtype, vocab_size, sizes):
    """A head without kernels for its adapters is probed with a smaller vocabulary, for which there
    are no kernels either.
    """
    config = ModelConfig.from_directory(tiny_model(tmp_path, vocab_size=vocab_size))
    backend = choose_backend(config, dtype, CPU, None)
    if not backend.can_pack(64, 64):
        pytest.skip("this machine has no kernels of our own")
    assert [module.sizes for module in probing._torch_lora_modules(backend)] == sizes
    tiling = backend.tiling
    assert tiling is not None
    assert tiling.padded(1, None) == 1
    assert (tiling.lora is None) == (not sizes)


@pytest.fixture
def _matmuls_of_torch(monkeypatch):
    """Use planish's kernels for all families except matmuls."""
    library = ops.load_library()
    if library is None:
        pytest.skip("this machine has no kernels of our own")
    monkeypatch.setattr(library, "torch_families", frozenset({"matmul", "decode"}))


@pytest.fixture
def _fresh_memory_is_nan():
    """Let torch fill the memory of new tensors with NaN, so that no undefined entry goes unseen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms", [3, 5, 6, 7, 8, 9, 16, 21, 33, 64])
def test_the_inputs_of_the_probe_show_a_reversed_order_of_additions(dtype, terms):
    def added(products: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(products[..., 0])
        for product in products.unbind(-1):
            total = total + product
        return total.to(dtype)

    different = 0.0
    for seed in range(6):
        drawn = cancelling_inputs(16, 16, terms, torch.Generator().manual_seed(seed))
        x, weight = (tensor.to(dtype).float() for tensor in drawn)
        products = x[:, None] * weight
        changed = added(products) != added(products.flip(-1))
        different = max(different, changed.float().mean().item())
    assert different > 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("_matmuls_of_torch")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((1, 2, 4, 7, 33), id="some"),
        pytest.param(range(1, 65), id="all", marks=pytest.mark.slow),
    ],
)
def test_padding_makes_adapters_of_every_rank_batch_invariant(tmp_path, ranks, dtype):
    """The matmuls are those of the decoder, with one A for all linears of an input."""
    tiny_model(tmp_path, family="qwen3", hidden_size=128, intermediate=384)
    config = ModelConfig.from_directory(tmp_path)
    tiling = probe(choose_backend(config, dtype, CPU, False), at_any_cost=True)
    if tiling is None:
        pytest.skip("this machine's products differ at every multiple")
    wrong, padded = [], set()
    generator = torch.Generator().manual_seed(1)  # the probe draws with seed 0
    for rank in ranks:
        assert tiling.is_invariant(rank)
        for sizes, fan_in in 3 * (((64, 32, 32), 128), ((384, 384), 128), ((128,), 384)):
            x, a = (
                t.to(dtype) for t in cancelling_inputs(512, len(sizes) * rank, fan_in, generator)
            )
            pairs = [cancelling_inputs(512, size, rank, generator) for size in sizes]
            lora_hidden = torch.cat([hidden for hidden, _ in pairs], 1).to(dtype)
            b_matrices = [b.to(dtype) for _, b in pairs]

            def added(
                lora_hidden: torch.Tensor, sizes: Any = sizes, b_matrices: Any = b_matrices
            ) -> torch.Tensor:
                out = lora_hidden.new_zeros(len(lora_hidden), sum(sizes))
                add_outputs_(lora_hidden, out, sizes, b_matrices)
                return out

            for product, given in ((lambda x, a=a: x @ a.t(), x), (added, lora_hidden)):
                whole = product(given)
                for count in (1, 2, 3, 5, 9, 17, 40, 70, 77, 130, 150, 203, 300):
                    rows = tiling.padded(count, rank)
                    padded.add(rows > count)
                    if not torch.equal(product(given[:rows])[:count], whole[:count]):
                        wrong.append((rank, sizes, count, rows))
    assert not wrong
    # Without oneDNN, torch's bf16 matmuls are batch-invariant at every number of rows.
    pads = dtype == torch.float32 or onednn_packs_bfloat16()
    assert padded == ({True, False} if pads else {False})


@pytest.mark.slow
@pytest.mark.usefixtures("_matmuls_of_torch", "_fresh_memory_is_nan")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_samples_do_not_depend_on_adapters_of_other_ranks(tmp_path, dtype):
    tiny_model(tmp_path, "qwen3", hidden_size=128, intermediate=384, dtype="bfloat16")
    decoder = load_on(tmp_path, dtype, CPU, deterministic=True)
    if decoder.backend.tiling == FIXED:
        pytest.skip("this machine's products differ at every multiple")
    adapters = {}
    for rank in (1, 2, 3, 4, 7, 16, 33):
        layout = LoraLayout(decoder.config, LoraConfig(rank=rank))
        noise = 0.05 * torch.randn(layout.size, generator=torch.Generator().manual_seed(rank))
        adapters[rank] = LoraWeights(layout, layout.init(rank) + noise, decoder.backend)

    def sampled(asked: list[tuple[int, int]]) -> list[list[tuple[list[int], list[float]]]]:
        sampler = Sampler(decoder, SamplerSettings(), str)
        futures: list[Future[SampleResponse]] = []
        for rank, seed in asked:
            prompt = ModelInput.from_ints([(seed * 7 + i) % 250 for i in range(5 + 3 * seed)])
            params = SamplingParams(max_tokens=6 + seed, seed=seed, stop=[])
            futures.append(Future())
            op = Sample("s", prompt, 2, params)
            sampler.submit(op, adapters[rank], f"rank {rank}", futures[-1])
        while sampler.busy:
            sampler.step()
        return [
            [(list(one.tokens), list(one.logprobs)) for one in future.result().sequences]
            for future in futures
        ]

    asked = [(rank, seed) for seed in (0, 3) for rank in adapters]
    together = sampled(asked)
    for each, found in zip(asked, together, strict=True):
        assert sampled([each]) == [found]


def test_deterministic_rejects_a_rank_that_no_padding_serves(tmp_path, monkeypatch):
    model = tiny_model(tmp_path / "model")
    for deterministic in (True, None):
        settings = EngineSettings(dtype="float32", deterministic=deterministic)
        engine = Engine({"m": str(model)}, tmp_path / "data", settings)
        base = engine._base_models.get("m")
        tiling = RowTiling(lora=lambda rank: LoraRowRule(None if rank == 1 else 4))
        base.backend.tiling = tiling
        engine.submit(CreateModel("a", "m", LoraConfig(rank=2))).result()
        if deterministic:
            with pytest.raises(UserError, match=r"rank=1.*deterministic=True.*another rank"):
                engine.submit(CreateModel("b", "m", LoraConfig(rank=1)))
        else:
            engine.submit(CreateModel("b", "m", LoraConfig(rank=1))).result()
        engine.close()


def test_rows_are_padded_to_the_minimum_then_to_the_multiple():
    rules = {1: LoraRowRule(None), 8: LoraRowRule(16), 20: LoraRowRule(8, 16)}
    tiling = RowTiling(multiple=4, min_rows=2, lora=rules.__getitem__)
    assert [tiling.padded(n, None) for n in (1, 2, 4, 5)] == [4, 4, 4, 8]
    assert [tiling.padded(3, rank) for rank in (1, 8, 20)] == [4, 16, 16]
    assert tiling.padded(17, 8) == 20
    assert RowTiling().padded(1, 8) == 1


def test_fixed_tiles_are_batch_invariant():
    x, weight = torch.randn(256, 64), torch.randn(96, 64)
    assert RowTiling(multiple=FIXED.multiple, tile=FIXED.multiple) == FIXED
    backend = reference_backend(CONFIG, torch.float32, CPU, FIXED)
    linear = backend.pack([weight])
    whole = backend.matmul(x, linear)
    for start, stop in ((0, 32), (32, 64), (64, 65), (70, 150)):
        assert torch.equal(backend.matmul(x[start:stop], linear), whole[start:stop])
    torch.testing.assert_close(whole, x @ weight.t())


@pytest.mark.parametrize("tile", [None, 4])
def test_functions_run_with_padded_rows_change_their_outputs_in_place(tile):
    """Only the rows of the batch change, and the result has as many rows as the input."""
    tiling, seen = RowTiling(multiple=4, tile=tile, min_rows=8), []

    def added(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        out += x
        return 2 * x

    x, out = torch.arange(10.0).view(5, 2), torch.ones(7, 2)
    assert torch.equal(tiling.run(added, x, out[:5]), 2 * x)
    assert torch.equal(out[:5], x + 1)
    assert torch.equal(out[5:], torch.ones(2, 2))
    assert seen == ([8] if tile is None else [4, 4])
