"""The benchmark measures planish through its public API, doing the whole work."""

import math

import pytest
from iteration import count_tokens, rollouts, run_iteration, train_step, with_completions
from overheads import engine_thread_seconds
from workloads import Shape, make_round

import planish
from planish.testing import tiny_model

WORK = {"prompts": [[10, 11, 12], [10, 11, 13]], "samples": 3, "new_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    model = tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    with planish.ServiceClient() as service_client:
        yield service_client.create_lora_training_client(base_model=str(model), rank=4, seed=0)


def test_all_tokens_are_made_and_have_logprobs(client):
    groups = rollouts(client.save_weights_and_get_sampling_client(), WORK)
    assert [len(group) for group in groups] == [3, 3]
    assert count_tokens(groups) == 2 * 3 * 4


def test_an_iteration_trains_on_what_it_sampled(client):
    before = run_iteration(client, WORK)
    after = run_iteration(client, WORK)
    assert count_tokens(before.groups) == count_tokens(after.groups) == 24
    assert with_completions(WORK, before.groups) != with_completions(WORK, after.groups)
    assert before.seconds == before.sampling_seconds + before.training_seconds


def test_the_loss_is_that_of_importance_sampling(client):
    """Sampler and trainer agree, so every ratio is about 1 and the loss is the negative sum of the
    advantages over tokens.
    """
    groups = rollouts(client.save_weights_and_get_sampling_client(), WORK)
    answers = with_completions(WORK, groups) | {"advantages": [[1.0, 0.5, -0.25], [0.0, 0.0, 2.0]]}
    assert train_step(client, answers) == pytest.approx(-4 * (1.0 + 0.5 - 0.25 + 2.0), rel=1e-3)


def test_the_engine_has_a_thread_whose_time_is_known(client):
    before = engine_thread_seconds()
    run_iteration(client, WORK)
    assert math.isfinite(before)
    assert engine_thread_seconds() > before


class WordTokenizer:
    """A tokenizer in which token i, from 1000 to 1999, is a word of its own."""

    def decode(self, tokens: list[int]) -> str:
        letters = str.maketrans("0123456789", "abcdefghij")
        return "".join(
            " " + str(token).translate(letters) if token < 2000 else "?" for token in tokens
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        digits = str.maketrans("abcdefghij", "0123456789")
        return [int(word.translate(digits)) for word in text.split()]


def test_prompts_share_what_they_should():
    one, other = (
        make_round(WordTokenizer(), name, Shape(3, 2, 4, 20, 12), 0) for name in ("a", "b")
    )
    shared = {tuple(prompt[:12]) for prompt in one["prompts"]}
    assert len(shared) == 1
    assert [len(prompt) for prompt in one["prompts"]] == [20, 20, 20]
    assert len({tuple(prompt) for prompt in one["prompts"]}) == 3
    assert not shared & {tuple(prompt[:12]) for prompt in other["prompts"]}
    assert one == make_round(WordTokenizer(), "a", Shape(3, 2, 4, 20, 12), 0)
