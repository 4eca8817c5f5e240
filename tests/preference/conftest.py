import json

import pytest

from planish.renderers import get_renderer
from planish.testing import save_byte_tokenizer, tiny_model
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory):
    return get_renderer(
        "qwen3_instruct", load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two random models of one shape."""
    return [str(tiny_model(tmp_path_factory.mktemp(f"model{seed}"), seed=seed)) for seed in (0, 1)]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A file of 13 pairs: a short answer is preferred to a long one."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"prompt": f"Say {n}.", "chosen": str(n), "rejected": f"It is {n}, I think."}
        for n in range(13)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
