"""A judge that cannot read the longest answers is named before a run begins, also if no recipe
makes the builder.
"""

import asyncio
from typing import Any

import pytest
from scripted_judge import ScriptedJudge

from planish import ServiceClient
from planish.completers import MessageCompleter, PromptSize, TinkerMessageCompleter
from planish.errors import UserError
from planish.rubric.env import RubricDatasetBuilder
from planish.rubric.grading import Grader, judge_prompt, retry_prompt
from planish.rubric.rubrics import Criterion, RubricRow, RubricRows
from planish.runlog.model_renderer import model_renderer
from planish.training import train_rl
from planish.training.rl_config import Config

CRITERION = Criterion("Is it polite?", name="manner")
REPLY_TOKENS = 6


def row(question: str, location: str = "") -> RubricRow:
    return RubricRow(({"role": "user", "content": question},), (CRITERION,), location)


ROWS = RubricRows([row("Hi."), row("What is a lamp?", "rows.jsonl, line 2")], [row("Why?")])


def prompt_tokens(model: str, of: RubricRow) -> int:
    """The tokens of the second request about an empty answer, without the first reply."""
    messages = retry_prompt(judge_prompt(of.messages, "", CRITERION), "", CRITERION)
    return model_renderer(model).build_generation_prompt(messages).length


def builder(model: str, judge: MessageCompleter, rows: RubricRows = ROWS, **options: Any):
    return RubricDatasetBuilder(
        model_name=model,
        rows=lambda: rows,
        grader=Grader(judge),
        judge_name="mine",
        batch_size=1,
        group_size=2,
        **options,
    )


def engine_judge(model: str, context_window: int | None) -> TinkerMessageCompleter:
    """A judge that is never called."""
    unused: Any = None
    return TinkerMessageCompleter(
        unused, model_renderer(model), REPLY_TOKENS, context_window=context_window
    )


def test_answers_of_as_many_tokens_as_fit_are_accepted_and_of_one_more_are_not(model):
    window = prompt_tokens(model, ROWS.train[1]) + 2 * REPLY_TOKENS + 20
    train, _ = asyncio.run(builder(model, engine_judge(model, window))())
    train.require_answers_fit(20)
    with pytest.raises(UserError) as caught:
        train.require_answers_fit(21)
    assert str(caught.value).startswith(
        f"the judge (mine) has a context window of {window} tokens. For rows.jsonl, line 2 and the "
        f"criterion manner it needs {window - 2 * REPLY_TOKENS - 20} tokens for the prompt, "
        f"max_tokens=21 for the answer, and 2 times {REPLY_TOKENS} for its replies"
    )


def test_rows_that_max_prompt_tokens_leaves_out_do_not_count(model):
    window = prompt_tokens(model, ROWS.train[0]) + 2 * REPLY_TOKENS + 20
    judge = engine_judge(model, window)
    shortest = model_renderer(model).build_generation_prompt(ROWS.train[0].messages).length
    rows = RubricRows(ROWS.train)
    train, _ = asyncio.run(builder(model, judge, rows, max_prompt_tokens=shortest)())
    train.require_answers_fit(20)
    train, _ = asyncio.run(builder(model, judge, rows)())
    with pytest.raises(UserError, match="rows.jsonl, line 2"):
        train.require_answers_fit(20)


def test_a_run_ends_before_its_directory_is_made(model, tmp_path):
    config = Config(
        dataset_builder=builder(model, engine_judge(model, 100)),
        model_name=model,
        learning_rate=1e-3,
        max_tokens=8,
        log_path=str(tmp_path / "run"),
    )
    with (
        ServiceClient(data_dir=tmp_path / "data") as client,
        pytest.raises(UserError, match="context window of 100 tokens. For the row 'Hi.' and"),
    ):
        asyncio.run(train_rl.main(config, client))
    assert not (tmp_path / "run").exists()


class Measuring(ScriptedJudge):
    """A judge that measures prompts in characters, as an endpoint does in tokens."""

    max_tokens = REPLY_TOKENS
    context_window: int | None = 2000

    async def measure(self, messages: Any) -> PromptSize:
        return PromptSize(sum(len(each["content"]) for each in messages), self.context_window)


def test_a_judge_that_measures_prompts_is_asked_about_the_longest(model):
    train, _ = asyncio.run(builder(model, Measuring(lambda prompt: "0"))())
    train.require_answers_fit(20)
    with pytest.raises(UserError, match="For rows.jsonl, line 2 and the criterion manner"):
        train.require_answers_fit(2000)


def test_a_judge_of_unknown_limits_is_said_to_be_unchecked(model, capsys):
    unknown = Measuring(lambda prompt: "0")
    unknown.context_window = None
    for judge in (engine_judge(model, None), unknown):
        train, _ = asyncio.run(builder(model, judge)())
        train.require_answers_fit(10**6)
        assert "the judge (mine) does not tell how long" in capsys.readouterr().out
    asyncio.run(builder(model, ScriptedJudge(lambda prompt: "0"))())
    assert capsys.readouterr().out == ""
