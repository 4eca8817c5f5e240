"""What every training recipe does around its loop: read options from the command line, and end in a
way a person can read.
"""

import asyncio
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
from planish.client.local import used_together
from planish.errors import PlanishError, UserError
from planish.processes.interruption import Terminated, run_in_thread, sigterm_like_control_c
from planish.runlog.model_renderer import learn_renderer
from planish.training.run_options import instead

C = TypeVar("C")
T = TypeVar("T")
Presets = Mapping[str, Mapping[str, Any]]


def run_command(
    main: Callable[[C], object],
    config_type: type[C],
    presets: Presets,
    argv: Sequence[str],
    again: str = "goes on from the last checkpoint",
) -> None:
    """Run a recipe with `key=value` options; errors that the user can mend are printed without a
    traceback.

    Ctrl-C and SIGTERM end it with exit status 130 and 143. `again`: what the same command does then.
    """
    try:
        with sigterm_like_control_c(), engine_log_on_console():
            main(read_options(config_type, presets, argv))
    except PlanishError as error:
        places = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"error: {error}{places}", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, Terminated) as end:
        print(f"stopped; the same command {again}", file=sys.stderr)
        sys.exit(end.code if isinstance(end, Terminated) else 130)


class _ConsoleHandler(logging.Handler):
    """Prints records as people read them: warnings on stderr, others on stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        print(self.format(record), file=stream, flush=True)


@contextmanager
def engine_log_on_console() -> Iterator[None]:
    """Inside, the console shows what the engine logs (level INFO): once for each base model which
    device, dtype and kernels serve it, and that kernels are being compiled. A program that set up
    logging itself sees these records in its own way instead.
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
    others: Sequence[str | None] = (),
) -> Path:
    """`main` of the config and a service client: the given one, or one of the run's own. The
    renderer is learned from it. `others`: base models that are used beside the config's.
    """
    given: Any = config
    if instead.get() is not None:
        raise UserError("this recipe has no environments to play")
    if service_client is None:
        own = {"deterministic": given.deterministic} if hasattr(given, "deterministic") else {}
        models = used_together(given.base_url, given.model_name, *others)
        with ServiceClient(base_url=given.base_url, models=models, **own) as own_client:
            return run_main(main, config, own_client)
    renderer = learn_renderer(service_client, given.model_name, given.renderer_name)
    return finished(main(chz.replace(given, renderer_name=renderer.name), service_client))


def finished(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. In a notebook, whose event loop runs already, another one does it in a
    thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return run_in_thread(work)


def read_options(config_type: type[C], presets: Presets, argv: Sequence[str]) -> C:
    """A config from `key=value` arguments. `preset=NAME` gives other defaults, which further
    options still override.
    """
    names = [argument.partition("=")[2] for argument in argv if argument.startswith("preset=")]
    rest = [argument for argument in argv if not argument.startswith("preset=")]
    for argument in rest:
        if argument != "--help" and ("=" not in argument or argument.startswith("-")):
            raise UserError(
                f"{argument}: options are written name=value, such as seed=1; --help lists them"
            )
    blueprint = chz.Blueprint(config_type)
    for name in names:
        if name not in presets:
            raise UserError(
                f"preset={name}: there is no such preset; give one of {', '.join(sorted(presets))}"
            )
        blueprint.apply(dict(presets[name]), layer_name=f"preset={name}")
    try:
        return blueprint.make_from_argv(rest)
    except EntrypointHelpException as shown:
        print(shown)
        if left := sorted(presets.keys() - names):  # those that are named are in what was shown
            print(f"preset=NAME gives other defaults: {', '.join(left)}")
        sys.exit(0)
    except (
        ConstructionException,
        ExtraneousBlueprintArg,
        InvalidBlueprintArg,
        MissingBlueprintArg,
    ) as error:
        raise UserError(str(error)) from error


def refuse(config: Any, names: Iterable[str], reason: str) -> None:
    """Raise UserError for the first option of `names` that is given, and would be ignored."""
    for name in names:
        if getattr(config, name) not in (None, {}):
            raise UserError(f"{name}={getattr(config, name)} {reason}")


def require(config: Any, **conditions: tuple[bool, str]) -> None:
    """Raise UserError for the first option whose condition does not hold: `name=(holds, what to
    give)`.
    """
    for name, (holds, remedy) in conditions.items():
        if not holds:
            raise UserError(f"{name}={getattr(config, name)}: give {remedy}")
