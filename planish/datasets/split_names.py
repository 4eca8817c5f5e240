"""The options that name the splits of a dataset."""

import chz


@chz.chz
class SplitNames:
    """The names of the splits to train and to test on, such as train_sft and test_sft."""

    train_split: str | None = chz.field(
        default=None, doc="dataset: name of the split to train on; none = train"
    )
    test_split: str | None = chz.field(
        default=None, doc="dataset: name of the test split; none = test, if there is one"
    )
