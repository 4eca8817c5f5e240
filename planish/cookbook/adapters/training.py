"""Configs with the cookbook's fields, and functions that train with planish's loops. They raise
UnsupportedError for a field that planish does not support, unless it has its default.
`session_name` is stored in the metadata of the checkpoints.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chz

from planish.distillation import on_policy
from planish.errors import UnsupportedError
from planish.preference import dpo
from planish.tinker import ServiceClient
from planish.tinker.service_client import run_options
from planish.training import (
    rl_config as rl,
    supervised_config as supervised,
    train_rl as rl_train,
    train_supervised as supervised_train,
)


@chz.chz
class AsyncConfig(rl.AsyncConfig):
    """Sampling runs ahead of training. The run then uses this `loss_fn` instead of Config's."""

    loss_fn: str = "stable_reinforce"


@chz.chz
class _CookbookFields:
    """The further fields of all of the cookbook's configs."""

    session_name: str | None = None
    span_chart_every: int = 0


@chz.chz
class RLConfig(_CookbookFields, rl.Config):
    """planish.training.rl_config.Config with the cookbook's further fields."""

    def training_loss_fn(self) -> str:
        """Return the loss of the run: that of async_config, if it has one."""
        return getattr(self.async_config, "loss_fn", self.loss_fn)


@chz.chz
class SLConfig(_CookbookFields, supervised.Config):
    """planish.training.supervised_config.Config with the cookbook's further fields."""

    save_every_tokens: int = 0
    save_every_seconds: float = 0.0
    async_periodic_saves: bool = False


@chz.chz
class DPOConfig(_CookbookFields, dpo.Config):
    """planish.preference.dpo.Config with the cookbook's further fields."""

    num_replicas: int = 8


@chz.chz
class OnPolicyConfig(_CookbookFields, on_policy.Config):
    """planish.distillation.on_policy.Config with the cookbook's further fields."""


_UNSUPPORTED_FIELDS: Mapping[str, Any] = {
    "span_chart_every": "enable_trace and `planish trace` show when each part ran",
    "save_every_tokens": "give save_every, in steps",
    "save_every_seconds": "give save_every, in steps",
}


def _client(config: Any) -> ServiceClient:
    return ServiceClient(
        display_name=config.session_name or config.wandb_name, **config.client_options
    )


def _planish_config(config: Any, **changes: Any) -> Any:
    """Return the config as planish's loops need it. Raises UnsupportedError for an unsupported
    field.
    """
    for name, remedy in _UNSUPPORTED_FIELDS.items():
        if getattr(config, name, 0):
            raise UnsupportedError(f"{name}={getattr(config, name)}: {remedy}")
    # Recipes set wandb_name even if W&B is not used, and planish's loop would reject that.
    loggers = ("wandb",) if config.wandb_project and not config.loggers else config.loggers
    return chz.replace(
        config,
        log_path=str(Path(config.log_path).expanduser()),
        loggers=loggers,
        wandb_name=config.wandb_name if loggers else None,
        **changes,
    )


async def train_rl(config: RLConfig) -> Path:
    """Train, and return the run directory."""
    requested = config.training_loss_fn()
    loss_fn = run_options().get("substitute_losses", {}).get(requested, requested)
    return await rl_train.main(_planish_config(config, loss_fn=loss_fn), _client(config))


async def train_sl(config: SLConfig) -> Path:
    """Train, and return the run directory."""
    return await supervised_train.main(_planish_config(config), _client(config))


def train_dpo(config: DPOConfig) -> Path:
    """Train, and return the run directory."""
    return asyncio.run(dpo.main(_planish_config(config), _client(config)))


async def train_on_policy(config: OnPolicyConfig) -> Path:
    """Train, and return the run directory."""
    return await on_policy.main(_planish_config(config), _client(config))


async def run_evaluations_parallel(
    evaluators: Sequence[Any], sampling_client: Any, config: Any, i_batch: int, store: Any = None
) -> dict[str, Any]:
    """Run all evaluators concurrently, and return their metrics."""
    if store is not None:
        raise UnsupportedError("store: metrics go to the run's own log alone; leave it out")
    found = await asyncio.gather(*(evaluator(sampling_client) for evaluator in evaluators))
    return {name: value for metrics in found for name, value in metrics.items()}
