"""The process of `planish serve`. It builds the engine, the server and the application, and runs
them on one socket.

By default the process listens on the loopback interface. Any other address requires keys. The
process finds configuration errors before it accepts requests: base models that cannot be served, a
data directory in use, an unreadable key file. SIGINT or SIGTERM stops the server gracefully
(http/graceful_stop.py), and the exit status is 0. A second signal kills the process at once.
Acknowledged requests are in the journal even then.

If the engine fails or hangs, the server stops too, and the exit status is `ENGINE_FAULT_STATUS`. A
supervisor such as systemd or a container runtime then starts it again, and it repeats the
acknowledged requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread, Timer
from types import FrameType

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from planish.engine.engine import Engine, HostedEngine
from planish.engine.memory import DeviceMemory, gib, main_memory_bytes
from planish.errors import UserError
from planish.files import make_directory
from planish.fleet.drained import read_drained
from planish.fleet.link import EngineOptions
from planish.fleet.plan import FleetPlan, check_replicas, plan_fleet
from planish.fleet.served import ServedFleet
from planish.fleet.vllm.engine import VllmEngine
from planish.fleet.vllm.options import VllmSampler, checked_sampler
from planish.model.sources.listing import list_models
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model
from planish.processes.stall_watch import StallWatch
from planish.server.engine_client import WARMUP_SAMPLE
from planish.server.garbage import GarbageCollector, freeze_objects
from planish.server.http import routes_fleet, routes_sampling, routes_uploads
from planish.server.http.access import AccessLog, RequestMetrics, set_up_logging
from planish.server.http.app import create_app
from planish.server.http.connections import (
    ConnectionLimits,
    ConnectionTable,
    protocol_class,
    raise_file_limit,
)
from planish.server.http.context import HttpState
from planish.server.http.graceful_stop import RESPONSE_SECONDS, STOP_SECONDS, drain
from planish.server.http.keys import read_keys
from planish.server.http.metrics_page import (
    EngineSamples,
    ReplicaMetrics,
    SubstitutedLosses,
    metrics_route,
)
from planish.server.memory_plan import (
    FleetMemoryPlan,
    MemoryPlan,
    device_memory,
    fleet_memory_plan,
    memory_plan,
    request_bytes,
)
from planish.server.openai import routes
from planish.server.openai.lora_adapters import LoraAdapters
from planish.server.openai.models import OpenAIModels
from planish.server.options import ServeOptions
from planish.server.server import Server
from planish.server.settings import HttpSettings
from planish.server.tokenizer_cache import cache_tokenizer, hub_names
from planish.server.uploads import ImportAdapter, Uploads

__all__ = ["ServeOptions", "serve"]

ConsoleRoutes = Callable[[Server, HttpSettings, OpenAIModels], list[BaseRoute]]
"""Returns the routes of the console's pages."""

_KEEP_ALIVE_SECONDS = 120
"""How long the server keeps idle connections open. Clients close idle connections earlier. If the
server closed them first, a client might send a request on a connection that is being closed.
"""
_BACKLOG = 2048
"""The number of connections that the kernel queues until the server accepts them."""
_FEW_CONNECTIONS = 512
"""The server logs a warning if it can have fewer connections than this."""
_ACCEPT_BATCH = 64
"""The number of connections that asyncio accepts before the server can count them. It is less than
the number of file descriptors that stay free of connections (`RESERVED_FILES` in
http/connections.py). So a burst of connections does not exhaust the open files.
"""
ENGINE_FAULT_STATUS = 70
"""The exit status after a fault of the engine (EX_SOFTWARE)."""
_FAULT_EXIT_SECONDS = 3 * STOP_SECONDS
"""After a fault of the engine, the process exits within this time, even if its shutdown hangs."""
_STALL_EXIT_SECONDS = 10.0
"""After the server has detected that the engine hangs, the process exits within this time."""
_TICKS_PER_SECOND = 10
"""How often uvicorn calls `on_tick`."""

_GIL_SWITCH_SECONDS = 5e-5
"""Python's switch interval in seconds. The event loop takes the interpreter lock several times per
request, and the engine dozens of times per sampled token. Each time, a thread that decodes a large
body may delay them by up to this interval.
"""

_MANY_SAMPLES = 64
"""With more running samples than this, a full garbage collection is postponed. One took 150 ms with
100 requests of 20 samples.
"""

_log = logging.getLogger("planish.server")


@dataclass(frozen=True)
class _CheckedOptions:
    """The checked options, and the values that are derived from them before the server starts."""

    options: ServeOptions
    models: Mapping[str, Path]
    data_dir: Path
    keys: Mapping[str, str] | None
    memory: DeviceMemory | None
    plan: MemoryPlan | None
    """The memory and its plan; None for replicas, which plan the memory of their own devices."""
    requests: int
    """The limit for requests and results, in bytes."""
    fleet: FleetPlan | None
    """The replicas to start; None for one engine in this process."""
    vllm: VllmSampler | None
    """What samples instead of the engine."""


def serve(
    options: ServeOptions,
    import_adapter: ImportAdapter | None = None,
    console_routes: ConsoleRoutes | None = None,
) -> int:
    """Run the server until it stops, and return the exit status of the process: 0 after a graceful
    stop. `import_adapter` is that of export/importing.py; without it, nothing can be uploaded.
    `console_routes` is that of console/server_app.py, for `ServeOptions.console`.
    """
    set_up_logging(options.log_format, options.log_level)
    sys.setswitchinterval(_GIL_SWITCH_SECONDS)
    checked = _check_options(options)
    connections = ConnectionTable(
        ConnectionLimits.from_max_files(raise_file_limit(), has_keys=checked.keys is not None)
    )
    if connections.limits.total < _FEW_CONNECTIONS:
        _log.warning(
            "only %d connections fit into this process's limit of open files, and each waiting "
            "request holds one; raise the limit (ulimit -Hn, LimitNOFILE of systemd)",
            connections.limits.total,
        )
    with _listener(options.host, options.port) as listener:
        _log_models(checked)
        if checked.plan is not None:
            _log_plan(checked.plan)
        if options.hub_tokenizers:
            for name, path in checked.models.items():
                for hub_name in hub_names(name):
                    cache_tokenizer(hub_name, path)
        engine = _start_engine(checked)
        if isinstance(engine, ServedFleet):
            _log_plan(fleet_memory_plan(engine, options.settings, checked.requests))
        server = _UvicornServer(
            _application(engine, checked, import_adapter, console_routes),
            engine,
            checked,
            connections,
        )
        server.run([listener])
    if server.fault is not None:
        return ENGINE_FAULT_STATUS
    return 0 if server.was_ready else 1


def _check_options(options: ServeOptions) -> _CheckedOptions:
    vllm = checked_sampler(options.sampler, options.replicas, options.ray)
    models = _model_directories(options.models)
    keys = None if options.api_key_file is None else read_keys(options.api_key_file)
    directory = options.data_dir.expanduser().absolute()
    try:
        make_directory(directory, 0o700)  # prompts and training data of all tenants
    except OSError as error:
        raise UserError(
            f"--data-dir {directory}: it cannot be created ({error}); give another directory"
        ) from error
    requests = request_bytes(models, options.settings)
    fleet = memory = plan = None
    if options.replicas is None and options.ray is None:
        memory = device_memory(models, options.engine, options.settings)
        plan = memory_plan(models, memory, options.settings)
    else:
        check_replicas(options.engine.device, options.replicas, options.engine.tensor_parallel)
        fleet = plan_fleet(
            options.engine.device, options.replicas, options.ray, read_drained(directory)
        )
    return _CheckedOptions(options, models, directory, keys, memory, plan, requests, fleet, vllm)


def _start_engine(checked: _CheckedOptions) -> HostedEngine:
    """Start an engine in this process, or the replicas."""
    options = checked.options
    directories = {name: str(path) for name, path in checked.models.items()}
    if checked.vllm is not None:
        return VllmEngine(
            checked.vllm,
            directories,
            checked.data_dir,
            options.engine,
            checked.memory,
            only_these_models=True,
        )
    if checked.fleet is None:
        return Engine(
            directories, checked.data_dir, options.engine, checked.memory, only_these_models=True
        )
    settings = options.settings
    engine_options = EngineOptions(
        directories, str(checked.data_dir), asdict(options.engine), settings.adapter_memory_bytes
    )
    fleet = checked.fleet.start_served(engine_options, settings.engine_stall_timeout)
    _log.info("%d replicas are started", len(fleet.replicas.live()))
    for number in sorted(checked.fleet.drained):
        _log.warning("replica %d is drained and not started; `planish fleet add` does it", number)
    return fleet


def _application(
    engine: HostedEngine,
    checked: _CheckedOptions,
    import_adapter: ImportAdapter | None,
    console_routes: ConsoleRoutes | None,
) -> Starlette:
    options, models = checked.options, checked.models
    server = Server(engine, checked.data_dir, list(models), options.settings)
    http = HttpSettings(
        options.poll_seconds,
        models,
        checked.keys,
        options.allowed_origins,
        options.public_url,
        options.truncate_max_tokens,
    )
    openai_models = OpenAIModels(server, models, options.model_aliases)
    registry = CollectorRegistry()
    registry.register(SubstitutedLosses(engine.substitutions))
    other_routes: list[BaseRoute] = [
        *routes_sampling.PLANISH_ROUTES,
        *routes.routes(
            openai_models,
            has_adapter_routes=import_adapter is not None and options.adapter_dir is not None,
        ),
        metrics_route(registry),
        *routes_fleet.FleetRoutes(server, engine).routes(),
    ]
    if isinstance(engine, ServedFleet):
        registry.register(ReplicaMetrics(engine.status))
    if isinstance(engine, VllmEngine):
        registry.register(EngineSamples(engine.engine_samples))
    if import_adapter is not None:
        uploads = Uploads(server, models, import_adapter)
        other_routes += routes_uploads.routes(uploads)
        if options.adapter_dir is not None:
            adapters = LoraAdapters(server, uploads, options.adapter_dir, options.model_aliases)
            other_routes += adapters.routes()
    if options.console and console_routes is not None:
        other_routes += console_routes(server, http, openai_models)
    app = create_app(server, http, other_routes)
    app.add_middleware(AccessLog, metrics=RequestMetrics(registry))
    return app


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that logs when it is ready and then loads the base models. It stops as
    described in http/graceful_stop.py, also after a fault of the engine.
    """

    def __init__(
        self,
        app: Starlette,
        engine: HostedEngine,
        checked: _CheckedOptions,
        connections: ConnectionTable,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                log_config=None,
                access_log=False,
                http=protocol_class(connections),
                ws="none",
                backlog=_ACCEPT_BATCH,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=RESPONSE_SECONDS,
            )
        )
        self.was_ready = False
        self.fault: str | None = None
        """Why the engine failed, if the server stops for that reason."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine = engine
        self._check_options = checked
        self._http: HttpState = app.state.http
        self._connections = connections
        self._stall_watch = StallWatch(checked.options.settings.engine_stall_timeout)
        self._collector = GarbageCollector()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, log that it is ready, and begin to load the base models."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.was_ready = self.started
        if self.started and self.should_exit:
            # A signal arrived during the start. uvicorn does not shut down in this case.
            await self.shutdown(sockets)
        elif self.started and sockets:
            for listener in sockets:
                # uvicorn passed _ACCEPT_BATCH to asyncio, which also used it as the backlog.
                listener.listen(_BACKLOG)
            freeze_objects()
            _log_ready(_url(sockets[0]), self._check_options)
            notify("READY=1")
            self._http.is_loading = True
            Thread(target=self._load_models, name="planish-load").start()

    async def on_tick(self, counter: int) -> bool:
        """Stop the server if the engine has failed. Every second, notify the watchdog of systemd,
        close overdue connections, and check whether the engine hangs.
        """
        if counter % _TICKS_PER_SECOND == 0 and self._stall_watch.is_stalled(
            self._engine.progress()
        ):
            self._report_stall()
        fault = self._http.server.engine.fault
        if fault is not None and not self.should_exit:
            self.fault = fault
            _log.critical(
                "stopping with exit status %d, because the engine failed; acknowledged requests "
                "stay in the journal, and the next start repeats them",
                ENGINE_FAULT_STATUS,
            )
            _end_process_after(_FAULT_EXIT_SECONDS)
            self.should_exit = True
            self._http.stopping.set()
        if counter % _TICKS_PER_SECOND == 0:
            notify("WATCHDOG=1")
            self._connections.close_overdue()
            self._collector.tick(is_busy=self._has_many_objects)
        return await super().on_tick(counter)

    @property
    def _has_many_objects(self) -> bool:
        """Whether a full garbage collection would take long: large bodies are being decoded, or many
        samples are running.
        """
        num_samples = self._http.server.sampling_queue.used_slots
        return self._http.decoding_queue.used_slots > 0 or num_samples > _MANY_SAMPLES

    def _report_stall(self) -> None:
        client = self._http.server.engine
        if client.fault is not None:
            return
        timeout = self._check_options.options.settings.engine_stall_timeout
        client.fail(
            f"it has made no progress for {timeout:g} s (engine_stall_timeout). The engine thread "
            f"is at:\n{self._engine.thread_stack()}"
        )
        # A graceful stop would wait for the engine. Everything acknowledged is in the journal.
        _end_process_after(_STALL_EXIT_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell systemd that the server stops, finish the running work, and shut down."""
        notify("STOPPING=1")
        await drain(self._http)
        await super().shutdown(sockets)

    def _load_models(self) -> None:
        """Load each base model before the first client needs it. If a base model cannot be loaded,
        only its own requests fail.
        """
        for name in self._check_options.models:
            begun = time.monotonic()
            if self.should_exit:
                return
            try:
                self._engine.check_sample(name, WARMUP_SAMPLE)
            except Exception as error:
                _log.error("%s cannot be served: %s", name, error)
            else:
                _log.info("%s loaded in %.1f s", name, time.monotonic() - begun)
        freeze_objects()
        self._http.is_loading = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop gracefully at the first signal, and end the process at the second. Unlike uvicorn's
        method, this does not raise the first signal again, so the exit status of a graceful stop
        is 0.
        """
        if self.should_exit:
            # Before the flush, which may take long: a third signal ends it.
            signal.signal(sig, signal.SIG_DFL)
            _log.warning("ending at once, because of a second signal")
            for handler in logging.getLogger().handlers:
                handler.flush()
            signal.raise_signal(sig)
        _log.info(
            "stopping; running requests are finished or kept in the journal. Another signal ends "
            "the process at once"
        )
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._http.stopping.set)


def _end_process_after(seconds: float) -> None:
    """End the process with ENGINE_FAULT_STATUS after `seconds`, even if its shutdown hangs."""

    def end_process() -> None:
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(ENGINE_FAULT_STATUS)

    end = Timer(seconds, end_process)
    end.daemon = True
    end.start()


def _model_directories(mapping: Mapping[str, str]) -> dict[str, Path]:
    """Return the directories of all base models, by name. The default model is added if it is
    cached. It is also added, and downloaded if necessary, if there is no other base model.
    """
    models = {name: resolve_model(name, mapping) for name in mapping}
    if DEFAULT_MODEL in models:
        return models
    if models and not any(
        entry.name == DEFAULT_MODEL and entry.is_local for entry in list_models()
    ):
        return models
    return {**models, DEFAULT_MODEL: resolve_model(DEFAULT_MODEL)}


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # Accepted sockets inherit TCP_NODELAY from this socket. asyncio does not set the option
        # here, because `create_server` makes a socket with protocol number 0 instead of
        # IPPROTO_TCP. A response's body is sent after its headers. Without TCP_NODELAY, the body
        # would wait 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UserError(
            f"cannot listen on --host {host} --port {port} ({error}); give another address, or "
            "port 0"
        ) from error


def _url(listener: socket.socket) -> str:
    """Return the server's URL, with the name of this machine if the server listens on every
    address.
    """
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _log_models(checked: _CheckedOptions) -> None:
    for name, path in checked.models.items():
        _log.info("base model %s from %s", name, path)
    _log.info("data in %s", checked.data_dir)


def _log_plan(plan: MemoryPlan | FleetMemoryPlan) -> None:
    for line in str(plan).splitlines():
        _log.info("%s", line)
    limit = main_memory_bytes()
    if limit is not None and plan.main_memory > limit:
        _log.warning(
            "the server may need up to %s of main memory, but has %s, so the kernel may kill it "
            "under load; lower adapter_memory_bytes (--set), --kv-cache-gib or "
            "--micro-batch-tokens, or raise the limit (MemoryMax of the systemd unit, "
            "--memory of the container)",
            gib(plan.main_memory),
            gib(limit),
        )


def _log_ready(url: str, checked: _CheckedOptions) -> None:
    file = checked.options.api_key_file
    key = "tml-any" if file is None else "KEY"
    access_note = (
        "; it has no keys, and serves programs on this machine only"
        if file is None
        else f", with a KEY from {file}"
    )
    _log.info("ready at %s", url)
    if checked.options.console:
        _log.info("console at %s/console/", checked.options.public_url or url)
    _log.info(
        "use it with the tinker SDK: TINKER_BASE_URL=%s TINKER_API_KEY=%s%s", url, key, access_note
    )


def notify(state: str) -> None:
    """Send a state such as "READY=1" to systemd (sd_notify), if systemd started this process."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        # A leading @ stands for the abstract namespace, in which a name begins with a zero byte.
        sender.sendto(state.encode(), address.replace("@", "\0", 1))
