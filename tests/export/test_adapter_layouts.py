"""Adapters in the layouts of other programs have the values that those programs give them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft_adapters import FLOAT32, MERGED, imported_logprobs, loaded, model_logprobs, saved
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import CheckpointError, DamagedFileError, UnsupportedError
from planish.export import weights
from planish.export.importing import ImportedAdapter, import_adapter
from planish.testing import randomize, save_byte_tokenizer, tiny_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = 6


def imported(adapter: Path, base: Path) -> ImportedAdapter:
    return import_adapter(
        adapter, CheckpointStore(adapter.parent / "data"), base_model=str(base), overwrite=True
    )


def check(adapter: Path, base: Path, expected: list[float]) -> ImportedAdapter:
    """Check an adapter as a checkpoint and merged into its base model."""
    found = imported(adapter, base)
    logprobs = imported_logprobs(base, adapter.parent / "data", found)
    assert logprobs == pytest.approx(expected, abs=FLOAT32)
    merged = weights.build_hf_model(
        base_model=str(base), adapter_path=adapter, output_path=adapter.parent / "merged"
    )
    assert model_logprobs(loaded(merged)) == pytest.approx(expected, abs=MERGED)
    return found


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def multimodal(family: str, directory: Path) -> tuple[Path, Any]:
    """Return a tiny random multimodal model, saved by transformers, and the model itself."""
    text = json.loads((tiny_model(directory / "text", family) / "config.json").read_text())
    vision: dict[str, Any] = {**SIZES, "image_size": 28, "patch_size": 14}
    if family == "gemma3":
        config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        model: Any = Gemma3ForConditionalGeneration(config)
    elif family == "ministral3":
        vision["head_dim"] = 16
        outer = Mistral3Config(
            text_config=Ministral3Config(**text),
            vision_config=PixtralVisionConfig(**vision),
            tie_word_embeddings=True,
        )
        model = Mistral3ForConditionalGeneration(outer)
    else:
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
        vision |= {"out_hidden_size": 64, "num_position_embeddings": 16}
        model = Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
        )
    randomize(model, 0)
    model.save_pretrained(directory / "model")
    return save_byte_tokenizer(directory / "model"), model.eval()


PATTERNS: dict[str, dict[str, Any]] = {
    "full names": {
        "rank_pattern": {"model.language_model.layers.0.mlp.up_proj": 2},
        "alpha_pattern": {"model.language_model.layers.1.mlp.down_proj": 48},
    },
    "regular expressions": {
        "rank_pattern": {r"language_model\.layers\.\d+\.mlp\.(gate|up)_proj": 3},
        "alpha_pattern": {r"^model\.language_model\..*\.down_proj$": 48, "up_proj": 1},
    },
    "names of the text model alone": {"alpha_pattern": {"model.layers.0.mlp.up_proj": 48}},
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("patterns", PATTERNS)
@pytest.mark.parametrize("family", ["gemma3", "ministral3", "qwen3_5"])
def test_patterns_match_the_names_in_a_multimodal_base(tmp_path, family, patterns):
    base, model = multimodal(family, tmp_path)
    options = PATTERNS[patterns]
    targets = r".*language_model.*\.(gate_proj|up_proj|down_proj)"
    expected = saved(
        base, tmp_path / "adapter", model, r=4, lora_alpha=4, target_modules=targets, **options
    )
    found = check(tmp_path / "adapter", base, expected)
    unused = "alpha_pattern has 1 keys that decide for no module" in "".join(found.notes)
    assert unused == (patterns == "names of the text model alone")


def write_adapter(path: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Write an adapter as the hosted service does: with few settings."""
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {f"base_model.model.{name}.weight": t.contiguous() for name, t in tensors.items()},
        path / "adapter_model.safetensors",
    )
    return path


class Noise:
    """Random matrices of an adapter, and the changed weights of a copy of the base model."""

    def __init__(self, base: Path) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.tensors: dict[str, torch.Tensor] = {}
        self.model = loaded(base)

    def pair(self, name: str, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> torch.Tensor:
        """Add a pair of matrices; return B A for each expert, or one B A."""
        a, b = (torch.randn(s, generator=self.generator) * 0.2 for s in (shape_a, shape_b))
        self.tensors |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
        return b @ a

    def add(self, name: str, delta: torch.Tensor, rows: slice = slice(None)) -> None:
        """Add to rows of a weight [..., out, in] of the model."""
        with torch.no_grad():
            self.model.get_parameter(name)[..., rows, :] += delta


LAYOUTS = ["hosted", "hosted, one A", "hosted, one B", "each expert"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_experts_of_the_hosted_service_and_of_vllm_are_read(tmp_path, family, layout):
    """w1, w3 and w2 are gate, up and down. A first dimension of 1 is shared by all experts."""
    base = tiny_model(tmp_path / "base", family, tied=False, experts=EXPERTS)
    noise, rank, (hidden, inner) = Noise(base), 3, (64, 32)
    attention = "attn" if family == "gpt_oss" else "self_attn"
    layer = "model.layers.1."
    for projection, (fan_in, fan_out) in {
        "w1": (hidden, inner), "w3": (hidden, inner), "w2": (inner, hidden),
    }.items():  # fmt: skip
        delta = noise.pair(
            f"{layer}mlp.experts.{projection}",
            (1 if layout == "hosted, one A" else EXPERTS, rank, fan_in),
            (1 if layout == "hosted, one B" else EXPERTS, fan_out, rank),
        )
        add_to_experts(noise, family, projection, 2 * delta)
    query = loaded(base).get_parameter(f"{layer}self_attn.q_proj.weight")
    delta = noise.pair(f"{layer}{attention}.q_proj", (rank, hidden), (query.shape[0], rank))
    noise.add(f"{layer}self_attn.q_proj.weight", 2 * delta)
    delta = noise.pair("model.unembed_tokens", (rank, hidden), (272, rank))
    noise.add("lm_head.weight", 2 * delta)
    tensors = split_experts(noise.tensors) if layout == "each expert" else noise.tensors
    adapter = write_adapter(tmp_path / "adapter", tensors, r=rank, lora_alpha=2 * rank)
    found = check(adapter, base, model_logprobs(noise.model))
    assert found.lora.rank == 2 * rank


def split_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return matrices of single experts, as the service's converter and vLLM name them."""
    result: dict[str, torch.Tensor] = {}
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name, tensor in tensors.items():
        before, separator, last = name.partition(".experts.")
        if not separator:
            result[name] = tensor
            continue
        projection, matrix = last.split(".")
        for expert, part in enumerate(tensor):
            result[f"{before}.experts.{expert}.{names[projection]}.{matrix}"] = part
    return result


def add_to_experts(noise: Noise, family: str, projection: str, delta: torch.Tensor) -> None:
    """Add [experts, out, in] to the experts' weights as transformers keeps them."""
    experts = "model.layers.1.mlp.experts."
    is_up = projection == "w3"
    parameter = "down_proj" if projection == "w2" else "gate_up_proj"
    with torch.no_grad():
        weight = noise.model.get_parameter(experts + parameter)
        if family == "gpt_oss":  # [experts, in, out]; gate and up alternate
            view = weight if projection == "w2" else weight[..., int(is_up) :: 2]
            view += delta.transpose(1, 2)
        else:
            size = delta.shape[1]
            view = weight if projection == "w2" else weight[:, is_up * size : (1 + is_up) * size]
            view += delta


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["qkv", "qk", "v"])
def test_the_separate_projections_of_a_delta_net_are_read(tmp_path, parts):
    base = tiny_model(tmp_path / "base", "qwen3_5", tied=False)
    noise = Noise(base)
    linear = "model.layers.0.linear_attn."
    rows = {"q": slice(0, 32), "k": slice(32, 64), "v": slice(64, 128)}
    for part in parts:
        outputs = rows[part].stop - rows[part].start
        delta = noise.pair(f"{linear}in_proj_{part}", (4, 64), (outputs, 4))
        noise.add(f"{linear}in_proj_qkv.weight", delta, rows[part])
    noise.add(f"{linear}out_proj.weight", noise.pair(f"{linear}out_proj", (4, 64), (64, 4)))
    adapter = write_adapter(tmp_path / "adapter", noise.tensors, r=4, lora_alpha=4)
    found = check(adapter, base, model_logprobs(noise.model))
    assert found.lora.rank == 4 * len(parts)


@pytest.mark.slow
# PEFT looks for its own patterns among modules, and experts are parameters.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("only", ["", r"experts\.[02]\."])
def test_matrices_of_each_expert_are_read_as_peft_reads_them(tmp_path, only):
    """PEFT on transformers 4 saved each expert's matrices; PEFT on transformers 5 loads them."""
    base = tiny_model(tmp_path / "base", "qwen3_moe", tied=False, experts=EXPERTS)
    noise = Noise(base)
    for expert in range(EXPERTS):
        for name, fan_in, fan_out in (
            ("gate_proj", 64, 32), ("up_proj", 64, 32), ("down_proj", 32, 64),
        ):  # fmt: skip
            noise.pair(f"model.layers.0.mlp.experts.{expert}.{name}", (2, fan_in), (fan_out, 2))
            noise.pair(f"model.layers.1.mlp.experts.{expert}.{name}", (2, fan_in), (fan_out, 2))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 6}
    config |= {"base_model_name_or_path": str(base), "target_modules": ALL[4:]}
    adapter = write_adapter(tmp_path / "adapter", noise.tensors, **config)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    if only:
        for name, tensor in tensors.items():
            if name.endswith("lora_B.weight") and not re.search(only, name):
                tensor.zero_()
        save_file(tensors, file)
    expected = model_logprobs(peft.PeftModel.from_pretrained(loaded(base), adapter))
    if only:
        save_file({n: t for n, t in tensors.items() if re.search(only, n)}, file)
    check(adapter, base, expected)


def change_names(adapter: Path, change: Any) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(file).items()}, file)


@pytest.mark.slow
def test_layouts_that_no_linear_corresponds_to_are_rejected_with_the_reason(tmp_path):
    base = tiny_model(tmp_path / "base", "qwen3_moe", tied=False, experts=EXPERTS)

    def rejected(error: type[Exception], told: str, pairs: Mapping[str, Any], **config) -> None:
        noise = Noise(base)
        for name, shapes in pairs.items():
            noise.pair(name, *shapes)
        adapter = write_adapter(
            tmp_path / "adapter", noise.tensors, **({"r": 2, "lora_alpha": 2} | config)
        )
        with pytest.raises(error, match=told):
            imported(adapter, base)
        with pytest.raises(error, match=told):
            weights.build_hf_model(
                base_model=str(base), adapter_path=adapter, output_path=tmp_path / "out"
            )
        assert not (tmp_path / "out").exists()

    mlp = "model.layers.0.mlp."
    head = ((2, 64), (272, 2))
    rejected(UnsupportedError, "before the conversion", {"model.embed_tokens": head})
    rejected(UnsupportedError, "vision_tower.* has no adapter", {"model.vision_tower.fc": head})
    rejected(UnsupportedError, "layers.2.* has no adapter", {"model.layers.2.mlp.up_proj": head})
    rejected(UnsupportedError, "experts.6.gate", {f"{mlp}experts.6.gate_proj": ((2, 64), (32, 2))})
    rejected(UnsupportedError, "attn.q_proj, which", {"model.layers.0.attn.q_proj": head})
    rejected(
        DamagedFileError,
        "same outputs of lm_head as lm_head and as model.unembed_tokens",
        {"lm_head": head, "model.unembed_tokens": head},
    )
    whole, one = ((6, 2, 64), (6, 32, 2)), ((2, 64), (32, 2))
    rejected(
        DamagedFileError,
        "same outputs",
        {f"{mlp}experts.w1": whole, f"{mlp}experts.3.gate_proj": one},
    )
    rejected(
        CheckpointError,
        "are not those of 6 experts",
        {f"{mlp}experts.w1": ((5, 2, 64), (5, 32, 2))},
    )
    rejected(
        CheckpointError, "not those of 6 experts", {f"{mlp}experts.w1": ((1, 2, 64), (1, 32, 2))}
    )
    rejected(DamagedFileError, "need 3 dimensions", {f"{mlp}experts.w1": one})
    rejected(DamagedFileError, "need 2 dimensions", {f"{mlp}experts.1.up_proj": whole})
    rejected(DamagedFileError, "rank 3: lora_A and lora_B have rank 2", {"lm_head": head}, r=3)


def test_an_export_for_peft_asks_to_import_what_peft_does_not_know(tmp_path):
    base = tiny_model(tmp_path / "base", tied=False)
    saved(base, tmp_path / "adapter", r=4, target_modules=["q_proj"], alpha_pattern={"q_proj": 1})
    arguments: Any = {"base_model": str(base), "adapter_path": tmp_path / "adapter"}
    with pytest.raises(UnsupportedError, match=r"alpha_pattern.*planish checkpoints import"):
        weights.build_lora_adapter(**arguments, output_path=tmp_path / "out")
    change_names(tmp_path / "adapter", lambda name: name.replace("self_attn", "attn"))
    config = tmp_path / "adapter/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alpha_pattern": {}}))
    with pytest.raises(UnsupportedError, match=r"PEFT does not know.*planish checkpoints import"):
        weights.build_lora_adapter(**arguments, output_path=tmp_path / "out")


OLD_PEFT = {
    "base_model_name_or_path": "/Llama-2-7b-hf", "bias": "none", "enable_lora": None,
    "fan_in_fan_out": False, "inference_mode": True, "lora_dropout": 0.0, "merge_weights": False,
    "modules_to_save": None, "peft_type": "LORA", "task_type": "CAUSAL_LM",
}  # fmt: skip
AXOLOTL = {
    "auto_mapping": None, "base_model_name_or_path": "NousResearch/Meta-Llama-3-8B",
    "bias": "none", "fan_in_fan_out": None, "inference_mode": True, "init_lora_weights": True,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_dropout": 0, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA",
    "rank_pattern": {}, "alpha_pattern": {}, "revision": None, "task_type": "CAUSAL_LM",
    "use_dora": False, "use_rslora": False,
}  # fmt: skip
UNSLOTH = AXOLOTL | {
    "alora_invocation_tokens": None, "arrow_config": None, "corda_config": None,
    "auto_mapping": {
        "base_model_class": "Qwen3ForCausalLM",
        "parent_library": "transformers.models.qwen3.modeling_qwen3",
        "unsloth_fixed": True,
    },
    "base_model_name_or_path": "unsloth/qwen3-0.6b-unsloth-bnb-4bit", "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "kasa_config": None, "lora_bias": False,
    "lora_ga_config": None, "monteclora_config": None, "peft_version": "0.21.2",
    "qalora_group_size": 16, "target_parameters": None, "trainable_token_indices": None,
    "use_bdlora": None, "use_qalora": False, "velora_config": None,
}  # fmt: skip
PROGRAMS: dict[str, dict[str, Any]] = {
    "PEFT 0.2": OLD_PEFT,
    "axolotl": AXOLOTL,
    "Unsloth": UNSLOTH,
    "Unsloth, a multimodal base": UNSLOTH | {
        "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)",
        "task_type": None,
    },
    "LLaMA-Factory": AXOLOTL | {"lora_alpha": 8.0, "base_model_name_or_path": "saves/base"},
    "the hosted service": {},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_settings_that_programs_write_are_those_of_plain_lora(tmp_path, program):
    """The fields are those of published files. None of them changes the adapter or gives a note."""
    base = tiny_model(tmp_path / "base", "llama", tied=False)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    saved(base, tmp_path / "adapter", **settings)
    expected = imported(tmp_path / "adapter", base)
    store = CheckpointStore(tmp_path / "data")
    matrices = load_file(store.files(expected.path)["adapter_model.safetensors"])
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(settings | PROGRAMS[program]))
    found = imported(tmp_path / "adapter", base)
    assert found.notes == expected.notes
    assert found.num_linears == 4
    for name, matrix in load_file(store.files(found.path)["adapter_model.safetensors"]).items():
        assert torch.equal(matrix, matrices[name])
