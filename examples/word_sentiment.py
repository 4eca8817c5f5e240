"""Train a model to say whether people rate a word as positive or negative.

The words and their ratings are those of the package vaderSentiment: ten people rated each word from
-4 to 4. Half of the words are positive, so one constant answer is right for half of them.

    pip install vaderSentiment==3.3.2
    planish models --fetch gemma3-270m
    python examples/word_sentiment.py log_path=runs/words
"""

import asyncio
import importlib.util
import json
import random
import sys
from pathlib import Path

import chz

from planish.rl.environments.reward_env import RewardDatasetBuilder
from planish.training.rl_config import Config
from planish.training.train_rl import main

QUESTION = (
    "Is the word positive or negative? Examples: sunny is positive, war is negative, gift is "
    "positive, thief is negative. Now the word {0}: is {0} positive or negative?"
)


@chz.chz
class Options:
    log_path: str = chz.field(default="runs/words", doc="directory of the run")
    lexicon: str | None = chz.field(
        default=None, doc="file of words and ratings; None: that of the package vaderSentiment"
    )
    model_name: str = chz.field(default="gemma3-270m", doc="base model")
    learning_rate: float = chz.field(default=1e-4, doc="learning rate of AdamW")
    batch_size: int = chz.field(default=16, doc="words per step")
    max_steps: int = chz.field(default=60, doc="steps of training")


def find_lexicon(options: Options) -> Path:
    """Return the path of the lexicon."""
    if options.lexicon is not None:
        return Path(options.lexicon)
    package = importlib.util.find_spec("vaderSentiment")
    if package is None or package.origin is None:
        sys.exit("pip install vaderSentiment==3.3.2, or give the path of its file as lexicon=...")
    return Path(package.origin).with_name("vader_lexicon.txt")


def write_questions(lexicon: Path, directory: Path) -> None:
    """Write train.jsonl and test.jsonl, each with as many positive as negative words.

    Words with the same first four letters, such as "hope" and "hopeful", are in the same file. So
    the words of test.jsonl are not forms of words in train.jsonl.
    """
    lines = lexicon.read_text(encoding="utf-8").splitlines()
    ratings = {word: float(mean) for word, mean, *_ in (line.split("\t") for line in lines)}
    words = sorted(
        w for w, mean in ratings.items() if w.isalpha() and len(w) > 3 and abs(mean) >= 1
    )
    families = sorted({word[:4] for word in words})
    random.Random(0).shuffle(families)
    test_families = set(families[: len(families) // 5])
    directory.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        positive, negative = [], []
        for word in words:
            if (word[:4] in test_families) == (split == "test"):
                (positive if ratings[word] > 0 else negative).append(word)
        num_words = min(len(positive), len(negative))
        rows = [(word, "positive") for word in random.Random(1).sample(positive, num_words)]
        rows += [(word, "negative") for word in random.Random(1).sample(negative, num_words)]
        random.Random(2).shuffle(rows)
        with open(directory / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for word, answer in rows:
                file.write(json.dumps({"prompt": QUESTION.format(word), "answer": answer}) + "\n")


def correct(answer: str, row) -> float:
    """Return 1 if the answer begins with the right word."""
    return float(answer.strip().lower().startswith(row["answer"]))


def train(options: Options) -> None:
    """Write the questions beside the run, and train on them."""
    questions = Path(f"{options.log_path}-questions")
    write_questions(find_lexicon(options), questions)
    builder = RewardDatasetBuilder(
        dataset=str(questions),
        reward=correct,
        model_name=options.model_name,
        batch_size=options.batch_size,
    )
    config = Config(
        dataset_builder=builder,
        model_name=options.model_name,
        learning_rate=options.learning_rate,
        max_tokens=3,
        max_steps=options.max_steps,
        eval_every=options.max_steps,
        log_path=options.log_path,
    )
    asyncio.run(main(config))


if __name__ == "__main__":
    train(chz.entrypoint(Options))
