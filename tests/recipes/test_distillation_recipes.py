"""The distillation recipes from their options to their files, on an untrained tiny model."""

import json
from typing import Any

import pytest
from metric_tables import definition_of

from planish.distillation.prompts import PromptOnlyDatasetBuilder
from planish.errors import UserError
from planish.files import lock_directory, read_rows
from planish.recipes import off_policy_distillation, on_policy_distillation, prompt_distillation
from planish.recipes.sum_tasks import generated_sum_prompts
from planish.recipes.sums import held_out_sums
from planish.recipes.training_run import read_options
from planish.renderers import Renderer
from planish.renderers.termination import ParsedResponse, Termination
from planish.testing import tiny_model


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(8)))
    return str(path)


def on_policy_options(small_model, tmp_path, env="arithmetic", **changes):
    usual = {
        "model_name": small_model,
        "teacher_model": small_model,
        "log_path": str(tmp_path / "run"),
        "batch_size": 2,
        "group_size": 2,
        "lora_rank": 4,
        "max_tokens": 4,
        "max_steps": 2,
        "eval_every": 0,
        "num_groups_to_log": 1,
    }
    return on_policy_distillation.options_for(env, **{**usual, **changes})


def check_metrics(run):
    rows = read_rows(run / "metrics.jsonl")
    assert [
        key
        for row in rows
        for key in row
        if key != "step" and definition_of(key, "guide/distillation.md") is None
    ] == []
    return rows


def test_on_policy_with_the_tests_of_its_env(small_model, tmp_path, engine):
    options = on_policy_options(small_model, tmp_path, max_operand=3, eval_every=2)
    rows = check_metrics(on_policy_distillation.main(options, engine))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["teacher_kl"] == pytest.approx(0.0, abs=1e-4), "teacher and student are the same"
    assert "test/env/all/correct" in rows[-1]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["recipe_name"], config["advantage"]) == ("on_policy_distillation", "none")


def test_on_policy_with_several_datasets_and_a_teacher_for_each(
    small_model, tmp_path, engine, questions
):
    other = str(tiny_model(tmp_path / "other", seed=1))
    more = (
        on_policy_distillation.Source(
            env="prompts", dataset=questions, batch_size=3, teacher_model=other
        ),
    )
    options = on_policy_options(
        small_model, tmp_path, more=more, max_steps=1, max_prompt_tokens=500
    )
    [row] = check_metrics(on_policy_distillation.main(options, engine))
    assert row["teacher_kl/dataset_0"] == pytest.approx(0.0, abs=1e-4)
    assert abs(row["teacher_kl/dataset_1"]) > 1e-4
    assert (row["env/all/total_episodes"], row["env/prompts/total_episodes"]) == (10, 6)
    builder = (
        on_policy_distillation.distillation_config(options).dataset_builder.parts[1].dataset_builder
    )
    assert isinstance(builder, PromptOnlyDatasetBuilder)
    assert builder.max_prompt_tokens == 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_model": None}, "there is no teacher"),
        ({"kl_penalty_coef": 0.0}, "kl_penalty_coef=0"),
        ({"kl_reference_model": "x"}, "kl_reference_model"),
        ({"remove_constant_reward_groups": True}, "remove_constant_reward_groups"),
        ({"temperature": 0.5}, "temperature=0.5"),
        ({"group_size": 0}, "group_size=0"),
        ({"env": "prompts"}, "dataset=None"),
        ({"env": "prompts", "dataset": "x.jsonl", "max_operand": 3}, "max_operand=3"),
        ({"env": "prompts", "dataset": "x.jsonl", "advantage": "mean"}, "advantage=mean"),
        ({"env": "prompts", "dataset": "x.jsonl", "eval_problems": 4}, "eval_problems=4"),
        ({"more": (on_policy_distillation.Source(),)}, "there is no teacher"),
    ],
)
def test_on_policy_rejects_invalid_options(small_model, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        on_policy_distillation.main(on_policy_options(small_model, tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_on_policy_options_of_the_command_line():
    arguments = [
        "env=prompts",
        "dataset=a.jsonl",
        "teacher_model=x",
        "more.0.env=gsm8k",
        "more.0.teacher_checkpoint=y",
    ]
    options = read_options(
        on_policy_distillation.Options, *on_policy_distillation.with_env_defaults(arguments)
    )
    assert (options.max_tokens, options.log_path.rpartition("-")[2]) == (512, "prompts")
    assert options.more == (on_policy_distillation.Source(env="gsm8k", teacher_checkpoint="y"),)


def taught_options(recipe, small_model, tmp_path, **changes):
    usual = {
        "model_name": small_model,
        "log_path": str(tmp_path / "run"),
        "batch_size": 4,
        "lora_rank": 4,
        "max_tokens": 8,
        "max_steps": 2,
        "eval_every": 2,
        "test_size": 2,
        "max_operand": 3,
        "num_prompts": 24,
        "learning_rate": 1e-3,
    }
    return recipe.Options(**{**usual, **changes})


@pytest.fixture
def ends(monkeypatch):
    """A random model's answers do not end. Here each counts as ended where it was cut off."""
    parse = Renderer.parse_response
    monkeypatch.setattr(
        Renderer,
        "parse_response",
        lambda self, tokens: ParsedResponse(parse(self, tokens).message, Termination.STOP_SEQUENCE),
    )


def test_off_policy_on_sums_that_the_teacher_answers(small_model, tmp_path, engine, ends):
    options = taught_options(
        off_policy_distillation, small_model, tmp_path, teacher_model=small_model, topk=4
    )
    rows = check_metrics(off_policy_distillation.main(options, engine))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "test/teacher_kl" in rows[-1]
    assert "test/env/all/correct" in rows[-1]
    sampled = read_rows(tmp_path / "run" / "sampled.jsonl")
    assert [row["index"] for row in sampled] == list(range(24))
    assert [message["role"] for message in sampled[0]["messages"]] == ["user", "assistant"] * 3


def test_only_one_process_has_the_teacher_answer(small_model, tmp_path, engine, ends):
    options = taught_options(
        off_policy_distillation, small_model, tmp_path, teacher_model=small_model, topk=4
    )
    other = lock_directory(tmp_path / "run", "log_path", "this run")
    with pytest.raises(UserError, match="log_path=.*: another process is writing this run"):
        off_policy_distillation.main(options, engine)
    assert not (tmp_path / "run" / "sampled.jsonl").exists()
    other.release()
    off_policy_distillation.main(options, engine)


def test_off_policy_on_given_answers(small_model, tmp_path, engine):
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"Say {n}.", "completion": f"{n}"}) + "\n" for n in range(10))
    )
    options = taught_options(
        off_policy_distillation,
        small_model,
        tmp_path,
        teacher_model=small_model,
        dataset=str(path),
        max_tokens=256,
        num_prompts=None,
        max_operand=None,
    )
    rows = check_metrics(off_policy_distillation.main(options, engine))
    assert rows[0]["num_sequences"] == 4
    assert not (tmp_path / "run" / "sampled.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "there is no teacher"),
        (
            {"teacher_model": "x", "dataset": "chats.jsonl", "max_operand": None},
            "max_tokens=8 has no effect, because the answers come from",
        ),
        ({"teacher_model": "x", "dataset": "chats.jsonl"}, "max_operand=3 is for sums"),
        (
            {"teacher_model": "x", "dataset": "chats.jsonl", "teacher_answers": True},
            "max_operand=3 is for sums",
        ),
        ({"teacher_model": "x", "topk": 0}, "topk=0"),
        ({"teacher_model": "x", "num_prompts": 0}, "num_prompts=0"),
        ({"teacher_model": "x", "train_on_what": "all_messages"}, "train_on_what="),
        ({"teacher_model": "x", "batch_size": 0}, "batch_size=0"),
    ],
)
def test_off_policy_rejects_invalid_options(small_model, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        off_policy_distillation.main(
            taught_options(off_policy_distillation, small_model, tmp_path, **changes)
        )
    assert not (tmp_path / "run").exists()


def test_prompt_distillation_of_sums(small_model, tmp_path, engine, ends):
    run = prompt_distillation.main(
        taught_options(prompt_distillation, small_model, tmp_path), engine
    )
    rows = check_metrics(run)
    assert rows[-1]["test/nll"] < rows[0]["test/nll"]
    assert rows[-1]["test/env/all/ob_tokens_per_turn"] < 60, "tested without the worked examples"
    sampled = read_rows(run / "sampled.jsonl")
    assert [message["role"] for message in sampled[0]["messages"]] == ["user", "assistant"]
    origin = json.loads((run / "sampled.jsonl.json").read_text())["origin"]
    assert [message["role"] for message in origin["prefix"]] == ["user", "assistant"] * 2


@pytest.mark.parametrize("name", ["prompt.txt", "prompt.json"])
def test_prompt_distillation_of_a_file(small_model, tmp_path, engine, questions, ends, name):
    text = "Answer as a pirate."
    (tmp_path / name).write_text(
        json.dumps([{"role": "system", "content": text}]) if name.endswith("json") else text
    )

    def options(num_prompts: int) -> Any:
        given = {"dataset": questions, "prompt": str(tmp_path / name), "max_operand": None}
        return taught_options(
            prompt_distillation, small_model, tmp_path, num_prompts=num_prompts, **given
        )

    rows = check_metrics(prompt_distillation.main(options(7), engine))
    assert [row["step"] for row in rows] == [0, 1]
    origin = json.loads((tmp_path / "run" / "sampled.jsonl.json").read_text())["origin"]
    assert origin["prefix"] == [{"role": "system", "content": text}]
    with pytest.raises(UserError, match="prompts was 7, is 6"):
        prompt_distillation.main(options(6), engine)
    edited = tmp_path / "questions.jsonl"
    edited.write_text(edited.read_text().replace("Say 0", "Say 9"))
    with pytest.raises(UserError, match="prompts_sha256 was"):
        prompt_distillation.main(options(7), engine)


def test_too_few_prompts_are_rejected_before_the_teacher_is_asked(small_model, tmp_path, engine):
    options = taught_options(prompt_distillation, small_model, tmp_path, num_prompts=5)
    with pytest.raises(
        UserError, match="there are 5 prompts, and batch_size=4 with test_size=2 needs 6"
    ):
        prompt_distillation.main(options, engine)
    assert not (tmp_path / "run").exists()


def test_too_few_complete_answers_are_blamed_on_the_teacher(
    small_model, tmp_path, engine, monkeypatch
):
    """A weak teacher ends 4 of its 24 answers."""
    remaining = iter([Termination.STOP_SEQUENCE] * 4 + [Termination.MALFORMED] * 20)
    parse = Renderer.parse_response
    monkeypatch.setattr(
        Renderer,
        "parse_response",
        lambda self, tokens: ParsedResponse(parse(self, tokens).message, next(remaining)),
    )
    options = taught_options(prompt_distillation, small_model, tmp_path)
    message = "the teacher completed 4 of 24 answers within max_tokens=8, and batch_size=4 with"
    with pytest.raises(UserError, match=message):
        prompt_distillation.main(options, engine)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "at least one"),
        ('[{"role": "user"}]', "is empty"),
    ],
)
def test_prompt_distillation_rejects_an_invalid_prompt(small_model, tmp_path, content, message):
    path = tmp_path / "prompt.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        prompt_distillation.main(
            taught_options(prompt_distillation, small_model, tmp_path, prompt=str(path))
        )
    other = taught_options(
        prompt_distillation, small_model, tmp_path, dataset="x.jsonl", max_operand=None
    )
    with pytest.raises(UserError, match="prompt is missing"):
        prompt_distillation.main(other)
    assert not (tmp_path / "run").exists()


def test_no_test_sum_is_a_prompt():
    tests = {frozenset((test.left, test.right)) for test in held_out_sums(3, None)}
    prompts = generated_sum_prompts(200, 3, seed=0, shows_examples=False)
    asked = {
        frozenset(int(word) for word in prompt[-1]["content"].strip("?").split() if word.isdigit())
        for prompt in prompts
    }
    assert asked
    assert not asked & tests
    assert generated_sum_prompts(200, 3, seed=0, shows_examples=False) == prompts
    assert generated_sum_prompts(200, 3, seed=1, shows_examples=False) != prompts
