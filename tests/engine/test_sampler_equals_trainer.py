"""The sampler's logprobs equal the trainer's: up to rounding in float32, nearly bitwise in bf16.

In bf16, this requires the same summation order in every matmul and attention of both. A different
order in one of them would grow to some hundredths through the layers, as a control test shows.
"""

from concurrent.futures import Future

import numpy as np
import pytest
import torch
from backends import CPU, load_on, with_tiling

from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.training.adapters import Adapter
from planish.engine.training.trainer import Trainer
from planish.engine.training.trainer_settings import TrainerSettings
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.choose import choose_backend
from planish.model.kernels.cpp import ops
from planish.model.kernels.reference import ordered_attention
from planish.model.kernels.reference.probe import probe
from planish.model.layers.lora import LoraLayout
from planish.model.layers.row_tiling import RowTiling
from planish.model.sources.weights import load_weights
from planish.service import Sample
from planish.testing import tiny_model
from planish.types import (
    Datum,
    EncodedTextChunk,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
    TensorData,
)

YARN_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def trained_adapter(decoder: Decoder, rank: int = 8, **options: bool) -> Adapter:
    layout = LoraLayout(decoder.config, LoraConfig(rank=rank, **options))
    noise = 0.05 * torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    return Adapter(layout, decoder.backend, layout.init(0) + noise)


def rollouts(
    decoder: Decoder, adapter: Adapter, tiling: RowTiling | None, temperature: float = 1.0
) -> list[tuple[ModelInput, SampleResponse]]:
    """Sample groups whose prompts share a prefix, with lengths around the borders of spans, chunks
    and slots.
    """
    rng = np.random.default_rng(0)
    common = rng.integers(0, 256, 70).tolist()
    sampler = Sampler(
        with_tiling(decoder, tiling), SamplerSettings(max_prefill_tokens_per_step=100), str
    )
    asked = []
    for i, extra in enumerate((1, 26, 57, 58, 59, 122, 300)):
        prompt = ModelInput.from_ints(
            common[: 70 if i else 3] + rng.integers(0, 256, extra).tolist()
        )
        params = SamplingParams(max_tokens=8 + 12 * i, temperature=temperature, stop=[], seed=i)
        asked.append((prompt, Sample("s", prompt, 1 + i % 4, params), Future()))
    for _, op, future in asked:
        sampler.submit(op, adapter.snapshot(), "version", future)
    while sampler.busy:
        sampler.step()
    return [(prompt, future.result()) for prompt, _, future in asked]


def gap(decoder: Decoder, temperature: float) -> np.ndarray:
    """Return the sampled minus the trained logprob of every sampled token."""
    adapter = trained_adapter(decoder)
    tiling = probe(decoder.backend)
    return gaps(
        decoder, adapter, tiling, rollouts(decoder, adapter, tiling, temperature), temperature
    )


def gaps(
    decoder: Decoder,
    adapter: Adapter,
    tiling: RowTiling | None,
    answered: list[tuple[ModelInput, SampleResponse]],
    temperature: float = 1.0,
    micro_batch_tokens: int = 4096,
) -> np.ndarray:
    data, sampled = [], []
    for prompt, response in answered:
        for sequence in response.sequences:
            pad = [0] * (prompt.length - 1)
            tokens, logprobs = sequence.tokens, sequence.logprobs
            inputs = {
                "target_tokens": pad + tokens,
                "logprobs": [0.0] * len(pad) + logprobs,
                "advantages": [0.0] * len(pad) + [1.0] * len(tokens),
            }
            data.append(Datum(prompt.append(EncodedTextChunk(tokens[:-1])), inputs))
            sampled.append(np.array(logprobs))
    work = Trainer(
        with_tiling(decoder, tiling), TrainerSettings(micro_batch_tokens)
    ).forward_backward(adapter, data, "importance_sampling", {"temperature": temperature})
    while True:
        try:
            next(work)
        except StopIteration as end:
            outputs = end.value.loss_fn_outputs
            break
    trained = [
        out["logprobs"].to_numpy()[-len(s) :] for out, s in zip(outputs, sampled, strict=True)
    ]
    return np.concatenate(sampled) - np.concatenate(trained)


@pytest.fixture(params=["native", "torch"])
def _kernels(request, monkeypatch):
    """Run the test with planish's CPU kernels, if there are any, and without."""
    if request.param == "torch":
        monkeypatch.setattr(ops, "load_library", lambda: None)


@pytest.mark.slow
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3",
        "qwen3_moe",
        "gpt_oss",
        "gemma3",
        "olmo3",
        "ministral3",
        "phi3",
        "qwen3_5",
        "qwen3_5_moe",
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_and_trained_logprobs_agree_in_float32(tmp_path, family, temperature):
    """With planish's kernels, the logprobs are bitwise equal."""
    tiny_model(tmp_path, family=family, vocab_size=320)
    found = np.abs(gap(load_on(tmp_path, torch.float32, CPU), temperature)).max()
    assert found == 0 if ops.load_library() is not None else found < 3e-5


@pytest.mark.slow
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", {"layers": 6, "vocab_size": 320}, marks=pytest.mark.slow),
        ("qwen2", {"rope_scaling": YARN_SCALING}),
        ("qwen3", {"kv_heads": 4}),
        ("qwen3_moe", {"dense_layers": [1], "layers": 3}),
        ("qwen3_moe", {"experts_per_token": 1, "layers": 1}),
        ("gpt_oss", {"layers": 3, "rope_scaling": YARN_SCALING}),
        ("smollm3", {}),
        ("gemma3", {"vocab_size": 320}),
        ("qwen3_5", {"vocab_size": 320, "layers": 4}),
        ("qwen3_5_moe", {"vocab_size": 320, "layers": 4}),
        ("mistral", {"window": 48}),
        ("olmo3", {"rope_scaling": YARN_SCALING}),
        ("ministral3", {}),
        ("phi3", {"rope_scaling": {"partial_rotary_factor": 0.75}}),
    ],
)
def test_sampled_and_trained_logprobs_agree_bitwise_in_bf16(tmp_path, family, options):
    # As in real models, the width is a multiple of the vector registers: for the remainder, torch's
    # SwiGLU uses another exp.
    tiny_model(tmp_path, family=family, dtype="bfloat16", intermediate=128, **options)
    decoder = load_on(tmp_path, torch.bfloat16, CPU)
    adapter, tiling = trained_adapter(decoder), probe(decoder.backend)
    if tiling is None:
        pytest.skip("this machine's bf16 products depend on the number of rows; see probe.py")
    answered = rollouts(decoder, adapter, tiling)
    for micro_batch_tokens in (4096, 500):
        found = np.abs(
            gaps(decoder, adapter, tiling, answered, micro_batch_tokens=micro_batch_tokens)
        )
        if ops.load_library() is not None:
            assert not found.any()
        assert np.quantile(found, 0.995) < 1e-5
        # If the 16th and 17th largest logits are rounded to a tie, head.py may recompute either.
        assert found.max() < 1e-3


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("native", torch.float32),
        pytest.param("native", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("torch", torch.float32, marks=pytest.mark.slow),
        pytest.param("torch", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_logprobs_of_almost_certain_tokens_are_equal_and_never_positive(
    tmp_path, kernels, dtype, monkeypatch
):
    """By rounding, the logit of a token may exceed the log-sum-exp of its row. Sampler, trainer and
    all prompt scores give 0 then.
    """
    if kernels == "torch":
        monkeypatch.setattr(ops, "load_library", lambda: None)
    tiny_model(tmp_path, tied=False, intermediate=128)
    config = ModelConfig.from_directory(tmp_path)
    weights = dict(load_weights(tmp_path, config))
    weights["lm_head.weight"] = weights["lm_head.weight"].float() * 100
    decoder = Decoder(weights, choose_backend(config, dtype, CPU, deterministic=False))
    adapter, prompt = trained_adapter(decoder), ModelInput.from_ints(list(range(30)))
    sampler = Sampler(decoder, SamplerSettings(), str)

    def response(op: Sample) -> SampleResponse:
        future: Future[SampleResponse] = Future()
        sampler.submit(op, adapter.snapshot(), "version", future)
        while sampler.busy:
            sampler.step()
        return future.result()

    params = SamplingParams(max_tokens=100, seed=1, stop=[])
    answer = response(Sample("s", prompt, 3, params, topk_sample_logprobs=3))
    difference = gaps(decoder, adapter, None, [(prompt, answer)])
    sampled, scored, others = [], [], []
    for sequence in answer.sequences:
        whole = prompt.append(EncodedTextChunk(sequence.tokens))
        scores = response(
            Sample(
                "s",
                whole,
                1,
                params,
                prompt_logprobs=True,
                topk_prompt_logprobs=3,
                prompt_alt_tokens_k=2,
                target_prompt_logprobs=TensorData.from_numpy(
                    np.array(whole.to_ints()[1:])[:, None]
                ),
                prompt_only=True,
            )
        )
        assert scores.prompt_logprobs_np is not None
        assert scores.target_prompt_logprobs is not None
        assert scores.prompt_alt_tokens is not None
        assert scores.topk_prompt_logprobs_np is not None
        sampled += sequence.logprobs
        scored += scores.prompt_logprobs_np[prompt.length :].tolist()
        targets = scores.target_prompt_logprobs.to_numpy()[:, 0]
        assert np.array_equal(targets, scores.prompt_logprobs_np[1:])
        others += [targets, scores.prompt_alt_tokens.logprobs.to_numpy().flatten()]
        others.append(scores.topk_prompt_logprobs_np.logprobs[1:].flatten())
    trained = np.array(sampled) - difference
    assert max(np.concatenate(others).max(), max(scored), max(sampled), trained.max()) == 0
    assert 0.1 < np.mean(np.array(sampled) == 0) < 0.99
    if ops.load_library() is not None:
        assert not difference.any()
        assert sampled == scored
    assert np.abs(difference).max() < (1e-3 if dtype == torch.float32 else 1)


def test_logprobs_agree_for_widths_without_adapter_kernels(tmp_path):
    """Without kernels for these widths, torch multiplies all target modules of all adapters, in the
    sampler and in the trainer, whatever else is in the batch.
    """
    tiny_model(tmp_path, intermediate=112, layers=4)
    decoder = load_on(tmp_path, torch.float32, CPU)
    tiling = probe(decoder.backend)
    prompt = ModelInput.from_ints(list(range(70)))
    op = Sample("s", prompt, 4, SamplingParams(max_tokens=30, seed=1, stop=[]))

    def response(*adapters: Adapter) -> SampleResponse:
        """Return the response of the first adapter's request."""
        sampler = Sampler(with_tiling(decoder, tiling), SamplerSettings(), str)
        futures: list[Future[SampleResponse]] = [Future() for _ in adapters]
        for number, (adapter, future) in enumerate(zip(adapters, futures, strict=True)):
            sampler.submit(op, adapter.snapshot(), number, future)
        while sampler.busy:
            sampler.step()
        return futures[0].result()

    every, attention = trained_adapter(decoder), trained_adapter(decoder, train_mlp=False)
    for adapter in (every, attention):
        assert np.abs(gaps(decoder, adapter, tiling, [(prompt, response(adapter))])).max() < 1e-9
    alone, beside = (
        [(one.tokens, one.logprobs) for one in response(*adapters).sequences]
        for adapters in ([attention], [attention, every])
    )
    assert alone == beside


def test_logprobs_agree_for_several_adapters_in_one_batch(tmp_path):
    """The sampler computes all adapters in one batch, the trainer one at a time. The vocabulary of
    320 has kernels for the head too.
    """
    tiny_model(tmp_path, dtype="bfloat16", intermediate=128, vocab_size=320)
    decoder = load_on(tmp_path, torch.bfloat16, CPU)
    tiling = probe(decoder.backend)
    if ops.load_library() is None or tiling is None:
        pytest.skip("bits are promised where the CPU's own kernels serve")
    sampler = Sampler(with_tiling(decoder, tiling), SamplerSettings(), str)
    asked = []
    for number, rank in enumerate((8, 1, 40, 8)):
        adapter = trained_adapter(decoder, rank)
        prompt = ModelInput.from_ints(np.random.default_rng(number).integers(0, 256, 30).tolist())
        future: Future[SampleResponse] = Future()
        params = SamplingParams(max_tokens=30, stop=[], seed=number)
        sampler.submit(Sample("s", prompt, 1 + number, params), adapter.snapshot(), number, future)
        asked.append((adapter, prompt, future))
    while sampler.busy:
        sampler.step()
    for adapter, prompt, future in asked:
        assert not gaps(decoder, adapter, tiling, [(prompt, future.result())]).any()


def alone(
    decoder: Decoder, adapter: Adapter, tiling: RowTiling | None
) -> list[tuple[ModelInput, SampleResponse]]:
    """Sample each prompt alone, so that every decoding step has one row."""
    sampler = Sampler(with_tiling(decoder, tiling), SamplerSettings(), str)
    answered = []
    for seed in range(6):
        prompt = ModelInput.from_ints(np.random.default_rng(seed).integers(0, 256, 30).tolist())
        future: Future[SampleResponse] = Future()
        op = Sample("s", prompt, 1, SamplingParams(max_tokens=40, stop=[], seed=seed))
        sampler.submit(op, adapter.snapshot(), "version", future)
        while sampler.busy:
            sampler.step()
        answered.append((prompt, future.result()))
    return answered


def test_logprobs_agree_for_a_batch_of_one_row(tmp_path):
    """For one row with 1024 columns or more, some machines use another summation order."""
    tiny_model(tmp_path, family="llama", dtype="bfloat16", layers=6, intermediate=2048)
    decoder = load_on(tmp_path, torch.bfloat16, CPU)
    tiling = probe(decoder.backend)
    if tiling is None:
        pytest.skip("this machine's bf16 products depend on the number of rows; see probe.py")
    adapter = trained_adapter(decoder)
    found = np.abs(gaps(decoder, adapter, tiling, alone(decoder, adapter, tiling)))
    assert np.quantile(found, 0.98) < 1e-5
    assert found.max() < 1e-3


@pytest.mark.slow
def test_a_different_summation_order_exceeds_the_tolerance(tmp_path, monkeypatch):
    """A control: another rounding in the trainer's attention alone changes logprobs by far more."""
    tiny_model(tmp_path, family="llama", dtype="bfloat16", layers=6)
    monkeypatch.setattr(ops, "load_library", lambda: None)
    decoder = load_on(tmp_path, torch.bfloat16, CPU)
    exact = ordered_attention.attend

    def less_exact(*tensors):
        out, lse = exact(*tensors)
        return out * (1 + 2**-9), lse

    monkeypatch.setattr(ordered_attention, "attend", less_exact)
    assert np.quantile(np.abs(gap(decoder, 1.0)), 0.5) > 1e-3
