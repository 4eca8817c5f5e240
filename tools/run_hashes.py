"""Hash six fixed runs of a tiny random model, to show that a change keeps their bits.

    python tools/run_hashes.py                  with each kind of kernels of this CPU
    python tools/run_hashes.py --kernels torch  with one kind

Compare the lines of two checkouts on one machine. A hash covers the tokens and logprobs of all
samples, the logprobs and metrics of all training operations, and the final checkpoints. Each
kind of kernels has bits of its own. A served rl_loop has the hash of rl_loop in one process.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "server")]

from server_process import BASE_MODEL, running_server  # noqa: E402

from planish import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient  # noqa: E402
from planish.client.local import connect  # noqa: E402
from planish.datasets.grading import Grade, Grader  # noqa: E402
from planish.engine.engine import Engine  # noqa: E402
from planish.model.architecture.config import ModelConfig  # noqa: E402
from planish.model.kernels.choose import choose_backend  # noqa: E402
from planish.recipes import dpo, rl_basic, rl_loop, sl_loop  # noqa: E402
from planish.rl.environments.boxed_problems import BoxedProblemEnv  # noqa: E402
from planish.service import Service  # noqa: E402
from planish.testing import tiny_model  # noqa: E402
from planish.types import ForwardBackwardOutput, OptimStepResponse, SampleResponse  # noqa: E402
from planish.wire.sampling import sample_response_to_message  # noqa: E402

KERNELS = {
    "fastest": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "torch": {"PLANISH_KERNELS": "torch"},
}
"""The environment of each kind of kernels. The fastest ones are those of the CPU."""
STEPS = 3


class RecordingService:
    """A service that keeps the results of all operations."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.futures: list[Future[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def submit(self, operation: Any) -> Future[Any]:
        """Submit the operation, and keep its future."""
        self.futures.append(self._service.submit(operation))
        return self.futures[-1]


def content_of(result: object) -> bytes:
    """Return the bits of a result. Ids and paths differ between runs, so they are left out."""
    match result:
        case SampleResponse():
            return sample_response_to_message(replace(result, prompt_cache_hit_tokens=0))
        case ForwardBackwardOutput():
            tensors = [
                (name, tensor.to_numpy().tobytes())
                for output in result.loss_fn_outputs
                for name, tensor in sorted(output.items())
            ]
            return repr((tensors, sorted(result.metrics.items()))).encode()
        case OptimStepResponse():
            return repr(sorted(result.metrics.items())).encode()
        case _:
            return b""


def hash_of(service: RecordingService, data: Path) -> str:
    """Return the hash of all results, and of the final checkpoints in the directory `data`."""
    # The order of concurrent requests may differ, so the order does not count.
    contents = sorted(content_of(future.result()) for future in service.futures)
    # A server also has the checkpoints from which it would restore the model after a crash.
    files = sorted(path.read_bytes() for path in data.rglob("final*/*.safetensors"))
    return hashlib.sha256(b"".join([*contents, *files])).hexdigest()[:16]


def run_engine(model: str, client: ServiceClient) -> None:
    """Sample, train on the samples, and save."""
    training = client.create_lora_training_client(model, rank=4, seed=0)
    prompts = [[1, 2, 3], [1, 2, 4, 5]]
    for step in range(STEPS):
        sampling = training.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=12, seed=step)
        futures = [sampling.sample(ModelInput.from_ints(each), 4, params) for each in prompts]
        rows = [
            [*prompt, *sequence.tokens]
            for prompt, future in zip(prompts, futures, strict=True)
            for sequence in future.result().sequences
        ]
        data = [Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in rows]
        training.forward_backward(data, "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-2)).result()
    training.save_state("final").result()


def recipe_options(directory: Path, model: str) -> dict[str, Any]:
    """Return options of every recipe. They include a new data set and an unused log path."""
    row = '{{"question": "What is {0} + 2?", "answer": "#### {0}"}}\n'
    for split in ("train", "test"):
        (directory / f"{split}.jsonl").write_text("".join(row.format(n) for n in range(12)))
    return {
        "model_name": model,
        "log_path": str(directory / "run"),
        "renderer_name": "role_colon",
        "batch_size": 4,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "max_steps": STEPS,
    }


def run_recipe(name: str, directory: Path, model: str, client: ServiceClient) -> None:
    """Train with a recipe."""
    options = recipe_options(directory, model)
    rows: dict[str, Any] = {"dataset": str(directory)}
    rl: dict[str, Any] = {**rows, "group_size": 4, "max_tokens": 12}
    match name:
        case "sl_loop":
            sl_loop.train(sl_loop.Config(**options, **rows), client)
        case "dpo":
            dpo.main(dpo.Options(**options, test_size=4), client)
        case "rl_basic":
            rl_basic.main(rl_basic.Options(**options, **rl, eval_problems=4), client)
        case _:
            rl_loop.train(rl_loop.Config(**options, **rl, eval_problems=4), client)


def is_even(text: str) -> bool:
    """Return the reward of a text. A random model gives no right answers, so it needs others."""
    return sum(text.encode()) % 2 == 0


async def check_answer(_: BoxedProblemEnv, text: str) -> bool:
    """Grade for rl_basic."""
    return is_even(text)


def hashes(directory: Path) -> dict[str, str]:
    """Run all, and return the hashes by the names of the runs. `directory` is empty."""
    model = tiny_model(directory / "model", "qwen3", dtype="bfloat16")
    found = {}
    for name in ("engine", "rl_loop", "sl_loop", "rl_basic", "dpo", "served"):
        (here := directory / name).mkdir()
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(sys.stderr))
            stack.enter_context(
                patch.object(Grader, "grade", lambda _, text, __: Grade(None, is_even(text)))
            )
            stack.enter_context(patch.object(BoxedProblemEnv, "check_answer", check_answer))
            if name == "served":
                process = stack.enter_context(running_server(here / "data", model))
                service = RecordingService(connect(process.url, None, {}))
            else:
                service = RecordingService(Engine({BASE_MODEL: str(model)}, here / "data"))
            with ServiceClient(service=cast(Service, service)) as client:
                if name == "engine":
                    run_engine(BASE_MODEL, client)
                else:
                    run_recipe(name, here, BASE_MODEL, client)
            found[name] = hash_of(service, here / "data")
            service.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the kernels, and one hash for each run."""
    parser = argparse.ArgumentParser(description="Hash fixed runs of a tiny model.")
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.here:
        for kind in options.kernels:
            environment = {**os.environ, **KERNELS[kind]}
            subprocess.run([sys.executable, __file__, "--here"], env=environment, check=True)
        return
    with tempfile.TemporaryDirectory() as directory:
        found = hashes(Path(directory))
        config = ModelConfig.from_directory(Path(directory) / "model")
        backend = choose_backend(config, torch.bfloat16, torch.device("cpu"), None)
    print(f"kernels: {backend.name}")
    for name, digest in found.items():
        print(f"  {name:<9} {digest}", flush=True)


if __name__ == "__main__":
    main()
