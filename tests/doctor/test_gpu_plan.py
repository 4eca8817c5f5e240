"""`planish doctor --plan MODEL --gpu NAME`: the computed times and the memory plan."""

import json

import pytest
import torch

from planish.commands.cli import main
from planish.doctor.gpu.cards import CARDS
from planish.doctor.gpu.plan import model_directory, plan
from planish.doctor.gpu.roofline import (
    HOST_ROW_SECONDS,
    HOST_STEP_SECONDS,
    Estimate,
    attended_bytes,
    bytes_per_weight,
    decode_estimate,
    launches,
    training_estimate,
    work_of,
)
from planish.errors import UnknownModelError, UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.testing import tiny_model, tiny_transformers_model

H100, RTX4090 = CARDS["h100"], CARDS["rtx4090"]


@pytest.fixture(scope="module")
def qwen3_8b() -> ModelConfig:
    with model_directory("Qwen3-8B") as directory:
        return ModelConfig.from_directory(directory)


def test_the_work_of_a_known_model(qwen3_8b):
    """8.19e9 parameters, of which embeddings and head have 0.62e9 each."""
    work = work_of(qwen3_8b, 1)
    assert work.linear_weights == work.token_weights == pytest.approx(6.945e9, rel=1e-3)
    assert work.head_weights == 151_936 * 4096
    # an adapter of rank 32 on all modules and the head
    assert 32 * (work.adapter_weights + work.head_adapter_weights) == pytest.approx(
        92.3e6, rel=0.01
    )
    # keys and values: 2 x 36 layers x 8 heads x 128 x 2 bytes a position
    assert attended_bytes(qwen3_8b, 100, torch.bfloat16) == 100 * 147_456


def test_a_decoding_step_takes_at_least_the_reading_of_the_weights(qwen3_8b):
    one = decode_estimate(qwen3_8b, H100, 1, 1024)
    assert 15.1e9 / H100.bandwidth < one.seconds < 3 * 15.1e9 / H100.bandwidth
    many = decode_estimate(qwen3_8b, H100, 128, 1024)
    assert one.seconds < many.seconds < 5 * one.seconds
    assert many.parts["attention"] == pytest.approx(128 * one.parts["attention"])


def test_the_host_is_hidden_behind_a_step_that_takes_longer(qwen3_8b, tmp_path):
    assert decode_estimate(qwen3_8b, H100, 128, 1024).parts["host"] == 0
    tiny = ModelConfig.from_directory(tiny_model(tmp_path, "qwen3"))
    found = decode_estimate(tiny, H100, 128, 100)
    assert found.seconds == pytest.approx(HOST_STEP_SECONDS + 128 * HOST_ROW_SECONDS)


@pytest.mark.parametrize("scheme", [None, "int8", "nf4"])
def test_a_small_step_reads_the_counted_bytes_of_each_weight(qwen3_8b, scheme):
    found = decode_estimate(qwen3_8b, RTX4090, 15, 64, scheme).parts["matmuls"]
    work = work_of(qwen3_8b, 15)
    moved = work.linear_weights * bytes_per_weight(scheme, 15) + 2 * work.head_weights
    assert found == pytest.approx(moved / (0.8 * RTX4090.bandwidth))
    assert bytes_per_weight(scheme, 15) <= bytes_per_weight(scheme, 10_000)


def test_training_takes_at_least_its_flops(qwen3_8b):
    tokens = 131_072
    found = training_estimate(qwen3_8b, H100, tokens, 1024, 2048)
    flops = 4 * (6.945e9 + 0.622e9) * tokens
    assert flops / H100.matmul_rate < found.seconds < 2.5 * flops / H100.matmul_rate
    recomputed = training_estimate(qwen3_8b, H100, tokens, 1024, 2048, recompute=True)
    assert recomputed.seconds > 1.3 * found.seconds
    quantized = training_estimate(qwen3_8b, H100, tokens, 1024, 2048, "nf4")
    assert quantized.parts["dequantization"] > 0


def test_a_window_limits_what_attention_reads(tmp_path):
    config = ModelConfig.from_directory(tiny_model(tmp_path, "gemma3", window=24))
    whole, half = (attended_bytes(config, n, torch.bfloat16) for n in (1000, 24))
    position = half / (2 * 24)
    assert whole == pytest.approx(position * (24 + 1000))


def test_experts_are_read_if_a_row_chooses_them(tmp_path):
    config = ModelConfig.from_directory(
        tiny_model(tmp_path, "qwen3_moe", experts=16, experts_per_token=4)
    )
    one, many = work_of(config, 1), work_of(config, 1000)
    assert one.linear_weights == one.token_weights == many.token_weights
    attention = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64)
    experts = one.linear_weights - attention
    assert many.linear_weights == pytest.approx(attention + 4 * experts, rel=1e-6)


def test_a_model_by_the_code_of_transformers_has_no_counts(tmp_path):
    config = ModelConfig.from_directory(tiny_transformers_model(tmp_path, "gpt_neox"))
    with pytest.raises(UnsupportedError, match="no launches are counted"):
        launches(config, None, "decode")


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("scheme", [None, "int8", "nf4"])
def test_every_card_has_a_plan(card, scheme):
    report = plan("Qwen3-0.6B", card, scheme)
    assert not report.problems
    sections = report.as_json()["sections"]
    assert list(sections) == ["gpu", "memory", "decoding", "training"]
    assert "nothing here is measured" in sections["gpu"]["source"]["text"]
    contexts = sections["decoding"]
    assert (
        contexts["context_1024"]["value"]["samples"] >= contexts["context_4096"]["value"]["samples"]
    )
    steps = contexts["context_1024"]["value"]["steps"]
    assert all(step["seconds"] > 0 for step in steps.values())
    assert sections["training"]["length_1024"]["value"]["tokens_per_second"] > 0


def test_a_model_that_does_not_fit_needs_attention():
    report = plan("Qwen3-8B", "t4", None)
    [(section, finding)] = report.problems
    assert (section, finding.name) == ("memory", "plan")
    assert "does not fit" in finding.text


def test_the_command_prints_samples_context_and_speed(capsys):
    assert main(["doctor", "--plan", "Qwen3-8B", "--gpu", "h100"]) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA H100 SXM" in printed
    assert "nothing here is" in printed
    assert "samples fit" in printed
    assert "tokens/s" in printed
    assert (
        main(["doctor", "--plan", "Qwen3-8B", "--gpu", "rtx4090", "--quantize", "nf4", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["sections"]["memory"]["plan"]["value"]["quantize"] == "nf4"


def test_a_model_of_this_machine_is_planned_too(tmp_path):
    model = tiny_model(tmp_path / "model")
    assert not plan(str(model), "a100", None).problems


def test_a_model_that_is_not_known_is_an_error_that_names_the_remedy():
    with pytest.raises(UnknownModelError, match=r"--plan nobody/nothing: .*Qwen3-8B"):
        plan("nobody/nothing", "h100", None)


def test_an_estimate_is_the_sum_of_its_parts():
    assert Estimate({"a": 1.0, "b": 0.5}).seconds == 1.5
