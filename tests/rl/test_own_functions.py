"""An advantage and a loss of the user's own: how they are named, what is refused, and that runs with
them train, log and resume like others.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import chz
import numpy as np
import pytest
import user_functions
from digest_service import FakeService, Killed
from digit_env import DigitsBuilder
from metric_tables import definition_of

from planish import ServiceClient
from planish.completers import TokensWithLogprobs
from planish.errors import UnsupportedError, UserError
from planish.files import read_rows
from planish.recipes.rl_options import RLOptions
from planish.recipes.training_run import read_options
from planish.reports.rollout_index import INDEX
from planish.rl.data_processing import compute_advantages
from planish.rl.own_functions import advantage_estimator, own_loss
from planish.rl.types import Trajectory, TrajectoryGroup, Transition
from planish.testing import tiny_model
from planish.training.rl_config import Config, check
from planish.training.train_rl import main
from planish.types import Datum, ModelInput

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    monkeypatch.setattr("planish.training.run_loop.code_diff", lambda paths: "")


def config_of(path="unused", **changes):
    options = {
        "learning_rate": 0.1,
        "dataset_builder": DigitsBuilder(),
        "model_name": "tiny",
        "max_tokens": 6,
        "log_path": str(path),
        "save_every": 2,
        "eval_every": 0,
        "num_groups_to_log": 1,
        **changes,
    }
    return Config(**options)


def test_a_function_and_its_import_path_are_the_same_option():
    given = config_of(advantage=user_functions.halved, loss_fn=user_functions.plain_gradient)
    named = config_of(advantage="user_functions:halved", loss_fn="user_functions:plain_gradient")
    for config in (given, named):
        assert config.advantage == "user_functions:halved"
        assert config.loss_fn == "user_functions:plain_gradient"
        check(config)
    words = ["advantage=user_functions:Rules.doubled", "loss_fn=user_functions:no_metrics"]
    options = read_options(RLOptions, {}, words)
    assert options.advantage == "user_functions:Rules.doubled"
    assert config_of(advantage=user_functions.Rules.doubled).advantage == options.advantage
    assert advantage_estimator(options.advantage)([1.0, 0.0]) == [0.5, -0.5]


def defined_inside():
    def inner(rewards_G):
        return rewards_G

    return inner


def replaced(rewards_G):  # pyright: ignore[reportRedeclaration]
    return rewards_G


FIRST_VERSION = replaced


def replaced(rewards_G):
    return list(rewards_G)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rewards_G: rewards_G, "is a lambda, so a resumed run could not import it"),
        (defined_inside(), "is defined inside a function, so a resumed run could not import it"),
        (FIRST_VERSION, "replaced is another object than the function that was given"),
        (user_functions.Rules().bound, "bound is another object than the function"),
        (3, "advantage=3: give a name, or a function"),
        (
            partial(user_functions.powered, power=2.0),
            "could not import a partial; give the function itself, and its numbers as "
            "advantage_config=",
        ),
    ],
)
def test_a_function_that_cannot_be_imported_again_is_refused(function, message):
    with pytest.raises(UserError, match=message):
        config_of(advantage=function)
    with pytest.raises(UserError, match=message.replace("advantage", "loss_fn")):
        config_of(loss_fn=function)


SCRIPT = """
import sys
from planish.rl.own_functions import advantage_estimator
from planish.training.rl_config import LossOptions

def doubled(rewards_G):
    return [2 * reward for reward in rewards_G]

print(path := LossOptions(advantage=doubled).advantage, advantage_estimator(path)([1.0]))
"""


@pytest.mark.slow
def test_a_function_of_the_program_is_named_by_its_file(tmp_path):
    """The script is not run a second time, although it has no `if __name__ == "__main__"`."""
    (tmp_path / "my_script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "my_script.py"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert done.stdout.decode() == "my_script:doubled [2.0]\n", done.stderr
    typed = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True
    )
    assert b"doubled is defined in a program without a file" in typed.stderr


def test_a_function_of_a_program_started_as_a_module_is_named_by_the_module(monkeypatch):
    program = ModuleType("__main__")
    program.__spec__ = ModuleSpec("package.my_recipe", None)
    exec("def f(rewards_G):\n    return rewards_G", program.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert config_of(advantage=program.f).advantage == "package.my_recipe:f"


BROKEN = {
    "no_such_module:f": "there is no module no_such_module; give module:function",
    "user_functions:no_such": "user_functions has no no_such",
    "user_functions:": "user_functions has no ",
    "user_functions:SHAPES": "is a dict; give a function",
    "broken_module:f": "importing broken_module failed: SyntaxError",
    "needs_another:f": "importing needs_another failed: No module named 'no_such_library'",
    "user_functions:later": "is async or a generator",
    "user_functions:plain_gradient": r"is called with \(rewards\), which it does not take",
    "user_functions:two_of_them": "returned 2 advantages for 4 rewards; return one for each",
    "user_functions:nothing": "returned a NoneType; return a list of numbers",
    "user_functions:a_word": "returned 'up' for one of the rewards",
    "user_functions:not_finite": "returned 1e.60 for one of the rewards .*; return finite numbers",
    "user_functions:failing": r"failed for the rewards \[0.0, 1.0, 0.0, 1.0\]: LookupError",
}


@chz.chz
class SizedBuilder(DigitsBuilder):
    def smallest_group_size(self):
        return 4


@pytest.mark.parametrize("path", BROKEN)
def test_an_advantage_that_cannot_be_used_is_refused_before_work_begins(
    path, tmp_path, monkeypatch
):
    (tmp_path / "broken_module.py").write_text("def f(:\n")
    (tmp_path / "needs_another.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = config_of(tmp_path / "run", advantage=path, dataset_builder=SizedBuilder())
    with pytest.raises(UserError, match=f"advantage={re.escape(path)}.*{BROKEN[path]}"):
        check(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_fn": "user_functions:halved"}, UserError, r"called with \(data, logprobs\)"),
        ({"loss_fn": "no_such_module:f"}, UserError, "loss_fn=no_such_module:f: there is no mod"),
        ({"loss_fn": "cross_entropy"}, UserError, "dro, or a function as module:name"),
        ({"advantage": "median"}, UserError, "none, or a function as module:name"),
        (
            {"loss_fn": "user_functions:no_metrics", "loss_fn_config": {"beta": 1.0}},
            UserError,
            r"called with \(data, logprobs, beta=1.0\), which it does not take: got an unexpected",
        ),
        (
            {"advantage": "user_functions:powered", "advantage_config": {"pover": 2.0}},
            UserError,
            r"called with \(rewards, pover=2.0\), which it does not take: got an unexpected",
        ),
        (
            {"advantage": "user_functions:halved", "advantage_config": {"rewards_G": 2.0}},
            UserError,
            "which it does not take: multiple values for argument 'rewards_G'",
        ),
        (
            {"advantage": "std", "advantage_config": {"power": 2.0}},
            UserError,
            "advantage=std takes no options; leave advantage_config out",
        ),
        (
            {"loss_fn": "user_functions:no_metrics", "temperature": 1.2},
            UnsupportedError,
            "temperature=1.2 with loss_fn=user_functions:no_metrics",
        ),
    ],
)
def test_options_that_do_not_fit_an_own_function_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        check(config_of(**options))


def test_the_numbers_of_a_run_are_arguments_of_its_own_functions():
    words = ["advantage=user_functions:powered", "advantage_config.power=2"]
    options = read_options(RLOptions, {}, [*words, "advantage_config.scale=3"])
    config = config_of(
        advantage=options.advantage,
        advantage_config=options.advantage_config,
        loss_fn=user_functions.scaled_gradient,
        loss_fn_config={"scale": 4},
    )
    check(config)
    advantages = [[0.75], [0.75], [0.1875]]
    assert config.training_rewards.advantages(group_of(1.0, 0.0, 0.25)) == advantages
    assert not config.training_rewards.is_constant(group_of(1.0, 1.0))
    value, _ = own_loss(config.loss_fn, config.loss_fn_config)([datum()], [_leaf()])
    assert value.item() == pytest.approx(-4.0)


def group_of(*rewards):
    return TrajectoryGroup(
        [
            Trajectory(
                [
                    Transition(
                        ModelInput.from_ints([1]), TokensWithLogprobs([2], [-1.0]), reward, True
                    )
                ],
                ModelInput.from_ints([1, 2]),
            )
            for reward in rewards
        ],
        [0.0] * len(rewards),
        [{} for _ in rewards],
    )


@pytest.mark.parametrize("name", user_functions.SHAPES)
def test_lists_arrays_and_tensors_are_taken(name, monkeypatch):
    monkeypatch.setattr(user_functions, "in_a_shape", user_functions.SHAPES[name], raising=False)
    groups = [group_of(1.0, 0.0, 0.25), group_of()]
    assert compute_advantages(groups, "user_functions:in_a_shape") == [[0.5, -0.5, -0.25], []]


@pytest.mark.parametrize(
    ("advantage", "rewards", "is_constant"),
    [
        ("mean", (1.0, 1.0), True),
        ("user_functions:halved", (1.0, 1.0), True),
        ("user_functions:against_a_half", (1.0, 1.0), False),
        ("user_functions:against_a_half", (0.5, 0.5), True),
        ("user_functions:zero", (1.0, 0.0), False),
    ],
)
def test_a_group_with_equal_rewards_and_advantages_is_not_left_out(advantage, rewards, is_constant):
    rewards_of_run = config_of(advantage=advantage).training_rewards
    assert rewards_of_run.is_constant(group_of(*rewards)) == is_constant


def test_groups_of_one_need_an_advantage_with_another_baseline():
    @chz.chz
    class OfOne(DigitsBuilder):
        def smallest_group_size(self):
            return 1

    check(config_of(advantage=user_functions.against_a_half, dataset_builder=OfOne()))
    with pytest.raises(UserError, match="group_size=1: give at least 2"):
        check(config_of(dataset_builder=OfOne()))


def rows_of(path):
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in read_rows(path / "metrics.jsonl")
    ]


def train(service, path, **changes):
    return asyncio.run(main(config_of(path, **changes), service))


def test_a_run_that_is_killed_resumes_with_its_own_advantage(tokenizer, tmp_path):
    """The first process names the function and the second gives it."""
    numbers = {"advantage_config": {"scale": 0.5}}
    whole, service = FakeService(tokenizer), FakeService(tokenizer)
    train(whole, tmp_path / "whole", advantage="user_functions:powered", **numbers)
    service.die_at = len(whole.operations) // 2
    with pytest.raises(Killed):
        train(service, tmp_path / "run", advantage="user_functions:powered", **numbers)
    service.die_at = None
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["advantage"] == "user_functions:powered"
    with pytest.raises(UserError, match="advantage was 'user_functions:powered', is 'mean'"):
        train(service, tmp_path / "run")
    with pytest.raises(UserError, match="advantage_config.*0.5"):
        train(service, tmp_path / "run", advantage=user_functions.powered)
    train(service, tmp_path / "run", advantage=user_functions.powered, **numbers)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert service.clients[-1].weights == whole.clients[-1].weights
    named = FakeService(tokenizer)
    train(named, tmp_path / "named")
    assert named.clients[-1].weights != whole.clients[-1].weights
    first_group = [
        row for row in read_rows(tmp_path / "run" / INDEX) if (row["step"], row["group"]) == (0, 0)
    ]
    rewards = [row["reward"] for row in first_group]
    shown = [row["advantage"] for row in first_group]
    assert shown == pytest.approx(user_functions.powered(rewards, scale=0.5))
    assert any(shown)


def datum():
    arrays = {
        "target_tokens": np.array([2, 3]),
        "logprobs": np.array([0.0, -1.0], np.float32),
        "advantages": np.array([0.0, 1.0], np.float32),
        "mask": np.array([0.0, 1.0], np.float32),
    }
    return Datum(ModelInput.from_ints([1, 2]), arrays)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def engine(model, tmp_path):
    with ServiceClient(models={"tiny": model}, data_dir=tmp_path / "data") as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (user_functions.no_metrics, UserError, "user_functions.no_metrics must return"),
        (user_functions.nan_metric, UserError, "nan_metric returned the metric 'spread': nan"),
        (user_functions.failing_loss, LookupError, "no reference"),
    ],
)
def test_a_loss_that_fails_is_named_and_changes_nothing(engine, tmp_path, loss_fn, error, message):
    with pytest.raises(error, match=message) as raised:
        train(engine, tmp_path / "run", loss_fn=loss_fn, lora_rank=4)
    notes = getattr(raised.value, "__notes__", [])
    if error is LookupError:
        assert "in loss_fn=user_functions:failing_loss" in notes
    assert rows_of(tmp_path / "run") == []
    train(engine, tmp_path / "run", loss_fn="importance_sampling", lora_rank=4, max_steps=1)
    assert len(rows_of(tmp_path / "run")) == 1


@pytest.mark.slow
def test_an_own_loss_trains_as_the_named_one_of_the_same_formula(engine, tmp_path):
    options = {"lora_rank": 4, "max_steps": 3, "compute_post_kl": True, "num_substeps": 2}
    # CPUs differ in the samples. At a small learning rate, the rewards of some groups of each
    # substep always differ; a substep without such a group would be left out.
    options |= {"learning_rate": 1e-3, "dataset_builder": DigitsBuilder(groups=8)}
    train(engine, tmp_path / "named", **options)
    # Twice the loss of half the advantages, whose baseline is the mean.
    own_functions = {
        "advantage": user_functions.halved,
        "loss_fn": user_functions.scaled_gradient,
        "loss_fn_config": {"scale": 2.0},
    }
    train(engine, tmp_path / "own", **options, **own_functions)
    named, own = rows_of(tmp_path / "named"), rows_of(tmp_path / "own")
    for left, right in zip(named, own, strict=True):
        assert right["optim/grad_norm"] == pytest.approx(left["optim/grad_norm"], rel=1e-3)
        assert right["kl_pre_post_v2"] == pytest.approx(left["kl_pre_post_v2"], rel=0.1)
        assert right["env/all/reward/total"] == left["env/all/reward/total"]
        assert right["optim/loss/sampled:sum"] == right["tokens/sampled"]
    assert [key for row in own for key in row if key != "step" and not definition_of(key)] == []


PROGRAM = """
import logging, os, runpy, signal, sys
logging.getLogger("planish.model.kernels").setLevel("ERROR")
from planish.runlog.run_directory import RunDirectory
log, dies = RunDirectory.log, sys.argv[1] == "dies"
def logged(self, step, metrics):
    log(self, step, metrics)
    if dies and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
RunDirectory.log = logged
module, sys.argv = "planish.recipes.math_rl", sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run_recipe(end, options, cwd, home):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, end, *options],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=cwd,
        env={
            **os.environ,
            "PLANISH_HOME": str(home),
            "PLANISH_DATA": str(home / "data"),
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )


@pytest.mark.slow
def test_a_recipe_takes_both_from_its_command_and_resumes_after_a_kill(
    model, tmp_path, planish_home
):
    home = planish_home(tmp_path / "home")
    (tmp_path / "my_rules.py").write_text(Path(user_functions.__file__).read_text())
    options = [
        *(f"model_name={model}", "env=arithmetic", "max_steps=4", "batch_size=3", "group_size=4"),
        *("max_tokens=6", "eval_every=0", "save_every=2", "lora_rank=4", "num_groups_to_log=1"),
        *("advantage=my_rules:against_a_half", "loss_fn=my_rules:plain_gradient"),
    ]
    whole = run_recipe("ends", [*options, "log_path=whole"], tmp_path, home)
    assert (whole.returncode, whole.stderr) == (0, "")
    killed = run_recipe("dies", [*options, "log_path=run"], tmp_path, home)
    assert killed.returncode == -signal.SIGKILL
    resumed = run_recipe("ends", [*options, "log_path=run"], tmp_path, home)
    assert (resumed.returncode, resumed.stderr) == (0, "")

    def compared(run):
        timed = ("time/", "tokens_per_second/", "tokens/prefill", "tokens/cumulative/prefill")
        return [
            {k: v for k, v in row.items() if not k.startswith(timed) and "cached" not in k}
            for row in read_rows(tmp_path / run / "metrics.jsonl")
        ]

    assert compared("run") == compared("whole")
    assert len(compared("run")) == 4
    assert compared("run")[-1]["optim/loss/sampled:sum"] > 0


def test_the_metrics_of_a_loss_are_kept_apart_from_those_of_planish():
    value, metrics = own_loss("user_functions:plain_gradient")([datum()], [_leaf()])
    assert metrics == {"loss/sampled:sum": 1.0, "loss/value": pytest.approx(-1.0)}
    assert value.item() == pytest.approx(-1.0)


def _leaf():
    import torch

    return torch.tensor([0.0, -1.0], requires_grad=True)
