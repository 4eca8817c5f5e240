"""`planish run`: run an unmodified script for the tinker SDK, with an engine in the script's
process.

The command replaces itself (execve) with Python running the script. A directory on PYTHONPATH makes
`import tinker` load planish.tinker. So tracebacks, the exit status, `__main__` and Ctrl-C are those
of `python SCRIPT`, and processes that the script starts import the same packages.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import orjson

import planish
from planish.errors import UserError
from planish.import_shims import COOKBOOK_DIRECTORY, SDK_DIRECTORY
from planish.model.architecture.weight_sizes import SCHEMES
from planish.model.sources.resolve import models_from_env_var, resolve_model
from planish.processes.arguments import argument_adder, parse_pairs
from planish.service import checked_substitutes
from planish.tinker.service_client import OPTIONS_VARIABLE

MODELS_VARIABLE = "PLANISH_MODELS"
_SIZE_OPTIONS = ("kv_cache_bytes", "prefix_cache_bytes", "max_batch", "micro_batch_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ServiceClient, then SCRIPT or -m MODULE with arguments, as for
    `python`.
    """
    add = argument_adder(parser)
    parser.usage = "planish run [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS]"
    add(
        "--model NAME=PATH",
        "Hugging Face directory or .gguf file of the base model NAME; may be repeated",
        action="append",
        default=[],
    )
    add("--data-dir DIR", "directory of the checkpoints")
    add("--replicas N", "number of engines, each on a device of its own", type=int)
    add("--ray ADDRESS", "use this Ray cluster: auto, or HOST:PORT")
    add("--sampler SAMPLER", "what samples: engine, vllm, or the URLs of vLLM servers")
    add("--device", "device: cpu, cuda, cuda:N, or auto")
    add("--dtype", "dtype of weights and matmuls: bfloat16, float32, or auto")
    add("--quantize", "quantize the base weights", choices=SCHEMES)
    add(
        "--deterministic",
        "make samples batch-invariant: bitwise the same, whatever else runs",
        action=argparse.BooleanOptionalAction,
    )
    for name in _SIZE_OPTIONS:
        add(f"--{name.replace('_', '-')} N", f"the argument {name} of ServiceClient", type=int)
    add(
        "--substitute-loss stable_reinforce=LOSS",
        "compute LOSS if the script requests stable_reinforce, whose formula is not public",
        action="append",
        default=[],
    )
    add("--base-url URL", "use this planish server instead of an engine in the process")
    add("--api-key KEY", "API key for that server")
    add(
        "--hub-tokenizers",
        "copy the tokenizers of --model into the hub's cache, so that transformers finds them "
        "without a network",
        action="store_true",
    )
    add("-m", "run a module, as `python -m` does", dest="is_module", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> NoReturn:
    """Replace this process with Python running the program."""
    if not arguments.program:
        raise UserError("name a script, or a module after -m: planish run SCRIPT [ARGUMENTS]")
    program, *program_arguments = arguments.program
    options = client_options(arguments)
    models = parse_pairs("--model", "NAME=PATH", arguments.model)
    for name, path in models.items():
        directory = resolve_model(name, models)
        if "," in path:
            raise UserError(
                f"--model {name}={path}: the path must not contain a comma; rename the directory"
            )
        if arguments.hub_tokenizers:
            _cache_tokenizer(name, directory)
    environment = script_environment(options, _program_directory(program, arguments.is_module))
    if models:
        all_models = {**models_from_env_var(), **models}
        environment[MODELS_VARIABLE] = ",".join(
            f"{name}={path}" for name, path in all_models.items()
        )
    python_arguments = ["-m", program] if arguments.is_module else [program]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *python_arguments, *program_arguments], environment)


def client_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ServiceClient that were given. Raise a UserError that names an
    invalid option.
    """
    if arguments.base_url and arguments.model:
        raise UserError(
            "--model is for an engine in this process, and --base-url names a server; leave one out"
        )
    options: dict[str, Any] = {
        "substitute_losses": checked_substitutes(
            parse_pairs("--substitute-loss", "LOSS=LOSS", arguments.substitute_loss)
        ),
    }
    names = ("data_dir", "replicas", "ray", "sampler", "device", "dtype", "quantize")
    names = (*names, "deterministic", *_SIZE_OPTIONS)
    options |= {name: getattr(arguments, name) for name in (*names, "base_url", "api_key")}
    return {name: value for name, value in options.items() if value not in (None, {})}


def script_environment(options: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Return the environment of the script: `tinker` is planish.tinker, with `options` as the
    defaults of ServiceClient.

    `tinker_cookbook` is the installed package, or one next to the program in `directory`. If there
    is neither, it is planish.cookbook.
    """
    paths = [str(SDK_DIRECTORY)]
    search_path = [str(directory), *sys.path]
    if importlib.machinery.PathFinder.find_spec("tinker_cookbook", search_path) is None:
        paths.append(str(COOKBOOK_DIRECTORY))
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    package = str(Path(planish.__file__).parent.parent)
    if "site-packages" not in package and package not in paths[-1].split(os.pathsep):
        # planish runs from a checkout, which only the working directory makes importable.
        paths.append(package)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        OPTIONS_VARIABLE: orjson.dumps(dict(options)).decode(),
    }


def _cache_tokenizer(name: str, directory: Path) -> None:
    """Put a tokenizer where `transformers` looks for it on a machine without a network."""
    # Import this here, because the server loads torch, which this process does not need.
    from planish.server.tokenizer_cache import cache_tokenizer, hub_names

    for hub_name in hub_names(name):
        cache_tokenizer(hub_name, directory)


def _program_directory(program: str, is_module: bool) -> Path:
    """Return the directory that Python puts first on its path for this program."""
    return Path.cwd() if is_module else Path(program).absolute().parent
