"""transformers' `generate`: W1 as one batch, with the logprobs of the sampled tokens."""

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
        prompts = torch.tensor(round_spec["prompts"], device=DEVICE)
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            num_return_sequences=round_spec["samples"],
            max_new_tokens=round_spec["new_tokens"],
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = out.sequences[:, prompts.shape[1] :]
        logprobs = [
            torch.log_softmax(logits.float(), -1).gather(1, token[:, None])
            for logits, token in zip(out.logits, new.T, strict=True)
        ]
        return {"tokens": torch.cat(logprobs, 1).cpu().numel()}

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return Peer({"W1": sample, "W1b": sample, "W1c": sample}, versions)


if __name__ == "__main__":
    serve(load)
