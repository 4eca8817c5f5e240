"""Images in environments of messages: the next prompt extends the last one, tokens and images."""

import asyncio
import base64
import io
import json
from typing import Any

import pytest
from PIL import Image

from planish import logtree
from planish.completers import TokensWithLogprobs
from planish.images import ImageChunk
from planish.renderers import get_renderer
from planish.rl.data_processing import trajectory_to_data
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.types import InitialObservationOverflow, Trajectory, Transition
from planish.testing_vision import tiny_vision_model
from planish.tokenizer import load_tokenizer
from planish.types import ModelInput


def png(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(file, "PNG")
    return file.getvalue()


def data_url(color: str) -> str:
    return "data:image/png;base64," + base64.b64encode(png(color)).decode()


def shows(image: Any, text: str, role: str = "user") -> Any:
    return {
        "role": role,
        "content": [{"type": "image", "image": image}, {"type": "text", "text": text}],
    }


class LookEnv(MessageEnv):
    """Shows a red image, and a blue one after the first answer."""

    def __init__(self, role: str = "user") -> None:
        self.role = role

    async def initial_observation(self) -> Any:
        self.messages = [shows(data_url("red"), "Look.")]
        return self.messages

    async def step(self, message: Any) -> MessageStepResult:
        self.messages = [*self.messages, message, shows(png("blue"), "Again.", self.role)]
        return MessageStepResult(1.0, len(self.messages) > 3, self.messages)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tiny_vision_model(tmp_path_factory.mktemp("vision"))
    return get_renderer("qwen3_vl_instruct", load_tokenizer(directory))


def answer_tokens(renderer) -> list[int]:
    """Return an answer whose text would be tokenised to other tokens: half a character."""
    return [65, 0xE2, 66, renderer.get_stop_sequences()[0]]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_the_next_prompt_has_the_sampled_tokens_and_the_next_image(renderer, role):
    action = answer_tokens(renderer)

    async def episode() -> tuple[Any, Any]:
        env: Any = EnvFromMessageEnv(renderer, LookEnv(role))
        first, _ = await env.initial_observation()
        return first, [await env.step(action), await env.step(action)]

    first, (second, third) = asyncio.run(episode())
    prompt = second.next_observation
    assert first.images == [ImageChunk(png("red"), "png", expected_tokens=4)]
    assert prompt.to_keys()[: first.length + len(action)] == first.to_keys() + action
    assert prompt.images == [*first.images, ImageChunk(png("blue"), "png", expected_tokens=4)]
    assert third.episode_done
    assert third.next_observation.to_keys() == prompt.to_keys() + action
    sampled = TokensWithLogprobs(action, [-1.0] * len(action))
    turns = [Transition(ob, sampled, 1.0, False) for ob in (first, prompt)]
    [sequence] = trajectory_to_data(Trajectory(turns, ModelInput.empty()), 1.0)
    assert sequence.model_input.images == prompt.images
    assert sequence.mask_N.sum() == 2 * len(action)


def test_images_count_in_the_limits_of_an_episode(renderer):
    async def first_prompt(**limits: Any) -> Any:
        return await EnvFromMessageEnv(renderer, LookEnv(), **limits).initial_observation()

    prompt, _ = asyncio.run(first_prompt())
    fits = asyncio.run(first_prompt(max_trajectory_tokens=prompt.length))
    assert isinstance(fits, tuple)
    too_long = asyncio.run(first_prompt(max_trajectory_tokens=prompt.length - 1))
    assert isinstance(too_long, InitialObservationOverflow)


def test_the_log_of_an_episode_has_no_image_data(renderer):
    async def episode() -> dict[str, Any]:
        with logtree.init_trace("images") as trace:
            env = EnvFromMessageEnv(renderer, LookEnv())
            await env.initial_observation()
            await env.step(answer_tokens(renderer))
        return trace.to_json()

    text = json.dumps(asyncio.run(episode()))
    assert f"<data URL of {len(data_url('red')):,} characters>" in text
    assert f"<{len(png('blue')):,} bytes>" in text
    assert base64.b64encode(png("red")).decode() not in text
