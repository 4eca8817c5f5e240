"""The rollout files of an iteration: names in both layouts, schemas and atomic writes."""

import html
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_samples import NASTY, group, logged_tree, questions, several, single, spoken, turn

from planish import logtree
from planish.completers import TokensWithLogprobs
from planish.errors import UserError
from planish.reports import rollout_files
from planish.reports.rollout_files import (
    PAGE,
    ROLLOUT_TEXTS,
    SUMMARIES,
    TREE,
    RolloutFiles,
    find_rollout_texts,
    split_label,
)
from planish.rl.types import RolloutError, Trajectory, prompt_id
from planish.types import ModelInput


@pytest.fixture
def files(tmp_path, tokenizer):
    return RolloutFiles(tmp_path, "flat", 2, True, tokenizer)


def names(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


def rows(path: Path) -> list[dict]:
    with open(path) as f:  # as the published snippet reads them
        return [json.loads(line) for line in f]


# The published snippet.
def find_conversations(node):
    results = []
    if isinstance(node, dict):
        if node.get("data", {}).get("type") == "conversation":
            results.append(node["data"])
        for child in node.get("children", []):
            if isinstance(child, dict):
                results.extend(find_conversations(child))
    return results


def titles(node, depth=0):
    """Return the headings of the tree with their depth."""
    found = []
    for child in node["children"]:
        if isinstance(child, dict):
            if child["tag"] == "section":
                found.append((depth, child["children"][0]["children"][0]))
                found += titles(child["children"][1], depth + 1)
            else:
                found += titles(child, depth)
    return found


def table(node, caption):
    """Return the rows of the first table with this caption."""
    if node["tag"] == "table" and node["children"][0]["children"] == [caption]:
        return {
            row["children"][0]["children"][0]: row["children"][1]["children"][0]
            for row in node["children"][2]["children"]
        }
    found = (table(child, caption) for child in node["children"] if isinstance(child, dict))
    return next(filter(None, found), None)


def test_flat_file_names(files, tmp_path):
    page = files.write("train", 10, questions(1))
    files.write("eval/test", 20, questions(1))
    assert page == tmp_path / "train_iteration_000010.html"
    assert names(tmp_path) == [
        "eval_test_iteration_000020.html",
        "eval_test_iteration_000020_logtree.json",
        "eval_test_iteration_000020_rollout_summaries.jsonl",
        "eval_test_iteration_000020_rollouts.jsonl",
        "iteration_000010/train_logtree.json",
        "iteration_000010/train_rollout_summaries.jsonl",
        "iteration_000020/eval_test_logtree.json",
        "iteration_000020/eval_test_rollout_summaries.jsonl",
        "rollouts/index.jsonl",
        "train_iteration_000010.html",
        "train_iteration_000010_logtree.json",
        "train_iteration_000010_rollout_summaries.jsonl",
        "train_iteration_000010_rollouts.jsonl",
    ]
    for name in ("logtree.json", "rollout_summaries.jsonl"):
        flat, linked = (
            tmp_path / f"{p}_{name}" for p in ("train_iteration_000010", "iteration_000010/train")
        )
        assert flat.samefile(linked)


def test_rewriting_an_iteration_updates_both_file_names(files, tmp_path):
    files.write("train", 10, questions(1))
    files.write("train", 10, questions(2))
    flat = tmp_path / "train_iteration_000010_rollout_summaries.jsonl"
    assert (
        flat.read_text()
        == (tmp_path / "iteration_000010/train_rollout_summaries.jsonl").read_text()
    )


def test_without_hard_links_only_flat_names_are_written(files, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refuse)
    files.write("train", 10, questions(1))
    assert [name for name in names(tmp_path) if "/" in name] == ["rollouts/index.jsonl"]


def test_file_names_in_folders(tmp_path, tokenizer):
    files = RolloutFiles(tmp_path / "run", "folders", 2, True, tokenizer)
    files.write("train", 10, questions(1))
    files.write("eval/test", 10, questions(1))
    assert names(tmp_path / "run") == [
        "iteration_000010/eval_test.html",
        "iteration_000010/eval_test_logtree.json",
        "iteration_000010/eval_test_rollout_summaries.jsonl",
        "iteration_000010/eval_test_rollouts.jsonl",
        "iteration_000010/train.html",
        "iteration_000010/train_logtree.json",
        "iteration_000010/train_rollout_summaries.jsonl",
        "iteration_000010/train_rollouts.jsonl",
        "rollouts/index.jsonl",
    ]


@pytest.mark.parametrize("layout", ["flat", "folders"])
def test_texts_are_found_by_split_and_iteration(tmp_path, tokenizer, layout):
    files = RolloutFiles(tmp_path, layout, 2, True, tokenizer)
    files.write("train", 10, questions(1))
    files.write("eval/a b", 20, questions(1))
    (tmp_path / "notes_rollouts.jsonl").write_text("mine\n")
    found = find_rollout_texts(tmp_path)
    assert found == {
        ("train", 10): files.path("train", 10, ROLLOUT_TEXTS),
        ("eval_a_b", 20): files.path("eval/a b", 20, ROLLOUT_TEXTS),
    }
    assert all(path.is_file() for path in found.values())


def test_every_trajectory_has_a_row_of_texts(files):
    groups = questions(5, size=3)
    advantages = [[0.5, 0.0, -0.5]] * 5
    files.write("train", 10, groups, advantages)
    found = rows(files.path("train", 10, ROLLOUT_TEXTS))
    assert [(row["group_idx"], row["traj_idx"]) for row in found] == [
        (group, trajectory) for group in range(5) for trajectory in range(3)
    ]
    summaries = rows(files.path("train", 10, SUMMARIES))
    for row, summary in zip(found, summaries, strict=True):
        assert row["total_reward"] == summary["total_reward"]
        assert [turn["answer_tokens"] for turn in row["turns"]] == [
            step["ac_len"] for step in summary["steps"]
        ]
        assert row["advantage"] == advantages[0][row["traj_idx"]]
        assert row["turns"][0]["observation"]
    page = files.path("train", 10).read_text()
    assert 'href="train_iteration_000010_rollouts.jsonl"' in page


def test_a_page_shows_groups_up_to_its_size_limit(tmp_path, tokenizer, monkeypatch):
    """A small iteration is shown completely; of a large one, at least the requested groups."""

    def shown(logged):
        files = RolloutFiles(tmp_path, "flat", logged, True, tokenizer)
        page = files.write("train", 1, questions(6)).read_text()
        return sum(f'id="g{group}"' in page for group in range(6)), page

    assert shown(1)[0] == 6
    assert shown(0)[0] == 0
    monkeypatch.setattr(rollout_files, "MAX_PAGE_TOKENS", 0)
    count, page = shown(2)
    assert count == 2
    assert "4 more groups" in page
    assert "planish rollouts RUN --step 1" in page


def test_json_files_can_be_disabled(tmp_path, tokenizer):
    RolloutFiles(tmp_path, "flat", 2, False, tokenizer).write("train", 0, questions(1))
    assert names(tmp_path) == ["rollouts/index.jsonl", "train_iteration_000000.html"]
    assert "logtree.json" not in (tmp_path / "train_iteration_000000.html").read_text()


@pytest.mark.parametrize(
    ("split", "label"),
    [
        ("train", "train"),
        ("eval/gsm8k", "eval_gsm8k"),
        ("eval/a/b c:é", "eval_a_b_c__"),
        ("eval/..", "eval_.."),
    ],
)
def test_evaluator_names_become_safe_file_names(split, label):
    assert split_label(split) == label


@pytest.mark.parametrize("split", ["", "test", "eval", "eval/", "train/x"])
def test_unknown_splits_are_rejected(files, split, tmp_path):
    with pytest.raises(UserError, match="split="):
        files.write(split, 0, questions(1))
    assert names(tmp_path) == []


def test_invalid_report_options_are_rejected(tmp_path, tokenizer):
    with pytest.raises(UserError, match="rollout_layout='deep'"):
        RolloutFiles(tmp_path, "deep", 2, True, tokenizer)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="num_groups_to_log=-1"):
        RolloutFiles(tmp_path, "flat", -1, True, tokenizer)


def test_advantages_must_match_the_groups(files, tmp_path):
    for advantages in ([[0.0] * 4], [[0.0] * 3] * 3):
        with pytest.raises(ValueError, match="shorter|longer"):
            files.write("train", 0, questions(3), advantages)
    assert names(tmp_path) == []


def test_summaries_have_one_row_per_trajectory(files):
    rollouts = questions(5, size=3)
    files.write("train", 10, rollouts)
    found = rows(files.path("train", 10, SUMMARIES))
    assert [(row["group_idx"], row["traj_idx"]) for row in found] == [
        (p, g) for p in range(5) for g in range(3)
    ]
    assert found[2] == {
        "schema_version": 1,
        "split": "train",
        "iteration": 10,
        "group_idx": 0,
        "traj_idx": 2,
        "tags": ["sums"],
        "prompt_id": prompt_id(rollouts[0].group.trajectories_G[2].transitions[0].ob),
        "sampling_client_step": 7,
        "total_reward": 1.0,
        "final_reward": 0.0,
        "trajectory_metrics": {},
        "steps": [
            {
                "step_idx": 0,
                "ob_len": 14,
                "ac_len": 17,
                "reward": 1.0,
                "episode_done": True,
                "metrics": {"correct": 1.0},
                "logs": {},
            }
        ],
        "final_ob_len": 0,
    }


def test_summaries_include_turns_and_group_grading(files):
    float32: Any = np.float32(0.25)
    trajectory = several("Begin.", ["one", "two", "three"], 0.5)
    rollout = group(
        9, [trajectory], final_rewards=[0.25], metrics=[{"win_minus_loss": float32}], tags=[]
    )
    files.write("eval/a b", 3, [rollout])
    [row] = rows(files.path("eval/a b", 3, SUMMARIES))
    assert (row["split"], row["group_idx"], row["sampling_client_step"]) == ("eval/a b", 9, None)
    assert (row["total_reward"], row["final_reward"]) == (0.75, 0.25)
    assert row["trajectory_metrics"] == {"win_minus_loss": 0.25}
    assert [step["step_idx"] for step in row["steps"]] == [0, 1, 2]
    assert [step["ob_len"] for step in row["steps"]] == [6, 15, 24]
    assert [step["episode_done"] for step in row["steps"]] == [False, False, True]
    assert row["final_ob_len"] == 33


def test_values_without_a_json_form_are_written_as_text(files):
    odd = turn(
        "q",
        spoken("a"),
        math.nan,
        metrics={"x": math.inf},
        logs={"text": "a\ud800", "y": np.int64(3)},
    )
    files.write("train", 0, [group(0, [Trajectory([odd], ModelInput.empty())])])
    text = files.path("train", 0, SUMMARIES).read_bytes().decode("ascii")
    row = json.loads(text, parse_constant=pytest.fail)
    assert row["total_reward"] is None
    assert row["steps"][0]["metrics"] == {"x": None}
    assert row["steps"][0]["logs"] == {"text": "a\ud800", "y": 3}
    assert "nan" in files.path("train", 0, PAGE).read_text()


def test_the_tree_has_the_first_groups_and_their_metrics(files):
    rollouts = questions(4, size=2)
    files.write("train", 10, rollouts)
    document = json.loads(files.path("train", 10, TREE).read_text())
    assert list(document) == ["title", "started_at", "path", "root"]
    assert document["path"].endswith("train_iteration_000010.html")
    assert document["root"]["attrs"] == {"class": "lt-root"}
    one_trajectory = [
        (2, "Trajectory 0 Episode"),
        (3, "Episode Details"),
        (4, "Turn 1"),
        (5, "Step Metrics"),
    ]
    found = titles(document["root"])
    assert found[:5] == [
        (0, "Group 0"),
        (1, "Trajectory 0"),
        (2, "Prompt"),
        (2, "Policy Response"),
        (2, "Reward"),
    ]
    assert found[9:14] == [(1, "Trajectory Details"), *one_trajectory]
    assert [title for depth, title in found if depth == 0] == ["Group 0", "Group 1"]
    assert table(document["root"], "Step stats") == {
        "ob_len": "14",
        "ac_len": "17",
        "step_reward": "0",
    }
    assert table(document["root"], "Metrics emitted by env.step") == {"correct": "0"}
    assert table(document["root"], "Episode totals") == {
        "num_turns": "1",
        "final_ob_len": "0",
        "sum_step_rewards": "0",
        "final_group_reward": "0",
        "total_return": "0",
    }


def test_the_documented_snippet_reads_prompts_and_answers(files):
    files.write("eval/test", 20, questions(1, size=2))
    with open(files.path("eval/test", 20, TREE)) as f:
        trace = json.load(f)
    lines = [
        f"{msg['role']}: {msg['content'][:100]}"
        for conv in find_conversations(trace["root"])
        for msg in conv["messages"]
    ]
    assert lines == [
        "user: What is 0 + 2?",
        "assistant: I think it is 0.",
        "user: What is 0 + 2?",
        "assistant: I think it is 1.",
    ]


def test_tokens_are_shown_for_an_environment_without_logs(files):
    with logtree.capture("Group 0") as empty:
        pass
    for tree in (empty, None):
        files.write("train", 0, [group(0, [several("Begin.", ["one", "two"], 1.0)], tree=tree)])
        found = find_conversations(json.loads(files.path("train", 0, TREE).read_text())["root"])
        assert [
            [message["content"] for message in conversation["messages"]] for conversation in found
        ] == [
            ["Begin.", "one<|im_end|>"],
            ["next?", "two<|im_end|>"],
        ]


def test_diagnostics_and_failed_attempts_are_in_the_tree(files):
    logs = {"tool": "calculator", "trace": "a\nb"}
    trajectory = Trajectory([turn("q", spoken("a"), logs=logs)], ModelInput.empty())
    files.write(
        "train", 0, [group(0, [trajectory], errors=[RolloutError("TimeoutError", "too slow")])]
    )
    root = json.loads(files.path("train", 0, TREE).read_text())["root"]
    assert [title for _, title in titles(root)][-2:] == ["Diagnostics", "Rollout Errors"]
    assert "tool: calculator" in json.dumps(root)
    assert '["too slow"]' in json.dumps(root)


def test_writing_twice_is_idempotent(files):
    rollouts = questions(2)
    before = json.dumps([rollout.tree.to_json() for rollout in rollouts if rollout.tree])
    files.write("train", 0, rollouts)
    first = files.path("train", 0, SUMMARIES).read_text()
    files.write("train", 0, rollouts)
    assert files.path("train", 0, SUMMARIES).read_text() == first
    assert json.dumps([rollout.tree.to_json() for rollout in rollouts if rollout.tree]) == before


@pytest.mark.parametrize("layout", ["flat", "folders"])
def test_repeating_an_iteration_removes_its_files_and_later_ones(tmp_path, tokenizer, layout):
    files = RolloutFiles(tmp_path, layout, 1, True, tokenizer)
    for iteration in (0, 9, 10, 1_000_000):
        files.write("train", iteration, questions(1))
        files.write("eval/a_iteration_000000", iteration, questions(1))
    kept = [
        "metrics.jsonl",
        "iteration_notes.txt",
        "train_iteration_9.html",
        "my_iteration_000099.html",
    ]
    for name in kept:
        (tmp_path / name).write_text("mine")
    if layout == "folders":
        (tmp_path / "iteration_000010" / "mine.txt").write_text("mine")
    files.remove_from(10)
    left = names(tmp_path)
    assert set(kept) <= set(left)
    assert len(
        [
            name
            for name in left
            if "000009" in name.split("_iteration_")[-1] or "iteration_000009/" in name
        ]
    ) == (8 if layout == "folders" else 12)
    assert not any("000010" in name.split("iteration_")[-1] and "mine" not in name for name in left)
    assert not any("1000000" in name for name in left)
    if layout == "folders":
        assert "iteration_000010/mine.txt" in left
        assert not (tmp_path / "iteration_1000000").exists()
    files.remove_from(0)
    assert [name for name in names(tmp_path) if "mine.txt" not in name] == sorted(kept)


def test_an_iteration_without_groups_is_written(files):
    files.write("train", 0, [])
    assert files.path("train", 0, SUMMARIES).read_text() == ""
    assert "No groups" in files.path("train", 0, PAGE).read_text()


def test_rollouts_without_logprobs_or_turns_are_written(files):
    silent = Trajectory(
        [turn("", TokensWithLogprobs([], []), -0.1, train_on_action=False)],
        ModelInput.empty(),
        "context_overflow",
    )
    unknown = Trajectory([turn("Hi", TokensWithLogprobs([72, 105], None), 0.5)], ModelInput.empty())
    nothing = Trajectory([], ModelInput.empty())
    files.write("train", 0, [group(0, [silent, unknown, nothing])])
    page = files.path("train", 0, PAGE).read_text()
    assert "Nothing was sampled" in page
    assert "no logprobs" in page
    assert [len(row["steps"]) for row in rows(files.path("train", 0, SUMMARIES))] == [1, 1, 0]


def test_additional_sections_follow_the_groups(files):
    with logtree.capture("Judge") as node:
        logtree.log_text(NASTY)
    files.write("eval/judge", 0, questions(1), title="Judged & found", sections=[node])
    document = json.loads(files.path("eval/judge", 0, TREE).read_text())
    assert document["title"] == "Judged & found"
    assert [title for depth, title in titles(document["root"]) if depth == 0] == [
        "Group 0",
        "Judge",
    ]
    page = files.path("eval/judge", 0, PAGE).read_text()
    assert "<title>Judged &amp; found</title>" in page
    assert page.index("Judge</h2>") > page.index("Group 0")


def test_writing_a_step_is_fast(files):
    """The target for 16 groups of 8 answers with 256 tokens is 0.1 s on a machine that formats as
    many numbered spans in 0.016 s. The test allows twice that ratio.
    """
    text = "The answer is forty-two, since six times seven makes it. " * 5
    texts = [text[index:][:255] for index in range(8)]
    rewards = [float(index % 2) for index in range(8)]
    rollouts = [
        group(
            number,
            [
                single("How much is six times seven?", text, reward, {"correct": reward})
                for text, reward in zip(texts, rewards, strict=True)
            ],
            tree=logged_tree(number, "How much is six times seven?", texts, rewards)
            if number < 4
            else None,
        )
        for number in range(16)
    ]

    def format_spans():
        for _ in range(16 * 8):
            "".join(
                f'<span title="{n:.4f}">{html.escape(chr(97 + n % 26))}</span>' for n in range(256)
            )

    writing, formatting = [], []
    for _ in range(5):
        writing.append(cpu_seconds(lambda: files.write("train", 0, rollouts, [[0.0] * 8] * 16)))
        formatting.append(cpu_seconds(format_spans))
    assert min(writing) < 12.5 * min(formatting)


def cpu_seconds(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun
