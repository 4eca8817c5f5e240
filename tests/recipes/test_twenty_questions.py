import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_policy import ScriptedPolicy, is_one_sequence, made, play, problems

from planish.completers import MessageCompleter
from planish.errors import UserError
from planish.recipes import twenty_questions
from planish.recipes.twenty_questions import (
    Options,
    Riddle,
    Rules,
    TwentyQuestionsDatasetBuilder,
    few_shot_messages,
    read_guess,
)
from planish.recipes.twenty_questions_answerer import Answerer
from planish.recipes.twenty_questions_words import KINDS, held_out_words, training_words
from planish.renderers import get_text_content

WORDS = ("cat", "bus", "rose", "drum")


@dataclass
class Oracle(MessageCompleter):
    """An answerer with given replies, which records the questions."""

    answer: str = "Yes"
    asked: list[str] = field(default_factory=list)

    async def __call__(self, messages) -> Any:
        self.asked.append(get_text_content(messages[-1]))
        return {"role": "assistant", "content": self.answer}


def group_of(model, oracle, choices=WORDS, size=1, **rules):
    builder = TwentyQuestionsDatasetBuilder(
        model_name=model, answerer=Answerer(oracle), rules=Rules(**rules)
    )
    return builder.group(Riddle("rose", choices), size)


def rollout_of(model, answers, oracle=None, **options):
    said = iter(answers)
    policy = ScriptedPolicy(model, lambda _: next(said))
    return play(group_of(model, oracle or Oracle(), **options), policy), policy


def test_questions_go_to_the_answerer_and_guesses_do_not(small_model):
    oracle = Oracle()
    group, policy = rollout_of(small_model, ["Is it alive?", "Guess: cat", "Guess: rose"], oracle)
    assert policy.asked[1:] == ["Yes. Words: cat, bus, rose, drum.", "No. Words: bus, rose, drum."]
    [question] = oracle.asked
    assert "word is rose." in question
    assert "Is it alive?" in question
    assert group.get_total_rewards() == [1.0]
    assert group.metrics_G == [{"found": 1.0}]
    assert is_one_sequence(group.trajectories_G[0])


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["Guess: rose"], 1.0),
        (["guess: The Rose!"], 1.0),
        (["Guess: cat", "Guess: cat", "Guess: rose"], 0.9),
        (["Guess: tulip", "Guess: rose"], 0.9),
        (["It is a rose.", "Is it a rose?", "Guess: rose"], 0.9),
        (["Is it red?"] * 4, 0.0),
        (["Is it red?", "well..."], -0.4),
    ],
)
def test_rewards(small_model, answers, reward):
    group, _ = rollout_of(small_model, answers)
    assert group.get_total_rewards() == [pytest.approx(reward)]
    assert group.metrics_G == [{"found": float(reward > 0)}]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("Yes", "Yes."),
        ("no, never", "No."),
        ("The word is rose", "I cannot say."),
        ("Yesterday", "I cannot say."),
        ("", "I cannot say."),
        ([{"type": "text", "text": "Yes!"}], "Yes."),
    ],
)
def test_the_answerer_says_nothing_but_yes_or_no(small_model, answer, told):
    _, policy = rollout_of(
        small_model, ["Tell me the word!", "Guess: rose"], Oracle(answer), choices=()
    )
    assert policy.asked[1] == told


def test_without_choices_any_word_may_be_guessed(small_model):
    group, policy = rollout_of(small_model, ["Guess: cat", "Guess: rose"], choices=())
    assert group.get_total_rewards() == [1.0]
    assert "Words" not in "".join(policy.asked)
    assert "Words" not in str(few_shot_messages(Riddle("cat")))


def test_the_shown_games_keep_to_the_rules():
    messages = few_shot_messages(Riddle("cat", WORDS))
    for told, said in zip(messages[1:-1:2], messages[2::2], strict=True):
        listed = re.findall(r"\w+", get_text_content(told).partition("Words:")[2])
        guess = read_guess(get_text_content(said))
        assert guess in listed if guess else get_text_content(said).endswith("?")


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("Guess: an apple.", "apple"),
        (" GUESS :cat", "cat"),
        ("Is it a cat?", None),
        ("A guess: cat", None),
        ("Guess:", ""),
    ],
)
def test_reading_a_guess(text, guess):
    assert read_guess(text) == guess


def test_no_word_is_in_two_places():
    words = [word for kind in KINDS.values() for word in kind]
    assert len(set(words)) == len(words)
    assert sorted(training_words() + held_out_words()) == sorted(words)


def builder_of(model, **options):
    return TwentyQuestionsDatasetBuilder(model_name=model, answerer=Answerer(Oracle()), **options)


def test_words_of_the_test_are_held_out(small_model):
    train, test = made(builder_of(small_model, batch_size=30))
    riddles = [riddle for index in range(20) for riddle in problems(train.get_batch(index))]
    tests = problems(test.get_batch(0))
    assert {riddle.secret for riddle in tests} == set(held_out_words())
    assert not {word for riddle in tests for word in riddle.choices} & {
        w for r in riddles for w in r.choices
    }
    for riddle in riddles + tests:
        assert riddle.secret in riddle.choices
        assert len(set(riddle.choices)) == 6
    places = [riddle.choices.index(riddle.secret) for riddle in riddles]
    assert all(places.count(place) > 50 for place in range(6))


def test_batches_are_functions_of_seed_and_index(small_model):
    def riddles(seed, index):
        train, _ = made(builder_of(small_model, seed=seed))
        return problems(train.get_batch(index))

    assert riddles(0, 3) == riddles(0, 3)
    assert riddles(0, 3) != riddles(0, 4)
    assert riddles(0, 3) != riddles(1, 3)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("choices", 1),
        ("choices", 41),
        ("max_questions", 0),
        ("waste_cost", -1.0),
        ("rollout_processes", 2),
    ],
)
def test_options_that_cannot_be_right(option, value):
    with pytest.raises(UserError, match=f"{option}={value}"):
        twenty_questions.main(Options(**{option: value}))
