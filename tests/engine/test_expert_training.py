"""Mixtures of experts in the sampler, in the trainer and in an engine."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from backends import load_on
from test_sampler_equals_trainer import gaps, trained_adapter
from test_trainer import (
    CPU,
    decoder_tensors,
    gradient,
    group_datums,
    new_adapter,
    new_trainer,
    relative,
    run,
    with_policy_logprobs,
)
from variants import slow_after

from planish import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.training.trainer_settings import TrainerSettings
from planish.model.decoder import experts
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.cpp import ops
from planish.model.kernels.reference.probe import probe
from planish.service import Sample
from planish.testing import tiny_model
from planish.types import SampleResponse

OPTIONS = {
    "qwen3_moe": {"layers": 3, "dense_layers": [1], "intermediate": 128},
    "qwen3_5_moe": {"layers": 3, "dense_layers": [1], "intermediate": 128},
    "gpt_oss": {"layers": 3},
}


@pytest.fixture(name="decoder", scope="module", params=OPTIONS)
def _decoder(tmp_path_factory, request) -> Decoder:
    path = tiny_model(tmp_path_factory.mktemp("model"), request.param, **OPTIONS[request.param])
    return load_on(path, torch.float32, CPU)


def test_packed_training_equals_single_datums_and_any_split(decoder):
    adapter, trainer = new_adapter(decoder), new_trainer(decoder)
    data = with_policy_logprobs(trainer, adapter, group_datums(7, prompts=2))
    together, whole = gradient(trainer, adapter, data, "importance_sampling")
    assert together.metrics["computed_tokens:sum"] < together.metrics["tokens:sum"] / 1.3
    # Calls with one datum each share no prefix.
    adapter.grad, outputs = None, []
    for datum in data:
        outputs += run(trainer, adapter, [datum], "importance_sampling")[0].loss_fn_outputs
    assert adapter.grad is not None
    assert relative(adapter.grad, whole) < 1e-5
    split, grad = gradient(new_trainer(decoder, 30), adapter, data, "importance_sampling")
    assert split.metrics["micro_batches:sum"] > 1
    assert relative(grad, whole) < 1e-5
    for found in (outputs, split.loss_fn_outputs):
        for a, b in zip(found, together.loss_fn_outputs, strict=True):
            logprobs = a["logprobs"].to_torch(), b["logprobs"].to_torch()
            torch.testing.assert_close(*logprobs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", OPTIONS)
def test_activation_bytes_match_the_memory_autograd_saves(tmp_path, family):
    # As in real models, all experts of a token are wider than its hidden state.
    path = tiny_model(tmp_path, family, experts_per_token=4, expert_size=64)
    decoder = load_on(path, torch.bfloat16, CPU)
    tokens = np.random.default_rng(0).integers(0, 272, 501)
    inputs = ModelInput.from_ints(tokens[:-1].tolist())
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    adapter = new_adapter(decoder)
    frozen = {
        t.untyped_storage().data_ptr() for t in (*decoder_tensors(decoder), *adapter.weights.leaves)
    }
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(new_trainer(decoder), adapter, [Datum(inputs, {"target_tokens": tokens[1:]})])
    measured = sum(size for pointer, size in kept.items() if pointer not in frozen)
    estimate = TrainerSettings(micro_batch_tokens=500).activation_bytes(decoder.backend, rank=4)
    # The estimate also has the temporary tensors of one of the two layers. Those of the gradient of
    # a clamped SwiGLU are larger than what a layer stores.
    smallest_share = 0.4 if family == "gpt_oss" else 0.45
    assert smallest_share * estimate < measured < 1.15 * estimate


@contextmanager
def recorded(monkeypatch) -> Iterator[dict[bytes, bytes]]:
    """Record the experts and their weights of each row, by the bits of the row's hidden state."""
    found: dict[bytes, bytes] = {}
    route = experts.route

    def noted(backend, x, router, *, training):
        weights, rows = route(backend, x, router, training=training)
        chosen = rows.unsort(
            torch.tensor(
                [e for e, part in rows.expert_slices for _ in range(part.stop - part.start)]
            )
        )
        for row, own, ids in zip(x.detach(), weights.detach(), chosen, strict=True):
            found[row.view(torch.uint8).numpy().tobytes()] = own.numpy().tobytes() + bytes(
                ids.tolist()
            )
        return weights, rows

    with monkeypatch.context() as patch:
        patch.setattr(experts, "route", noted)
        yield found


@pytest.mark.parametrize("family", OPTIONS)
@pytest.mark.parametrize("dtype", slow_after(1, [torch.bfloat16, torch.float32]))
def test_sampler_and_trainer_choose_the_same_experts(tmp_path, dtype, family, monkeypatch):
    """Every row of the sampler comes again in the trainer, with the same bits, experts and weights,
    although one computes it alone and the other with many rows.
    """
    if ops.load_library() is None:
        pytest.skip("bits are promised where the CPU's own kernels serve")
    path = tiny_model(tmp_path, family, dtype="bfloat16", vocab_size=320, **OPTIONS[family])
    decoder = load_on(path, dtype, CPU)
    adapter, tiling = trained_adapter(decoder), probe(decoder.backend)
    prompt = ModelInput.from_ints(np.random.default_rng(0).integers(0, 256, 30).tolist())
    sampler = Sampler(decoder, SamplerSettings(), str)
    future: Future[SampleResponse] = Future()
    params = SamplingParams(max_tokens=20, seed=1, stop=[])
    with recorded(monkeypatch) as sampled:
        sampler.submit(Sample("s", prompt, 3, params), adapter.snapshot(), "version", future)
        while sampler.busy:
            sampler.step()
    with recorded(monkeypatch) as trained:
        assert not gaps(decoder, adapter, tiling, [(prompt, future.result())]).any()
    assert len(sampled) > 100
    assert sampled.items() <= trained.items()


@pytest.mark.parametrize("family", slow_after(1, list(OPTIONS)))
def test_a_saved_state_of_an_engine_continues_bit_for_bit(tmp_path, family):
    path = tiny_model(tmp_path / "model", family, **OPTIONS[family])
    tokens = list(range(40, 70))
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})

    def step(client) -> float:
        pending = client.forward_backward([datum], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=0.02)).result()
        return pending.result().metrics["loss:sum"]

    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as service:
        client = service.create_lora_training_client(str(path), rank=4, seed=0)
        losses = [step(client) for _ in range(3)]
        saved = client.save_state("middle").result().path
        expected = [step(client) for _ in range(2)]
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as service:
        client = service.create_training_client_from_state_with_optimizer(saved)
        assert [step(client) for _ in range(2)] == expected
    assert expected[-1] < 0.8 * losses[0]
