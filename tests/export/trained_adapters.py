"""Adapters of tiny models after some training steps."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planish import AdamParams, Datum, ModelInput, ServiceClient

TOKENS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33, 10, 65, 66, 67, 200, 201, 5, 250]
LEARNING_RATE = 0.05
"""So large that an adapter which is left out, or put in another place, shows."""


@dataclass(frozen=True)
class Trained:
    path: str
    """tinker://..."""
    data_dir: Path
    base: Path
    logprobs: list[float]
    """Of TOKENS[1:], as planish computes them with the adapter."""
    base_logprobs: list[float]

    @property
    def files(self) -> Path:
        return self.data_dir.joinpath(*self.path.removeprefix("tinker://").split("/"))


def train_adapter(
    data_dir: Path, base: Path, attn: bool, mlp: bool, unembed: bool, kind: str
) -> Trained:
    with ServiceClient(models={"tiny": str(base)}, data_dir=data_dir, dtype="float32") as service:
        client = service.create_lora_training_client(
            "tiny", rank=4, seed=1, train_attn=attn, train_mlp=mlp, train_unembed=unembed,
            user_metadata={"recipe_name": "a recipe", "renderer_name": "chatml"},
        )  # fmt: skip
        inputs = {
            "target_tokens": np.array(TOKENS[1:]),
            "weights": np.ones(len(TOKENS) - 1, np.float32),
        }
        datum = Datum(ModelInput.from_ints(TOKENS[:-1]), inputs)
        for _ in range(2):
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=LEARNING_RATE)).result()
        save = client.save_weights_for_sampler if kind == "sampler_weights" else client.save_state
        path = save("final").result().path
        prompt = ModelInput.from_ints(TOKENS)
        tuned = service.create_sampling_client(model_path=path).compute_logprobs(prompt).result()
        plain = service.create_sampling_client(base_model="tiny").compute_logprobs(prompt).result()
    return Trained(path, data_dir, base, _numbers(tuned), _numbers(plain))


def _numbers(logprobs: list[float | None]) -> list[float]:
    return [logprob for logprob in logprobs if logprob is not None]
