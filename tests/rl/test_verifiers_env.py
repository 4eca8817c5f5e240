"""Environments of verifiers in planish's rollouts; skipped without planish[verifiers]."""

import asyncio
import json
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="make test-extras runs it")

from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.errors import UnsupportedError, UserError
from planish.files import read_rows
from planish.integrations.verifiers import environments
from planish.integrations.verifiers.datasets import VerifiersDatasetBuilder
from planish.integrations.verifiers.library import load_environment
from planish.recipes.verifiers_rl import Options, main
from planish.rl.data_processing import trajectory_to_data
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.types import EnvGroupBuilder, TrajectoryGroup
from planish.runlog import model_renderer as renderers
from planish.runlog.model_renderer import model_renderer
from planish.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("default")  # warnings of dependencies of verifiers
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("verifiers") / "base"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(renderers, "_RENDERERS", {})
    load_environment.cache_clear()


class Policy(TokenCompleter):
    """Returns its next line; each rollout has its own lines. A line that ends with "..." is
    truncated.
    """

    def __init__(self, model: str, lines: Callable[[int], list[str]]) -> None:
        self.renderer = model_renderer(model, "qwen3_instruct")
        self.lines, self.rollouts, self.prompts = lines, 0, []

    def seeded(self, seed: int) -> "Policy":
        return self

    async def __call__(
        self, model_input: Any, stop: Any, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        text = self.renderer.tokenizer.decode(model_input.to_ints())
        self.prompts.append(text)
        turn = text.count("<|im_start|>assistant") - 1
        who, self.rollouts = (self.rollouts, self.rollouts + 1) if turn == 0 else (0, self.rollouts)
        said = self.lines(who)[turn]
        mark = "" if said.endswith("...") else "<|im_end|>"
        tokens = self.renderer.tokenizer.encode(said + mark, add_special_tokens=False)
        return TokensWithLogprobs(tokens, [-0.5] * len(tokens), "stop" if mark else "length")


def builder_of(model: str, group_size: int = 2, **options: Any) -> VerifiersDatasetBuilder:
    own = {
        name: options.pop(name)
        for name in ("eval_problems", "max_prompt_tokens")
        if name in options
    }
    return VerifiersDatasetBuilder(
        env_id="verifiers_environments", env_args=json.dumps(options), model_name=model, renderer_name="qwen3_instruct",
        batch_size=2, group_size=group_size, **own,
    )  # fmt: skip


def group_of(model: str, **options: Any) -> EnvGroupBuilder:
    train, _ = asyncio.run(builder_of(model, **options)())
    return train.get_batch(0)[0]


def play(group: EnvGroupBuilder, policy: TokenCompleter) -> TrajectoryGroup:
    found = asyncio.run(do_group_rollout(group, policy))
    assert found is not None
    return found


def test_rewards_come_from_the_rubric_of_the_whole_group(model):
    group = group_of(model)
    answer = group.row["answer"]  # type: ignore[attr-defined]
    said = [f"it is {answer}", "I do not know at all"]
    rollout = play(group, Policy(model, lambda who: [said[who]]))
    assert rollout.get_total_rewards() == [1.0, 0.5]
    assert [metrics["right"] for metrics in rollout.metrics_G] == [1.0, 0.0]
    assert [metrics["longest"] for metrics in rollout.metrics_G] == [0.0, 1.0]
    assert [trajectory.stop_reason for trajectory in rollout.trajectories_G] == [
        "completed",
        "completed",
    ]
    assert group.logging_tags() == ["verifiers_environments"]


def test_rewards_of_single_turns_are_reported_once(model, caplog, monkeypatch):
    monkeypatch.setattr(environments, "_tags_with_turn_rewards", set())
    policy = Policy(model, lambda _: ["first", "second", "third"])
    for kind, count in (("multi", 0), ("rewarding", 1), ("rewarding", 1)):
        play(group_of(model, kind=kind, group_size=1), policy)
        assert caplog.text.count("sets the reward of single turns, which is not used") == count


def test_verifiers_turns_become_one_sequence_of_sampled_tokens(model):
    policy = Policy(model, lambda _: ["first", "second", "third"])
    rollout = play(group_of(model, kind="multi", group_size=1, system_prompt="Be brief."), policy)
    [trajectory] = rollout.trajectories_G
    assert [turn.ac.tokens[:1] for turn in trajectory.transitions] == [
        [ord("f")],
        [ord("s")],
        [ord("t")],
    ]
    [sequence] = trajectory_to_data(trajectory, 1.0)
    assert sequence.mask_N.sum() == sum(len(turn.ac.tokens) for turn in trajectory.transitions)
    text = policy.renderer.tokenizer.decode(sequence.tokens_N.tolist())
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nsay ")
    assert text.endswith(
        "first<|im_end|>\n<|im_start|>user\n2 "
        "left<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>\n<|im_start|>user\n1 "
        "left<|im_end|>\n<|im_start|>assistant\nthird<|im_end|>"
    )
    assert trajectory.stop_reason == "max_turns"
    assert rollout.metrics_G[0]["num_turns"] == 3


class Spelling(Policy):
    """Samples its first word byte by byte, although the tokenizer has one token for it."""

    async def __call__(
        self, model_input: Any, stop: Any, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        answer = await super().__call__(model_input, stop, max_tokens=max_tokens)
        if len(self.prompts) > 1:
            return answer
        [end] = self.renderer.get_stop_sequences()
        tokens = [*b"<tool_response>", int(end)]
        return TokensWithLogprobs(tokens, [-0.5] * len(tokens), "stop")


def test_verifiers_tokens_are_not_tokenized_again(model):
    policy = Spelling(model, lambda _: ["", "done"])
    assert len(policy.renderer.tokenizer.encode("<tool_response>", add_special_tokens=False)) == 1
    [trajectory] = play(group_of(model, kind="multi", group_size=1), policy).trajectories_G
    first, second = trajectory.transitions
    assert len(first.ac.tokens) == len("<tool_response>") + 1
    begun = first.ob.to_ints() + first.ac.tokens
    assert second.ob.to_ints()[: len(begun)] == begun
    assert trajectory.stop_reason == "completed"


def test_verifiers_tools_are_offered_and_called(model):
    policy = Policy(model, lambda _: [f"Let me see.\n{CALL}", "It is 5."])
    rollout = play(group_of(model, kind="tools", group_size=1), policy)
    [trajectory] = rollout.trajectories_G
    assert '"name": "add"' in policy.prompts[0]
    assert "<tool_response>\n5\n</tool_response>" in policy.prompts[1]
    assert len(trajectory_to_data(trajectory, 1.0)) == 1
    assert rollout.metrics_G[0]["add_calls"] == 1
    assert trajectory.stop_reason == "completed"


def test_a_rewritten_verifiers_history_begins_a_new_sequence(model):
    policy = Policy(model, lambda _: ["done"])
    policy.lines = lambda _: ["a"]  # type: ignore[assignment]
    [trajectory] = play(group_of(model, kind="rewriting", group_size=1), policy).trajectories_G
    assert len(trajectory_to_data(trajectory, 1.0)) == 3
    assert "anew 2" in policy.prompts[2]
    assert "anew 1" not in policy.prompts[2]


def test_a_truncated_answer_is_reported_to_verifiers(model):
    rollout = play(group_of(model, group_size=1), Policy(model, lambda _: ["going on and..."]))
    assert rollout.trajectories_G[0].stop_reason == "max_tokens"
    assert rollout.metrics_G[0]["truncated"] == 1.0


def test_a_prompt_that_fills_the_context_ends_a_verifiers_rollout(model):
    policy = Policy(model, lambda _: ["x" * 50, "y", "z"])
    rollout = play(group_of(model, kind="multi", group_size=1, max_prompt_tokens=60), policy)
    assert [len(t.transitions) for t in rollout.trajectories_G] == [1]
    assert rollout.trajectories_G[0].stop_reason == "context_overflow"
    never = play(group_of(model, kind="multi", group_size=2, max_prompt_tokens=5), policy)
    assert never.get_total_rewards() == [0.0, 0.0]
    assert never.trajectories_G[0].stop_reason == "context_overflow"


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [("failing", Exception, "the machine is gone"), ("hungry", UnsupportedError, "temperature")],
)
def test_errors_of_a_verifiers_environment_fail_the_rollout(kind, error, told, model):
    policy = Policy(model, lambda _: ["a", "b", "c"])
    with pytest.raises(error, match=told):
        play(group_of(model, kind=kind, group_size=1), policy)


def test_a_cancelled_verifiers_rollout_runs_its_cleanup(model):
    from verifiers_environments import CLEANED, WAITING

    group_of_slow = group_of(model, kind="slow", group_size=3)
    CLEANED.clear()
    WAITING.clear()

    async def play_and_cancel() -> None:
        playing = asyncio.create_task(
            do_group_rollout(group_of_slow, Policy(model, lambda _: ["a", "b", "c"]))
        )
        while len(WAITING) < 3:
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play_and_cancel())
    assert len(CLEANED) == 3


def test_the_time_limit_of_verifiers_ends_a_rollout(model):
    group = group_of(model, kind="slow", group_size=1, timeout_seconds=3.0)
    [trajectory] = play(group, Policy(model, lambda _: ["a", "b", "c"])).trajectories_G
    assert trajectory.stop_reason == "rollout_timeout"


def test_evaluation_uses_the_eval_dataset_or_held_out_rows(model):
    def splits(**options: Any) -> tuple[set[str], set[str]]:
        train, tests = asyncio.run(builder_of(model, **options)())

        def prompts(data: Any) -> set[str]:
            batches = [data.get_batch(index) for index in range(len(data))] if data else []
            return {group.row["prompt"][-1]["content"] for batch in batches for group in batch}

        return prompts(train), prompts(tests)

    train, tests = splits()
    assert (len(train), tests) == (6, set())
    train, tests = splits(eval_problems=2)
    assert (len(train), len(tests), train & tests) == (4, 2, set())
    train, tests = splits(eval_rows=3)
    assert (len(train), tests) == (6, {f"say {n} please" for n in range(3)})
    with pytest.raises(UserError, match="eval_problems=6"):
        splits(eval_problems=6)


def test_verifiers_groups_run_in_another_process(model):
    group = pickle.loads(pickle.dumps(group_of(model)))
    assert len(play(group, Policy(model, lambda _: ["a"])).trajectories_G) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_loading_verifiers_keeps_the_signal_handlers(model, number):
    before = signal.getsignal(number)
    group_of(model)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"env_id": "no_such_environment"}, "install the environment's package"),
        ({"env_id": "verifiers_environments", "env_args": "{"}, "not JSON"),
        ({"env_id": "verifiers_environments", "env_args": '["a"]'}, "a JSON object"),
        (
            {"env_id": "verifiers_environments", "env_args": '{"kind": "none"}'},
            "env_id=verifiers_environments",
        ),
        ({"env_id": "verifiers_environments", "max_tokens": 4096}, "no prompt fits"),
        ({"env_id": "verifiers_environments", "group_size": 1}, "group_size=1"),
    ],
)
def test_invalid_verifiers_options_are_rejected_before_any_work(options, told, tmp_path):
    with pytest.raises(UserError, match=told):
        main(Options(log_path=str(tmp_path / "run"), **options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("processes", [0, 1])
def test_the_verifiers_recipe_trains(processes, model, tmp_path, monkeypatch):
    from planish import ServiceClient

    options = Options(
        env_id="verifiers_environments", env_args='{"kind": "multi", "eval_rows": 2}', model_name=model,
        log_path=str(tmp_path / "run"), batch_size=2, group_size=2, max_tokens=8, max_steps=2, eval_every=1,
        renderer_name="qwen3_instruct", remove_constant_reward_groups=False, rollout_processes=processes,
    )  # fmt: skip
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as service:
        run = main(options, service)
    rows = read_rows(run / "metrics.jsonl")
    assert {row["step"] for row in rows} >= {0, 1}
    assert all(
        key in rows[0]
        for key in (
            "env/all/right",
            "env/all/num_turns",
            "env/all/truncated",
            "env/all/reward/total",
        )
    )
    assert any("test/env/all/right" in row for row in rows)
    assert abs(rows[0]["optim/kl_sample_train_v1"]) < 1e-3
