"""sl_loop on a fake service: the trained tokens, the falling learning rate, resuming, and rejected
options.
"""

import json

import pytest
from fake_service import GAP, LOGPROB, Killed

from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import sl_loop
from planish.renderers import get_renderer


def options(dataset, tmp_path, **changes):
    return sl_loop.Config(
        **{
            "model_name": "tiny",
            "dataset": str(dataset),
            "log_path": str(tmp_path / "run"),
            "renderer_name": "role_colon",
            "batch_size": 4,
            "lora_rank": 4,
            "save_every": 2,
            **changes,
        }
    )


@pytest.mark.slow
def test_two_epochs_with_a_falling_rate(service, sums_dataset, tmp_path):
    run = sl_loop.train(options(sums_dataset, tmp_path, num_epochs=2, eval_examples=5), service)
    rows = read_rows(run / "metrics.jsonl")
    training = [row for row in rows if "train_mean_nll" in row]
    assert [row["step"] for row in training] == list(range(12))
    assert [row["epoch"] for row in training] == [0] * 6 + [1] * 6
    assert training[0]["optim/lr"] == 2e-4
    assert training[6]["optim/lr"] == pytest.approx(1e-4)
    assert [row["step"] for row in rows if "test/nll" in row] == [0, 12]
    assert training[0]["train_mean_nll"] == pytest.approx(GAP - LOGPROB, rel=1e-5)
    assert (run / "nll.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_learned_is_the_solution_with_its_boxed_result(sums_dataset, tokenizer):
    conversation = sl_loop.load_conversations(str(sums_dataset), "train")[3]
    assert conversation[-1] == {
        "role": "assistant",
        "content": "3 + 2 = 5\nThe answer is \\boxed{5}",
    }
    datum = sl_loop.render([conversation], get_renderer("role_colon", tokenizer), 1024).data[0]
    targets, weights = (
        datum.loss_fn_inputs[name].tolist() for name in ("target_tokens", "weights")
    )
    learned = tokenizer.decode(
        [token for token, weight in zip(targets, weights, strict=True) if weight]
    )
    assert learned.endswith("3 + 2 = 5\nThe answer is \\boxed{5}\n\nUser:")
    assert "What is" not in learned


def test_each_epoch_shows_each_example_once_in_its_own_order():
    first, second = sl_loop.epoch_order(26, 0, 0), sl_loop.epoch_order(26, 0, 1)
    assert sorted(first) == sorted(second) == list(range(26))
    assert first != second
    assert first == sl_loop.epoch_order(26, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "die_at", [pytest.param(n, marks=pytest.mark.slow if n % 4 else ()) for n in range(0, 16, 2)]
)
def test_killed_anywhere_and_started_again_gives_the_rows_of_an_undisturbed_run(
    service, tokenizer, sums_dataset, tmp_path, die_at
):
    service.die_at = die_at
    with pytest.raises(Killed):
        sl_loop.train(options(sums_dataset, tmp_path), service)
    service.die_at = None
    run = sl_loop.train(options(sums_dataset, tmp_path), service)
    other = sl_loop.train(
        options(sums_dataset, tmp_path, log_path=str(tmp_path / "other")), type(service)(tokenizer)
    )
    timed = ("time/", "tokens_per_second/")
    rows, undisturbed = (
        [
            {k: v for k, v in row.items() if not k.startswith(timed)}
            for row in read_rows(path / "metrics.jsonl")
        ]
        for path in (run, other)
    )
    assert rows == undisturbed
    assert read_rows(run / "checkpoints.jsonl") == read_rows(other / "checkpoints.jsonl")


def test_conversations_of_a_file_with_a_falling_rate(service, tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Say {n}."},
                {"role": "assistant", "content": str(n)},
            ]
        }
        for n in range(8)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = sl_loop.train(options(path, tmp_path), service)
    rates = [row["optim/lr"] for row in read_rows(run / "metrics.jsonl")]
    assert rates == pytest.approx([2e-4, 1e-4])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "alone"}]}, "line 7.*assistant"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]},
            "line 7.*'robot'",
        ),
        ({"prompt": "a", "completion": "\ud83d"}, "line 7.*half of a character"),
        ({"body": "a"}, r"line 7: the row has \['body'\]"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named_before_the_model_is_loaded(
    service, tmp_path, row, message
):
    good = {
        "messages": [
            {"role": "user", "content": "Say it."},
            {"role": "assistant", "content": "It.", "refusal": None},
        ]
    }
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [*[good] * 6, row]))
    with pytest.raises(UserError, match=message):
        sl_loop.train(options(path, tmp_path), service)
    assert service.operations == service.models == []
    path.write_text((json.dumps(good) + "\n") * 6)
    assert len(read_rows(sl_loop.train(options(path, tmp_path), service) / "metrics.jsonl")) == 1


def test_a_batch_of_which_nothing_is_left_is_passed_over_and_counted(service, tmp_path):
    lengths = [3, 3, 300, 3, 3]
    rows = [{"prompt": "p" * length, "completion": "ok"} for length in lengths]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = sl_loop.train(options(path, tmp_path, batch_size=1, max_length=200), service)
    found = read_rows(run / "metrics.jsonl")
    place = sl_loop.epoch_order(5, 0, 0).index(2)
    assert [row["num_left_out"] for row in found] == [int(step == place) for step in range(5)]
    assert ["train_mean_nll" in row for row in found] == [step != place for step in range(5)]
    assert service.operations.count("optim_step") == 4


def test_a_max_length_that_leaves_no_target_is_rejected_at_the_start(
    service, sums_dataset, tmp_path
):
    with pytest.raises(
        UserError, match="max_length=32: in every train row, the answer begins after that"
    ):
        sl_loop.train(options(sums_dataset, tmp_path, max_length=32, eval_examples=2), service)
    assert service.operations == service.models == []


def test_what_is_too_long_is_cut_and_counted_or_left_out_and_counted(tokenizer):
    renderer = get_renderer("role_colon", tokenizer)
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 40}]
    long = [{"role": "user", "content": "a" * 50}, {"role": "assistant", "content": "b"}]
    examples = sl_loop.render([short, long], renderer, 32)
    assert (len(examples.data), examples.num_truncated, examples.num_left_out) == (1, 1, 1)
    assert examples.data[0].model_input.length == 32
    assert sl_loop.render([long], renderer, 32).data == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("max_length", 1),
        ("num_epochs", 0),
        ("learning_rate", -1.0),
        ("learning_rate", float("inf")),
        ("ttl_seconds", 0),
    ],
)
def test_an_invalid_option_is_rejected_by_name(sums_dataset, tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name}="):
        sl_loop.main(options(sums_dataset, tmp_path, **{name: value}))
