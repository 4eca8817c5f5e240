"""Every command in the documents is run on a tiny model, or is known not to be, with a reason."""

import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from doc_commands import NOT_RUN, ROOT, TUTORIALS, Command, all_commands, commands_of

from planish import ServiceClient
from planish.commands.cli import main
from planish.export import weights
from planish.files import read_rows
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.recipes import math_rl
from planish.recipes.training_run import read_options
from planish.testing import tiny_model

COMMANDS = all_commands()
RUN = [command for command in COMMANDS if command.reason is None]
OPTIONS = (
    *("env=arithmetic", "max_steps=1", "batch_size=2", "group_size=2", "max_tokens=6"),
    *("eval_every=0", "save_every=1", "lora_rank=4", "log_path=runs/rl"),
)
REPLACED = (
    ("--step 12 --group 3", "--step 0 --group 0"),
    ("--step 10", "--step 0"),
    ("--tag gsm8k", "--tag arithmetic"),
    ("--text sorry", "--text {text}"),
    ("--reward 0.5:1", "--reward=-10:10"),
    ("test/*,optim/grad_norm", "env/all/*"),
    ("checkpoints delete", "checkpoints delete --yes"),
    ("checkpoints import", "checkpoints import --overwrite"),
    ("--data DIRECTORY", "--data sums --limit 2 --max-tokens 8"),
    ("math500", "math500 --data math.jsonl --limit 2 --max-tokens 8"),
    ("tinker://RUN/sampler_weights/final-000050", "{sampler}"),
    ("CHECKPOINT DIRECTORY", "{sampler} exported --overwrite"),
    ("checkpoints download PATH --out DIR", "checkpoints download {sampler} --out downloaded"),
    ("downloaded/adapter", "{adapter}"),
    ("outputs/adapter", "{adapter}"),
    ("play examples/", f"play {ROOT}/examples/"),
    ("runs/three-words", "runs/rl"),
    ("PATH", "{state}"),
    ("list --run RUN", "list --run {run}"),
    ("runs RUN", "runs {run}"),
    ("RUN", "runs/rl"),
    ("OTHER", "runs/other"),
)
"""What is written for the reader's own names, numbers of steps, and data."""


def write_rows(path: str, rows: list[dict[str, str]]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a run of one step, and what the commands of the pages name.

    It also sets the environment, in which the default model is a tiny one.
    """
    directory = tmp_path_factory.mktemp("reader")
    model = tiny_model(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANISH_MODELS", f"{DEFAULT_MODEL}={model}")
        patch.setenv("PLANISH_HOME", str(directory / "home"))
        patch.setenv("PLANISH_DATA", str(directory / "data"))
        patch.chdir(directory)
        Path("sums").mkdir()
        rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
        write_rows("sums/test.jsonl", rows)
        write_rows("math.jsonl", [{"problem": "1 + 1?", "answer": "2"}] * 2)
        Path("questions.txt").write_text("Hello\n")
        with ServiceClient() as client:
            options = read_options(math_rl.Options, {}, OPTIONS)
            math_rl.main(options, service_client=client)
        shutil.copytree("runs/rl", "runs/other")
        last = read_rows(Path("runs/rl/checkpoints.jsonl"))[-1]
        weights.build_lora_adapter(
            base_model=str(model),
            adapter_path=weights.download(tinker_path=last["sampler_path"], output_dir="files"),
            output_path=Path("adapter"),
        )
        yield {
            "sampler": last["sampler_path"],
            "state": last["state_path"],
            "run": re.sub(r"tinker://([^/]+)/.*", r"\1", last["state_path"]),
            "adapter": "adapter",
            "text": "e",
        }


def words_of(command: Command, place: dict[str, str]) -> tuple[list[str], str]:
    """Return the words after `planish`, with names of this directory, and the standard input."""
    text, _, redirected = command.text.partition(" < ")
    for old, new in REPLACED:
        text = text.replace(old, new)
    typed = Path(redirected.split()[0]).read_text() if redirected else "Hello\n"
    program, *words = shlex.split(text.format(**place))
    assert program == "planish"
    return words, typed


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN, ids=lambda command: command.text[:50])
def test_the_command_succeeds(command, place, monkeypatch, capsys):
    words, typed = words_of(command, place)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    status = main(words)
    printed = capsys.readouterr()
    # The doctor's status says whether the machine needs attention.
    assert status == 0 or words == ["doctor"], f"{words}: {printed.err}"
    assert printed.out


def test_every_command_is_run_or_has_a_reason():
    assert len(COMMANDS) > 150
    foreign = [command for command in RUN if not command.text.startswith("planish ")]
    assert foreign == [], "enter a reason in tests/doc_commands.py"
    for form in NOT_RUN:
        assert any(re.match(form, command.text) for command in COMMANDS), f"{form}: no such command"


def test_the_places_that_reasons_name_are_there():
    for reason in [*NOT_RUN.values(), *TUTORIALS.values()]:
        for name in re.findall(r"tests/[\w/.]*\w", reason):
            assert (ROOT / name).exists(), name


def test_commands_are_found():
    block = "planish a \\\n    --b c   a comment\n# all\npython - <<'EOF'\nx = 1\nEOF\nmake d # e\n"
    assert commands_of(block) == ["planish a --b c", "python - <<'EOF'\nx = 1\nEOF", "make d"]
