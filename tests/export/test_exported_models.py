"""transformers and PEFT compute the same with an export as planish with the checkpoint."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from trained_adapters import TOKENS, train_adapter
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)
from variants import slow_after

from planish import ModelInput, ServiceClient
from planish.export import weights
from planish.export.adapter_layouts import LoraMatrices
from planish.export.lora_update import read_adapter
from planish.export.merging import MergedTensor, RoundingError, merge
from planish.testing import save_byte_tokenizer, tiny_model
from planish.testing_quantized import use_fp8, use_mxfp4

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "gemma3",
    "olmo3",
    "phi3",
    "qwen3_5",
    "qwen3_5_moe",
]
PARTS = [
    {"attn": attn, "mlp": mlp, "unembed": unembed}
    for attn in (True, False)
    for mlp in (True, False)
    for unembed in (True, False)
    if attn or mlp or unembed
]
TOLERANCE = 3e-5
"""Nats, float32 throughout, in two programs with other orders of sums. At single positions, where a
norm amplifies rounding, transformers in float32 is up to 3.5e-5 away from itself in float64. A wrong
export is off by hundredths.
"""


def logprobs(model) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].float()
    return torch.log_softmax(logits, -1)[range(len(TOKENS) - 1), TOKENS[1:]].tolist()


def loaded(directory, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def name_of(parts) -> str:
    return "+".join(name for name, is_trained in parts.items() if is_trained)


@pytest.mark.parametrize("parts", slow_after(2, PARTS), ids=name_of)
@pytest.mark.parametrize(
    "tied",
    [pytest.param(True, id="tied"), pytest.param(False, id="untied", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_equals_planish(family, tied, parts, trained, tmp_path):
    made = trained(family, tied=tied, **parts)
    assert np.abs(np.subtract(made.logprobs, made.base_logprobs)).max() > 0.1, (
        "the adapter changes nothing"
    )
    out = weights.build_hf_model(
        base_model=str(made.base), adapter_path=made.files, output_path=tmp_path / "out"
    )
    loading: Any = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    model, information = loading
    assert not any(
        information[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    np.testing.assert_allclose(logprobs(model.eval()), made.logprobs, atol=TOLERANCE, rtol=0)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is (tied and not parts["unembed"])


def test_experts_in_mxfp4_are_merged_in_bf16(tmp_path):
    base = use_mxfp4(tiny_model(tmp_path / "base", "gpt_oss", dtype="bfloat16"))
    made = train_adapter(tmp_path / "data", base, True, True, True, "sampler_weights")
    out = weights.build_hf_model(
        base_model=str(base), adapter_path=made.files, output_path=tmp_path / "out", dtype="float32"
    )
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    np.testing.assert_allclose(logprobs(loaded(out)), made.logprobs, atol=TOLERANCE, rtol=0)


def test_weights_in_fp8_are_merged_in_bf16(tmp_path):
    stored = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    base = tiny_model(tmp_path / "base", "qwen3", dtype="bfloat16")
    use_fp8(base, stored, (32, 32), "weight_scale_inv")
    made = train_adapter(tmp_path / "data", base, True, True, True, "sampler_weights")
    for dtype in ("float32", None):
        out = weights.build_hf_model(
            base_model=str(base),
            adapter_path=made.files,
            output_path=tmp_path / f"out-{dtype}",
            dtype=dtype,
        )
        out = Path(out)
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        assert "stores the linears in fp8" in (out / "README.md").read_text()
        tensors = load_file(out / "model.safetensors")
        assert {str(x.dtype) for x in tensors.values()} == {f"torch.{dtype or 'bfloat16'}"}
        assert not any("scale" in name for name in tensors)
        tolerance = TOLERANCE if dtype else 0.2  # logprobs are about -10
        np.testing.assert_allclose(logprobs(loaded(out)), made.logprobs, atol=tolerance, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS, ids=name_of)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_equals_planish(family, tied, parts, trained, tmp_path):
    made = trained(family, tied=tied, **parts)
    out = weights.build_lora_adapter(
        base_model=str(made.base), adapter_path=made.files, output_path=tmp_path / "out"
    )
    with warnings.catch_warnings():
        # PEFT warns of merging an adapter on a tied head; the card says so too, and nothing is
        # merged here.
        warnings.filterwarnings("ignore", message=".*tie.*")
        model = PeftModel.from_pretrained(loaded(made.base), out)
    np.testing.assert_allclose(logprobs(model.eval()), made.logprobs, atol=TOLERANCE, rtol=0)


MULTIMODAL: dict[str, tuple[Any, Any]] = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}


def multimodal_model(path: Path, family: str) -> Path:
    """Write a tiny random multimodal model, as transformers saves it."""
    text = json.loads((tiny_model(path / "text", family) / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16}
    make_config, make_model = MULTIMODAL[family]
    torch.manual_seed(0)
    model = make_model(make_config(text_config=text, vision_config=vision))
    model.save_pretrained(path / "model")
    return save_byte_tokenizer(path / "model")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", MULTIMODAL)
@pytest.mark.parametrize("attn", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_exports_for_a_multimodal_base_equal_planish(family, attn, tmp_path):
    """The adapter is for the multimodal model, and the merged model is its text model."""
    base = multimodal_model(tmp_path, family)
    made = train_adapter(tmp_path / "data", base, attn, True, False, "sampler_weights")
    assert np.abs(np.subtract(made.logprobs, made.base_logprobs)).max() > 0.1
    load = MULTIMODAL[family][1].from_pretrained
    assert logprobs(load(base).eval()) == pytest.approx(made.base_logprobs, abs=TOLERANCE)
    given: Any = {"base_model": str(base), "adapter_path": made.files}
    adapter = weights.build_lora_adapter(**given, output_path=tmp_path / "adapter")
    tuned = PeftModel.from_pretrained(load(base), adapter).eval()
    assert logprobs(tuned) == pytest.approx(made.logprobs, abs=TOLERANCE)
    whole = weights.build_hf_model(**given, output_path=tmp_path / "whole")
    assert logprobs(loaded(whole)) == pytest.approx(made.logprobs, abs=TOLERANCE)
    # The adapter's card says that this command merges the exported adapter too.
    exported: Any = {"base_model": str(base), "adapter_path": adapter}
    merged = weights.build_hf_model(**exported, output_path=tmp_path / "merged")
    assert logprobs(loaded(merged)) == logprobs(loaded(whole))
    again = weights.build_lora_adapter(**exported, output_path=tmp_path / "again")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (Path(again) / name).read_bytes() == (Path(adapter) / name).read_bytes()


CARD = """
import sys
from peft import AutoPeftModelForCausalLM
import torch
exec(sys.argv[1])
by_name = AutoPeftModelForCausalLM.from_pretrained("DIRECTORY", dtype=torch.float32)
tokens = eval(sys.argv[2])
for found in (model, by_name):
    logits = found.eval()(torch.tensor([tokens])).logits[0].detach().float()
    print(torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]].tolist())
"""


@pytest.mark.slow
def test_the_cards_code_and_autopeft_find_the_base_by_its_hub_name(trained, tmp_path):
    """It runs in its own process, since the hub's cache is chosen at import."""
    made = trained("llama", unembed=False)
    cache = tmp_path / "hub/models--some-org--Tiny-1.0"
    shutil.copytree(made.base, cache / "snapshots/abc")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("abc")
    out = weights.build_lora_adapter(
        base_model=str(cache / "snapshots/abc"),
        adapter_path=made.files,
        output_path=tmp_path / "DIRECTORY",
    )
    code = (tmp_path / "DIRECTORY/README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "some-org/Tiny-1.0" in code
    done = subprocess.run(
        [sys.executable, "-c", CARD, code, str(TOKENS)],
        cwd=Path(out).parent,
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        np.testing.assert_allclose(json.loads(line), made.logprobs, atol=TOLERANCE, rtol=0)
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_merged_model_is_a_base_model_of_planish(family, trained, tmp_path):
    made = trained(family)
    out = weights.build_hf_model(
        base_model=str(made.base), adapter_path=made.files, output_path=tmp_path / "out"
    )
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as service:
        client = service.create_sampling_client(base_model=out)
        found = client.compute_logprobs(ModelInput.from_ints(TOKENS)).result()
    np.testing.assert_allclose(np.array(found[1:], float), made.logprobs, atol=TOLERANCE, rtol=0)
    assert (
        AutoTokenizer.from_pretrained(out).chat_template
        == AutoTokenizer.from_pretrained(made.base).chat_template
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype, trained, tmp_path):
    made = trained("llama", base_dtype="bfloat16")
    exact = weights.build_hf_model(
        base_model=str(made.base),
        adapter_path=made.files,
        output_path=tmp_path / "exact",
        dtype="float32",
    )
    out = weights.build_hf_model(
        base_model=str(made.base),
        adapter_path=made.files,
        output_path=tmp_path / "out",
        dtype=dtype,
    )
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype
    wanted, found = loaded(exact).state_dict(), loaded(out, torch.float32).state_dict()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype)).float()), name
    share = json.loads((tmp_path / "out/planish_export.json").read_text())["rounding"]
    assert 0 < share < 0.5
    assert json.loads((tmp_path / "exact/planish_export.json").read_text())["rounding"] < 1e-5


def test_the_base_keeps_its_dtype(trained, tmp_path):
    made = trained("llama", base_dtype="bfloat16")
    weights.build_hf_model(
        base_model=str(made.base), adapter_path=made.files, output_path=tmp_path / "out"
    )
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in tuple(file.keys())} == {"BF16"}


def test_shards_equal_one_file(trained, tmp_path):
    made = trained("llama")
    one = weights.build_hf_model(
        base_model=str(made.base), adapter_path=made.files, output_path=tmp_path / "one"
    )
    many = weights.build_hf_model(
        base_model=str(made.base),
        adapter_path=made.files,
        output_path=tmp_path / "many",
        shard_bytes=40_000,
    )
    shards = sorted(tmp_path.glob("many/model-*.safetensors"))
    assert len(shards) > 3
    largest = 272 * 64 * 4
    assert all(shard.stat().st_size < max(40_000, largest) + 4096 for shard in shards)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        t.numel() * 4 for t in loaded(one).state_dict().values()
    )
    ours, theirs = loaded(many).state_dict(), loaded(one).state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_blocks_of_rows_equal_one_product(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (
        torch.randn(shape, generator=generator) for shape in ((37, 24), (3, 24), (37, 3))
    )
    tensor = MergedTensor("w", weight, LoraMatrices(a, b), torch.float32)
    whole = merge(tensor, RoundingError())
    monkeypatch.setattr("planish.export.merging._BLOCK_ELEMENTS", 24 * 5)
    torch.testing.assert_close(merge(tensor, RoundingError()), whole)
    torch.testing.assert_close(whole, weight + b @ a)


def test_an_adapter_of_peft_is_merged_as_peft_merges_it(tmp_path, trained):
    from peft import LoraConfig, get_peft_model

    made = trained("qwen2", tied=False)
    config = LoraConfig(
        r=6,
        lora_alpha=24,
        use_rslora=True,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
    )
    model = get_peft_model(loaded(made.base), config)
    model.save_pretrained(tmp_path / "adapter")
    assert read_adapter(tmp_path / "adapter").manifest is None
    out = weights.build_hf_model(
        base_model=str(made.base), adapter_path=tmp_path / "adapter", output_path=tmp_path / "out"
    )
    np.testing.assert_allclose(
        logprobs(loaded(out)), logprobs(model.eval()), atol=TOLERANCE, rtol=0
    )
