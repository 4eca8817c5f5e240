"""A run limits its examples to the context window of its models."""

import asyncio
import json

import chz
import pytest

from planish.supervised.datasets import FromConversationFileBuilder
from planish.supervised.types import ChatDatasetBuilderCommonConfig, SupervisedDatasetBuilder
from planish.training.supervised_config import Config
from planish.training.supervised_context import limit_to_context
from planish.training.train_supervised import main
from planish.types import GetServerCapabilitiesResponse, SupportedModel


class Models:
    """A service that only lists models. One of them appears after the first request for its
    sampler.
    """

    def __init__(self, contexts, later=()):
        self.contexts, self.later = contexts, list(later)

    async def get_server_capabilities_async(self):
        listed = [name for name in self.contexts if name not in self.later]
        return GetServerCapabilitiesResponse(
            [SupportedModel(name, self.contexts[name]) for name in listed]
        )

    async def create_sampling_client_async(self, base_model):
        if base_model in self.later:
            self.later.remove(base_model)


def config(max_length, path="run", file="chats.jsonl"):
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer="tiny", batch_size=4, max_length=max_length
    )
    builder = FromConversationFileBuilder(common_config=common, file_path=str(file))
    return Config(log_path=str(path), model_name="tiny", dataset_builder=builder)


def length_of(config):
    return config.dataset_builder.common_config.max_length


@pytest.mark.parametrize(
    ("asked", "contexts", "readers", "found"),
    [
        (100, {"tiny": 100}, [], 100),
        (101, {"tiny": 100}, [], 100),
        (None, {"tiny": 100}, [], 100),
        (100, {"tiny": 100}, [("tiny", 1)], 99),
        (100, {"tiny": 100, "other": 60}, [("other", 2)], 58),
        (100, {"tiny": 50, "other": 60}, [("other", 2)], 50),
        (40, {"tiny": 50, "other": 60}, [("other", 2)], 40),
        (100, {"tiny": None}, [], 100),
        (None, {}, [], None),
    ],
)
def test_max_length_is_limited_by_the_context_of_each_model(
    asked, contexts, readers, found, capsys
):
    held = asyncio.run(limit_to_context(config(asked), Models(contexts), readers))  # pyright: ignore[reportArgumentType]
    assert length_of(held) == found
    assert ("is lowered to" in capsys.readouterr().out) == (asked != found)


def test_the_context_of_an_unlisted_model_is_known_after_loading():
    service = Models({"tiny": 100, "other": 60}, later=["tiny", "other"])
    held = asyncio.run(limit_to_context(config(100), service, [("other", 1)]))  # pyright: ignore[reportArgumentType]
    assert length_of(held) == 59


def test_a_custom_builder_is_not_changed():
    class Own(SupervisedDatasetBuilder):
        def __call__(self):
            raise NotImplementedError

    own = chz.replace(config(1), dataset_builder=Own())
    assert asyncio.run(limit_to_context(own, Models({"tiny": 100}))) is own  # pyright: ignore[reportArgumentType]


def test_a_run_truncates_at_the_context_and_logs_the_length(service, chats, tmp_path):
    service.context = 30
    asyncio.run(main(config(32768, tmp_path / "run", chats), service))
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["dataset_builder"]["common_config"]["max_length"] == 30
    assert service.weights.steps == 3
