"""The parts that all training recipes share: command-line options, their checks, and readable
errors.
"""

import logging
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import chz
from chz.blueprint import (
    ConstructionException,
    EntrypointHelpException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)

from planish import ServiceClient
from planish.errors import PlanishError, UserError, message_with_notes
from planish.processes.interruption import Terminated, run_coroutine, sigterm_as_interrupt
from planish.runlog.model_renderer import learn_renderer
from planish.supervised.types import ChatDatasetBuilderCommonConfig
from planish.training.option_rules import USUAL_NAMES
from planish.training.run_loop import open_client
from planish.training.run_options import run_in_place_of_training

C = TypeVar("C")
T = TypeVar("T")
Presets = Mapping[str, Mapping[str, Any]]


def run_command(
    main: Callable[[C], object],
    config_type: type[C],
    presets: Presets,
    argv: Sequence[str],
    on_restart: str = "resumes from the last checkpoint",
) -> None:
    """Run a recipe with `key=value` options. Errors of planish are printed without a traceback and
    end the process with exit status 1.

    Ctrl-C and SIGTERM end the process with exit status 130 and 143, and with a message.
    `on_restart` is the part of that message that says what the same command does next.
    """
    try:
        with sigterm_as_interrupt(), engine_log_on_console():
            main(read_options(config_type, presets, argv))
    except PlanishError as error:
        print(f"error: {message_with_notes(error)}", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, Terminated) as end:
        print(f"stopped; the same command {on_restart}", file=sys.stderr)
        sys.exit(end.code if isinstance(end, Terminated) else 130)


class _ConsoleHandler(logging.Handler):
    """Prints log records as plain text: warnings and errors on stderr, others on stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        print(self.format(record), file=stream, flush=True)


@contextmanager
def engine_log_on_console() -> Iterator[None]:
    """Print the engine's log records of level INFO in the block: device, dtype and kernels of each
    base model, and when kernels are compiled. If the program has set up logging, nothing is
    changed.
    """
    if logging.getLogger().handlers:
        yield
        return
    handler = _ConsoleHandler(logging.INFO)
    loggers = [logging.getLogger(name) for name in ("planish.engine", "planish.model.kernels")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def run_main(
    main: Callable[[C, Any], Coroutine[Any, Any, Path]],
    config: C,
    service_client: ServiceClient | None = None,
    other_models: Sequence[str | None] = (),
) -> Path:
    """Return the result of `main(config, client)`, with the given service client or a new one. If
    the config has no renderer name, it is set to the renderer of the config's model. `other_models`
    are further base models that the run uses.
    """
    untyped_config: Any = config
    if (replacement := run_in_place_of_training.get()) is not None:
        return replacement(untyped_config)
    with open_client(untyped_config, service_client, other_models) as client:
        renderer = learn_renderer(client, untyped_config.model_name, untyped_config.renderer_name)
        return run_coroutine(main(chz.replace(untyped_config, renderer_name=renderer.name), client))


def read_options(config_type: type[C], presets: Presets, argv: Sequence[str]) -> C:
    """Return the config of `key=value` arguments. `preset=NAME` gives other defaults, which other
    arguments override. --help prints the options and exits. Raise UserError for a wrong argument.
    """
    names = [argument.partition("=")[2] for argument in argv if argument.startswith("preset=")]
    options = [argument for argument in argv if not argument.startswith("preset=")]
    for argument in options:
        if argument != "--help" and ("=" not in argument or argument.startswith("-")):
            raise UserError(
                f"{argument}: options are written name=value, such as seed=1; --help lists them"
            )
    for argument in options:
        name = argument.partition("=")[0]
        if name in USUAL_NAMES and name not in chz.chz_fields(config_type):
            raise UserError(f"{argument}: there is no option {name}; give {USUAL_NAMES[name]}")
    inherit_docs(config_type)
    blueprint = chz.Blueprint(config_type)
    for name in names:
        if name not in presets:
            raise UserError(
                f"preset={name}: there is no such preset; give one of {', '.join(sorted(presets))}"
            )
        blueprint.apply(dict(presets[name]), layer_name=f"preset={name}")
    try:
        return blueprint.make_from_argv(options)
    except EntrypointHelpException as help_text:
        print(help_text)
        # The defaults shown above include the presets that were given.
        other_presets = sorted(presets.keys() - names)
        if other_presets:
            print(f"preset=NAME gives other defaults: {', '.join(other_presets)}")
        sys.exit(0)
    except (
        ConstructionException,
        ExtraneousBlueprintArg,
        InvalidBlueprintArg,
        MissingBlueprintArg,
    ) as error:
        raise UserError(str(error)) from error


def inherit_docs(config_type: Any) -> None:
    """Give each option that has no text for --help the text of the option that it overrides."""
    for name, option in chz.chz_fields(config_type).items():
        for base in config_type.__mro__[1:]:
            if not option._doc and chz.is_chz(base) and name in chz.chz_fields(base):
                option._doc = chz.chz_fields(base)[name]._doc
        if chz.is_chz(option.final_type):
            inherit_docs(option.final_type)


def reject_unused(config: Any, names: Iterable[str], reason: str) -> None:
    """Raise UserError for the first option of `names` that is set although it would be ignored.
    `reason` ends the message.
    """
    for name in names:
        if getattr(config, name) not in (None, {}):
            raise UserError(f"{name}={getattr(config, name)} {reason}")


SPLITS_OF_DATASET = (
    ("train_split", "test_split"),
    "names a split of dataset, and dataset is not given; leave it out",
)
"""The arguments of `reject_unused` for a run on generated data."""


def build(target: type[T], options: Any, **overrides: Any) -> T:
    """Return an object of the chz class `target`. Its fields get the values of the options with the
    same names, and `overrides`, which take precedence.
    """
    names = chz.chz_fields(target).keys() & chz.chz_fields(type(options)).keys()
    return target(**{**{name: getattr(options, name) for name in names}, **overrides})


def build_with_defaults(target: type[T], options: Any, **overrides: Any) -> T:
    """Return the same as `build`, but an option that is None leaves the default of the field."""
    names = chz.chz_fields(target).keys() & chz.chz_fields(type(options)).keys()
    given_options = {
        name: getattr(options, name) for name in names if getattr(options, name) is not None
    }
    return target(**{**given_options, **overrides})


def chat_config(options: Any) -> ChatDatasetBuilderCommonConfig:
    """Return the part of a chat dataset builder's config that all recipes set in the same way."""
    return build(
        ChatDatasetBuilderCommonConfig, options, model_name_for_tokenizer=options.model_name
    )
