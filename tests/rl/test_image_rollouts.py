"""Rollouts whose prompts contain images: training sequences, ids and reports."""

import io

from PIL import Image

from planish.completers import TokensWithLogprobs
from planish.cookbook.adapters.display import format_trajectory
from planish.images import ImageChunk
from planish.reports.rollout_records import context_after, new_tokens
from planish.reports.rollout_tokens import IMAGE_SIGN, DisplayDetokenizer
from planish.rl.data_processing import count_sequences, trajectory_to_data
from planish.rl.types import Trajectory, Transition, prompt_id
from planish.testing import save_byte_tokenizer
from planish.tokenizer import load_tokenizer
from planish.types import EncodedTextChunk, ModelInput


def image(color: str) -> ImageChunk:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(file, "PNG")
    return ImageChunk(file.getvalue(), "png", expected_tokens=4)


def prompt(color: str, *tokens: int) -> ModelInput:
    return ModelInput([EncodedTextChunk([70]), image(color), EncodedTextChunk(list(tokens))])


def turn(ob: ModelInput, *sampled: int) -> Transition:
    return Transition(ob, TokensWithLogprobs(list(sampled), [-1.0] * len(sampled)), 0.0, False)


def test_turns_after_an_image_become_one_sequence():
    trajectory = Trajectory(
        [turn(prompt("red", 71), 72, 73), turn(prompt("red", 71, 72, 73, 74), 75)],
        ModelInput.empty(),
    )
    [sequence] = trajectory_to_data(trajectory, 1.0)
    datum = sequence.datum("importance_sampling")
    assert datum.model_input.images == [image("red")]
    assert datum.model_input.to_targets() == [70, 0, 0, 0, 0, 71, 72, 73, 74]
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    assert targets == [0, 0, 0, 0, 71, 72, 73, 74, 75]
    assert datum.loss_fn_inputs["advantages"].tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 1]
    assert sequence.model_input.length == 10


def test_another_image_begins_another_sequence():
    turns = [turn(prompt("red", 71), 72), turn(prompt("blue", 71, 72, 73), 74)]
    trajectory = Trajectory(turns, ModelInput.empty())
    assert count_sequences(trajectory) == 2
    first, second = trajectory_to_data(trajectory, 1.0)
    assert first.model_input.images == [image("red")]
    assert second.model_input.images == [image("blue")]


def test_a_prompt_id_depends_on_the_image():
    assert prompt_id(prompt("red", 71)) == prompt_id(prompt("red", 71))
    assert prompt_id(prompt("red", 71)) != prompt_id(prompt("blue", 71))
    assert prompt_id(prompt("red", 71)) != prompt_id(ModelInput.from_ints([70, 71]))


def test_texts_of_prompts_have_a_sign_for_each_image(tmp_path):
    tokenizer = load_tokenizer(save_byte_tokenizer(tmp_path))
    trajectory = Trajectory([turn(prompt("red", 71), 72)], ModelInput.empty())
    assert f"Observation: F{IMAGE_SIGN}G\nAction: H\n" in format_trajectory(trajectory, tokenizer)


def test_reports_show_a_sign_for_each_token_of_an_image(tmp_path):
    first = turn(prompt("red", 71), 72)
    tokens, extends = new_tokens(context_after(first), prompt("red", 71, 72, 73))
    assert (tokens, extends) == ([73], True)
    tokens, extends = new_tokens([], prompt("red", 71))
    display = DisplayDetokenizer(load_tokenizer(save_byte_tokenizer(tmp_path)))
    assert display.text(tokens) == f"F{4 * IMAGE_SIGN}G"
