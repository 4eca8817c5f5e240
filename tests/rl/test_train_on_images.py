"""The RL loop on a tiny model with images: two turns of an episode share the image."""

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass

import chz
import pytest
from PIL import Image

from planish import ServiceClient
from planish.files import read_rows
from planish.images import ImageChunk
from planish.renderers import get_renderer
from planish.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from planish.testing_vision import tiny_vision_model
from planish.tokenizer import load_tokenizer
from planish.training.rl_config import Config
from planish.training.train_rl import main
from planish.types import EncodedTextChunk, ModelInput


def picture(number: int) -> ImageChunk:
    file = io.BytesIO()
    Image.new("RGB", (32, 48), (number * 40 % 256, 20, 200)).save(file, "PNG")
    return ImageChunk(file.getvalue(), "png")


@dataclass
class PictureEnv(Env):
    prompt: ModelInput
    turns: int = 0

    async def initial_observation(self):
        return self.prompt, [10]

    async def step(self, action, *, extra=None):
        self.turns += 1
        self.prompt = self.prompt.append(EncodedTextChunk([*action, 10]))
        return StepResult(float(action[-1] % 2), self.turns == 2, self.prompt, [10])


@dataclass(frozen=True)
class PictureGroup(EnvGroupBuilder):
    prompt: ModelInput

    async def make_envs(self) -> Sequence[Env]:
        return [PictureEnv(self.prompt) for _ in range(3)]


@dataclass(frozen=True)
class Pictures(RLDataset):
    prompts: tuple[ModelInput, ...]

    def get_batch(self, index):
        return [PictureGroup(prompt) for prompt in self.prompts]

    def __len__(self):
        return 2


@chz.chz
class PicturesBuilder(RLDatasetBuilder):
    directory: str

    async def __call__(self):
        renderer = get_renderer("qwen3_vl_instruct", load_tokenizer(self.directory))
        content = [{"type": "image", "image": picture(number)} for number in range(2)]
        prompts = [
            renderer.build_generation_prompt([{"role": "user", "content": [part]}])
            for part in content
        ]
        return Pictures(tuple(prompts)), None


@pytest.mark.slow
def test_the_rl_loop_trains_on_images(tmp_path):
    directory = str(tiny_vision_model(tmp_path / "model"))
    config = Config(
        learning_rate=1e-2,
        dataset_builder=PicturesBuilder(directory=directory),
        model_name="tiny",
        renderer_name="qwen3_vl_instruct",
        lora_rank=4,
        max_tokens=4,
        log_path=str(tmp_path / "log"),
        eval_every=0,
        save_every=0,
        num_groups_to_log=1,
    )
    with ServiceClient(
        models={"tiny": directory}, data_dir=tmp_path / "data", dtype="float32"
    ) as client:
        asyncio.run(main(config, client))
    rows = read_rows(tmp_path / "log" / "metrics.jsonl")
    assert len(rows) >= 2
    assert all(abs(row["optim/kl_sample_train_v2"]) < 1e-6 for row in rows[:2])
