"""Supervised runs on the real engine with a tiny model: the loss falls, and a resumed run ends with
the same bits.
"""

import asyncio
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from planish import ServiceClient
from planish.files import read_rows
from planish.supervised.datasets import FromConversationFileBuilder
from planish.supervised.types import ChatDatasetBuilderCommonConfig
from planish.testing import tiny_model
from planish.training.supervised_config import Config
from planish.training.train_supervised import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


def train(client, model, chats, path, **changes):
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, batch_size=4, reduction="none"
    )
    builder = FromConversationFileBuilder(common_config=common, file_path=str(chats), test_size=1)
    options = {
        "learning_rate": 1e-2,
        "lora_rank": 4,
        "num_epochs": 4,
        "save_every": 3,
        "eval_every": 12,
        **changes,
    }
    return asyncio.run(
        main(
            Config(log_path=str(path), model_name=model, dataset_builder=builder, **options), client
        )
    )


class StoppedError(Exception):
    pass


def final_tensors(data_dir: Path, path: Path):
    """Return every tensor of the last state, by file and name."""
    [state] = [
        row["state_path"] for row in read_rows(path / "checkpoints.jsonl") if row.get("final")
    ]
    run, name = state.split("//")[1].split("/")[0], state.rpartition("/")[2]
    files = [
        file for file in data_dir.rglob("*.safetensors") if run in file.parts and name in file.parts
    ]
    assert files
    return {
        (file.name, file.parent.parent.name, key): value
        for file in files
        for key, value in load_file(file).items()
    }


@pytest.mark.slow
def test_the_loss_falls_and_a_resumed_run_is_bitwise_equal(model, chats, tmp_path, monkeypatch):
    with ServiceClient(data_dir=tmp_path / "data") as client:
        train(client, model, chats, tmp_path / "whole")
        rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
        assert rows[-1]["test/nll"] < 0.8 * rows[0]["test/nll"]
        assert rows[-1]["test/bpb"] < 0.8 * rows[0]["test/bpb"]
        create = client.create_lora_training_client

        def mortal(**options):
            training_client = create(**options)
            steps = iter(range(8))
            submit = training_client.optim_step_async

            async def optim_step_async(adam_params):
                if next(steps, None) is None:
                    raise StoppedError
                return await submit(adam_params)

            training_client.optim_step_async = optim_step_async  # pyright: ignore[reportAttributeAccessIssue]
            return training_client

        monkeypatch.setattr(client, "create_lora_training_client", mortal)
        with pytest.raises(StoppedError):
            train(client, model, chats, tmp_path / "parts")
        monkeypatch.undo()
        train(client, model, chats, tmp_path / "parts")
    timed = ("time/", "tokens_per_second/")
    first, second = (
        [
            {k: v for k, v in row.items() if not k.startswith(timed)}
            for row in read_rows(tmp_path / run / "metrics.jsonl")
        ]
        for run in ("whole", "parts")
    )
    assert first == second
    whole, parts = (final_tensors(tmp_path / "data", tmp_path / run) for run in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(whole[key].tobytes() == parts[key].tobytes() for key in whole)
