"""Models that score a policy's tokens need its vocabulary, and limit its answers to their context.
Both are settled before the first step.
"""

import asyncio
import json

import pytest

from planish import ServiceClient
from planish.errors import UserError
from planish.files import read_rows
from planish.rl.environments.reward_env import RewardDatasetBuilder
from planish.testing import tiny_model
from planish.training.rl_config import Config, KLReferenceConfig
from planish.training.scoring_models import require_one_vocabulary, shared_context_window
from planish.training.train_rl import main

SHORT = 64


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A model with the policy's tokens, and a context window of SHORT tokens."""
    return str(tiny_model(tmp_path_factory.mktemp("short"), seed=1, max_context=SHORT))


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A model with the policy's tokens, and 16 more token ids."""
    return str(tiny_model(tmp_path_factory.mktemp("padded"), vocab_size=288))


@pytest.fixture
def client(tmp_path):
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as client:
        yield client


def reward(answer, row):
    return float(len(answer))


def train(client, path, policy, reference, questions, **options):
    rows = path / "rows.jsonl"
    path.mkdir(exist_ok=True)
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    config = Config(
        dataset_builder=RewardDatasetBuilder(
            dataset=str(rows), reward=reward, model_name=policy, batch_size=1, group_size=3
        ),
        **{
            "model_name": policy,
            "learning_rate": 1e-3,
            "lora_rank": 2,
            "max_tokens": 200,
            "kl_penalty_coef": 0.1,
            "kl_reference_config": KLReferenceConfig(base_model=reference),
            "log_path": str(path / "run"),
            **options,
        },
    )
    return asyncio.run(main(config, client))


def test_answers_end_at_the_context_window_of_the_reference(
    client, policy, short, tmp_path, capsys
):
    run = train(client, tmp_path / "a", policy, short, ["Hi"])
    [row] = read_rows(run / "metrics.jsonl")
    assert "kl_policy_base" in row
    assert row["env/all/ob_tokens_per_turn"] + row["env/all/ac_tokens_per_turn"] <= SHORT
    line = (
        f"kl_reference_config: a prompt and its answer have at most {SHORT} tokens together, "
        f"because that is the context window of {short}; {policy} has 2048"
    )
    assert line in capsys.readouterr().out


def test_a_prompt_longer_than_the_context_of_the_reference_is_named(
    client, policy, short, tmp_path
):
    with pytest.raises(UserError, match=f"line 2: .* context window of 64 tokens of {short}"):
        train(client, tmp_path / "a", policy, short, ["Hi", "Hello" * 20])
    assert not read_rows(tmp_path / "a" / "run" / "metrics.jsonl")


def test_a_reference_with_fewer_token_ids_is_rejected_before_the_first_step(
    client, policy, padded, tmp_path
):
    with pytest.raises(
        UserError, match=f"^kl_reference_config: {padded} has 288 token ids, and {policy} only 272"
    ):
        train(client, tmp_path / "a", padded, policy, ["Hi"])
    assert not read_rows(tmp_path / "a" / "run" / "metrics.jsonl")


def test_a_scorer_may_have_more_token_ids(client, policy, padded):
    asyncio.run(require_one_vocabulary(policy, padded, client, "teacher"))
    models = client.get_server_capabilities()
    assert [models.model(name).vocab_size for name in (policy, padded)] == [272, 288]


def test_without_a_shorter_scorer_the_window_is_the_policy_s(client, policy, padded, capsys):
    found = asyncio.run(shared_context_window(client, policy, {"a": policy, "b": padded}))
    assert found == (2048, policy)
    assert capsys.readouterr().out == ""


FORMAT = (
    "kl_reference_config: the prompts have the chat format role_colon, and {} has qwen3_instruct"
)


def test_a_reference_with_another_chat_format_is_reported_before_the_first_step(
    client, policy, padded, tmp_path, caplog
):
    def stopped(*_):
        assert FORMAT.format(padded) in caplog.text
        raise InterruptedError

    with pytest.raises(InterruptedError):
        train(
            client,
            tmp_path / "a",
            policy,
            padded,
            ["Hi"],
            renderer_name="role_colon",
            evaluator_builders=[lambda: stopped],
        )


def test_a_reference_with_the_chat_format_of_the_prompts_is_not_reported(
    client, policy, padded, tmp_path, caplog
):
    train(client, tmp_path / "a", policy, padded, ["Hi"], max_tokens=4)
    assert "chat format" not in caplog.text


def test_a_reference_is_the_checkpoint_with_which_the_run_began(client, policy, tmp_path):
    path = tmp_path / "a"
    reference = train(client, path, policy, policy, ["Hi"], max_tokens=4)
    options = {
        "kl_reference_config": KLReferenceConfig(
            base_model=policy, load_checkpoint_path=str(reference)
        ),
        "log_path": str(path / "second"),
        "max_tokens": 4,
        "num_epochs": 1,
    }
    train(client, path, policy, policy, ["Hi"], **options)
    train(client, path, policy, policy, ["Hi"], max_tokens=4, num_epochs=2)
    with pytest.raises(UserError, match="kl_reference_config.load_checkpoint_path was 'tinker:"):
        train(client, path, policy, policy, ["Hi"], **{**options, "num_epochs": 2})
