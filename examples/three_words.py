"""Train a model on a task of your own: questions, and a function that rewards answers.

    python examples/three_words.py

The answer should be three single words with commas between them.
"""

import asyncio
import json

from planish.rl.environments.reward_env import RewardDatasetBuilder
from planish.training.rl_config import Config
from planish.training.train_rl import main

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PLACES = """kitchen garden school forest beach garage office library farm hospital market bathroom
desert harbour museum bakery stable attic cellar church cinema hotel station workshop castle river
cave theatre prison tent bedroom zoo"""


def reward(answer, row):
    items = [item.strip() for item in answer.strip().rstrip(".").split(",")]
    words = sum(item.isalpha() for item in items)
    return {
        "three": 0.5 * max(0.0, 1 - abs(len(items) - 3) / 3),
        "single_words": 0.5 * words / max(3, len(items)),
    }


with open("places.jsonl", "w") as file:
    for place in PLACES.split():
        row = {"prompt": f"Name three things in a {place}, separated by commas."}
        file.write(json.dumps(row) + "\n")

questions = RewardDatasetBuilder(
    dataset="places.jsonl", reward=reward, model_name=MODEL, batch_size=8, group_size=8
)
config = Config(
    dataset_builder=questions,
    model_name=MODEL,
    learning_rate=2e-4,
    max_tokens=24,
    num_epochs=6,  # 32 questions are 4 batches of 8, so 24 steps
    log_path="runs/three-words",
)
asyncio.run(main(config))
