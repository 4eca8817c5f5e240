"""transformers and PEFT: W2 in micro-batches, eager or with `torch.compile`, in the dtype with
torch's fastest matmuls.

The model's head runs on the positions of completions only, and adapters have the dtype of the base
weights. `PEFT_MICRO_BATCH` sets the sequences per micro-batch; `PEFT_COMPILE=1`
compiles the model.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import peft
import torch
import transformers
from serving import Peer, fastest_dtype, serve

# In float32, 16 sequences need more than 20 GiB.
MICRO_BATCH = int(
    os.environ.get("PEFT_MICRO_BATCH", "16" if fastest_dtype() == torch.bfloat16 else "4")
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILE = os.environ.get("PEFT_COMPILE") == "1"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(path: str) -> Peer:
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=fastest_dtype())
    lora = peft.LoraConfig(r=32, lora_alpha=32, target_modules=LINEARS, lora_dropout=0.0)
    model = peft.get_peft_model(base.to(DEVICE), lora, autocast_adapter_dtype=False)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-5, weight_decay=0.0
    )
    forward = torch.compile(model) if COMPILE else model

    def train(round_spec: dict[str, Any]) -> dict[str, Any]:
        total = 0.0
        for tokens, sampled, advantages in micro_batches(round_spec):
            new = sampled.shape[1]
            logits = forward(input_ids=tokens, use_cache=False, logits_to_keep=new + 1).logits[
                :, :-1
            ]
            logprobs = (
                torch.log_softmax(logits.float(), -1).gather(2, tokens[:, -new:, None]).squeeze(2)
            )
            loss = -((logprobs - sampled).exp() * advantages[:, None]).sum()
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return {"loss": total}

    versions = {
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "torch": torch.__version__,
    }
    return Peer({"W2": train}, versions)


def micro_batches(
    round_spec: dict[str, Any],
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    rows = [
        (prompt + tokens, logprobs, advantage)
        for prompt, *group in zip(
            round_spec["prompts"],
            round_spec["completions"],
            round_spec["logprobs"],
            round_spec["advantages"],
            strict=True,
        )
        for tokens, logprobs, advantage in zip(*group, strict=True)
    ]
    for first in range(0, len(rows), MICRO_BATCH):
        tokens, logprobs, advantages = zip(*rows[first : first + MICRO_BATCH], strict=True)
        yield on_device(tokens), on_device(logprobs), on_device(advantages)


def on_device(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


if __name__ == "__main__":
    serve(load)
