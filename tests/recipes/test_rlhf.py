"""rlhf runs three stages and a comparison in one command. Killed at any point and resumed, it ends
with the same bits.
"""

import json
from typing import Any

import pytest
from metric_tables import definition_of

from planish import ServiceClient
from planish.client.sampling_client import SamplingClient
from planish.client.training_client import TrainingClient
from planish.errors import UserError
from planish.files import read_rows
from planish.preference.matchups import TournamentPattern
from planish.recipes import rlhf
from planish.recipes.rlhf_options import (
    Options,
    PreferenceStage,
    RLStage,
    SFTStage,
    TrainedModels,
    check,
    preference_config,
    rl_config,
    sft_config,
    tournament_pattern_of,
)
from planish.recipes.training_run import read_options
from planish.recipes.wordy_sums import RuleBuilder, WordySums
from planish.testing import tiny_model

TIMING = (
    "time/",
    "tokens/prefill",
    "tokens/cumulative/prefill",
    "tokens_per_second/",
    "env/all/total_cached_ob_tokens",
)
STAGES = ("sft", "preference_model", "rl", "evaluation")


class Killed(BaseException):
    """Simulates a kill of the process."""


def killed(*_):
    raise Killed


def options_of(small_model, directory, *, sft=None, preference=None, rl=None, **changes):
    usual: dict[str, Any] = {
        "model_name": small_model,
        "log_path": str(directory),
        "lora_rank": 4,
        "sums": WordySums(largest=4, test_size=4),
        "sft": SFTStage(
            **{
                "batch_size": 4,
                "max_steps": 3,
                "learning_rate": 1e-2,
                "save_every": 1,
                **(sft or {}),
            }
        ),
        "preference": PreferenceStage(
            **{
                "batch_size": 4,
                "max_steps": 3,
                "calibration_size": 4,
                "save_every": 1,
                **(preference or {}),
            }
        ),
        "rl": RLStage(
            **{
                "batch_size": 2,
                "max_steps": 3,
                "max_tokens": 5,
                "eval_every": 2,
                "save_every": 1,
                **(rl or {}),
            }
        ),
    }
    return Options(**{**usual, **changes})


def play(options, data_dir) -> Any:
    with ServiceClient(data_dir=data_dir, dtype="float32", deterministic=True) as engine:
        return rlhf.main(options, engine)


def untimed(run, stage):
    rows = read_rows(run / stage / "metrics.jsonl")
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMING)} for row in rows
    ]


def results(run):
    return {stage: untimed(run, stage) for stage in STAGES} | {
        "answers": (run / "evaluation" / "comparisons.jsonl").read_text()
    }


def assert_equal(found, expected):
    """Compare stage by stage, so that the message is readable."""
    for stage in expected:
        assert found[stage] == expected[stage], stage


@pytest.fixture(scope="module")
def whole(small_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return play(options_of(small_model, directory / "run"), directory / "data")


@pytest.mark.slow
def test_each_stage_leaves_its_files(whole):
    assert sorted(path.name for path in whole.iterdir()) == sorted(STAGES)
    assert [row["step"] for row in untimed(whole, "sft")] == [0, 1, 2, 3]
    assert [row["step"] for row in untimed(whole, "preference_model")] == [0, 1, 2, 3]
    assert [row["step"] for row in untimed(whole, "rl")] == [0, 1, 2, 3]
    [row] = untimed(whole, "evaluation")
    judges = {"preference_model", "rule"}
    assert {f"test/win_rate/{judge}" for judge in judges} <= row.keys() & untimed(whole, "rl")[
        -1
    ].keys()
    assert row["step"] == 3
    logged = {name for each in (*untimed(whole, "rl"), row) for name in each} - {"step"}
    assert {name for name in logged if definition_of(name) is None} == set()
    answers = [
        json.loads(line)
        for line in (whole / "evaluation" / "comparisons.jsonl").read_text().splitlines()
    ]
    assert (
        sum(answer["wins"]["rule"] for answer in answers) / len(answers)
        == row["test/win_rate/rule"]
    )
    assert answers[0]["prompt"][0]["content"].startswith("What is ")


@pytest.mark.slow
def test_stages_hand_over_checkpoints(whole):
    sft = read_rows(whole / "sft" / "checkpoints.jsonl")[-1]
    config = json.loads((whole / "rl" / "config.json").read_text())
    assert config["load_checkpoint_path"] == sft["state_path"]
    assert config["evaluator_builders"][0]["reference_checkpoint_path"] == sft["state_path"]
    judge = config["dataset_builder"]["preference_model_builder"]
    described = json.loads((whole / "preference_model" / "preference_model.json").read_text())
    assert (judge["model_path"], judge["temperature"]) == (
        described["model_path"],
        described["temperature"],
    )


@pytest.mark.slow
def test_what_is_done_is_not_done_again(whole, small_model, monkeypatch, capsys):
    before = {path: path.read_bytes() for path in whole.glob("*/*.jsonl")}

    def refuse(*args, **kwargs):
        raise AssertionError("a stage is trained again")

    monkeypatch.setattr(TrainingClient, "optim_step_async", refuse)
    monkeypatch.setattr(SamplingClient, "sample_async", refuse)
    play(options_of(small_model, whole), whole.parent / "data")
    assert {path: path.read_bytes() for path in whole.glob("*/*.jsonl")} == before
    assert "win rate by the rule" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "die_at", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2)), 4, 8]
)
def test_a_run_killed_in_any_stage_resumes_bitwise_identically(
    whole, small_model, tmp_path, monkeypatch, die_at
):
    """Steps 0 to 2 belong to SFT, 3 to 5 to the preference model, 6 to 8 to RL."""
    step, taken = TrainingClient.optim_step_async, []

    async def counted(self, *args, **kwargs):
        if len(taken) == die_at:
            raise Killed
        taken.append(1)
        return await step(self, *args, **kwargs)

    options = options_of(small_model, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(TrainingClient, "optim_step_async", counted)
        with pytest.raises((Killed, BaseExceptionGroup)):
            play(options, tmp_path / "data")
    began = [stage for stage in STAGES if (tmp_path / "run" / stage).exists()]
    assert began == list(STAGES[: 1 + die_at // 3])
    assert_equal(results(play(options, tmp_path / "data")), results(whole))


@pytest.mark.slow
def test_a_run_that_is_killed_between_stages(whole, small_model, tmp_path, monkeypatch):
    options = options_of(small_model, tmp_path / "run")
    for module in (rlhf.model_training, rlhf.train_rl):
        with monkeypatch.context() as patched:
            patched.setattr(module, "main", killed)
            with pytest.raises(Killed):
                play(options, tmp_path / "data")
    with monkeypatch.context() as patched:
        patched.setattr(rlhf, "write_atomically", killed)
        with pytest.raises(Killed):
            play(options, tmp_path / "data")
    assert untimed(tmp_path / "run", "evaluation") == []
    assert_equal(results(play(options, tmp_path / "data")), results(whole))


@pytest.mark.slow
def test_a_longer_rl_stage_is_compared_again(small_model, tmp_path):
    options = options_of(small_model, tmp_path / "run", rl={"max_steps": 1})
    play(options, tmp_path / "data")
    run = play(options_of(small_model, tmp_path / "run", rl={"max_steps": 2}), tmp_path / "data")
    assert [row["step"] for row in untimed(run, "evaluation")] == [1, 2]


@pytest.mark.slow
def test_changed_options_of_a_finished_stage_are_rejected(whole, small_model):
    with pytest.raises(UserError, match="learning_rate was 0.01, is 0.02"):
        play(options_of(small_model, whole, sft={"learning_rate": 2e-2}), whole.parent / "data")


@pytest.mark.slow
def test_rlhf_runs_on_custom_data_with_a_kl_penalty(small_model, tmp_path):
    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    chats = write("chats.jsonl", [{"prompt": f"Say {n}.", "completion": str(n)} for n in range(12)])
    pairs = [{"prompt": f"Say {n}.", "chosen": str(n), "rejected": "no"} for n in range(16)]
    run = play(
        options_of(
            small_model,
            tmp_path / "run",
            sft={"dataset": chats, "test_size": 2},
            preference={"dataset": write("pairs.jsonl", pairs), "test_size": 3, "kind": "chat"},
            rl={"kl_penalty_coef": 0.1},
            test_prompts=2,
        ),
        tmp_path / "data",
    )
    rows = untimed(run, "rl")
    assert "kl_policy_base" in rows[0]
    assert [name for name in rows[0] if name.startswith("test/win_rate/")] == [
        "test/win_rate/preference_model"
    ]
    assert len((run / "evaluation" / "comparisons.jsonl").read_text().splitlines()) == 2
    config = json.loads((run / "rl" / "config.json").read_text())
    assert config["kl_reference_config"]["load_checkpoint_path"] == config["load_checkpoint_path"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sft": {"batch_size": 0}}, "sft: batch_size=0"),
        ({"sft": {"learning_rate": 0.0}}, "sft: learning_rate=0.0"),
        ({"preference": {"calibration_size": -1}}, "preference: calibration_size=-1"),
        ({"rl": {"batch_size": 0}}, "rl: batch_size=0"),
        ({"rl": {"group_size": 1}}, "rl: group_size=1"),
        ({"rl": {"temperature": 0.0}}, "rl: temperature=0.0"),
        ({"sft": {"dataset": "chats.jsonl"}}, "give both sft.dataset and preference.dataset"),
        ({"rl": {"dataset": "prompts.jsonl"}}, "give both sft.dataset and preference.dataset"),
        ({"test_prompts": 0}, "test_prompts=0"),
        ({"sums": WordySums(largest=4, test_size=0)}, "sums.test_size=0"),
    ],
)
def test_an_invalid_option_of_any_stage_is_rejected_at_the_start(
    small_model, tmp_path, changes, message
):
    with pytest.raises(UserError, match=message):
        rlhf.main(options_of(small_model, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "chosen": "b"}], "preference: .*line 1"),
        (
            [{"prompt": f"Say {n}.", "chosen": "b", "rejected": "c"} for n in range(20)],
            "there are no test prompts",
        ),
    ],
)
def test_data_of_a_later_stage_are_read_before_the_first_begins(
    small_model, tmp_path, rows, message
):
    for name, content in (
        ("chats.jsonl", [{"prompt": "a", "completion": "b"}] * 8),
        ("pairs.jsonl", rows),
    ):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    options = options_of(
        small_model,
        tmp_path / "run",
        sft={"dataset": str(tmp_path / "chats.jsonl"), "test_size": 0},
        preference={"dataset": str(tmp_path / "pairs.jsonl"), "test_size": 0},
    )
    with pytest.raises(UserError, match=message):
        play(options, tmp_path / "data")
    assert not (tmp_path / "run").exists()


def test_answers_that_the_judge_cannot_read_are_found_before_the_first_stage(tmp_path):
    """Two answers of 40 tokens, which are bytes, and the prompt exceed 128 tokens."""
    model = str(tiny_model(tmp_path / "model", max_context=128))
    options = options_of(
        model, tmp_path / "run", preference={"kind": "chat"}, rl={"max_tokens": 40}
    )
    with pytest.raises(UserError, match=f"^rl: .*the preference model {model} .* has 128; give"):
        play(options, tmp_path / "data")
    assert not (tmp_path / "run").exists()


def test_options_from_the_command_line_reach_their_stages():
    options = read_options(
        Options,
        rlhf.PRESETS,
        [
            "preset=seed",
            "preference.dataset=pairs.jsonl",
            "rl.group_size=8",
            "seed=3",
            *(f"{stage}.grad_clip_norm=2.0" for stage in ("sft", "preference", "rl")),
        ],
    )
    check(options)
    sft, judge = sft_config(options), preference_config(options)
    trained = TrainedModels("planish://x/weights/final", RuleBuilder())
    policy = rl_config(options, trained, None)
    assert [config.learning_rate for config in (sft, judge, policy)] == [2e-4, 3e-4, 1e-5]
    assert {config.lora_rank for config in (sft, judge, policy)} == {64}
    assert {config.seed for config in (sft, judge, policy)} == {3}
    assert {config.grad_clip_norm for config in (sft, judge, policy)} == {2.0}
    assert (policy.max_tokens, policy.load_checkpoint_path) == (1024, "planish://x/weights/final")
    assert {config.recipe_name for config in (sft, judge, policy)} == {"rlhf"}


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("chat", None, "all_pairs_both_ways"),
        ("bradley_terry", None, "all_pairs_one_way"),
        ("bradley_terry", TournamentPattern.ALL_PAIRS_BOTH_WAYS, "all_pairs_both_ways"),
    ],
)
def test_a_judge_without_a_taste_for_sides_is_asked_once(kind, given, expected):
    options = Options(preference=PreferenceStage(kind=kind), rl=RLStage(tournament_pattern=given))
    assert tournament_pattern_of(options) == expected
