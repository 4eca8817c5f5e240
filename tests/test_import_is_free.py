"""`import planish` is fast and loads none of the heavy libraries."""

import subprocess
import sys

HEAVY = (
    "torch",
    "httpx2",
    "prometheus_client",
    "starlette",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "matplotlib",
    "huggingface_hub",
    "gguf",
    "peft",
    "plotly",
    "wandb",
    "tensorboard",
    "httpx",
)


def test_import_planish_loads_no_torch():
    program = f"import planish, sys; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_types_work_without_torch():
    program = (
        "import planish, sys; planish.Datum(planish.ModelInput.from_ints([1, 2]), "
        "{'target_tokens': [2, 3]}); planish.SamplingParams(stop=['a']); assert 'torch' not in "
        "sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
