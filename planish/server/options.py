"""The options of `planish serve`. They are checked before the server starts."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from planish.engine.settings import EngineSettings
from planish.errors import UserError
from planish.model.weight_sizes import SCHEMES
from planish.server.http.access import LOG_LEVELS, LogFormat
from planish.server.http.context import is_loopback
from planish.server.settings import RENAMED_SETTINGS, HttpSettings, ServerSettings

_log = logging.getLogger("planish.serve")

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*(|[KMGT]iB)")
_GIB = 1 << 30


@dataclass(frozen=True)
class ServeOptions:
    """The command's options."""

    host: str = "127.0.0.1"
    port: int = 8000
    data_dir: Path = Path("~/.local/share/planish/server")
    models: Mapping[str, str] = field(default_factory=dict)
    """Maps the names of base models to their directories or .gguf files. The default model is also
    served if it is on this machine, or if this mapping is empty.
    """
    api_key_file: Path | None = None
    engine: EngineSettings = field(default_factory=EngineSettings)
    settings: ServerSettings = field(default_factory=ServerSettings)
    hub_tokenizers: bool = False
    poll_seconds: float = HttpSettings.poll_seconds
    log_format: LogFormat | None = None
    """None: text on a terminal, JSON elsewhere."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(
                f"--port {self.port}: give a number from 1 to 65535, or 0 for any free one"
            )
        if not 0 <= self.poll_seconds <= 40:
            raise UserError(
                f"--poll-seconds {self.poll_seconds:g}: give 0 to 40; clients hang up after 45"
            )
        if not is_loopback(self.host) and self.api_key_file is None:
            raise UserError(
                f"--host {self.host} accepts connections from other machines; give --api-key-file "
                "with a key for each user"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `planish serve` to a parser."""
    default = ServeOptions
    parser.add_argument(
        "--host", default=default.host, help="address to listen on (%(default)s: this machine only)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=default.port,
        help="0: any free port, which is logged at the start",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=default.data_dir,
        metavar="DIR",
        help="checkpoints, journal and database; created if it does not exist (%(default)s)",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a base model to serve: a Hugging Face directory or a .gguf file; may be repeated",
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="the API keys that may use the server"
    )
    _add_engine_arguments(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="a setting, such as max_tokens_per_minute=100000 or max_storage_bytes=20GiB; "
        "may be repeated. One of " + ", ".join(field.name for field in fields(ServerSettings)),
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        help="by default text on a terminal, json elsewhere",
    )
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default=default.log_level,
        help="the lowest level that is logged (%(default)s)",
    )
    parser.add_argument(
        "--poll-seconds",
        type=float,
        default=default.poll_seconds,
        metavar="S",
        help="how long a request for a result is held (%(default)s); lower it if a proxy "
        "closes connections earlier",
    )
    parser.add_argument(
        "--hub-tokenizers",
        action="store_true",
        help="put tokenizers into the hub's cache, where scripts on this machine find "
        "them without a network",
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, or auto")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32, or auto")
    parser.add_argument(
        "--quantize",
        choices=SCHEMES,
        help="quantize the base weights with this scheme, for sampling and training alike, to save "
        "memory (docs/models.md)",
    )
    parser.add_argument(
        "--kv-cache-gib",
        type=float,
        metavar="GIB",
        help="maximum size of the KV cache of running samples, for each base model. Samples that "
        "do not fit wait. By default 4 on a CPU (less if the memory is small); on a GPU, the "
        "memory that weights, adapters, training and the prefix cache leave",
    )
    parser.add_argument(
        "--prefix-cache-gib",
        type=float,
        metavar="GIB",
        help="maximum size of the prefix cache, for each base model, in addition to "
        "--kv-cache-gib; the least recently used prefixes are evicted. 0 turns the cache off. By "
        "default 1 on a CPU (less if the memory is small); on a GPU, an eighth of the memory that "
        "the weights and adapters leave",
    )
    parser.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let tenants use each other's cached prefixes. This saves time if they share a system "
        "prompt. It also reveals whether another tenant has sent a prompt with the same beginning, "
        "so a tenant can guess another tenant's prompts word by word",
    )
    parser.add_argument(
        "--max-batch",
        type=int,
        help="maximum number of samples in a batch (256; on a GPU up to 512)",
    )
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        help="maximum number of training tokens in a micro-batch (4096; on a GPU up to 16384)",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="samples are batch-invariant (bitwise reproducible), even where that costs "
        "speed (on a GPU, and on CPUs without our kernels)",
    )
    parser.add_argument(
        "--substitute-loss",
        action="append",
        default=[],
        metavar="stable_reinforce=LOSS",
        dest="substitute_losses",
        help="compute LOSS if a script requests stable_reinforce, whose formula is not public; "
        "responses and /metrics report the substitution",
    )


def options_of(arguments: argparse.Namespace) -> ServeOptions:
    """Return the parsed options. Raise UserError, which names the option, for a wrong value."""
    return ServeOptions(
        host=arguments.host,
        port=arguments.port,
        data_dir=arguments.data_dir,
        models=_parse_pairs("--model", "NAME=PATH", arguments.model),
        api_key_file=arguments.api_key_file,
        engine=EngineSettings(
            device=arguments.device,
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            kv_cache_bytes=_gib_to_bytes("--kv-cache-gib", arguments.kv_cache_gib),
            prefix_cache_bytes=_gib_to_bytes(
                "--prefix-cache-gib", arguments.prefix_cache_gib, allow_zero=True
            ),
            share_prefix_cache=arguments.share_prefix_cache,
            max_batch=arguments.max_batch,
            micro_batch_tokens=arguments.micro_batch_tokens,
            deterministic=arguments.deterministic,
            substitute_losses=_parse_pairs(
                "--substitute-loss", "LOSS=LOSS", arguments.substitute_losses
            ),
        ),
        settings=_parse_settings(_parse_pairs("--set", "NAME=VALUE", arguments.settings)),
        hub_tokenizers=arguments.hub_tokenizers,
        poll_seconds=arguments.poll_seconds,
        log_format=arguments.log_format,
        log_level=arguments.log_level,
    )


def _parse_pairs(option: str, form: str, entries: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for entry in entries:
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not (name and equals and value):
            raise UserError(f"{option} {entry!r}: write {form}")
        if name in pairs:
            raise UserError(f"{option} names {name!r} twice; keep one")
        pairs[name] = value
    return pairs


def _parse_settings(values_by_name: Mapping[str, str]) -> ServerSettings:
    values_by_name = _replace_old_names(values_by_name)
    is_integer = {field.name: field.type == "int" for field in fields(ServerSettings)}
    unknown = sorted(values_by_name.keys() - is_integer.keys())
    if unknown:
        raise UserError(
            f"--set {unknown[0]}: there is no such setting; give one of {', '.join(is_integer)}"
        )
    values: dict[str, Any] = {
        name: _parse_number(name, text, is_integer[name]) for name, text in values_by_name.items()
    }
    return ServerSettings(**values)


def _replace_old_names(values_by_name: Mapping[str, str]) -> dict[str, str]:
    """Replace the old names of settings, and log a warning for each."""
    settings: dict[str, str] = {}
    for old, value in values_by_name.items():
        name = RENAMED_SETTINGS.get(old, old)
        if name != old:
            _log.warning(
                "--set %s: this setting is now called %s; the old name will stop working", old, name
            )
        if name in settings:
            raise UserError(f"--set names {name!r} twice, once by its old name; keep one")
        settings[name] = value
    return settings


def _parse_number(name: str, text: str, is_integer: bool) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or (match[2] and not name.endswith("_bytes")):
        raise UserError(
            f"--set {name}={text}: give a "
            f"number{', or one with a unit such as 64MiB' * name.endswith('_bytes')}"
        )
    value = float(match[1]) * _UNITS[match[2]]
    if is_integer and not value.is_integer():
        raise UserError(f"--set {name}={text}: give a whole number")
    return int(value) if is_integer else value


def _gib_to_bytes(option: str, gib: float | None, allow_zero: bool = False) -> int | None:
    """Convert GiB to bytes. With `allow_zero`, 0 is valid."""
    if gib is not None and not (0 < gib < 1 << 20 or (allow_zero and gib == 0)):
        raise UserError(f"{option} {gib}: give a number above 0{', or 0 for none' * allow_zero}")
    return None if gib is None else int(gib * _GIB)
