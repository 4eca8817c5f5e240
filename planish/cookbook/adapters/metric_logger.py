"""Metrics of loops that are not planish's own: metrics.jsonl, the console, and W&B."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chz
import orjson
from rich.console import Console

from planish.errors import UserError
from planish.runlog.run_directory import CONFIG, METRICS

_log = logging.getLogger(__name__)


def dump_config(config: Any) -> Any:
    """Return the options as JSON values."""
    if chz.is_chz(config):
        return {name: dump_config(getattr(config, name)) for name in chz.chz_fields(config)}
    if isinstance(config, Mapping):
        return {str(key): dump_config(value) for key, value in config.items()}
    if isinstance(config, list | tuple | set | frozenset):
        return [dump_config(value) for value in config]
    if config is None or isinstance(config, bool | int | float | str):
        return config
    return getattr(config, "__name__", None) or repr(config)


class Logger:
    """Writes the metrics of each step."""

    def __init__(self, log_dir: Path, wandb_run: Any = None) -> None:
        self.log_dir = log_dir
        self.store = None
        self._wandb = wandb_run
        self._console = Console(highlight=False)

    def log_hparams(self, config: Any) -> None:
        """Write config.json."""
        options = orjson.dumps(dump_config(config), option=orjson.OPT_INDENT_2)
        (self.log_dir / CONFIG).write_bytes(options)
        if self._wandb is not None:
            self._wandb.config.update(dump_config(config))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row to metrics.jsonl and print it."""
        row = {**({} if step is None else {"step": step}), **metrics}
        with open(self.log_dir / METRICS, "ab") as file:
            file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY, default=str) + b"\n")
        numbers = [f"{k} {v:.4g}" for k, v in metrics.items() if isinstance(v, int | float)]
        self._console.print(f"step {step}: {', '.join(numbers)}")
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def log_long_text(self, key: str, text: str) -> None:
        """Log a text at level INFO."""
        _log.info("%s: %s", key, text)

    def get_logger_url(self) -> str | None:
        """Return the URL of the run at W&B; None without W&B."""
        return None if self._wandb is None else self._wandb.url

    def sync(self) -> None:
        """Do nothing: each row is written at once."""

    def close(self) -> None:
        """End the run at W&B, if there is one."""
        if self._wandb is not None:
            self._wandb.finish()


def setup_logging(
    log_dir: str,
    wandb_project: str | None = None,
    wandb_name: str | None = None,
    config: Any = None,
    do_configure_logging_module: bool = True,
) -> Logger:
    """Create `log_dir` and return a logger for it. With `wandb_project`, the logger also sends the
    metrics to W&B.
    """
    directory = Path(log_dir).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    logger = Logger(directory, _wandb_run(wandb_project, wandb_name, directory))
    if config is not None:
        logger.log_hparams(config)
    if do_configure_logging_module:
        file = logging.FileHandler(directory / "logs.log", encoding="utf-8")
        logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(), file])
    return logger


def _wandb_run(project: str | None, name: str | None, directory: Path) -> Any:
    if project is None:
        return None
    try:
        # Imported here, because wandb is an extra.
        import wandb
    except ImportError as error:
        raise UserError(
            "wandb_project: wandb is not installed; run: pip install 'planish[wandb]'"
        ) from error
    return wandb.init(project=project, name=name, dir=directory)
