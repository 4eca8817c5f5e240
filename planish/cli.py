"""The command `planish`: models that can be loaded here, and what came out of runs.

planish models               what can be loaded as a base model, and from where
planish models --fetch       get the embedded model now, rather than at its first use
planish plot RUN [RUN ...]   curves of runs, as a picture and as a page
planish trace RUN            when each part of a traced run ran, for Perfetto
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from planish.errors import PlanishError
from planish.model.listing import print_models
from planish.model.sources import DEFAULT_MODEL, resolve_model
from planish.plotting import plot_runs
from planish.timing import write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 on success, 1 with a message on stderr when it could not be done."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except PlanishError as error:
        print(f"planish: {error}", file=sys.stderr)
        return 1
    return 0


def _models(arguments: argparse.Namespace) -> None:
    if arguments.fetch is not None:
        print(f"{arguments.fetch}: {resolve_model(arguments.fetch)}")
    else:
        print_models()


def _plot(arguments: argparse.Namespace) -> None:
    metrics = arguments.metrics.split(",") if arguments.metrics is not None else None
    for path in plot_runs(arguments.runs, arguments.out, metrics=metrics, smooth=arguments.smooth):
        print(path)


def _trace(arguments: argparse.Namespace) -> None:
    print(f"{write_trace(arguments.traced, arguments.out)}: open it at https://ui.perfetto.dev")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="planish", description="Reinforcement learning of language models, locally.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_models(commands)
    _add_plot(commands)
    _add_trace(commands)
    return parser


def _add_models(commands: Any) -> None:
    models = commands.add_parser("models", help="list the base models that can be loaded, and from where")
    models.set_defaults(run=_models)
    models.add_argument(
        "--fetch",
        metavar="NAME",
        nargs="?",
        const=DEFAULT_MODEL,
        help="download and cache NAME (by default the embedded model) instead of listing",
    )


def _add_plot(commands: Any) -> None:
    plot = commands.add_parser("plot", help="draw the curves of runs: curves.png, and curves.html to explore")
    plot.set_defaults(run=_plot)
    plot.add_argument("runs", metavar="RUN", nargs="+", help="the log_path of a run, or its metrics.jsonl")
    plot.add_argument("--out", metavar="DIR", help="where to write (the run itself, or here for several runs)")
    plot.add_argument("--metrics", metavar="A,B", help="metrics or patterns such as 'test/*', a panel each")
    plot.add_argument("--smooth", metavar="N", type=int, default=1, help="also draw the mean over N steps")


def _add_trace(commands: Any) -> None:
    trace = commands.add_parser("trace", help="turn the events of a run with enable_trace=True into trace.json")
    trace.set_defaults(run=_trace)
    trace.add_argument("traced", metavar="RUN", help="the log_path of a run")
    trace.add_argument("--out", metavar="FILE", help="where to write (trace.json in the run)")


if __name__ == "__main__":
    sys.exit(main())
