"""TRL's GRPOTrainer: W3 as one step on all prompts, in bf16, in micro-batches of `TRL_MICRO_BATCH`
sequences.

Only the step itself is timed, as in a trainer that has been running for some time. A trainer is
created for each round with the same model and adapter, and its creation is not timed. The step
samples with the weights that the previous round left.
"""

import os
import random
import tempfile
import time
from typing import Any

import datasets
import peft
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from serving import Peer, fastest_dtype, serve

MICRO_BATCH = int(os.environ.get("TRL_MICRO_BATCH", "16"))
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class StepClock(transformers.TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.begun


class RandomReward:
    """The reward function; it also counts the tokens that it sees."""

    __name__ = "random_reward"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.tokens = 0

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.tokens += sum(map(len, completion_ids))
        return [self._rng.random() for _ in completion_ids]


def load(path: str) -> Peer:
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=fastest_dtype())
    lora = peft.LoraConfig(r=32, lora_alpha=32, target_modules=LINEARS, lora_dropout=0.0)
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def iterate(round_spec: dict[str, Any]) -> dict[str, Any]:
        clock, reward = StepClock(), RandomReward(round_spec["seed"])
        with tempfile.TemporaryDirectory() as directory:
            trainer = trl.GRPOTrainer(
                model=model,
                args=grpo_config(round_spec, directory),
                reward_funcs=reward,
                train_dataset=datasets.Dataset.from_dict({"prompt": round_spec["texts"]}),
                processing_class=tokenizer,
                callbacks=[clock],
            )
            trainer.train()
        return {"seconds": clock.seconds, "tokens": reward.tokens}

    versions = {
        package.__name__: package.__version__ for package in (trl, transformers, peft, torch)
    }
    return Peer({"W3": iterate}, versions)


def grpo_config(round_spec: dict[str, Any], directory: str) -> trl.GRPOConfig:
    """One optimizer step on all samples of all prompts, sampled once."""
    sequences = len(round_spec["texts"]) * round_spec["samples"]
    micro_batch = min(MICRO_BATCH, sequences)
    return trl.GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=sequences // micro_batch,
        num_generations=round_spec["samples"],
        max_completion_length=round_spec["new_tokens"],
        generation_kwargs={"min_new_tokens": round_spec["new_tokens"]},
        max_steps=1,
        num_iterations=1,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=1e-5,
        bf16=False,  # the model is already bf16; TRL's autocast would only cast it again
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    serve(load)
