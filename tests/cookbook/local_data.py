"""Small datasets under hub names, which `datasets.load_dataset` finds in the working directory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COUNT = 136
"""Rows for training: recipes that cannot be told their batch size take 128."""


def write_data(directory: Path) -> None:
    """Write conversations, sums and preference pairs, a few more than 128 of each."""
    said = [
        [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"It is {n}."}]
        for n in range(COUNT)
    ]
    sums = [{"question": f"{n}+1?", "answer": f"So\n#### {n + 1}"} for n in range(COUNT)]
    pairs = [
        {
            "chosen": f"\n\nHuman: Say {n}\n\nAssistant: It is {n}.",
            "rejected": f"\n\nHuman: Say {n}\n\nAssistant: No.",
        }
        for n in range(COUNT)
    ]
    for split, count in (("train", COUNT), ("test", 8)):
        _write(directory / f"HuggingFaceH4/no_robots/{split}.jsonl", _messages(said[:count]))
        _write(directory / f"openai/gsm8k/{split}.jsonl", sums[:count])
        _write(directory / f"Anthropic/hh-rlhf/{split}.jsonl", pairs[:count])
    _write(directory / "conversations.jsonl", _messages(said))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (directory / "openai/gsm8k/README.md").write_text(
        f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n"
    )


def _messages(conversations: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"messages": messages} for messages in conversations]


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
