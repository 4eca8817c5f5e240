"""A teacher whose tokenizer differs from the student's is rejected."""

import asyncio
import json
import shutil

import pytest

from planish.distillation.teachers import TeacherConfig
from planish.errors import UserError
from planish.training.scoring_models import pin_checkpoint, scoring_client, vocabulary_difference


def test_the_first_difference_of_two_vocabularies_is_named():
    assert vocabulary_difference({"a": 0, "b": 1}, {"b": 1, "a": 0}) is None
    assert vocabulary_difference({"a": 0, "b": 1}, {"a": 0, "c": 1}) == (
        "the id of token 'b' is 1 in the first and missing in the second"
    )
    assert vocabulary_difference({"a": 0}, {"a": 0, "x": 7}) == (
        "the id of token 'x' is missing in the first and 7 in the second"
    )


@pytest.fixture
def other_vocabulary(models, tmp_path):
    """The second model with another token in place of <think>."""
    directory = shutil.copytree(models[1], tmp_path / "other")
    file = directory / "tokenizer.json"
    file.write_text(file.read_text().replace("<think>", "<muse>"))
    return str(directory)


def taught_by(client, models, renderer_name, **teacher):
    """Return a sampling client of a teacher of models[0]."""
    config = TeacherConfig(**{"base_model": models[1], **teacher})
    return asyncio.run(scoring_client(config, client, models[0], renderer_name, "teacher_config"))


def test_a_teacher_with_the_student_s_renderer_is_not_reported(client, models, caplog):
    taught_by(client, models, None)
    taught_by(client, models, "qwen3_instruct")
    assert caplog.text == ""


def test_a_teacher_with_another_renderer_is_reported(client, models, caplog):
    taught_by(client, models, "role_colon")
    message = (
        f"teacher_config: the prompts have the chat format role_colon, and {models[1]} has "
        "qwen3_instruct: it scores texts in a format that is not its own"
    )
    assert message in caplog.text


def test_a_checkpoint_has_the_renderer_that_its_run_recorded(client, models, caplog):
    training_client = client.create_lora_training_client(
        base_model=models[1], rank=2, seed=0, user_metadata={"renderer_name": "role_colon"}
    )
    path = training_client.save_state("x").result().path
    taught_by(client, models, "role_colon", load_checkpoint_path=path)
    assert caplog.text == ""
    taught_by(client, models, None, load_checkpoint_path=path)
    assert f"and {path} has role_colon" in caplog.text


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
)


def with_template(model, directory, template):
    """Return a copy of a model with a chat template that no renderer has."""
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    return str(directory)


def test_two_chat_templates_without_a_renderer_of_their_own_are_compared(
    client, models, tmp_path, caplog
):
    policy = with_template(models[0], tmp_path / "policy", TEMPLATE)
    other = with_template(models[1], tmp_path / "other", TEMPLATE.replace(": ", " says "))
    same = with_template(models[1], tmp_path / "same", TEMPLATE)
    taught_by(client, [policy, same], "template")
    assert caplog.text == ""
    taught_by(client, [policy, other], "template")
    assert f"the chat format template, and {other} has another chat template" in caplog.text


def test_another_base_model_with_the_same_tokens_may_teach(client, models):
    found = asyncio.run(
        scoring_client(
            TeacherConfig(base_model=models[1]), client, models[0], None, "teacher_config"
        )
    )
    assert found.get_base_model() == models[1]


def test_a_teacher_with_another_tokenizer_is_rejected(client, models, other_vocabulary):
    with pytest.raises(UserError, match=r"teacher_config: the vocabulary of .*'<(think|muse)>'"):
        asyncio.run(
            scoring_client(
                TeacherConfig(base_model=other_vocabulary),
                client,
                models[0],
                None,
                "teacher_config",
            )
        )


def test_a_checkpoint_of_another_base_model_is_rejected(client, models):
    path = (
        client.create_lora_training_client(base_model=models[1], rank=2, seed=0)
        .save_state("x")
        .result()
        .path
    )
    teacher = TeacherConfig(base_model=models[0], load_checkpoint_path=path)
    with pytest.raises(UserError, match="give the checkpoint's base model"):
        asyncio.run(scoring_client(teacher, client, models[0], None, "teacher_config"))


def test_a_path_of_neither_checkpoint_nor_run_is_rejected(client, models, tmp_path):
    teacher = TeacherConfig(base_model=models[0], load_checkpoint_path=str(tmp_path))
    with pytest.raises(UserError, match="teacher_config: .* is neither the path of a checkpoint"):
        asyncio.run(scoring_client(teacher, client, models[0], None, "teacher_config"))


def test_a_run_directory_is_its_newest_state(tmp_path):
    rows = [
        {"name": name, "batch": batch, "state_path": f"tinker://a/weights/{name}"}
        for batch, name in enumerate("xy")
    ]
    (tmp_path / "checkpoints.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = TeacherConfig(base_model="m", load_checkpoint_path=str(tmp_path))
    assert pin_checkpoint(teacher, "teacher") == TeacherConfig(
        base_model="m", load_checkpoint_path="tinker://a/weights/y"
    )
    assert pin_checkpoint(TeacherConfig(base_model="m"), "teacher") == TeacherConfig(base_model="m")
