"""Decoding and LoRA training of a two-layer slice of each family, compared with transformers.

    OMP_NUM_THREADS=2 python benchmarks/families.py prepare=True   # writes the models, 2 GB
    OMP_NUM_THREADS=2 python benchmarks/families.py
    python benchmarks/families.py families=phi3,olmo3 rounds=5

The slices have random bf16 weights in the widths of published models and a small vocabulary, so the
head counts less than in a real model. Both libraries run in this process, one after the other in
each round. `decode`: `samples` samples of `new_tokens` tokens each from one prompt, by
`SamplingClient.sample` and by `generate` with a KV cache. `training`: the gradient of one batch of
different sequences for an adapter on the linears of attention and MLP, by `forward_backward` and by
PEFT, which keeps the adapters of a bf16 model in float32. Adapters of experts are left out of both.

planish computes the families of SLICES with its own decoder, those of TRANSFORMERS_SLICES with the
code of transformers, and with `own_decoders=False` all of them with that code.

The script prints one JSON object with medians, the ratio of the rates (above 1: planish is faster),
and `others`, the largest share of the cores that other programs used in a round. Beside other
programs the ratio says more about the scheduler than about the two libraries.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import chz
import torch
from machine import CpuTime
from peft import LoraConfig as PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM

from planish import ServiceClient
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.families import FAMILIES
from planish.model.layers.lora import LoraLayout
from planish.testing import tiny_model, tiny_transformers_model
from planish.types import Datum, LoraConfig, ModelInput, SamplingParams

VOCAB_SIZE = 4096


def _widths(
    hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate": intermediate,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        **more,
    }


def _delta_net(key_heads: int, value_heads: int) -> dict[str, int]:
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }


SLICES: Mapping[str, Mapping[str, Any]] = {
    "llama": _widths(2048, 8192, 32, 8, 64),
    "mistral": _widths(2048, 7168, 16, 4, 128, window=4096, max_context=8192),
    "ministral3": _widths(3072, 9216, 32, 8, 128),
    "qwen2": _widths(896, 4864, 14, 2, 64),
    "qwen3": _widths(1024, 3072, 16, 8, 128),
    "qwen3_moe": _widths(2048, 768, 32, 4, 128, experts=16, experts_per_token=8, expert_size=768),
    "qwen3_5": _widths(1024, 3584, 8, 2, 256, delta_net=_delta_net(16, 16)),
    "qwen3_5_moe": _widths(
        2048,
        512,
        16,
        2,
        256,
        experts=16,
        experts_per_token=8,
        expert_size=512,
        delta_net=_delta_net(16, 32),
    ),
    "gpt_oss": _widths(
        2880, 2880, 64, 8, 64, window=128, experts=8, experts_per_token=4, expert_size=2880
    ),
    "smollm3": _widths(2048, 11008, 16, 4, 128),
    "gemma3": _widths(1152, 6912, 4, 1, 256, window=512),
    "olmo3": _widths(2048, 5504, 16, 16, 128, window=1024),
    "phi3": _widths(3072, 8192, 24, 8, 128, rope_scaling={"partial_rotary_factor": 0.75}),
}
"""Widths of Llama 3.2 1B, Mistral 7B (halved), Ministral 3 3B, Qwen2.5 0.5B, Qwen3 0.6B,
Qwen3-30B-A3B (16 of its 128 experts), Qwen3.5 0.8B, Qwen3.5-35B-A3B (16 of its 256 experts),
gpt-oss-20b (8 of its 32 experts, in bf16), SmolLM3 3B, Gemma 3 1B, OLMo 3 7B (halved) and
Phi-4-mini. Of the two layers of Qwen3.5, one is a gated delta net and one has attention.
"""


def _fields(
    hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int | None, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        **more,
    }


TRANSFORMERS_SLICES: Mapping[str, Mapping[str, Any]] = {
    "gemma2": _fields(2304, 9216, 8, 4, 256, sliding_window=4096, query_pre_attn_scalar=256),
    "granite": _fields(2048, 8192, 32, 8, None),
    "glm4": _fields(4096, 13696, 32, 2, 128),
    "olmo2": _fields(2048, 8192, 16, 16, None),
    "cohere": _fields(4096, 14336, 32, 8, None),
    "mixtral": _fields(
        2048, 7168, 16, 4, 128, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    ),
    "lfm2": _fields(
        2048,
        8192,
        32,
        8,
        None,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=3,
    ),
}
"""Widths of Gemma 2 2B, Granite 3.3 2B, GLM-4 9B, OLMo 2 1B, Command R7B, Mixtral 8x7B (halved) and
LFM2 1.2B. LFM2 has three layers here: attention between two short convolutions.
"""


@chz.chz
class Options:
    families: tuple[str, ...] = (*SLICES, *TRANSFORMERS_SLICES)
    directory: str = str(Path(tempfile.gettempdir()) / "planish-family-slices")
    prepare: bool = False
    """Only write the models that `directory` lacks."""
    own_decoders: bool = True
    """False: the code of transformers computes also the families that have a decoder of planish."""
    samples: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 24
    sequences: int = 4
    length: int = 96
    rank: int = 16
    rounds: int = 3


def main(options: Options) -> None:
    paths = {family: _prepare_slice(Path(options.directory), family) for family in options.families}
    if options.prepare:
        return
    if not options.own_decoders:
        FAMILIES.clear()
    report = {}
    for family, path in paths.items():
        # A service of its own frees the memory of each family before the next one.
        with ServiceClient(dtype="bfloat16") as service:
            decoders, trainers = (
                _decoders(options, service, path),
                _trainers(options, service, path),
            )
            report[family] = {
                "decode": _measure_both(
                    *decoders, options.rounds, options.samples * options.new_tokens
                ),
                "training": _measure_both(
                    *trainers, options.rounds, options.sequences * options.length
                ),
            }
    print(json.dumps(report, indent=1))


def _prepare_slice(directory: Path, family: str) -> Path:
    path = directory / family
    if not (path / "tokenizer.json").is_file():  # written last
        if family in SLICES:
            tiny_model(path, family, vocab_size=VOCAB_SIZE, dtype="bfloat16", **SLICES[family])
        else:
            sizes = {"vocab_size": VOCAB_SIZE, **TRANSFORMERS_SLICES[family]}
            tiny_transformers_model(path, family, dtype="bfloat16", **sizes)
    return path


def _measure_both(
    ours: Callable[[], None], theirs: Callable[[], None], rounds: int, tokens: int
) -> dict[str, float]:
    """Return tokens per second of both functions, their ratio, and the cores that others used.

    The first round warms up and does not count.
    """
    seconds: dict[str, list[float]] = {"planish": [], "transformers": []}
    others: list[float] = []
    for _ in range(rounds + 1):
        for name, run in (("planish", ours), ("transformers", theirs)):
            start_time, own_cpu_seconds, cpu_before = (
                time.perf_counter(),
                time.process_time(),
                CpuTime.now(),
            )
            run()
            seconds[name].append(time.perf_counter() - start_time)
            others.append(cpu_before.share_of_others(time.process_time() - own_cpu_seconds))
    rates = {
        name: tokens / statistics.median(round_seconds[1:])
        for name, round_seconds in seconds.items()
    }
    ratio = rates["planish"] / rates["transformers"]
    return {
        **{name: round(rate, 1) for name, rate in rates.items()},
        "ratio": round(ratio, 2),
        "others": round(max(others[2:]), 2),
    }


def _decoders(
    options: Options, service: ServiceClient, path: Path
) -> tuple[Callable[[], None], Callable[[], None]]:
    prompt = list(range(options.prompt_tokens))
    client = service.create_sampling_client(base_model=str(path))
    params = SamplingParams(max_tokens=options.new_tokens, stop=[], seed=0)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    batch = torch.tensor([prompt] * options.samples)

    def ours() -> None:
        response = client.sample(ModelInput.from_ints(prompt), options.samples, params).result()
        assert all(len(s.tokens) == options.new_tokens for s in response.sequences)

    def theirs() -> None:
        with torch.inference_mode():
            model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                top_k=0,
                min_new_tokens=options.new_tokens,
                max_new_tokens=options.new_tokens,
            )

    return ours, theirs


def _trainers(
    options: Options, service: ServiceClient, path: Path
) -> tuple[Callable[[], None], Callable[[], None]]:
    config = ModelConfig.from_directory(path)
    lora = LoraConfig(rank=options.rank, train_unembed=False, train_mlp=config.num_experts == 0)
    client = service.create_lora_training_client(
        base_model=str(path),
        rank=lora.rank,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )
    generator = torch.Generator().manual_seed(0)
    shape = (options.sequences, options.length + 1)
    tokens = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
    data = [
        Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in tokens.tolist()
    ]
    base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    targets = sorted({entry.target for entry in LoraLayout(config, lora).entries})
    model = get_peft_model(base, PeftConfig(r=options.rank, lora_alpha=32, target_modules=targets))

    def ours() -> None:
        client.forward_backward(data, "cross_entropy").result()

    def theirs() -> None:
        logits = model(tokens[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        loss.backward()

    return ours, theirs


if __name__ == "__main__":
    chz.nested_entrypoint(main)
