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
from planish.export import weights
from planish.export.importing import import_adapter
from planish.testing import tiny_model

trl = pytest.importorskip("trl", reason="make test-extras runs it")

# TRL, Accelerate and torch warn of each other's newer versions.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def trainer(model: Any, base: Path, out: Path, **options: Any) -> Any:
    """A TRL trainer that takes two steps on a few short texts."""
    settings = trl.SFTConfig(
        output_dir=str(out),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        dataset_num_proc=None,
        seed=1,
    )
    return trl.SFTTrainer(
        model=model,
        args=settings,
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
