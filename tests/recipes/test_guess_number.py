import pickle
from collections import Counter

import pytest
from hypothesis import given, strategies as st
from scripted_policy import ScriptedPolicy, contents, is_one_sequence, made, play, problems

from planish.errors import UserError
from planish.recipes import guess_number
from planish.recipes.guess_number import (
    GuessNumberDatasetBuilder,
    Options,
    Rules,
    few_shot_messages,
    read_guess,
)
from planish.renderers import get_text_content


class Halver:
    """A policy that halves the remaining range."""

    def __init__(self, largest=15):
        self.largest = largest

    def __call__(self, said):
        if "my number" in said:
            self.low, self.high = 0, self.largest
        elif "low" in said:
            self.low = self.guess + 1
        else:
            self.high = self.guess - 1
        self.guess = (self.low + self.high) // 2
        return str(self.guess)


def group_of(model, secret, size=1, hints=False):
    builder = GuessNumberDatasetBuilder(model_name=model, rules=Rules(hints=hints))
    return builder.group(secret, size)


def test_halving_finds_every_number_but_one(small_model):
    groups = [
        play(group_of(small_model, secret), ScriptedPolicy(small_model, Halver()))
        for secret in range(16)
    ]
    assert [group.get_total_rewards() for group in groups] == [[1.0]] * 15 + [[0.0]]
    assert [group.metrics_G for group in groups] == [[{"found": 1.0}]] * 15 + [[{"found": 0.0}]]
    assert all(is_one_sequence(group.trajectories_G[0]) for group in groups)
    assert {len(group.trajectories_G[0].transitions) for group in groups} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("guesses", "reward", "replies"),
    [
        (["9"], 1.0, []),
        (["4", "9"], 1.0, ["Too low."]),
        (["12", "13", "9"], 0.75, ["Too high.", "Too high."]),
        (["3", "3", "3", "3"], -0.75, ["Too low."] * 3),
        (["16", "what?", "4 or 5", "9"], 0.25, ["Write a number from 0 to 15."] * 3),
        (["4", "no idea, so I..."], -1.0, ["Too low."]),
    ],
)
def test_rewards(small_model, guesses, reward, replies):
    said = iter(guesses)
    policy = ScriptedPolicy(small_model, lambda _: next(said))
    group = play(group_of(small_model, 9), policy)
    assert group.get_total_rewards() == [pytest.approx(reward)]
    assert policy.asked[1:] == replies
    assert group.metrics_G == [{"found": float("9" in guesses)}]


def test_players_of_a_group_do_not_share_what_they_know(small_model):
    said = iter(["12", "3", "13", "9", "9"])
    group = play(
        group_of(small_model, 9, size=2), ScriptedPolicy(small_model, lambda _: next(said))
    )
    assert group.get_total_rewards() == [0.75, 1.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        (" I say 12!", 12),
        ("3.75", None),
        ("", None),
        ("seven", None),
        ("9" * 5000, None),
        ("²", None),
    ],
)
def test_reading_a_guess(text, number):
    assert read_guess(text) == number


@given(largest=st.integers(1, 300), max_guesses=st.integers(1, 12), hints=st.booleans())
def test_the_shown_games_are_won_by_halving(largest, max_guesses, hints):
    rules = Rules(largest=largest, max_guesses=max_guesses, hints=hints)
    system, *said = [get_text_content(message) for message in few_shot_messages(rules)]
    assert system == "Guess the number."
    assert said[-1] == f"Right. Guess my number, 0 to {largest}."
    games = " | ".join(said).split(f"Guess my number, 0 to {largest}. | ")[1:]
    assert len(games) == 3
    for game in games:
        guesses = [int(guess) for guess in game.split(" | ")[::2] if guess.isdigit()]
        assert len(guesses) <= max_guesses
        player = Halver(largest)
        told = ["my number", *game.split(" | ")[1::2][: len(guesses) - 1]]
        assert [int(player(reply)) for reply in told] == guesses
        assert (" to " in told[-1]) == (hints and len(guesses) > 1)


def test_hints_say_what_is_left(small_model):
    said = iter(["4", "20", "12", "14"])
    policy = ScriptedPolicy(small_model, lambda _: next(said))
    play(group_of(small_model, 9, hints=True), policy)
    assert policy.asked[1:] == [
        "Too low: 5 to 15.",
        "Write a number from 0 to 15: 5 to 15.",
        "Too high: 5 to 11.",
    ]


def test_the_same_index_gives_the_same_batch_and_every_number_comes_as_often(small_model):
    builder = GuessNumberDatasetBuilder(model_name=small_model, batch_size=8, group_size=3, seed=5)
    train, test = made(builder)
    again, _ = made(builder)
    assert contents(train.get_batch(7)) == contents(again.get_batch(7))
    assert contents(train.get_batch(7)) != contents(train.get_batch(5))
    counts = Counter(secret for index in range(20) for secret in problems(train.get_batch(index)))
    assert set(counts.values()) == {10}
    assert len(counts) == 16
    assert problems(test.get_batch(0)) == list(range(16))
    assert {group.num_envs for group in test.get_batch(0)} == {1}
    assert contents(pickle.loads(pickle.dumps(train.get_batch(0)))) == contents(train.get_batch(0))


def test_the_test_of_a_long_range_is_a_sample_of_it(small_model):
    builder = GuessNumberDatasetBuilder(model_name=small_model, rules=Rules(largest=999))
    _, test = made(builder)
    secrets = problems(test.get_batch(0))
    assert len(test) == 1
    assert len(secrets) <= guess_number.NUM_TEST_GAMES
    assert secrets[0] == 0
    assert secrets[-1] > 950


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("largest", 0),
        ("max_guesses", 0),
        ("waste_cost", -1.0),
        ("batch_size", 0),
        ("group_size", 1),
    ],
)
def test_options_that_cannot_be_right(option, value):
    with pytest.raises(UserError, match=f"{option}={value}"):
        guess_number.main(Options(**{option: value}))
