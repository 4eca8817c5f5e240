"""Sampling and training on a pretended GPU, which checks the devices of tensors and what happens
during a capture. It does not check kernels.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/engine/gpu has more to say", allow_module_level=True)
from pretended_gpu import GPU, Marks, RefusedError, pretended_gpu
from test_sampler import request, tokens

from planish.engine import base_models
from planish.engine.base_models import BaseModel
from planish.engine.kernel_check.gpu import check_family
from planish.engine.memory import DeviceMemory
from planish.engine.sampling.cuda_graph_runner import CudaGraphRunner, DecodeStep, GraphRecorder
from planish.engine.sampling.model_runner import EagerRunner
from planish.engine.settings import EngineSettings
from planish.engine.training.adapters import Adapter
from planish.model.architecture.config import ModelConfig
from planish.model.device import HostCopies
from planish.model.kernels.self_test.process import WrongResultError
from planish.model.kernels.self_test.verdicts import Verdict
from planish.model.kernels.triton.families import FAMILIES
from planish.model.layers.lora import LoraLayout
from planish.testing import CONFIGS, tiny_model, tiny_transformers_model
from planish.testing_quantized import use_fp8, use_mxfp4
from planish.types import AdamParams, Datum, LoraConfig, ModelInput, SampleResponse

pytestmark = pytest.mark.slow


@pytest.fixture
def gpu() -> Iterator[Marks]:
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction, torch.get_float32_matmul_precision()
    with pytest.MonkeyPatch.context() as patch, pretended_gpu(patch) as marks:
        yield marks
    products.allow_bf16_reduced_precision_reduction = before[0]
    torch.set_float32_matmul_precision(before[1])


@pytest.mark.parametrize("deterministic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_sampling_and_training_keep_tensors_on_the_gpu(
    tmp_path: Path, gpu: Marks, deterministic: bool | None
):
    directory = tiny_model(
        tmp_path, family="qwen3", layers=1, heads=2, kv_heads=1, hidden_size=32, intermediate=32
    )
    settings = EngineSettings(
        max_batch=3, kv_cache_bytes=1 << 24, prefix_cache_bytes=1 << 20, deterministic=deterministic
    )
    base = BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    assert (base.device, base.backend.dtype) == (GPU, torch.bfloat16)
    assert isinstance(base.sampler._runner, EagerRunner if deterministic else CudaGraphRunner)
    adapters = [
        adapted(base, LoraConfig(rank=8, seed=0)),
        adapted(base, LoraConfig(rank=4, seed=1, train_unembed=False)),
    ]
    responses, waits = sampled(base, adapters, gpu)
    # a step that only decodes waits for the sampled tokens of the step before alone
    assert deterministic or {"synchronize"} in waits
    assert all(
        np.isfinite(sequence.logprobs).all()
        for answer in responses
        for sequence in answer.sequences
    )
    for adapter in adapters:
        gpu.waited.clear()
        output = done(base.trainer.forward_backward(adapter, data(), "importance_sampling"))
        # Training waits for the logprobs and the finiteness of the gradient, but not for transfers.
        assert deterministic or "to" not in gpu.waited
        assert np.isfinite(output.metrics["loss:sum"])
        assert adapter.grad is not None
        assert adapter.grad.device == GPU
        assert (
            adapter.optim_step(AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).metrics[
                "grad_norm"
            ]
            > 0
        )
        adapter.load_state({name: tensor.cpu() for name, tensor in adapter.state().items()})
        assert adapter.master.device == adapter.exp_avg.device == GPU


@pytest.mark.parametrize("deterministic", [None, True])
def test_overlapping_steps_sample_what_steps_one_after_another_sample(
    tmp_path: Path, gpu: Marks, monkeypatch: pytest.MonkeyPatch, deterministic: bool | None
):
    monkeypatch.setenv("PLANISH_GRAPHS", "0")
    directory = tiny_model(
        tmp_path, family="qwen3", layers=1, heads=2, kv_heads=1, hidden_size=32, intermediate=32
    )
    settings = EngineSettings(
        max_batch=2, kv_cache_bytes=1 << 24, prefix_cache_bytes=0, deterministic=deterministic
    )
    base = BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    weights = adapted(base, LoraConfig(rank=4, seed=0)).snapshot()
    found, waits = [], []
    assert base.sampler._steps.overlap
    for overlap in (False, True):
        base.sampler._steps.overlap = overlap
        futures: list[Future[SampleResponse]] = [Future(), Future()]
        for number, future in enumerate(futures):
            op = request(tokens(5 + number), seed=number, max_tokens=3 + number)
            base.sampler.submit(op, weights if number else None, number, future)
        while base.sampler.busy:
            gpu.waited.clear()
            base.sampler.step()
            waits.append([*gpu.waited])
        found.append([future.result(timeout=0).sequences[0] for future in futures])
    # The first step waits for the first tokens. Only then does it wait for its own tokens too.
    one_after_another, overlapping_waits = waits[: len(waits) // 2], waits[len(waits) // 2 :]
    assert deterministic or [
        [wait.count("synchronize") for wait in each]
        for each in (one_after_another, overlapping_waits)
    ] == [[2, 1, 1], [1, 1, 1, 1]]
    for plain, overlapping in zip(*found, strict=True):
        assert overlapping.tokens == plain.tokens
        # The last bits depend on the other rows, unless sampling is deterministic.
        tolerance = 0 if deterministic else 1e-3
        np.testing.assert_allclose(overlapping.logprobs, plain.logprobs, rtol=0, atol=tolerance)


def test_gpu_matmuls_accumulate_in_float32(tmp_path: Path, gpu: Marks):
    """By default torch adds partial sums in bf16, and a process may have enabled TF32."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.set_float32_matmul_precision("high")
    directory, settings = tiny_model(tmp_path, layers=1), EngineSettings()
    BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("told", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_gpu_allocator_uses_expandable_segments_unless_configured(
    tmp_path: Path, gpu: Marks, monkeypatch: pytest.MonkeyPatch, told: str | None
):
    found: list[str] = []
    assert torch._C._accelerator_setAllocatorSettings
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    if told is not None:
        monkeypatch.setenv(told, "max_split_size_mb:512")
    directory, settings = tiny_model(tmp_path, layers=1), EngineSettings()
    BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    assert found == ([] if told else ["expandable_segments:True"])


def test_the_gpu_allocator_is_unchanged_on_wsl(
    tmp_path: Path, gpu: Marks, monkeypatch: pytest.MonkeyPatch
):
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.setattr(base_models, "is_wsl", lambda: True)
    directory, settings = tiny_model(tmp_path, layers=1), EngineSettings()
    BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    assert not found


MODELS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "gemma3": ("gemma3", {}, None),
    "gpt_oss": ("gpt_oss", {}, None),
    "gpt_oss mxfp4": ("gpt_oss", {"expert_size": 64}, None),
    "ministral3": ("ministral3", {}, None),
    "olmo3": ("olmo3", {}, None),
    "phi3": ("phi3", {}, None),
    "qwen3 fp8": ("qwen3", {}, None),
    "qwen3 int8": ("qwen3", {}, "int8"),
    "qwen3 nf4": ("qwen3", {"intermediate": 64}, "nf4"),
    "qwen3_5": ("qwen3_5", {}, None),
    "qwen3_5_moe": ("qwen3_5_moe", {}, None),
    "qwen3_moe": ("qwen3_moe", {}, None),
    "smollm3": ("smollm3", {}, None),
    # The code of transformers computes the layers of these.
    "lfm2": ("lfm2", {}, None),
    "glm4_moe": ("glm4_moe", {}, None),
}
"""The models of the next test: family, options of `tiny_model` and quantization."""


@pytest.mark.parametrize("name", MODELS)
def test_each_family_and_scheme_has_the_logprobs_of_the_cpu(tmp_path: Path, name: str):
    """The reference is torch on a CPU in float32."""
    family, options, quantize = MODELS[name]
    if family in CONFIGS:
        directory = tiny_model(tmp_path, family, layers=2, dtype="bfloat16", **options)
    else:
        directory = tiny_transformers_model(tmp_path, family, dtype="bfloat16", **options)
    if name.endswith("mxfp4"):
        use_mxfp4(directory)
    if name.endswith("fp8"):
        stored = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
        use_fp8(directory, stored, (32, 32), "weight_scale_inv")
    found = []
    for device in ("cpu", "cuda"):
        with pytest.MonkeyPatch.context() as patch:
            context = pretended_gpu(patch) if device == "cuda" else nullcontext(Marks())
            with context as marks:
                settings = EngineSettings(
                    device=device,
                    dtype="float32",
                    max_batch=3,
                    kv_cache_bytes=1 << 24,
                    prefix_cache_bytes=1 << 20,
                    quantize=quantize,
                )
                base = BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
                assert base.device.type == device
                adapter = adapted(base, LoraConfig(rank=4, seed=0))
                responses, _ = sampled(base, [adapter, adapter], marks)
                output = done(base.trainer.forward_backward(adapter, data(), "importance_sampling"))
                assert adapter.grad is not None
                found.append((responses, output, adapter.grad.cpu().clone()))
    (of_cpu, ours), (output, other), (grad, others) = zip(*found, strict=True)
    for mine, theirs in zip(ours, of_cpu, strict=True):
        for sequence, expected in zip(mine.sequences, theirs.sequences, strict=True):
            assert sequence.tokens == expected.tokens
            np.testing.assert_allclose(sequence.logprobs, expected.logprobs, atol=1e-4)
    assert output.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], rel=1e-4)
    assert (others - grad).norm() < 1e-4 * grad.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_replaces_a_kernel_family_that_failed(
    tmp_path: Path, gpu: Marks, monkeypatch: pytest.MonkeyPatch, family: str
):
    """Sampling and training still work with the remaining families."""
    verdicts = [Verdict(name, name != family) for name in FAMILIES]
    monkeypatch.setattr(base_models, "check_kernels", lambda *_: verdicts)
    directory = tiny_model(
        tmp_path, family="qwen3", layers=1, heads=2, kv_heads=1, hidden_size=32, intermediate=32
    )
    settings = EngineSettings(max_batch=3, kv_cache_bytes=1 << 24, prefix_cache_bytes=1 << 20)
    base = BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    passes = base.sampler._runner
    assert isinstance(passes, EagerRunner if family in ("attention", "lora") else CudaGraphRunner)
    if isinstance(passes, CudaGraphRunner):
        assert (passes.recorder is None) == (family == "graphs")
    adapter = adapted(base, LoraConfig(rank=8, seed=0))
    responses, _ = sampled(base, [adapter, adapter], gpu)
    assert all(np.isfinite(s.logprobs).all() for answer in responses for s in answer.sequences)
    output = done(base.trainer.forward_backward(adapter, data(), "importance_sampling"))
    assert np.isfinite(output.metrics["loss:sum"])


def test_cuda_graphs_can_be_disabled_alone(
    tmp_path: Path, gpu: Marks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLANISH_GRAPHS", "0")
    directory, settings = tiny_model(tmp_path, layers=1), EngineSettings()
    base = BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    assert isinstance(base.sampler._runner, CudaGraphRunner)
    assert base.sampler._runner.recorder is None


def test_a_captured_step_is_checked_against_its_eager_run(
    tmp_path: Path, gpu: Marks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLANISH_KERNELS", "triton")
    directory = tiny_model(
        tmp_path, family="qwen3", layers=1, heads=2, kv_heads=1, hidden_size=32, intermediate=32
    )
    config = ModelConfig.from_directory(directory)
    check_family("graphs", config, torch.bfloat16, GPU)

    def recorded_once(_: GraphRecorder, step: DecodeStep) -> DecodeStep:
        """Return a graph that ignores changes of the tables."""
        out = tuple(x.clone() for x in step())
        return lambda: out  # type: ignore[return-value]

    monkeypatch.setattr(GraphRecorder, "record", recorded_once)
    with pytest.raises(WrongResultError, match="of a recorded step"):
        check_family("graphs", config, torch.bfloat16, GPU)


def adapted(base: BaseModel, lora: LoraConfig) -> Adapter:
    layout = LoraLayout(base.config, lora)
    noise = 0.02 * torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    return Adapter(layout, base.backend, layout.init(0) + noise)


def sampled(
    base: BaseModel, adapters: list[Adapter], gpu: Marks
) -> tuple[list[SampleResponse], list[set[str]]]:
    """Return the responses and, for each step, the operations that waited for the device.

    The requests use two adapters and the base model, every filter, and all kinds of prompt
    logprobs.
    """
    asked: list[tuple[int | None, dict[str, Any]]] = [
        (None, {"n": 2, "max_tokens": 4}),
        (0, {"max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.001}),
        (1, {"max_tokens": 2, "temperature": 0.0, "topk_sample_logprobs": 2}),
        (0, {"max_tokens": 1, "prompt_logprobs": True, "topk_prompt_logprobs": 2}),
        (None, {"max_tokens": 1, "prompt_alt_tokens_k": 2}),
    ]
    futures: list[Future[SampleResponse]] = []
    for number, (which, options) in enumerate(asked):
        weights = None if which is None else adapters[which].snapshot()
        futures.append(Future())
        base.sampler.submit(
            request(tokens((66, 20, 9, 12, 5)[number]), seed=number, **options),
            weights,
            which,
            futures[-1],
        )
    waits = []
    while base.sampler.busy:
        gpu.waited.clear()
        base.sampler.step()
        waits.append(set(gpu.waited))
    return [future.result(timeout=0) for future in futures], waits


def data() -> list[Datum]:
    """Return datums with a common prefix."""
    found = []
    for seed in range(2):
        sequence = tokens(6) + tokens(6, seed=seed)
        inputs = {
            "target_tokens": sequence[1:],
            "logprobs": np.full(11, -5, np.float32),
            "advantages": np.ones(11, np.float32),
        }
        found.append(Datum(ModelInput.from_ints(sequence[:-1]), inputs))
    return found


def done(work) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3)[torch.zeros(2, dtype=torch.int64, device=GPU)],
        lambda x: torch.zeros(3, device=GPU).add_(torch.ones(3)),
        lambda x: x.view(1, 3).numpy(),
        lambda x: torch.cat([x.cpu(), x]),
    ],
)
def test_the_pretended_gpu_rejects_what_a_gpu_rejects(
    gpu: Marks, mistake: Callable[[torch.Tensor], Any]
):
    x = torch.ones(3, device=GPU)
    with pytest.raises(RefusedError):
        mistake(x)


def test_an_asynchronous_copy_is_done_when_the_host_has_waited(gpu: Marks):
    x, source = torch.ones(3, device=GPU), torch.zeros(3)
    copies = HostCopies({"x": x}, GPU)
    assert not any(copies._copies["x"] == 1)
    assert copies.wait()["x"].tolist() == [1, 1, 1]
    x.copy_(source, non_blocking=True)
    source.fill_(5)
    with pytest.raises(RefusedError, match="was changed before its end"):
        x.tolist()


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.new_tensor([1.0]),
    ],
)
def test_waiting_for_the_device_during_capture_is_rejected(
    gpu: Marks, mistake: Callable[[torch.Tensor], Any]
):
    x = torch.ones(3, device=GPU)
    mistake(x)
    gpu.is_recording = True
    with pytest.raises(RefusedError, match="recorded"):
        mistake(x)
