"""The adapter of a run has the requested parts, and a resumed run keeps them."""

import json

import pytest

from planish import ServiceClient
from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import demo, rl_basic, rl_loop, rlhf_options, sl_basic
from planish.testing import tiny_model

SWITCHES = ("train_mlp", "train_attn", "train_unembed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def service(tmp_path):
    with ServiceClient(data_dir=tmp_path / "data") as client:
        yield client


@pytest.fixture
def train(model, service, tmp_path):
    chats = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": role, "content": role} for role in ("user", "assistant")]}
    chats.write_text((json.dumps(row) + "\n") * 6)

    def run(name="run", **changes):
        usual = {
            "model_name": model,
            "dataset": str(chats),
            "log_path": str(tmp_path / name),
            "batch_size": 2,
            "lora_rank": 4,
            "max_steps": 1,
            "lr_schedule": "constant",
            "learning_rate": 1e-3,
        }
        return sl_basic.main(sl_basic.Options(**{**usual, **changes}), service)

    return run


def parts_of(run, service):
    path = read_rows(run / "checkpoints.jsonl")[-1]["state_path"]
    info = service.create_rest_client().get_weights_info_by_tinker_path(path).result()
    return {name for name in SWITCHES if getattr(info, name)}


@pytest.mark.parametrize("left_out", [None, *SWITCHES])
def test_the_adapter_has_what_is_asked_for(train, service, left_out):
    run = train(**({left_out: False} if left_out else {}))
    assert parts_of(run, service) == set(SWITCHES) - {left_out}


def test_a_run_that_was_begun_without_these_options_is_resumed(train, service):
    run = train()
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name not in SWITCHES})
    )
    train(max_steps=2)
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [0, 1]
    assert parts_of(run, service) == set(SWITCHES)


def test_a_resumed_run_keeps_them(train, service):
    run = train(train_unembed=False)
    for changed in ({}, {"train_unembed": True}, {"train_unembed": False, "train_mlp": False}):
        with pytest.raises(UserError, match="has a run with other options: train_"):
            train(max_steps=2, **changed)
    train(max_steps=2, train_unembed=False)
    assert parts_of(run, service) == {"train_mlp", "train_attn"}


def test_loaded_weights_keep_their_parts(train, service):
    first = train("first", train_unembed=False)
    start = {"load_checkpoint_path": str(first)}
    assert parts_of(train("same", **start), service) == {"train_mlp", "train_attn"}
    assert parts_of(train("named", train_unembed=False, **start), service) == {
        "train_mlp",
        "train_attn",
    }
    with pytest.raises(
        UserError, match="train_unembed=False, but the options have train_unembed=True"
    ):
        train("other", train_unembed=True, **start)


def test_loaded_weights_keep_their_rank(train, service):
    """The rank is that of the checkpoint, unless the options name it."""
    first = train("first")
    run = train("second", lora_rank=None, load_checkpoint_path=str(first))
    path = read_rows(run / "checkpoints.jsonl")[-1]["state_path"]
    assert (
        service.create_rest_client().get_weights_info_by_tinker_path(path).result().lora_rank == 4
    )
    with pytest.raises(UserError, match="rank 4 .* lora_rank=8 .*leave lora_rank out"):
        train("third", lora_rank=8, load_checkpoint_path=str(first))


@pytest.mark.parametrize(
    "options", [demo.Config, rl_basic.Options, rl_loop.Config, rlhf_options.Options]
)
def test_an_adapter_without_modules_is_rejected(options):
    with pytest.raises(UserError, match="are all False: nothing would be trained"):
        options(train_mlp=False, train_attn=False, train_unembed=False)
