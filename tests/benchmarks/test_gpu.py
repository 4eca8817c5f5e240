"""The GPU benchmark also runs on the CPU, and counts only necessary work."""

import json

import gpu
import pytest
import torch
from gpu_limits import decode_bytes, num_attention_pairs, training_flops
from gpu_parts import Options
from transformers import AutoModelForCausalLM, AutoTokenizer

from planish.doctor.gpu import kernel_profile
from planish.doctor.gpu.random_model import SHAPES, random_model
from planish.model.architecture.config import ModelConfig, RopeConfig

SIZES = ModelConfig(
    "qwen3", 100, 8, 12, 3, 4, 2, 2, 1e-6, RopeConfig(1e6), 128, True, True, False, ()
)
"""A layer's linears: q 8 x 8, k and v 4 x 8, o 8 x 8, gate and up 12 x 8, down 8 x 12."""
LINEARS = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 12 * 8
ENDS = (8 + 8) + 2 * (4 + 8) + (8 + 8) + 3 * (12 + 8)
"""Sum of outputs and inputs of the linears."""


def round_spec(
    prompts: int, samples: int, new_tokens: int, prompt_tokens: int, shared: int
) -> dict[str, object]:
    tokens = [[0] * prompt_tokens for _ in range(prompts)]
    return {
        "prompts": tokens,
        "shared_tokens": shared,
        "samples": samples,
        "new_tokens": new_tokens,
    }


def test_pairs_are_those_of_a_mask_in_which_what_is_shared_is_there_once():
    # Positions 0 .. 3 once, 4 and 5 of each prompt, 6 .. 8 of each answer (whose last token is no
    # input); each sees itself and all before.
    assert num_attention_pairs(round_spec(2, 3, 4, 6, 4)) == (1 + 2 + 3 + 4) + 2 * (
        5 + 6
    ) + 2 * 3 * (7 + 8 + 9)


def test_the_flops_of_training():
    """First one token that attends to itself, then the saving by a shared prefix."""
    alone = round_spec(1, 1, 1, 1, 0)
    layer = 4 * LINEARS + 6 * 5 * ENDS + 12 * 4 * 2
    assert training_flops(SIZES, alone, rank=5) == 3 * layer + 4 * 8 * 100 + 6 * 5 * (8 + 100)
    shared, separate = round_spec(4, 1, 2, 50, 50), round_spec(4, 1, 2, 50, 0)
    rows = 50 + 4 * 1, 4 * 50 + 4 * 1
    pairs = 51 * 25 + 4 * 51, 4 * 51 * 25 + 4 * 51
    saved = 3 * (
        (4 * LINEARS + 6 * 5 * ENDS) * (rows[1] - rows[0]) + 12 * 4 * 2 * (pairs[1] - pairs[0])
    )
    assert training_flops(SIZES, separate, rank=5) - training_flops(SIZES, shared, rank=5) == saved


def test_the_bytes_of_a_decode_step():
    weights = 2 * (3 * LINEARS + 8 * 100)
    position = 2 * 2 * 3 * 2 * 2  # keys and values, two bytes, layers, key heads, head_dim
    assert decode_bytes(SIZES, round_spec(2, 3, 9, 10, 4), 5) == weights + position * (
        4 + 2 * (10 - 4 + 3 * 5)
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def test_a_random_model_is_one_that_transformers_loads(models, monkeypatch):
    monkeypatch.setattr("planish.doctor.gpu.random_model.SHARD_BYTES", 50_000)
    directory = random_model("tiny", models, torch.device("cpu"))
    assert len(list(directory.glob("*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.arange(200)[None]).logits[0]
    assert 0.5 < float(logits.std()) < 2
    assert AutoTokenizer.from_pretrained(directory).decode([104, 105]) == "hi"
    assert random_model("tiny", models, torch.device("cpu")) == directory
    assert not list(models.glob(".*"))


def test_the_shapes_are_those_of_the_models():
    assert {name: shape["hidden_size"] for name, shape in SHAPES.items()} == {
        "Qwen3-8B": 4096,
        "Qwen3-0.6B": 1024,
        "Qwen3-30B-A3B-slice": 2048,
        "tiny": 64,
        "tiny-experts": 64,
    }


def run(directory, models, parts: str) -> dict[str, dict]:
    gpu.main(
        Options(model="tiny", small=True, rounds=1, parts=parts, directory=directory, models=models)
    )
    return json.loads((directory / "gpu-tiny.json").read_text())["parts"]


@pytest.mark.slow
def test_all_parts_run_and_are_recorded_one_by_one(tmp_path, models, capsys, monkeypatch):
    whole = gpu.write_atomically
    written = []
    monkeypatch.setattr(
        gpu,
        "write_atomically",
        lambda file, text: (written.append(list(json.loads(text)["parts"])), whole(file, text)),
    )
    names = ["decode", "training", "grpo-16x8", "tenants", "grpo-128x16"]
    parts = run(tmp_path, models, ",".join(names))
    assert written == [["limits", *names[:count]] for count in range(len(names) + 1)]
    assert [row["what"] for row in parts["decode"]["rows"]] == [
        "decode, 1 row",
        "decode, 2 rows",
        "decode, 8 rows",
        "decode without adapter, 1 row",
        "decode without adapter, 2 rows",
        "decode without adapter, 8 rows",
    ]
    assert [row["what"] for row in parts["tenants"]["rows"]] == [
        "decode, 8 rows, 1 adapter",
        "decode, 8 rows, 8 adapters",
    ]
    assert [row["unit"] for row in parts["grpo-16x8"]["rows"]] == [
        "s",
        "new tokens/s",
        "tokens/s",
        "TFLOP/s",
    ]
    for part in parts.values():
        assert part["limits"]["bandwidth"] > 0
    for row in parts["training"]["rows"]:
        assert row["value"] > 0
        assert 0 < row["share"] < 1
    # A later run of one part leaves the others.
    again = run(tmp_path, models, "decode")
    assert {**again, "decode": None, "limits": None} == {**parts, "decode": None, "limits": None}
    assert "| iteration, 16 x 8 |" in capsys.readouterr().out


@pytest.mark.slow
def test_after_its_minutes_no_part_is_begun(tmp_path, models, capsys):
    options = Options(
        model="tiny", small=True, minutes=0, parts="decode", directory=tmp_path, models=models
    )
    gpu.main(options)
    assert list(json.loads((tmp_path / "gpu-tiny.json").read_text())["parts"]) == ["limits"]
    assert "decode: not begun" in capsys.readouterr().err


@pytest.mark.slow
def test_a_part_that_fails_is_named_and_the_others_run(tmp_path, models, capsys, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(gpu.SERVED_PARTS, "decode", fails)
    with pytest.raises(SystemExit, match="decode"):
        run(tmp_path, models, "decode,training")
    assert list(json.loads((tmp_path / "gpu-tiny.json").read_text())["parts"]) == [
        "limits",
        "training",
    ]
    assert "out of memory" in capsys.readouterr().err


def test_the_profile_names_what_takes_the_time(tmp_path, models, capsys):
    rows = run(tmp_path, models, "profile")["profile"]["rows"]
    assert [row["what"] for row in rows] == [
        "profile: a decode step of 8 rows",
        "profile: a micro-batch of 496 rows",
    ]
    assert "aten::" in capsys.readouterr().out


def test_time_without_a_kernel_is_what_no_span_covers():
    assert kernel_profile.union_length([(0, 2), (1, 3), (1, 2), (5, 6)]) == pytest.approx(4)
    assert kernel_profile.total_by_name([("a", 1, 1.0), ("b", 1, 5.0), ("a", 2, 2.0)]) == [
        ("b", 1, 5.0),
        ("a", 3, 3.0),
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_peers_do_the_same_work(tmp_path, models):
    parts = run(tmp_path, models, "peers")
    rows = [row for name in ("peers-W1", "peers-W1b", "peers-W2") for row in parts[name]["rows"]]
    assert [row["what"].split(",")[0] for row in rows] == ["W1", "W1", "W1b", "W1b", "W2", "W2"]
    assert all(row["value"] > 0 for row in rows)
