"""transformers with a hand-written loop: each prompt is computed once, and its cache is repeated
for its samples.
"""

from typing import Any

import torch
import transformers
from serving import Peer, fastest_dtype, serve

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(path: str) -> Peer:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=fastest_dtype())
    model.to(DEVICE)

    @torch.inference_mode()
    def sample(round_spec: dict[str, Any]) -> dict[str, Any]:
        cache = transformers.DynamicCache(config=model.config)
        out = model(
            torch.tensor(round_spec["prompts"], device=DEVICE),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_repeat_interleave(round_spec["samples"])
        logits = out.logits[:, -1].repeat_interleave(round_spec["samples"], 0)
        sampled = []
        for step in range(round_spec["new_tokens"]):
            if step:
                logits = model(sampled[-1][0], past_key_values=cache, use_cache=True).logits[:, -1]
            distribution = torch.log_softmax(logits.float(), -1)
            tokens = torch.multinomial(distribution.exp(), 1)
            sampled.append((tokens, distribution.gather(1, tokens)))
        return {"tokens": torch.cat([logprobs for _, logprobs in sampled]).cpu().numel()}

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return Peer({"W1": sample, "W1b": sample, "W1c": sample}, versions)


if __name__ == "__main__":
    serve(load)
