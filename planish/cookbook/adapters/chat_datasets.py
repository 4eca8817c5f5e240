"""Published conversations."""

import chz

from planish.supervised.datasets import FromRowsBuilder
from planish.supervised.types import ChatDatasetBuilder, SupervisedDataset


@chz.chz
class _HubBuilder(ChatDatasetBuilder):
    dataset: str = ""
    test_size: int | None = None

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        return FromRowsBuilder(
            common_config=self.common_config, dataset=self.dataset, test_size=self.test_size
        )()


@chz.chz
class NoRobotsBuilder(_HubBuilder):
    """HuggingFaceH4/no_robots."""

    dataset: str = "HuggingFaceH4/no_robots"


@chz.chz
class Tulu3Builder(_HubBuilder):
    """allenai/tulu-3-sft-mixture, with 1024 conversations held out."""

    dataset: str = "allenai/tulu-3-sft-mixture"
    test_size: int | None = 1024
