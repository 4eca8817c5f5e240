"""Programs of others: the recipes and loops of the public tinker-cookbook, unmodified, on a server
process with a tiny model.

    python tests/server/cookbook_run.py --python ENVIRONMENT/bin/python [--only NAME]...

ENVIRONMENT has tinker-cookbook 0.6 with its extra math-rl, inspect-ai and peft, as .venv-extras
after `make test-extras`. This program's own environment has planish with its extra age. No network
is needed: datasets are small files under the names by which recipes ask the hub.
Each trial must end by itself with every step once in its metrics, and its numbers must say
that it learned. Some trials, or the server, are killed in the middle and started again. What a user
must pass, and what cannot work: docs/operators/server.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_process import ServerProcess, start_server

from planish.testing import tiny_model

TINY = "planish/tiny-model"
KNOWN = "Qwen/Qwen3-4B-Instruct-2507"
"""A name in the cookbook's table: some recipes take the renderer from there and from nowhere else.
"""
CHAT = (
    f"model_name={TINY} renderer_name=qwen3_instruct lora_rank=16 behavior_if_log_dir_exists=resume"
)
TINY_CHAT = CHAT.replace("lora_rank=16 ", "")
"""Of recipes that take no rank."""
SUMS = (
    "env=arithmetic groups_per_batch=4 group_size=4 max_tokens=8 learning_rate=1e-3 eval_every=0 "
    "save_every=2"
)
SECONDS = 300
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ProgramRun:
    """A program with its arguments, {log} being its run directory; what its metrics must be; after
    how many rows which process is killed.
    """

    program: str
    check: Callable[[Rows], str]
    kill_at: int = 0
    kill_server: bool = False


def falls(name: str, steps: int, to: float = 0.5, repeats: bool = False) -> Callable[[Rows], str]:
    """Every step is there, once unless `repeats`, and at the end `name` is below a share of what it
    was.
    """

    def check(rows: Rows) -> str:
        found = [row[name] for row in rows if name in row]
        seen = [row["step"] for row in rows if name in row]
        assert (sorted(set(seen)) if repeats else seen) == list(range(steps)), seen
        assert found[-1] < to * found[0], found
        return f"{name} {found[0]:.2f} to {found[-1]:.2f}"

    return check


def rises(name: str, steps: int, by: float) -> Callable[[Rows], str]:
    def check(rows: Rows) -> str:
        check_rl_steps(steps)(rows)
        found = [row[name] for row in rows if name in row]
        assert found[-1] > found[0] + by, found
        return f"{name} {found[0]:.2f} to {found[-1]:.2f}"

    return check


def check_rl_steps(steps: int, on_policy: bool = True) -> Callable[[Rows], str]:
    """Every step of an RL run is there once; on-policy, sampler and trainer agree."""

    def check(rows: Rows) -> str:
        key = "optim/kl_sample_train_v2"
        assert [row["step"] for row in rows if key in row] == list(range(steps)), [
            row.get("step") for row in rows
        ]
        largest = max(row[key] for row in rows if key in row)
        assert largest < (1e-6 if on_policy else 5.0), largest
        return f"KL of sampler and trainer at most {largest:.1e}"

    return check


def check_steps(steps: int) -> Callable[[Rows], str]:
    def check(rows: Rows) -> str:
        assert [row["step"] for row in rows] == list(range(steps)), [
            row.get("step") for row in rows
        ]
        return f"{steps} steps"

    return check


def no_check(rows: Rows) -> str:
    """The program makes its own assertions."""
    return ""


_PROGRAMS = str(Path(__file__).with_name("cookbook_programs.py"))
_SL = (
    f"-m tinker_cookbook.recipes.chat_sl.train {CHAT} dataset=conversations.jsonl log_path={{log}} "
    "learning_rate=1e-2 batch_size=16 num_epochs=3"
)
_MATH = f"-m tinker_cookbook.recipes.math_rl.train {CHAT} {SUMS} log_path={{log}}"
_RL_LOOP = (
    f"-m tinker_cookbook.recipes.rl_loop model_name={KNOWN} log_path={{log}} batch_size=8 "
    "group_size=4 max_tokens=8 max_steps=3"
)
TRIALS = {
    "chat_sl": ProgramRun(f"{_SL} save_every=4 rolling_save_every=1", falls("train_mean_nll", 12)),
    "chat_sl, killed and resumed": ProgramRun(
        f"{_SL} save_every=4 rolling_save_every=1", falls("train_mean_nll", 12), 5
    ),
    "chat_sl, the server killed": ProgramRun(
        f"{_SL} save_every=4", falls("train_mean_nll", 12), 5, kill_server=True
    ),
    "sl_loop": ProgramRun(
        f"-m tinker_cookbook.recipes.sl_loop model_name={KNOWN} log_path={{log}} batch_size=8 "
        "learning_rate=1e-2 save_every=3",
        falls("train_mean_nll", 8),
    ),
    **{
        f"rl_loop, {loss}": ProgramRun(f"{_RL_LOOP} loss_fn={loss}", check_steps(3))
        for loss in ("importance_sampling", "cispo", "gspo")
    },
    "math_rl": ProgramRun(
        f"{_MATH} loss_fn=importance_sampling compute_post_kl=True max_steps=3", check_rl_steps(3)
    ),
    "math_rl, two substeps, ppo": ProgramRun(
        _MATH + ' loss_fn=ppo loss_fn_config={"clip_low_threshold":0.9} num_substeps=2 max_steps=3',
        check_rl_steps(3, False),
    ),
    "math_rl, asynchronous": ProgramRun(
        f"{_MATH} loss_fn=ppo max_steps_off_policy=2 max_steps=4", check_rl_steps(4, False)
    ),
    "math_rl, streamed": ProgramRun(
        f"{_MATH} loss_fn=cispo stream_minibatch_config.num_minibatches=2 "
        "stream_minibatch_config.groups_per_batch=4 max_steps=3",
        check_rl_steps(3),
    ),
    "math_rl, GSM8K with a test set": ProgramRun(
        f"{_MATH.replace('env=arithmetic', 'env=gsm8k').replace('eval_every=0', 'eval_every=2')} "
        "loss_fn=dro max_steps=3",
        check_rl_steps(3),
    ),
    "shorter": ProgramRun(
        f"-m tinker_cookbook.recipes.preference.shorter.train {TINY_CHAT} log_path={{log}} "
        "batch_size=2 group_size=4 max_tokens=8 max_steps=3",
        check_rl_steps(3),
    ),
    "guess_number": ProgramRun(
        f"-m tinker_cookbook.recipes.multiplayer_rl.guess_number.train {TINY_CHAT} "
        f"log_path={{log}} batch_size=2 group_size=2 max_tokens=8 "
        "max_steps=2 eval_every=0",
        check_rl_steps(2),
    ),
    "rubric": ProgramRun(
        f"-m tinker_cookbook.recipes.rubric.train {CHAT} log_path={{log}} grader_llm_name={TINY} "
        "grader_renderer_name=qwen3_instruct train_jsonl_path=rubric.jsonl "
        "test_jsonl_path=rubric.jsonl groups_per_batch=2 train_group_size=2 "
        "loss_fn=importance_sampling max_steps=1 eval_every=0",
        check_rl_steps(1),
    ),
    "on_policy_distillation": ProgramRun(
        f"-m tinker_cookbook.recipes.distillation.on_policy_distillation {CHAT} log_path={{log}} "
        f"teacher_model={KNOWN} groups_per_batch=4 "
        "max_tokens=8 max_steps=3 eval_every=0",
        check_rl_steps(3),
    ),
    "rl.train, a penalty, killed and resumed": ProgramRun(
        f"{_PROGRAMS} rl {{log}}", rises("env/all/correct", 10, 0.05), 4
    ),
    "twenty_questions": ProgramRun(f"{_PROGRAMS} twenty_questions {{log}}", check_rl_steps(1)),
    "train_dpo": ProgramRun(f"{_PROGRAMS} dpo {{log}}", falls("dpo_loss", 8)),
    # It keeps the rows of steps that it does again, and takes the weights of then as its reference.
    "train_dpo, killed and resumed": ProgramRun(
        f"{_PROGRAMS} dpo {{log}}", falls("dpo_loss", 8, to=0.9, repeats=True), 4
    ),
    "distillation.train_off_policy": ProgramRun(
        f"{_PROGRAMS} off_policy {{log}}", falls("train/loss:sum", 6, 0.8)
    ),
    **{
        f"distillation.sdft, {kind}": ProgramRun(f"{_PROGRAMS} sdft {{log}} {kind}", check_steps(3))
        for kind in ("forward", "reverse", "sampled")
    },
    "completers and evaluators": ProgramRun(f"{_PROGRAMS} evaluators {{log}}", no_check),
    "inspect": ProgramRun(f"{_PROGRAMS} inspect {{log}}", no_check),
    "weights": ProgramRun(f"{_PROGRAMS} weights {{log}}", no_check),
}


def write_data(directory: Path) -> None:
    """Small datasets under the names of the real ones, which `datasets.load_dataset` finds in the
    working directory.
    """

    def rows(path: str, found: Sequence[Mapping[str, Any]]) -> None:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text("".join(json.dumps(row) + "\n" for row in found))

    said = [
        [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"It is {n}."}]
        for n in range(64)
    ]
    sums = [
        {"question": f"{n}+1?", "answer": f"So\n#### {n + 1}", "final_answer": str(n + 1)}
        for n in range(64)
    ]
    rows("conversations.jsonl", [{"messages": messages} for messages in said])
    for split, count in (("train", 64), ("test", 8)):
        rows(
            f"HuggingFaceH4/no_robots/{split}.jsonl",
            [{"messages": messages} for messages in said[:count]],
        )
        rows(f"openai/gsm8k/{split}.jsonl", sums[:count])
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (directory / "openai/gsm8k/README.md").write_text(
        f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n"
    )
    rows("zwhe99/DeepMath-103K/train.jsonl", sums)
    item = {
        "rubric_str": "Is it right?",
        "extraction_regex": "<score>(.*?)</score>",
        "grader_output_format_instruction": "Score it.",
    }
    rows("rubric.jsonl", [{"convo": messages[:1], "rubric_items": [item]} for messages in said])


@dataclass
class Bench:
    python: Path
    place: Path

    def __post_init__(self) -> None:
        write_data(self.place)
        self.model = tiny_model(self.place / "model", family="qwen3", tied=False, max_context=8192)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = str(free.getsockname()[1])
        self.server = self.start_server()

    def start_server(self) -> ServerProcess:
        options = ("--port", self.port, "--hub-tokenizers", "--model", f"{KNOWN}={self.model}")
        return start_server(
            self.place / "data",
            self.model,
            *options,
            environment={"HF_HOME": str(self.place / "hub")},
        )

    def run(self, name: str, trial: ProgramRun) -> str:
        """What the metrics say; an AssertionError if it is wrong."""
        log = self.place / "runs" / name.replace(",", "").replace(" ", "_")
        process = self._start(trial, log)
        if trial.kill_at:
            self._wait_for(log, trial.kill_at, process)
            if trial.kill_server:
                self.server.stop(9)
                self.server = self.start_server()
            else:
                process.kill()
                process.wait()
                process = self._start(trial, log)
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            status = "none in time"
        tail = log.with_suffix(".log").read_text(errors="replace")[-1500:]
        assert status == 0, f"exit status {status}\n{tail}"
        return trial.check(_rows(log))

    def _start(self, trial: ProgramRun, log: Path) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "TINKER_BASE_URL": self.server.url,
            "TINKER_API_KEY": "tml-any",
            "HF_HOME": str(self.place / "hub"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COOKBOOK_TINY": TINY,
            "COOKBOOK_KNOWN": KNOWN,
            "COOKBOOK_MODEL": str(self.model),
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [
            word.format(log=log) if "{log}" in word else word for word in trial.program.split()
        ]
        with open(log.with_suffix(".log"), "ab") as output:
            return subprocess.Popen(
                [self.python, *words],
                cwd=self.place,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _wait_for(self, log: Path, rows: int, process: subprocess.Popen[bytes]) -> None:
        give_up = time.monotonic() + SECONDS
        while len(_rows(log)) < rows:
            assert process.poll() is None, (
                f"it ended early\n{log.with_suffix('.log').read_text(errors='replace')[-1500:]}"
            )
            assert time.monotonic() < give_up, f"no {rows} rows within {SECONDS} s"
            time.sleep(0.05)


def _rows(log: Path) -> list[dict[str, Any]]:
    path = log / "metrics.jsonl"
    whole = (
        [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if path.exists()
        else []
    )
    return [json.loads(line) for line in whole]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", type=Path, required=True, help="the interpreter that has tinker-cookbook"
    )
    parser.add_argument(
        "--only", action="append", help="trials whose names begin so; may be repeated"
    )
    options = parser.parse_args(arguments)
    chosen = {
        name: trial
        for name, trial in TRIALS.items()
        if not options.only or name.startswith(tuple(options.only))
    }
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(options.python.absolute(), Path(directory))
        try:
            for name, trial in chosen.items():
                began = time.monotonic()
                try:
                    said = f"works   {name}: {bench.run(name, trial)}"
                except AssertionError as error:
                    failed += 1
                    said = f"FAILED  {name}: {error}"
                print(f"{said} ({time.monotonic() - began:.0f} s)", flush=True)
        finally:
            status = bench.server.stop()
    print(f"{len(chosen) - failed} of {len(chosen)} work, exit status of the server {status}")
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main())
