"""The division of a device's memory, on simulated machines."""

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import load_on
from transformers import AutoConfig

from planish.client.local import models_used_together
from planish.engine import base_models, memory
from planish.engine.engine import Engine
from planish.engine.memory import RUNTIME_BYTES, DeviceMemory, ModelMemory
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.settings import EngineSettings
from planish.engine.training.trainer_settings import TrainerSettings
from planish.errors import UserError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.fp8_config import Fp8Config
from planish.model.architecture.inspection import probing
from planish.model.architecture.weight_sizes import (
    linear_bytes,
    mxfp4_bytes,
    quantized_shapes,
    unpacked_bytes,
    unquantized_bytes,
)
from planish.model.kernels.choose import choose_backend, reference_backend, triton_backend
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference import sampling_attention
from planish.model.layers.quantization import DEQUANTIZATION_BYTES
from planish.model.sequences.kv_cache import max_pool_bytes
from planish.service import CreateSampler
from planish.testing import tiny_model
from planish.testing_quantized import use_mxfp4

OF_20B = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "tie_word_embeddings": False,
}
"""The sizes of gpt-oss-20b."""

GB = 10**9
GIB = 1 << 30
SHAPES = {
    "Qwen3-8B": (151_936, 4096, 12288, 36, 32, 8, False),
    "Qwen3-0.6B": (151_936, 1024, 3072, 28, 16, 8, True),
    "SmolLM2-135M": (49_152, 576, 1536, 30, 9, 3, True),
}
DOCUMENTED = {
    "SmolLM2-135M": (SHAPES["SmolLM2-135M"], 64, "llama"),
    "Qwen3-0.6B": (SHAPES["Qwen3-0.6B"], 128, "qwen3"),
    "Qwen3-1.7B": ((151_936, 2048, 6144, 28, 16, 8, True), 128, "qwen3"),
    "Qwen3-4B": ((151_936, 2560, 9728, 36, 32, 8, True), 128, "qwen3"),
    "Llama-3.1-8B": ((128_256, 4096, 14336, 32, 32, 8, False), 128, "llama"),
    "Qwen3-14B": ((151_936, 5120, 17408, 40, 40, 8, False), 128, "qwen3"),
    "Qwen3-32B": ((151_936, 5120, 25600, 64, 64, 8, False), 128, "qwen3"),
    "Llama-3.3-70B": ((128_256, 8192, 28672, 80, 64, 8, False), 128, "llama"),
}
"""The published shapes of the models in the table of docs/reference/models.md, their head sizes and
families.
"""
NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
BOUNDS = "kv_cache_bytes, prefix_cache_bytes, max_batch, micro_batch_tokens"


@pytest.fixture
def shaped(tmp_path: Path):
    """Return a function that makes a model directory with a config.json but no weights.

    The weights of Qwen3-8B would take 16.4 GB.
    """
    tiny_model(tmp_path / "tiny", family="qwen3")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())

    def make(name: str, number: int = 0) -> Path:
        directory = tmp_path / f"{name}-{number}"
        directory.mkdir(exist_ok=True)
        names = (*NAMES, "num_key_value_heads", "tie_word_embeddings")
        head_dim = {"head_dim": 64 if name.startswith("SmolLM2") else 128}
        known = config | dict(zip(names, SHAPES[name], strict=True)) | head_dim
        (directory / "config.json").write_text(json.dumps(known))
        return directory

    return make


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that sets the total and free memory of the simulated GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    def set_memory(total: float, free: float | None = None) -> int:
        found = int(total if free is None else free), int(total)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: found)
        return memory.usable_bytes(torch.device("cuda:0")) or 0

    return set_memory


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the size of main memory."""

    def set_memory(total: float) -> int:
        monkeypatch.setattr(memory, "main_memory_bytes", lambda: int(total))
        return memory.usable_bytes(torch.device("cpu")) or 0

    return set_memory


def claims(
    directories: list[Path], reserves_for_next: bool = False, **settings: Any
) -> list[ModelMemory]:
    divided = DeviceMemory(
        EngineSettings(dtype="bfloat16", **settings), reserves_for_next=reserves_for_next
    )
    return [divided.claim(directory) for directory in directories]


@pytest.mark.parametrize("total", [22.0 * GIB, 23.6 * GIB, 47.4 * GIB, 79.2 * GIB, 139.8 * GIB])
def test_an_8b_model_fits_gpus_from_24_gb(shaped, gpu, total):
    usable = gpu(total)
    (found,) = claims([shaped("Qwen3-8B")])
    assert found.weight_bytes == pytest.approx(16.4 * GB, rel=0.01)
    assert found.adapter_bytes > 2.9 * GB  # one adapter of rank 32 in training
    assert found.total_bytes <= usable
    assert (
        found.cache_bytes
        == max_pool_bytes(found.sampler.kv_cache_bytes) + found.sampler.prefix_cache_bytes
    )
    positions = found.sampler.kv_cache_bytes // (2 * 36 * 8 * 128 * 2)
    assert positions > (5000 if total < 30 * GIB else 60_000)
    assert found.sampler.max_batch == (512 if total > 30 * GIB else found.sampler.max_batch)
    assert found.trainer.recompute == (total < 30 * GIB)
    assert found.trainer.micro_batch_tokens >= (
        256 if total < 30 * GIB else 1024 if total < 70 * GIB else 2048
    )


@pytest.mark.slow
def test_a_small_model_fits_every_gpu_size(shaped, gpu):
    small = shaped("Qwen3-0.6B")
    for gib in range(4, 100):
        usable = gpu(gib * GIB)
        (found,) = claims([small])
        assert found.total_bytes <= usable
        assert found.sampler.max_batch >= (32 if gib < 12 else 256)
        assert found.trainer.micro_batch_tokens >= (128 if gib < 8 else 1024)
        assert gib < 16 or not found.trainer.recompute


def test_gpu_memory_of_other_processes_is_not_divided(shaped, gpu):
    usable = gpu(80 * GB, free=40 * GB)
    assert usable == 38 * GB
    (found,) = claims([shaped("Qwen3-8B")])
    assert found.total_bytes <= usable


def test_memory_cached_by_torch_counts_as_free(gpu, monkeypatch):
    """torch keeps the memory of a closed engine, for example."""
    gpu(80 * GB, free=10 * GB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 60 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5 * GB)
    assert memory.usable_bytes(torch.device("cuda:0")) == 63 * GB


def test_a_second_base_model_fits_in_either_order(shaped, gpu):
    """A GPU with 140 GB fits two 8B models, in either order, and rejects a third."""
    usable = gpu(139.8 * GIB)
    models = [shaped("Qwen3-8B"), shaped("Qwen3-8B", 1)]
    first, second = claims(models, reserves_for_next=True)
    assert first.total_bytes + second.total_bytes <= usable
    assert first.sampler.kv_cache_bytes > second.sampler.kv_cache_bytes > GB
    small, large = claims([shaped("Qwen3-0.6B"), models[0]], reserves_for_next=True)
    assert small.total_bytes + large.total_bytes <= usable
    with pytest.raises(UserError, match=f"does not fit on cuda:0.*lower {BOUNDS}"):
        claims([*models, shaped("Qwen3-8B", 2)], reserves_for_next=True)


def test_a_single_base_model_gets_the_whole_gpu(shaped, gpu):
    """A second base model that was not configured is rejected with a remedy."""
    usable = gpu(139.8 * GIB)
    models = [shaped("Qwen3-8B"), shaped("Qwen3-8B", 1)]
    (alone,) = claims(models[:1])
    first, _ = claims(models, reserves_for_next=True)
    assert 0.99 * usable < alone.total_bytes <= usable
    assert alone.sampler.kv_cache_bytes > 1.5 * first.sampler.kv_cache_bytes
    with pytest.raises(UserError, match=r"name all base models .* in models= or PLANISH_MODELS"):
        claims(models)


@pytest.mark.parametrize(
    ("models", "environment", "reserves_for_next"),
    [
        (None, "", False),
        ({"a": "/x", "b": "/x"}, "", False),
        ({"a": "/x", "b": "/y"}, "", True),
        ({"a": "/x"}, "b=/y", True),
        (models_used_together(None, "a", None, "a"), "", False),
        (models_used_together(None, "a"), "a=/x", False),
        (models_used_together(None, "a", "b"), "", True),
    ],
)
def test_memory_is_reserved_for_further_configured_base_models(
    tmp_path, monkeypatch, models, environment, reserves_for_next
):
    monkeypatch.setenv("PLANISH_MODELS", environment)
    engine = Engine(models, tmp_path, EngineSettings(device="cpu"))
    assert engine._base_models._memory._reserves_for_next == reserves_for_next
    assert engine._base_models.mapping == {
        n: path for n, path in (models or {}).items() if n != path
    }
    engine.close()


def test_a_claim_is_kept_until_released(shaped, gpu):
    gpu(23.6 * GIB)
    divided, large = DeviceMemory(EngineSettings(dtype="bfloat16")), shaped("Qwen3-8B")
    found = divided.claim(large)
    assert divided.claim(large) is found
    with pytest.raises(UserError, match="does not fit"):
        divided.claim(shaped("Qwen3-0.6B"))
    divided.release(large)
    assert divided.claim(shaped("Qwen3-0.6B")).trainer.recompute is False


def test_known_base_models_share_all_memory(shaped, gpu):
    usable = gpu(79.2 * GIB)
    directories = [shaped("Qwen3-8B"), shaped("Qwen3-8B", 1), shaped("Qwen3-0.6B")]
    divided = DeviceMemory(EngineSettings(dtype="bfloat16"), directories, adapter_bytes=4 * GIB)
    found = [divided.claim(directory) for directory in directories]
    assert [model.adapter_bytes for model in found] == [0, 0, 0]
    assert 0.9 * usable < sum(model.total_bytes for model in found) + 4 * GIB <= usable
    assert found[1].divided_bytes == pytest.approx(found[0].divided_bytes, rel=0.1)
    assert found[2].divided_bytes < found[0].divided_bytes
    gpu(23.6 * GIB)
    directories = [shaped("Qwen3-8B"), shaped("SmolLM2-135M")]
    divided = DeviceMemory(EngineSettings(dtype="bfloat16"), directories, adapter_bytes=4 * GIB)
    assert [divided.claim(directory).trainer.recompute for directory in directories] == [True, True]
    gpu(22 * GIB)
    with pytest.raises(
        UserError, match=r"adapters of all base models take 4\.0 GiB \(adapter_memory_bytes\)"
    ):
        DeviceMemory(EngineSettings(dtype="bfloat16"), directories, adapter_bytes=4 * GIB).claim(
            directories[0]
        )


def test_too_little_memory_is_rejected_before_weights_are_loaded(
    shaped, gpu, tmp_path, monkeypatch
):
    gpu(16 * GIB)
    monkeypatch.setattr(base_models, "load_decoder", lambda *_: pytest.fail("weights are loaded"))
    engine = Engine(
        {"large": str(shaped("Qwen3-8B"))},
        tmp_path / "data",
        EngineSettings(kv_cache_bytes=5 * GIB),
    )
    with pytest.raises(
        UserError,
        match=r"its weights and adapters take 18\.0 GiB.*with kv_cache_bytes=5,368,709,120",
    ):
        engine.submit(CreateSampler("s", "large"))
    engine.close()


def test_explicit_sizes_are_used_unchanged(shaped, gpu):
    usable = gpu(23.6 * GIB)
    large = shaped("Qwen3-8B")
    given_sizes: dict[str, Any] = {
        "kv_cache_bytes": GIB,
        "prefix_cache_bytes": 0,
        "max_batch": 100,
        "micro_batch_tokens": 64,
    }
    for name, value in given_sizes.items():
        (found,) = claims([large], **{name: value})
        sizes = vars(found.sampler) | vars(found.trainer)
        assert sizes[name] == value
        assert found.total_bytes <= usable
    every: dict[str, Any] = {
        "kv_cache_bytes": 40 * GIB,
        "prefix_cache_bytes": GIB,
        "max_batch": 1000,
        "micro_batch_tokens": 5000,
    }
    (found,) = claims([large], **every)
    assert every.items() <= (vars(found.sampler) | vars(found.trainer)).items()
    (given,) = claims([large], device="cpu", max_batch=3, micro_batch_tokens=100)
    assert (given.sampler.max_batch, given.trainer) == (3, TrainerSettings(100))


@pytest.mark.parametrize("total", [15.5 * GIB, 23 * GIB, 64 * GIB, None])
def test_the_embedded_model_has_fixed_sizes_on_a_cpu(shaped, machine, monkeypatch, total):
    if total is None:
        monkeypatch.setattr(memory, "main_memory_bytes", lambda: None)
    else:
        machine(total)
    (found,) = claims([shaped("SmolLM2-135M")], device="cpu")
    assert (found.sampler, found.trainer) == (SamplerSettings(), TrainerSettings())


@pytest.mark.parametrize("total", [11.5 * GIB, 15.5 * GIB, 31 * GIB])
def test_a_small_model_fits_a_laptop(shaped, machine, total):
    usable = machine(total)
    (found,) = claims([shaped("Qwen3-0.6B")], device="cpu")
    assert found.total_bytes + RUNTIME_BYTES <= usable
    assert found.sampler.kv_cache_bytes >= GIB // 2
    assert found.trainer.micro_batch_tokens >= 1024


def test_a_cpu_rejects_only_weights_larger_than_its_memory(shaped, machine):
    machine(15.5 * GIB)
    large = shaped("Qwen3-8B")
    with pytest.raises(
        UserError, match=r"main memory: its weights take 15\.3 GiB.*12\.4 GiB are usable"
    ):
        claims([large], device="cpu")
    machine(23 * GIB)
    (found,) = claims([large], device="cpu")  # enough memory for sampling only
    assert found.trainer == TrainerSettings(128, recompute=True)
    assert found.sampler.kv_cache_bytes == 4096 * 2 * 36 * 8 * 128 * 2


def with_context(directory: Path, max_context: int) -> Path:
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = max_context
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def qwen3_8b(shaped) -> tuple[Path, Backend]:
    """A model with a context of 40,960 tokens, and its backend on a GPU."""
    directory = with_context(shaped("Qwen3-8B"), 40_960)
    config = ModelConfig.from_directory(directory)
    return directory, reference_backend(config, torch.bfloat16, torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("total", "at_least", "at_most"), [(23.6 * GIB, 4000, 5500), (79.2 * GIB, 20_000, 40_960)]
)
def test_the_longest_trainable_sequence_fits_the_gpu(
    qwen3_8b, gpu, machine, total, at_least, at_most
):
    """Beside 8B in bf16, 24 GB are enough for one sequence of about five thousand tokens."""
    (directory, backend), usable = qwen3_8b, gpu(total)
    machine(1 * GIB)
    (found,) = claims([directory])
    longest = found.trainer.max_sequence_tokens
    assert longest is not None
    assert at_least <= longest <= at_most
    assert found.trainer.offload_above is None
    rest = usable - found.weight_bytes - found.adapter_bytes
    assert found.trainer.reserved_bytes(backend, longest) <= rest
    if longest < backend.config.max_context:
        assert found.trainer.reserved_bytes(backend, longest + 1) > rest


@pytest.mark.parametrize(("scheme", "main", "at_least"), [(None, 64, 6000), ("nf4", 36, 32_768)])
def test_main_memory_keeps_the_inputs_of_longer_sequences(
    qwen3_8b, gpu, machine, scheme, main, at_least
):
    """On 24 GB, 8B in nf4 trains on 32,768 tokens if half of main memory has space for them."""
    (directory, backend), usable = qwen3_8b, gpu(23.6 * GIB)
    machine(main * GIB)
    (found,) = claims([directory], quantize=scheme)
    trainer, longest = found.trainer, found.trainer.max_sequence_tokens
    assert longest is not None
    assert longest >= at_least
    assert trainer.offload_above is not None
    assert not trainer.offloads(trainer.offload_above)
    rest = usable - found.weight_bytes - found.adapter_bytes
    assert trainer.reserved_bytes(backend, trainer.offload_above) <= rest
    assert trainer.reserved_bytes(backend, longest) <= rest
    # Pinned memory is allocated in powers of two.
    layer_bytes = 1 << (longest * 4 * backend.config.hidden_size - 1).bit_length()
    assert layer_bytes * backend.config.num_layers <= main * GIB / 2


def test_a_cpu_limits_no_sequence(shaped, machine):
    machine(23 * GIB)
    (found,) = claims([shaped("Qwen3-8B")], device="cpu")
    assert found.trainer.max_sequence_tokens is None


def test_control_groups_limit_main_memory(tmp_path):
    """Version 2 has limits of the process's group and its parents; version 1 has a memory
    controller.
    """
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    assert memory._control_group_limits(tmp_path, "0::/a/b\n") == [1000]
    old = tmp_path / "memory" / "c"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("500\n")
    assert memory._control_group_limits(tmp_path, "7:cpu,cpuacct:/c\n3:memory:/c\n0::/\n") == [500]
    assert (memory.main_memory_bytes() or 0) > 1 << 28


def test_activation_bytes_on_a_gpu_include_float32_logits(shaped, gpu):
    """For Qwen3-0.6B, the float32 logits are a third of the activations."""
    config = ModelConfig.from_directory(shaped("Qwen3-0.6B"))
    kept, logits = [], []
    for kind, itemsize in (("cpu", 2), ("cuda", 4)):
        backend = reference_backend(config, torch.bfloat16, torch.device(kind))
        kept.append(TrainerSettings(16384).activation_bytes(backend))
        # The gradient of one chunk of rows exists in both dtypes.
        logits.append(151_936 * (16384 * itemsize + backend.head_rows * (itemsize + 2)))
    assert kept[1] - kept[0] == logits[1] - logits[0]
    assert kept[1] < 4 * logits[1]


def test_activation_bytes_with_triton_kernels_include_logits_of_half_the_size(shaped, gpu):
    pytest.importorskip("triton")
    config, device = ModelConfig.from_directory(shaped("Qwen3-0.6B")), torch.device("cuda")
    backends = (
        triton_backend(config, torch.bfloat16, device, ["log_sum_exp"]),
        reference_backend(config, torch.bfloat16, device),
    )
    kept = [TrainerSettings(16384).activation_bytes(backend) for backend in backends]
    assert kept[1] - kept[0] == 151_936 * 2 * (16384 + backends[0].head_rows)


def test_step_bytes_on_a_cpu_include_attention_scores(shaped, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    short = ModelConfig.from_directory(shaped("Qwen3-8B"))
    long = replace(short, max_context=short.max_context + 100_000)

    def workspace_bytes(config: ModelConfig, device: str) -> int:
        backend = reference_backend(config, torch.float32, torch.device(device))
        return SamplerSettings().workspace_bytes(backend)

    # threads * rows * query heads per KV head * positions * bytes
    assert workspace_bytes(long, "cpu") - workspace_bytes(short, "cpu") == 4 * 16 * 4 * 100_000 * 4
    assert workspace_bytes(long, "cuda:0") == workspace_bytes(short, "cuda:0")


def test_a_mixture_of_experts_fits_a_gpu_of_80_gb(tmp_path, gpu):
    """The matrices of an adapter of rank 32 for all experts would take 38 GB."""
    tiny_model(tmp_path, family="qwen3_moe")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= dict(zip(NAMES, (151_936, 2048, 6144, 48, 32), strict=True))
    config |= {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    gpu(80 * GIB)
    found = DeviceMemory(EngineSettings()).claim(tmp_path)
    assert found.weight_bytes == pytest.approx(61.1 * GB, rel=0.01)  # 30.5 billion numbers
    assert found.adapter_bytes == pytest.approx(5.2 * GB, rel=0.1)  # 160 million numbers
    assert found.total_bytes <= 76 * GIB
    assert found.trainer.micro_batch_tokens >= 128


def test_the_documented_sizes_of_the_weights_follow_the_formula(tmp_path):
    """The table of docs/reference/models.md: one copy, and all copies on a CPU with the C++
    kernels.
    """
    text = Path("docs/reference/models.md").read_text()
    rows = re.findall(r"^\| ([A-Z][\w.-]+-[\w.]+[BM]) \|([\d.| ]+)\|$", text, re.MULTILINE)
    documented = {name: cells.split("|") for name, cells in rows}
    assert documented.keys() == DOCUMENTED.keys()
    for name, (shape, head_dim, family) in DOCUMENTED.items():
        config = documented_config(tmp_path / name, shape, head_dim, family)
        config = replace(config, fp8=Fp8Config((128, 128)))
        for cells, copies in ((documented[name][:4], 1), (documented[name][4:], 3)):
            for cell, scheme in zip(cells, (None, "int8", "nf4", "fp8"), strict=True):
                size = copies * unquantized_bytes(config, 2, scheme)
                size += linear_bytes(config, scheme) if scheme else 0
                if scheme == "fp8" and copies == 3:
                    size += 2 * 2 * sum(map(prod, quantized_shapes(config).values()))
                digits = len(cell.strip().partition(".")[2])
                assert size / GB == pytest.approx(float(cell), abs=0.5 * 10**-digits), (
                    name,
                    scheme,
                )


def test_the_memory_plan_of_a_cpu_has_all_copies_of_the_weights(tmp_path, machine):
    machine(64 * GIB)
    shape, head_dim, family = DOCUMENTED["Qwen3-0.6B"]
    config = documented_config(tmp_path, shape, head_dim, family)
    backend = choose_backend(config, torch.bfloat16, torch.device("cpu"), deterministic=False)
    if not backend.uses_compiled_kernels:
        pytest.skip("the formula is that of the C++ kernels")
    for scheme in (None, "int8", "nf4"):
        settings = EngineSettings(dtype="bfloat16", device="cpu", quantize=scheme)
        expected = 3 * unquantized_bytes(config, 2, scheme)
        expected += linear_bytes(config, scheme) if scheme else 0
        assert DeviceMemory(settings).claim(tmp_path).weight_bytes == expected


def test_a_table_of_inputs_per_layer_has_one_copy(tmp_path, machine):
    """The sizes are those of Gemma 4 E2B. All copies of the table would take 14 GB."""
    machine(32 * GIB)
    config = AutoConfig.for_model(
        "gemma4_text",
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=35,
        layer_types=([*["sliding_attention"] * 4, "full_attention"] * 7),
        num_key_value_heads=1,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    )
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    backend = choose_backend(config, torch.bfloat16, torch.device("cpu"), deterministic=False)
    plan = DeviceMemory(EngineSettings(dtype="bfloat16", device="cpu")).claim(tmp_path)
    table = 2 * 262144 * 35 * 256
    assert table <= unpacked_bytes(config, 2) < 1.01 * table
    one_copy, copies = unquantized_bytes(config, 2, None), backend.weight_copies
    assert plan.weight_bytes == copies * one_copy - (copies - 1) * unpacked_bytes(config, 2)
    assert backend.kv_spec.num_layers == 15


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5_moe"])
def test_the_memory_plan_counts_linears_that_are_dequantized(tmp_path, machine, family, dtype):
    """The kernel for int8 reads no linears of 48 inputs. They are packed in the model's dtype. Only
    a bfloat16 model keeps their codes.
    """
    machine(64 * GIB)
    tiny_model(tmp_path, family, intermediate=48, expert_size=48, dtype="bfloat16")
    settings = EngineSettings(dtype=dtype, device="cpu", quantize="int8")
    decoder = load_on(tmp_path, getattr(torch, dtype), torch.device("cpu"), quantize="int8")
    backend, config = decoder.backend, decoder.config
    if not backend.uses_compiled_kernels:
        pytest.skip("the formula is that of the C++ kernels")
    shapes = [shape for shape in quantized_shapes(config).values() if shape[1] == 48]
    num_weights = sum(map(prod, shapes))
    assert num_weights == backend.num_dequantized_weights > 0
    plan = DeviceMemory(settings).claim(tmp_path)
    if dtype == "bfloat16":
        expected = 3 * unquantized_bytes(config, 2, "int8") + linear_bytes(config, "int8")
        assert plan.weight_bytes == expected + 2 * 2 * num_weights
    else:
        expected = unquantized_bytes(config, 4, "int8") + linear_bytes(config, "int8")
        freed = num_weights + 4 * sum(fan_out for fan_out, _ in shapes)
        assert plan.weight_bytes == expected - freed + 4 * num_weights


def test_the_memory_plan_of_an_fp8_checkpoint(tmp_path, machine, gpu):
    """A CPU has the mapped codes and two packed bf16 copies of the linears, a GPU only the
    codes.
    """
    shape, head_dim, family = DOCUMENTED["Qwen3-4B"]
    documented_config(tmp_path, shape, head_dim, family)
    path = tmp_path / "config.json"
    stored = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    config = ModelConfig.from_directory(tmp_path)
    kept, codes = unquantized_bytes(config, 2, "fp8"), linear_bytes(config, "fp8")
    shapes = quantized_shapes(config).values()
    linears = sum(map(prod, shapes))
    machine(64 * GIB)
    backend = choose_backend(config, torch.bfloat16, torch.device("cpu"), deterministic=False)
    plan = DeviceMemory(EngineSettings(dtype="bfloat16", device="cpu")).claim(tmp_path)
    copies = backend.weight_copies
    assert plan.weight_bytes == copies * kept + codes + 2 * (copies - 1) * linears
    gpu(24 * GIB)
    plan = DeviceMemory(EngineSettings()).claim(tmp_path)
    gate_up = 2 * 2 * max(map(prod, shapes))
    assert plan.weight_bytes == kept + codes + gate_up + DEQUANTIZATION_BYTES


def test_the_memory_plan_counts_the_codes_of_an_mxfp4_checkpoint_once(tmp_path, machine):
    machine(64 * GIB)
    use_mxfp4(tiny_model(tmp_path, "gpt_oss", dtype="bfloat16"))
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text()) | OF_20B
    path.write_text(json.dumps(fields))
    config = ModelConfig.from_directory(tmp_path)
    backend = choose_backend(config, torch.bfloat16, torch.device("cpu"), deterministic=False)
    if not backend.uses_compiled_kernels:
        pytest.skip("the formula is that of the C++ kernels")
    plan = DeviceMemory(EngineSettings(dtype="bfloat16", device="cpu")).claim(tmp_path)
    # docs/reference/models.md: 10.2 GB of codes once, and three copies of the other 3.6 GB.
    assert plan.weight_bytes == 3 * 13_761_264_768 - 2 * mxfp4_bytes(config)
    assert plan.weight_bytes == pytest.approx(20.98e9, rel=1e-3)


def documented_config(
    directory: Path, shape: tuple[Any, ...], head_dim: int, family: str
) -> ModelConfig:
    """Write the config.json of a model of docs/reference/models.md, and return its ModelConfig."""
    tiny_model(directory, family=family)
    config = json.loads((directory / "config.json").read_text())
    names = (*NAMES, "num_key_value_heads", "tie_word_embeddings")
    config |= dict(zip(names, shape, strict=True)) | {"head_dim": head_dim}
    (directory / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_directory(directory)


def test_the_inspection_plans_the_scores_of_a_prefill():
    assert probing._QUERY_BLOCK == sampling_attention._QUERY_BLOCK
