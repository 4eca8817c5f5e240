"""The options of `planish serve`. They are checked before the server starts."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from planish.engine.settings import EngineSettings
from planish.errors import UserError
from planish.model.architecture.weight_sizes import SCHEMES
from planish.processes.arguments import argument_adder, parse_pairs
from planish.server.http.access import LOG_LEVELS, LogFormat
from planish.server.http.origins import check_origins, is_loopback
from planish.server.openai.model_names import check_aliases
from planish.server.settings import HttpSettings, ServerSettings

_log = logging.getLogger("planish.serve")

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*(|[KMGT]iB)")
_GIB = 1 << 30
_PUBLIC_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")


@dataclass(frozen=True)
class ServeOptions:
    """The command's options."""

    host: str = "127.0.0.1"
    port: int = 8000
    data_dir: Path = Path("~/.local/share/planish/server")
    models: Mapping[str, str] = field(default_factory=dict[str, str])
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
    allowed_origins: tuple[str, ...] = ()
    public_url: str | None = None
    truncate_max_tokens: bool = False
    model_aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Maps further names of checkpoints, for OpenAI clients, to their paths."""
    adapter_dir: Path | None = None
    console: bool = False
    """Whether /console has pages for browsers."""
    replicas: int | None = None
    """The number of engines, each on a device of its own. None: one engine in the server's process,
    or with `ray` one for each GPU of the cluster.
    """
    ray: str | None = None
    """The address of a Ray cluster. None: this machine."""
    sampler: str = "engine"
    """What samples: "engine", "vllm", or the URLs of vLLM servers with commas between them."""

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
        if self.adapter_dir is not None and not self.adapter_dir.is_dir():
            raise UserError(f"--adapter-dir {self.adapter_dir}: there is no such directory")
        check_aliases(self.model_aliases, self.models)
        check_origins(self.allowed_origins, self.api_key_file is not None)
        if self.public_url is not None and not _PUBLIC_URL.fullmatch(self.public_url):
            raise UserError(
                f"--public-url {self.public_url}: give the URL at which clients reach the server, "
                "such as https://planish.example or https://example.com/planish"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `planish serve` to a parser."""
    add = argument_adder(parser)
    default = ServeOptions
    add("--host", "address to listen on (%(default)s: this machine only)", default=default.host)
    add("--port", "0: any free port, which is logged at the start", default=default.port)
    add(
        "--data-dir DIR",
        "checkpoints, journal and database; created if it does not exist (%(default)s)",
        default=default.data_dir,
    )
    add(
        "--model NAME=PATH",
        "a base model to serve: a Hugging Face directory or a .gguf file; may be repeated",
        action="append",
        default=[],
    )
    add("--api-key-file FILE", "the API keys that may use the server", type=Path)
    add(
        "--public-url URL",
        "the URL at which clients reach the server through a proxy, for download links (by "
        "default, links have the Host and the scheme of the request)",
    )
    add(
        "--allow-origin ORIGIN",
        "let web pages of this origin, such as http://localhost:3000, use the server (CORS); may "
        "be repeated. '*' means every page and needs --api-key-file",
        action="append",
        default=[],
        dest="allowed_origins",
    )
    add(
        "--model-alias NAME=PATH",
        "a short name for a checkpoint, for OpenAI clients: its tinker:// path, or RUN/latest; may "
        "be repeated",
        action="append",
        default=[],
        dest="model_aliases",
    )
    add(
        "--adapter-dir DIR",
        "directory below which the operator loads adapters with POST /v1/load_lora_adapter",
        type=Path,
    )
    add(
        "--console",
        "pages at /console that show sessions, runs, queue, adapters and disk (docs/guide/console.md)",
        action="store_true",
    )
    add(
        "--truncate-max-tokens",
        "lower max_tokens in requests of OpenAI clients to what the model's context leaves, instead "
        "of rejecting such a request",
        action="store_true",
    )
    _add_engine_arguments(parser)
    add(
        "--set NAME=VALUE",
        "a setting, such as max_tokens_per_minute=100000 or max_storage_bytes=20GiB; "
        "may be repeated. One of " + ", ".join(field.name for field in fields(ServerSettings)),
        action="append",
        default=[],
        dest="settings",
    )
    add("--log-format", "by default text on a terminal, json elsewhere", choices=("text", "json"))
    add(
        "--log-level",
        "the lowest level that is logged (%(default)s)",
        choices=LOG_LEVELS,
        default=default.log_level,
    )
    add(
        "--poll-seconds S",
        "how long a request for a result is held (%(default)s); lower it if a proxy "
        "closes connections earlier",
        default=default.poll_seconds,
    )
    add(
        "--hub-tokenizers",
        "put tokenizers into the hub's cache, where scripts on this machine find "
        "them without a network",
        action="store_true",
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = argument_adder(parser)
    add(
        "--replicas N",
        "number of engines, each on a device of its own; needs planish[ray] "
        "(docs/operators/scaling.md)",
        type=int,
    )
    add(
        "--ray ADDRESS",
        "run the engines on a Ray cluster: auto for the one of this machine, or HOST:PORT",
    )
    add(
        "--sampler SAMPLER",
        "what samples: engine, vllm, or the URLs of vLLM servers with commas between them "
        "(docs/operators/scaling.md)",
        default="engine",
    )
    add("--device", "cpu, cuda, cuda:N, or auto", default="auto")
    add("--dtype", "bfloat16, float32, or auto", default="auto")
    add(
        "--quantize",
        "quantize the base weights with this scheme, for sampling and training alike, to save "
        "memory (docs/reference/models.md)",
        choices=SCHEMES,
    )
    add(
        "--tensor-parallel N",
        "number of devices of this machine that share each base model, for models that do not fit "
        "on one (docs/operators/scaling.md)",
        type=int,
    )
    add(
        "--kv-cache-gib GIB",
        "maximum size of the KV cache of running samples, for each base model. Samples that "
        "do not fit wait. By default 4 on a CPU (less if the memory is small); on a GPU, the "
        "memory that weights, adapters, training and the prefix cache leave",
        type=float,
    )
    add(
        "--prefix-cache-gib GIB",
        "maximum size of the prefix cache, for each base model, in addition to "
        "--kv-cache-gib; the least recently used prefixes are evicted. 0 turns the cache off. By "
        "default 1 on a CPU (less if the memory is small); on a GPU, an eighth of the memory that "
        "the weights and adapters leave",
        type=float,
    )
    add(
        "--share-prefix-cache",
        "let tenants use each other's cached prefixes. This saves time if they share a system "
        "prompt. It also reveals whether another tenant has sent a prompt with the same beginning, "
        "so a tenant can guess another tenant's prompts word by word",
        action="store_true",
    )
    add("--max-batch", "maximum number of samples in a batch (256; on a GPU up to 512)", type=int)
    add(
        "--micro-batch-tokens",
        "maximum number of training tokens in a micro-batch (4096; on a GPU up to 16384)",
        type=int,
    )
    add(
        "--deterministic",
        "samples are batch-invariant (bitwise reproducible), even where that costs "
        "speed (on a GPU, and on CPUs without our kernels)",
        action="store_true",
        default=None,
    )
    add(
        "--substitute-loss stable_reinforce=LOSS",
        "compute LOSS if a script requests stable_reinforce, whose formula is not public; "
        "responses and /metrics report the substitution",
        action="append",
        default=[],
        dest="substitute_losses",
    )


def options_of(arguments: argparse.Namespace) -> ServeOptions:
    """Return the parsed options. Raise UserError, which names the option, for a wrong value."""
    return ServeOptions(
        host=arguments.host,
        port=arguments.port,
        data_dir=arguments.data_dir,
        models=parse_pairs("--model", "NAME=PATH", arguments.model),
        api_key_file=arguments.api_key_file,
        engine=EngineSettings(
            device=arguments.device,
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            tensor_parallel=arguments.tensor_parallel,
            kv_cache_bytes=_gib_to_bytes("--kv-cache-gib", arguments.kv_cache_gib),
            prefix_cache_bytes=_gib_to_bytes(
                "--prefix-cache-gib", arguments.prefix_cache_gib, allow_zero=True
            ),
            share_prefix_cache=arguments.share_prefix_cache,
            max_batch=arguments.max_batch,
            micro_batch_tokens=arguments.micro_batch_tokens,
            deterministic=arguments.deterministic,
            substitute_losses=parse_pairs(
                "--substitute-loss", "LOSS=LOSS", arguments.substitute_losses
            ),
        ),
        settings=_parse_settings(parse_pairs("--set", "NAME=VALUE", arguments.settings)),
        hub_tokenizers=arguments.hub_tokenizers,
        poll_seconds=arguments.poll_seconds,
        log_format=arguments.log_format,
        log_level=arguments.log_level,
        allowed_origins=tuple(arguments.allowed_origins),
        public_url=arguments.public_url,
        truncate_max_tokens=arguments.truncate_max_tokens,
        adapter_dir=arguments.adapter_dir,
        console=arguments.console,
        replicas=arguments.replicas,
        ray=arguments.ray,
        sampler=arguments.sampler,
        model_aliases=parse_pairs("--model-alias", "NAME=PATH", arguments.model_aliases),
    )


def _parse_settings(values_by_name: Mapping[str, str]) -> ServerSettings:
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
