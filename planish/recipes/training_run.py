"""What every training recipe does around its loop: read options, start or resume, pick the renderer, save.

A recipe's record of a checkpoint says how many batches were really trained before it, also in the last one of a run that
`max_steps` ended early; so the same command with more steps goes on where the weights are.
"""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import chz
from chz.blueprint import (
    ConstructionException,
    EntrypointHelpException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)

from planish.errors import PlanishError, UnknownModelError, UserError
from planish.renderers import Renderer, get_renderer, recommended_renderer_name
from planish.runs import CheckpointRecord, RunDirectory, checkpoint_of

C = TypeVar("C")
Presets = Mapping[str, Mapping[str, Any]]


def run_command(main: Callable[[C], object], config_type: type[C], presets: Presets, argv: Sequence[str]) -> None:
    """Run a recipe with `key=value` options; errors that the user can mend are printed without a traceback."""
    try:
        main(read_options(config_type, presets, argv))
    except PlanishError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


def read_options(config_type: type[C], presets: Presets, argv: Sequence[str]) -> C:
    """A config from `key=value` arguments. `preset=NAME` gives other defaults, which further options still override."""
    names = [argument.partition("=")[2] for argument in argv if argument.startswith("preset=")]
    rest = [argument for argument in argv if not argument.startswith("preset=")]
    blueprint = chz.Blueprint(config_type)
    for name in names:
        if name not in presets:
            raise UserError(f"preset={name}: there is no such preset; give one of {', '.join(sorted(presets))}")
        blueprint.apply(dict(presets[name]), layer_name=f"preset={name}")
    try:
        return blueprint.make_from_argv(rest)
    except EntrypointHelpException as shown:
        print(shown)
        print(f"preset=NAME gives other defaults: {', '.join(sorted(presets))}")
        sys.exit(0)
    except (ConstructionException, ExtraneousBlueprintArg, InvalidBlueprintArg, MissingBlueprintArg) as error:
        raise UserError(str(error)) from error


def start_training(
    service_client: Any,
    run: RunDirectory,
    *,
    model_name: str,
    lora_rank: int,
    seed: int,
    load_checkpoint_path: str | None,
) -> tuple[Any, CheckpointRecord | None]:
    """A training client: resumed from the record that is returned too, from given weights with a fresh optimizer, or new."""
    record = run.resume_point()
    if record is not None:
        assert record.state_path is not None
        client = service_client.create_training_client_from_state_with_optimizer(record.state_path)
        return client, record
    if load_checkpoint_path is None:
        return service_client.create_lora_training_client(base_model=model_name, rank=lora_rank, seed=seed), None
    client = service_client.create_training_client_from_state(checkpoint_of(load_checkpoint_path))
    info = client.get_info()
    found = (info.model_data.model_name, info.lora_rank)
    if found != (model_name, lora_rank):
        raise UserError(
            f"load_checkpoint_path={load_checkpoint_path} holds an adapter of rank {found[1]} on {found[0]}, but "
            f"lora_rank={lora_rank} and model_name={model_name} were asked for; give the checkpoint's own"
        )
    return client, None


def choose_renderer(renderer_name: str | None, model_name: str, tokenizer: Any) -> Renderer:
    """The named renderer, or the one for the model's name, or the one that the model's own files ask for."""
    if renderer_name is not None:
        return get_renderer(renderer_name, tokenizer)
    try:
        name = recommended_renderer_name(model_name)
    except UnknownModelError:
        name = recommended_renderer_name(tokenizer.name_or_path)
    return get_renderer(name, tokenizer)


def save_state(training_client: Any, run: RunDirectory, batch: int, ttl_seconds: int | None) -> None:
    """A checkpoint from which the run resumes at `batch`."""
    name = f"{batch:06d}"
    path = training_client.save_state(name, ttl_seconds=ttl_seconds, overwrite=True).result().path
    run.log_checkpoint(CheckpointRecord(name, batch, state_path=path))


def save_final(training_client: Any, run: RunDirectory, batch: int) -> CheckpointRecord:
    """The last state and the weights for sampling, which do not expire."""
    name = f"final-{batch:06d}"
    state = training_client.save_state(name, ttl_seconds=None, overwrite=True).result().path
    weights = training_client.save_weights_for_sampler(name, ttl_seconds=None).result().path
    record = CheckpointRecord("final", batch, state_path=state, sampler_path=weights, final=True)
    run.log_checkpoint(record)
    return record


def draw_seed(seed: int, *place: int) -> int:
    """A seed for one place of a run, such as (batch, row): the same in every run, unlike at every other place."""
    return random.Random(":".join(map(str, (seed, *place)))).getrandbits(31)


def require(config: Any, **conditions: tuple[bool, str]) -> None:
    """Raise UserError for the first option whose condition does not hold: `name=(holds, what to give)`."""
    for name, (holds, remedy) in conditions.items():
        if not holds:
            raise UserError(f"{name}={getattr(config, name)}: give {remedy}")
