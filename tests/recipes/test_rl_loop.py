"""rl_loop on a fake service: its rows, resuming after a kill at any operation, and rejected
options.
"""

import json
import sys

import numpy as np
import pytest
from fake_service import GAP, LOGPROB, Killed
from metric_tables import definition_of

from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import rl_loop
from planish.recipes.training_run import read_options
from planish.rl.answers import answer_datum
from planish.runlog.run_directory import COMMAND, RunDirectory, request_stop
from planish.types import ModelInput


def options(sums_dataset, tmp_path, **changes):
    return rl_loop.Config(
        **{
            "model_name": "tiny",
            "dataset": str(sums_dataset),
            "log_path": str(tmp_path / "run"),
            "renderer_name": "role_colon",
            "batch_size": 4,
            "group_size": 4,
            "lora_rank": 4,
            "save_every": 2,
            **changes,
        }
    )


def untimed(rows):
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "tokens_per_second/"))}
        for row in rows
    ]


def test_a_run_goes_once_through_the_data_with_one_row_a_step(
    service, sums_dataset, tmp_path, caplog
):
    run = rl_loop.train(options(sums_dataset, tmp_path), service)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6))
    assert "batch_size=4: 2 of 26 problems do not fill a batch and are left out" in caplog.text
    assert [row["progress/batch"] for row in rows] == list(range(6))
    assert rows[-1]["progress/done_frac"] == 1.0
    assert rows[0]["reward/total"] < rows[-1]["reward/total"]
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    names = [(row["name"], row["batch"]) for row in read_rows(run / "checkpoints.jsonl")]
    assert names == [("000002", 2), ("000004", 4), ("final", 6)]


def test_metrics_have_their_definitions(service, sums_dataset, tmp_path):
    row = read_rows(
        rl_loop.train(options(sums_dataset, tmp_path, max_steps=1), service) / "metrics.jsonl"
    )[0]
    assert row["optim/kl_sample_train_v1"] == pytest.approx(GAP, rel=1e-4)
    assert row["optim/kl_sample_train_v2"] == pytest.approx(GAP**2 / 2, rel=1e-4)
    assert row["optim/entropy"] == pytest.approx(-LOGPROB)
    assert row["optim/grad_norm"] == 1.0
    assert row["optim/lr"] == 4e-5
    assert row["env/all/reward/total"] == row["reward/total"] == row["env/all/correct"]
    assert row["env/all/format"] == 1.0
    assert row["env/all/total_episodes"] == 16
    mixed, good, bad = (
        row[f"env/all/by_group/frac_{kind}"] for kind in ("mixed", "all_good", "all_bad")
    )
    assert mixed + good + bad == pytest.approx(1)
    assert row["env/all/by_group/frac_degenerate"] == pytest.approx(good + bad)
    assert row["time/total"] >= row["time/sampling"] + row["time/training"] > 0
    assert row["tokens/sampled"] == row["env/all/total_ac_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "die_at", [pytest.param(n, marks=pytest.mark.slow if n % 9 else ()) for n in range(0, 45, 3)]
)
def test_killed_anywhere_and_started_again_gives_the_rows_of_an_undisturbed_run(
    service, tokenizer, sums_dataset, tmp_path, die_at
):
    config = options(sums_dataset, tmp_path)
    service.die_at = die_at
    with pytest.raises(Killed):
        rl_loop.train(config, service)
    service.die_at = None
    run = rl_loop.train(config, service)
    undisturbed = rl_loop.train(
        options(sums_dataset, tmp_path, log_path=str(tmp_path / "other")), type(service)(tokenizer)
    )
    assert untimed(read_rows(run / "metrics.jsonl")) == untimed(
        read_rows(undisturbed / "metrics.jsonl")
    )
    assert read_rows(run / "checkpoints.jsonl") == read_rows(undisturbed / "checkpoints.jsonl")


@pytest.mark.slow
def test_a_run_ended_by_max_steps_continues_with_more(service, tokenizer, sums_dataset, tmp_path):
    run = rl_loop.train(options(sums_dataset, tmp_path, max_steps=3), service)
    assert read_rows(run / "checkpoints.jsonl")[-1]["batch"] == 3
    rl_loop.train(options(sums_dataset, tmp_path, max_steps=5), service)
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    trained = service.operations.count("optim_step")
    rl_loop.train(options(sums_dataset, tmp_path, max_steps=5), service)
    assert service.operations.count("optim_step") == trained, "a finished run does nothing"


def test_the_test_set_is_answered_before_and_after_and_a_longer_run_keeps_both(
    service, sums_dataset, tmp_path
):
    run = rl_loop.train(options(sums_dataset, tmp_path, max_steps=3, eval_problems=5), service)
    assert [
        row["step"] for row in read_rows(run / "metrics.jsonl") if "test/env/all/correct" in row
    ] == [0, 3]
    rl_loop.train(options(sums_dataset, tmp_path, max_steps=4, eval_problems=5), service)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "test/env/all/correct" in row] == [0, 3, 4]
    assert [row["step"] for row in rows if "reward/total" in row] == [0, 1, 2, 3]


def test_a_prompt_that_leaves_no_room_is_named_before_the_first_step(
    service, sums_dataset, tmp_path, caplog
):
    directory = tmp_path / "data"
    directory.mkdir()
    rows = (sums_dataset / "train.jsonl").read_text().splitlines()
    rows[8] = json.dumps({"question": "What is 1 + 2? " * 80, "answer": "#### 3"})
    (directory / "train.jsonl").write_text("\n".join(rows) + "\n")
    service.context = 1000
    changes = {"max_tokens": 16, "dataset": str(directory), "max_steps": 3}
    with pytest.raises(
        UserError, match=r"train.jsonl, line 9: its prompt has .* an answer of 16 tok"
    ):
        rl_loop.train(options(sums_dataset, tmp_path, **changes), service)
    assert "sample" not in service.operations
    rl_loop.train(options(sums_dataset, tmp_path, **changes, max_prompt_tokens=984), service)
    assert "1 of 26 train problems are left out" in caplog.text
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 3


class Broken(Exception):
    """The cause of a failure."""


def test_a_requested_stop_saves_the_step_and_the_run_resumes(
    service, tokenizer, sums_dataset, tmp_path, monkeypatch
):
    def log(self, step, metrics):
        logged(self, step, metrics)
        if step == 2:
            request_stop(self.path)

    logged = RunDirectory.log
    config = options(sums_dataset, tmp_path, save_every=0)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "log", log)
        with pytest.raises(SystemExit) as stopped:
            rl_loop.train(config, service)
    assert stopped.value.code == 0
    [record] = read_rows(tmp_path / "run" / "checkpoints.jsonl")
    assert record["batch"] == 3
    command = json.loads((tmp_path / "run" / COMMAND).read_text())
    assert command["command"] == sys.orig_argv
    run = rl_loop.train(config, service)
    other = options(sums_dataset, tmp_path, save_every=0, log_path=str(tmp_path / "other"))
    undisturbed = rl_loop.train(other, type(service)(tokenizer))
    assert untimed(read_rows(run / "metrics.jsonl")) == untimed(
        read_rows(undisturbed / "metrics.jsonl")
    )


def test_a_run_that_fails_while_it_samples_saves_its_steps(
    service, tokenizer, sums_dataset, tmp_path, capsys, monkeypatch
):
    def graded(self, text, answer):
        if service.operations.count("optim_step") >= 3:
            raise Broken
        return grade(self, text, answer)

    grade = rl_loop.Grader.grade
    config = options(sums_dataset, tmp_path, save_every=0)
    with monkeypatch.context() as patch:
        patch.setattr(rl_loop.Grader, "grade", graded)
        with pytest.raises(Broken):
            rl_loop.train(config, service)
    steps = len(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert steps >= 3
    [record] = read_rows(tmp_path / "run" / "checkpoints.jsonl")
    assert record["batch"] == steps
    message = f"failed after {steps} of 6 steps; once the cause is removed, the same command resum"
    assert message in capsys.readouterr().out.replace("\n", " ")
    run = rl_loop.train(config, service)
    other = options(sums_dataset, tmp_path, save_every=0, log_path=str(tmp_path / "other"))
    undisturbed = rl_loop.train(other, type(service)(tokenizer))
    assert untimed(read_rows(run / "metrics.jsonl")) == untimed(
        read_rows(undisturbed / "metrics.jsonl")
    )


def test_a_run_that_fails_after_an_update_was_submitted_saves_nothing(
    service, sums_dataset, tmp_path, monkeypatch
):
    def log(self, step, metrics):
        if step == 3:
            raise Broken
        return logged(self, step, metrics)

    logged = RunDirectory.log
    monkeypatch.setattr(RunDirectory, "log", log)
    with pytest.raises(Broken):
        rl_loop.train(options(sums_dataset, tmp_path, save_every=0), service)
    assert read_rows(tmp_path / "run" / "checkpoints.jsonl") == []


def test_evaluations_may_change_when_a_run_resumes(service, sums_dataset, tmp_path):
    rl_loop.train(options(sums_dataset, tmp_path, max_steps=2), service)
    changes = {"max_steps": 4, "eval_problems": 5, "eval_every": 3}
    run = rl_loop.train(options(sums_dataset, tmp_path, **changes), service)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "test/env/all/correct" in row] == [2, 3, 4]


def test_the_initial_weights_are_not_evaluated_without_eval_on_start(
    service, sums_dataset, tmp_path
):
    changes = {"max_steps": 4, "eval_problems": 5, "eval_every": 2, "eval_on_start": False}
    run = rl_loop.train(options(sums_dataset, tmp_path, **changes), service)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "test/env/all/correct" in row] == [2, 4]


def test_several_answers_to_each_test_problem_give_pass_at_k(service, sums_dataset, tmp_path):
    changes = {"max_steps": 1, "eval_problems": 5, "eval_samples": 4, "eval_temperature": 1.0}
    run = rl_loop.train(options(sums_dataset, tmp_path, **changes), service)
    for row in (row for row in read_rows(run / "metrics.jsonl") if "test/env/all/correct" in row):
        metrics = {name.removeprefix("test/env/all/"): value for name, value in row.items()}
        assert metrics["total_episodes"] == 20
        assert metrics["avg@4"] == pytest.approx(metrics["correct"])
        assert metrics["avg@4"] <= metrics["pass@2"] <= metrics["pass@4"] <= 1
        assert metrics["pass@4"] == pytest.approx(1 - metrics["by_group/frac_all_bad"])
        assert all(definition_of(f"test/env/all/{name}") for name in ("avg@4", "pass@2"))


BEST = {
    "save_every": 1,
    "eval_every": 1,
    "eval_problems": 5,
    "keep_last": 1,
    "keep_best": 2,
    "best_metric": "test/env/all/correct",
}


def test_the_last_and_the_best_checkpoints_are_kept(
    service, sums_dataset, tmp_path, monkeypatch, capsys
):
    """The service's scores before the steps 0, 1, ... are those of this list."""
    scores = iter((0.1, 0.7, 0.3, 0.9, 0.2, 0.7, 0.0))
    monkeypatch.setattr(
        rl_loop.StepRunner, "evaluate", lambda *_: {"test/env/all/correct": next(scores)}
    )
    run = rl_loop.train(options(sums_dataset, tmp_path, **BEST), service)
    records = read_rows(run / "checkpoints.jsonl")
    assert [record["batch"] for record in records] == [3, 5, 6]
    assert set(service.states) == {record["state_path"] for record in records}
    out = capsys.readouterr().out.replace("\n", " ")
    assert "test/env/all/correct = 0.9 after 3 steps: planish://run/sampler_weights/000003" in out


def test_the_options_of_checkpoints_may_change_when_a_run_resumes(service, sums_dataset, tmp_path):
    rl_loop.train(options(sums_dataset, tmp_path, max_steps=2, save_every=1), service)
    changes = {"max_steps": 5, "save_every": 1, "keep_last": 1}
    run = rl_loop.train(options(sums_dataset, tmp_path, **changes), service)
    assert [record["batch"] for record in read_rows(run / "checkpoints.jsonl")] == [2, 4, 5]


def test_a_metric_that_the_evaluations_lack_is_named_before_the_first_step(
    service, sums_dataset, tmp_path
):
    changes = {**BEST, "best_metric": "test/acc"}
    with pytest.raises(UserError, match="best_metric=test/acc: .*test/env/all/correct"):
        rl_loop.train(options(sums_dataset, tmp_path, **changes), service)
    assert "optim_step" not in service.operations


def test_groups_that_all_agree_are_not_trained_on(service, sums_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("fake_service.Weights.chance", 1.0)
    client = service.create_lora_training_client("tiny", 4, 0)
    client.weights.chance = 1.0
    monkeypatch.setattr(service, "create_lora_training_client", lambda **_: client)
    run = rl_loop.train(options(sums_dataset, tmp_path, max_steps=2), service)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["reward/total"] for row in rows] == [1.0, 1.0]
    assert [row["env/all/by_group/frac_all_good"] for row in rows] == [1.0, 1.0]
    assert "optim/kl_sample_train_v1" not in rows[0]
    assert not any(
        operation.startswith(("forward_backward", "optim_step")) for operation in service.operations
    )


def test_rollouts_at_another_temperature_are_trained_at_it(service, sums_dataset, tmp_path):
    rl_loop.train(
        options(sums_dataset, tmp_path, max_steps=1, temperature=0.7, loss_fn="ppo"), service
    )
    assert "forward_backward ppo {'temperature': 0.7}" in service.operations


def test_the_datum_of_an_answer_takes_what_a_sample_has():
    prompt, logprobs = ModelInput.from_ints([1, 2]), np.array([-1.0, -2.0], np.float32)
    datum = answer_datum(prompt, np.array([3, 4]), logprobs, 0.5, "dro")
    assert datum == answer_datum(prompt, [3, 4], logprobs.tolist(), 0.5, "dro")
    assert {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()} == {
        "target_tokens": [0, 3, 4],
        "logprobs": [0.0, -1.0, -2.0],
        "advantages": [0.0, 0.5, 0.5],
        "mask": [0.0, 1.0, 1.0],
    }
    with pytest.raises(UserError, match=r"prompt is a list; give ModelInput\.from_ints"):
        answer_datum([1, 2], [3, 4], [-1.0, -2.0], 0.5)  # pyright: ignore[reportArgumentType]


def test_weights_of_another_run_are_the_start(service, sums_dataset, tmp_path):
    first = rl_loop.train(options(sums_dataset, tmp_path, max_steps=5), service)
    other = options(
        sums_dataset,
        tmp_path,
        max_steps=1,
        log_path=str(tmp_path / "b"),
        load_checkpoint_path=str(first),
    )
    rows = read_rows(rl_loop.train(other, service) / "metrics.jsonl")
    assert rows[0]["reward/total"] > 0.5
    assert rows[0]["optim/adam_step"] == 1.0, "the optimizer begins anew"
    wrong = options(
        sums_dataset,
        tmp_path,
        log_path=str(tmp_path / "c"),
        load_checkpoint_path=str(first),
        lora_rank=8,
    )
    with pytest.raises(UserError, match="rank 4.*lora_rank=8"):
        rl_loop.train(wrong, service)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("group_size", 1),
        ("temperature", 0.0),
        ("loss_fn", "cross_entropy"),
        ("max_steps", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("inf")),
        ("ttl_seconds", 0),
        ("ttl_seconds", 10**11),
        ("temperature", float("inf")),
        ("eval_every", 5),
        ("eval_samples", 0),
        ("eval_samples", 4),
        ("eval_temperature", -1.0),
        ("keep_last", 0),
        ("best_metric", "test/env/all/correct"),
    ],
)
def test_an_invalid_option_is_rejected_by_name(sums_dataset, tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name}="):
        rl_loop.main(options(sums_dataset, tmp_path, **{name: value}))
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data_is_rejected(service, sums_dataset, tmp_path):
    with pytest.raises(UserError, match="batch_size=27.*at most 26"):
        rl_loop.train(options(sums_dataset, tmp_path, batch_size=27), service)


def test_the_command_line_has_presets_and_rejects_unknown_options(capsys):
    config = read_options(rl_loop.Config, rl_loop.PRESETS, ["preset=seed", "batch_size=32"])
    assert (config.model_name, config.batch_size, config.group_size) == ("Qwen/Qwen3-8B", 32, 16)
    defaults = read_options(rl_loop.Config, rl_loop.PRESETS, [])
    assert (defaults.batch_size, defaults.group_size, defaults.max_tokens, defaults.save_every) == (
        16,
        8,
        256,
        20,
    )
    for bad in ("preset=none", "batchsize=3", "batch_size=many"):
        with pytest.raises(UserError, match=bad.partition("=")[0] if "preset" in bad else "batch"):
            read_options(rl_loop.Config, rl_loop.PRESETS, [bad])
    with pytest.raises(SystemExit) as end:
        read_options(rl_loop.Config, rl_loop.PRESETS, ["--help"])
    assert end.value.code == 0
    assert "answers per problem" in capsys.readouterr().out


def test_the_config_is_written_down(service, sums_dataset, tmp_path):
    run = rl_loop.train(options(sums_dataset, tmp_path, max_steps=1), service)
    assert json.loads((run / "config.json").read_text())["group_size"] == 4
