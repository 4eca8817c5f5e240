"""`planish run` executes a script unchanged, with planish as its SDK."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from planish.testing import tiny_model


def run(place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planish", "run", *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def script(place: Path, text: str, name: str = "script.py") -> Path:
    path = place / name
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.slow
def test_a_script_gets_planish_as_the_sdk_and_its_own_arguments(tmp_path):
    script(
        tmp_path,
        """
        import sys
        import tinker
        from tinker.types.tensor_data import TensorData
        from tinker.lib.public_interfaces.rest_client import RestClient
        import planish
        assert tinker.Datum is planish.Datum and TensorData is planish.TensorData
        assert RestClient is planish.RestClient
        print(__name__, sys.argv, tinker.__version__)
        sys.exit(7)
        """,
    )
    done = run(tmp_path, "script.py", "--dtype", "a=1", "-m")
    assert done.stdout == ("__main__ ['script.py', '--dtype', 'a=1', '-m'] 0.38.0+planish\n"), (
        done.stderr
    )
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.slow
def test_a_traceback_shows_only_the_script(tmp_path):
    script(tmp_path, "def f():\n    raise KeyError('mine')\n\nf()\n")
    done = run(tmp_path, "script.py")
    plain = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)
    assert "KeyError: 'mine'" in done.stderr


@pytest.mark.slow
def test_a_missing_script_fails_as_with_python(tmp_path):
    done = run(tmp_path, "missing.py")
    assert done.returncode == 2
    assert "can't open file" in done.stderr
    assert "missing.py" in done.stderr
    module = run(tmp_path, "-m", "missing_module")
    assert module.returncode == 1
    assert "No module named missing_module" in module.stderr


@pytest.mark.slow
def test_an_unsupported_method_raises_in_the_script(tmp_path):
    script(
        tmp_path,
        """
        import tinker
        tinker.ServiceClient().create_rest_client().whoami()
        """,
    )
    done = run(tmp_path, "script.py")
    assert done.returncode == 1
    assert "script.py" in done.stderr
    assert "RestClient.whoami is not offered: planish has no accounts" in done.stderr
    assert "commands/run.py" not in done.stderr


@pytest.mark.slow
def test_a_module_and_its_subprocesses_import_from_the_working_directory(tmp_path):
    script(
        tmp_path,
        """
        import multiprocessing
        import tinker

        def version(_):
            return tinker.__version__

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(version, [0]))
        """,
        "mine.py",
    )
    done = run(tmp_path, "-m", "mine")
    assert done.stdout == "['0.38.0+planish']\n", done.stderr


@pytest.mark.slow
def test_options_are_those_of_every_service_client(tmp_path):
    model = tiny_model(tmp_path / "model")
    script(
        tmp_path,
        """
        import tinker
        client = tinker.ServiceClient(api_key="tml-mine").create_lora_training_client("mine", rank=4)
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2]),
            loss_fn_inputs={"target_tokens": [2, 3], "logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]},
        )
        metrics = client.forward_backward([datum], "stable_reinforce").result().metrics
        print(sorted(name for name in metrics if "substituted" in name))
        """,
    )
    done = run(
        tmp_path,
        "--model",
        f"mine={model}",
        "--data-dir",
        "data",
        "--dtype=float32",
        "--no-deterministic",
        "--substitute-loss=stable_reinforce=cispo",
        "script.py",
    )
    assert done.stdout == "['substituted_loss/stable_reinforce=cispo:max']\n", done.stderr
    assert "requests with loss_fn='stable_reinforce' compute 'cispo' instead" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "name a script"),
        (("--model", "x", "script.py"), "--model 'x': write NAME=PATH"),
        (("--substitute-loss", "ppo=cispo", "script.py"), "'ppo' cannot be substituted"),
    ],
)
def test_a_wrong_option_is_named_before_the_script_starts(tmp_path, words, named):
    script(tmp_path, "print('started')")
    done = run(tmp_path, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert named in done.stderr


@pytest.mark.slow
def test_without_the_official_cookbook_planish_provides_it(tmp_path):
    script(tmp_path, "import tinker_cookbook; print(tinker_cookbook.__name__)")
    (tmp_path / "beside").mkdir()
    script(tmp_path, "import tinker_cookbook; print(tinker_cookbook.MINE)", "beside/script.py")
    script(tmp_path, "MINE = 'beside the script'", "beside/tinker_cookbook.py")
    assert run(tmp_path, "beside/script.py").stdout == "beside the script\n"
