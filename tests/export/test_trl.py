# pyright: reportMissingImports=false
"""Adapters can be moved from planish to TRL and back. Needs TRL (`make test-extras`); skipped
without it.
"""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from trained_adapters import TOKENS
from transformers import AutoModelForCausalLM, AutoTokenizer

from planish import ModelInput, ServiceClient
from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import UnsupportedError
from planish.export import weights
from planish.export.importing import import_adapter
from planish.testing import tiny_model

trl = pytest.importorskip("trl", reason="make test-extras runs it")

# TRL, Accelerate and torch warn of each other's newer versions.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "seed": 1,
}


def trainer(model: Any, base: Path, out: Path, **options: Any) -> Any:
    """A TRL trainer that takes two steps on a few short texts."""
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(out), dataset_num_proc=None, **SETTINGS),
        train_dataset=Dataset.from_dict({"text": [f"{n} and {n} is {2 * n}" for n in range(4)]}),
        processing_class=AutoTokenizer.from_pretrained(base),
        **options,
    )


def base_model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def logprobs_of(model: Any) -> list[float]:
    with torch.no_grad():
        logits = model.eval()(torch.tensor([TOKENS])).logits[0].float()
    return torch.log_softmax(logits, -1)[range(len(TOKENS) - 1), TOKENS[1:]].tolist()


def logprobs_of_planish(base: Path, adapter: Path, data: Path) -> list[float | None]:
    models = {"tiny": str(base)}
    found = import_adapter(adapter, CheckpointStore(data), base_model="tiny", models=models)
    with ServiceClient(models=models, data_dir=data, dtype="float32") as service:
        client = service.create_sampling_client(model_path=str(found.path))
        return client.compute_logprobs(ModelInput.from_ints(TOKENS)).result()[1:]


def test_trl_trains_an_exported_adapter_further_and_planish_imports_it(trained, tmp_path):
    made = trained("llama", unembed=False)
    out = weights.build_lora_adapter(
        base_model=str(made.base), adapter_path=made.files, output_path=tmp_path / "exported"
    )
    model = peft.PeftModel.from_pretrained(base_model(made.base), out, is_trainable=True)
    assert logprobs_of(model) == pytest.approx(made.logprobs, abs=2e-5)
    training = trainer(model, made.base, tmp_path / "trl")
    training.train()
    training.save_model(str(tmp_path / "tuned"))
    expected = logprobs_of(training.model)
    assert expected != pytest.approx(made.logprobs, abs=1e-3)
    found = logprobs_of_planish(made.base, tmp_path / "tuned", tmp_path / "data")
    assert found == pytest.approx(expected, abs=1e-4)


def test_planish_imports_what_trl_trains_by_default(tmp_path):
    base = tiny_model(tmp_path / "base", "llama", tied=False)
    training = trainer(
        base_model(base), base, tmp_path / "trl", peft_config=peft.LoraConfig(task_type="CAUSAL_LM")
    )
    training.train()
    training.save_model(str(tmp_path / "tuned"))
    found = logprobs_of_planish(base, tmp_path / "tuned", tmp_path / "data")
    assert found == pytest.approx(logprobs_of(training.model), abs=1e-4)


def test_trl_rejects_an_adapter_of_the_head(trained, tmp_path):
    """docs/guide/export.md and the model card say so."""
    made = trained("llama", tied=False)
    out = weights.build_lora_adapter(
        base_model=str(made.base), adapter_path=made.files, output_path=tmp_path / "exported"
    )
    model = peft.PeftModel.from_pretrained(base_model(made.base), out, is_trainable=True)
    with pytest.raises(ValueError, match="lm_head.* is not supported"):
        trainer(model, made.base, tmp_path / "trl")


QUESTIONS = [f"What is {n} and {n}?" for n in range(4)]


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Prefer the second answer of each pair."""
    return [float(number % 2) for number in range(len(completions))]


def trained_with_checkpoints(kind: str, base: Path, out: Path, adapter: peft.LoraConfig) -> Any:
    """Run a trainer of TRL that saves a checkpoint after each step, and return it."""
    settings = SETTINGS | {"output_dir": str(out), "save_strategy": "steps", "save_steps": 1}
    tokenizer = AutoTokenizer.from_pretrained(base)
    options: dict[str, Any] = {"processing_class": tokenizer, "peft_config": adapter}
    if kind == "SFT":
        data = {"text": [f"{question} It is {n}." for n, question in enumerate(QUESTIONS)]}
        options["args"] = trl.SFTConfig(**settings)
    elif kind == "DPO":
        answers = [f"It is {2 * n}." for n in range(4)]
        data = {"prompt": QUESTIONS, "chosen": answers, "rejected": answers[::-1]}
        options["args"] = trl.DPOConfig(**settings)
    else:
        data = {"prompt": QUESTIONS}
        options["args"] = trl.GRPOConfig(**settings, num_generations=2, max_completion_length=4)
        options["reward_funcs"] = rewards
    trainer_class = getattr(trl, f"{kind}Trainer")
    training = trainer_class(base_model(base), train_dataset=Dataset.from_dict(data), **options)
    training.train()
    return training


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_planish_imports_the_checkpoints_of_trl(tmp_path, kind):
    """They contain an optimizer, the trainer's state and pickled arguments, too."""
    base = tiny_model(tmp_path / "base", "llama", tied=False)
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    training = trained_with_checkpoints(kind, base, tmp_path / "trl", adapter)
    checkpoint = tmp_path / "trl/checkpoint-2"
    assert {"optimizer.pt", "trainer_state.json", "training_args.bin"} <= {
        file.name for file in checkpoint.iterdir()
    }
    expected = logprobs_of(training.model)
    assert expected != pytest.approx(logprobs_of(base_model(base)), abs=1e-3)
    found = logprobs_of_planish(base, checkpoint, tmp_path / "data")
    assert found == pytest.approx(expected, abs=3e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_a_checkpoint_of_trl_with_whole_modules_is_merged(tmp_path, kind, tied):
    base = tiny_model(tmp_path / "base", "llama", tied=tied)
    modules = ["embed_tokens", "lm_head"]
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", modules_to_save=modules)
    training = trained_with_checkpoints(kind, base, tmp_path / "trl", adapter)
    checkpoint = tmp_path / "trl/checkpoint-2"
    with pytest.raises(UnsupportedError, match="NEW_MODEL --format merged"):
        logprobs_of_planish(base, checkpoint, tmp_path / "data")
    merged = weights.build_hf_model(
        base_model=str(base), adapter_path=checkpoint, output_path=tmp_path / "merged"
    )
    expected = logprobs_of(training.model)
    assert logprobs_of(base_model(Path(merged))) == pytest.approx(expected, abs=3e-5)
    assert logprobs_of_base(Path(merged), tmp_path / "data") == pytest.approx(expected, abs=3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_peft_merged_is_a_base_model(tmp_path, dtype):
    base = tiny_model(tmp_path / "base", "qwen3", tied=True)
    training = trainer(
        base_model(base), base, tmp_path / "trl", peft_config=peft.LoraConfig(task_type="CAUSAL_LM")
    )
    training.train()
    merged = training.model.merge_and_unload().to(dtype)
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "merged")
    expected = logprobs_of(base_model(tmp_path / "merged"))
    found = logprobs_of_base(tmp_path / "merged", tmp_path / "data")
    assert found == pytest.approx(expected, abs=3e-5)


def logprobs_of_base(base: Path, data: Path) -> list[float | None]:
    with ServiceClient(models={"tiny": str(base)}, data_dir=data, dtype="float32") as service:
        client = service.create_sampling_client(base_model="tiny")
        return client.compute_logprobs(ModelInput.from_ints(TOKENS)).result()[1:]
