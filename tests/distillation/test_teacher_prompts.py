"""Prompts from rows, the environment without rewards, and conversations that a teacher wrote."""

import asyncio
import json
import os
from contextlib import closing

import numpy as np
import pytest

from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.datasets.messages import read_message_list
from planish.distillation.prompts import PromptOnlyDatasetBuilder, load_prompts
from planish.distillation.sampling import (
    PROMPTS_PER_CHUNK,
    SampledFile,
    TeacherSampler,
    sample_conversations,
)
from planish.errors import DamagedFileError, UserError
from planish.files import RowFile, read_rows
from planish.renderers import get_renderer
from planish.rl.rollout.rollouts import do_group_rollout
from planish.types import SampledSequence, SampleResponse

QUESTION = [{"role": "user", "content": "a"}]


@pytest.fixture
def renderer(tokenizer):
    return get_renderer("qwen3_instruct", tokenizer)


def test_an_unrenderable_prompt_is_rejected_with_its_row(tmp_path, renderer):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a"}, {"prompt": [{"role": "poet", "content": "b"}, *QUESTION]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="line 2: .*poet"):
        load_prompts(str(path), renderer)
    path.write_text(json.dumps(rows[0]) + "\n")
    assert load_prompts(str(path), renderer) == [QUESTION]
    with pytest.raises(UserError, match="line 1: .*poet"):
        load_prompts(str(path), renderer, [{"role": "poet", "content": "b"}])


class Says(TokenCompleter):
    def __init__(self, tokens):
        self.tokens = tokens

    async def __call__(self, model_input, stop, *, max_tokens=None):
        return TokensWithLogprobs(self.tokens, [-1.0] * len(self.tokens))


def test_an_answer_to_a_prompt_has_no_reward(models, tmp_path):
    path = tmp_path / "prompts.jsonl"
    named = {"model_name": models[0], "renderer_name": "qwen3_instruct", "dataset": str(path)}
    group = PromptOnlyDatasetBuilder(**named).group(QUESTION, 2)
    rollout = asyncio.run(do_group_rollout(group, Says([65, 66])))
    assert rollout is not None
    assert rollout.get_total_rewards() == [0.0, 0.0]
    assert [len(one.transitions[0].ac.tokens) for one in rollout.trajectories_G] == [2, 2]


def test_long_prompts_are_left_out_and_counted(models, tmp_path, caplog):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * n}) + "\n" for n in (3, 50, 4)))
    named = {"model_name": models[0], "renderer_name": "qwen3_instruct", "dataset": str(path)}
    builder = PromptOnlyDatasetBuilder(**named, batch_size=2, max_prompt_tokens=40)
    train, _ = asyncio.run(builder())
    assert train.data_size() == 2
    assert "1 of 3 train problems are left out" in caplog.text
    assert f"the first is {path}, line 2, with" in caplog.text


class Teacher:
    """A teacher that answers with the number of its call by seed. The answer is truncated where
    `is_cut` is true of the prompt.
    """

    def __init__(self, renderer, is_cut=lambda text: False, start=""):
        self.renderer = renderer
        self.start = start
        self.is_cut = is_cut
        self.asked = []

    async def sample_async(self, prompt, num_samples, sampling_params):
        text = self.renderer.tokenizer.decode(prompt.to_ints())
        self.asked.append(text)
        end = "" if self.is_cut(text) else "<|im_end|>"
        tokens = self.renderer.tokenizer.encode(
            f"{self.start}{sampling_params.seed % 1000}{end}", add_special_tokens=False
        )
        sequence = SampledSequence(
            "stop", "0", np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
        )
        return SampleResponse([sequence])


def test_answers_that_no_row_may_have_are_left_out(renderer, tmp_path):
    path = tmp_path / "s.jsonl"
    with pytest.raises(UserError, match="none of 2 answers is complete"):
        sample(Teacher(renderer, start="It is so.</think>"), [ask(0), ask(1)], path)
    assert read_rows(path) == []
    kept = sample(Teacher(renderer, start="<think>It is.</think>"), [ask(0)], tmp_path / "t.jsonl")
    assert (kept.num_done, kept.num_left_out) == (1, 0)
    [row] = read_rows(tmp_path / "t.jsonl")
    assert len(read_message_list(row["messages"], "the row")) == 2


def ask(number):
    return [{"role": "user", "content": f"q{number}."}]


def sample(teacher, prompts, path, origin=None, **changes):
    sampler = TeacherSampler(teacher, teacher.renderer, 8, **changes)
    return asyncio.run(sample_conversations(sampler, prompts, path, origin or {"a": 1}))


def test_the_teacher_sees_the_prefix_and_the_rows_do_not(renderer, tmp_path):
    teacher = Teacher(renderer, lambda text: "q1." in text)
    kept = sample(
        teacher,
        [ask(n) for n in range(3)],
        tmp_path / "s.jsonl",
        prefix=[{"role": "system", "content": "Be brief."}],
    )
    assert (kept.num_done, kept.num_left_out) == (3, 1)
    assert all("Be brief." in text for text in teacher.asked)
    rows = read_rows(tmp_path / "s.jsonl")
    assert [row["index"] for row in rows] == [0, 2]
    assert rows[1]["messages"][0] == ask(2)[0]
    assert rows[1]["messages"][1]["role"] == "assistant"
    assert "Be brief." not in (tmp_path / "s.jsonl").read_text()


def test_a_killed_process_resumes_with_the_same_samples(renderer, tmp_path):
    prompts = [ask(n) for n in range(2 * PROMPTS_PER_CHUNK + 3)]
    sample(Teacher(renderer), prompts, tmp_path / "whole.jsonl")
    path = tmp_path / "parts.jsonl"
    sample(Teacher(renderer), prompts[:PROMPTS_PER_CHUNK], path)
    with path.open("a") as file:
        # rows of a part whose record was not written any more, the last one torn
        file.write(
            json.dumps({"index": PROMPTS_PER_CHUNK, "messages": []}) + '\n{"index": 65, "mess'
        )
    teacher = Teacher(renderer)
    sample(teacher, prompts, path)
    assert path.read_text() == (tmp_path / "whole.jsonl").read_text()
    assert len(teacher.asked) == PROMPTS_PER_CHUNK + 3
    again = Teacher(renderer)
    sample(again, prompts, path)
    assert again.asked == [], "no prompt is sampled twice"


def test_answers_are_on_disk_before_the_record_that_speaks_of_them(renderer, tmp_path, monkeypatch):
    path, synced = tmp_path / "s.jsonl", []

    def fsync(handle):
        synced.append((os.fstat(handle).st_ino, os.fstat(handle).st_size))

    file = SampledFile(path, {})
    monkeypatch.setattr(os, "fsync", fsync)
    with closing(RowFile(path)) as rows:
        file.add([{"index": 0, "messages": []}], rows)
    assert synced[0] == (path.stat().st_ino, path.stat().st_size), (
        "a power cut would leave the record alone"
    )


def test_a_file_of_other_origin_is_left_alone(renderer, tmp_path):
    path = tmp_path / "s.jsonl"
    sample(Teacher(renderer), [ask(1)], path, {"temperature": 1.0})
    with pytest.raises(UserError, match="temperature was 1.0, is 0.5"):
        sample(Teacher(renderer), [ask(1)], path, {"temperature": 0.5})
    foreign = tmp_path / "mine.jsonl"
    foreign.write_text("{}\n")
    with pytest.raises(UserError, match="was not sampled by planish"):
        SampledFile(foreign, {})
    path.write_text("")
    with pytest.raises(DamagedFileError, match="does not contain the rows"):
        SampledFile(path, {"temperature": 1.0})


def test_overlong_prompts_are_dropped_and_endless_answers_are_errors(renderer, tmp_path):
    teacher = Teacher(renderer)
    long = [{"role": "user", "content": "x" * 200}]
    kept = sample(teacher, [ask(0), long], tmp_path / "a.jsonl", context_window=100)
    assert (kept.num_done, kept.num_left_out, len(teacher.asked)) == (2, 1, 1)
    with pytest.raises(UserError, match="none of 1 answers is complete.*max_tokens=8"):
        sample(Teacher(renderer, lambda text: True), [ask(0)], tmp_path / "b.jsonl")
