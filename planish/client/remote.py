"""`RemoteService` implements `Service` over HTTP, with the messages of planish/wire. So a script
runs unchanged on an engine in its own process or on a server.

    remote_model_queue  sends the operations of one model in order
    remote_samplers     samplers and sampling requests
    remote_session      begin, heartbeat and end of the session
    remote_connection   HTTP requests (remote_http) with retries (remote_retries)
    remote_thread       the event loop thread in which all of these run
    remote_tokenizer    a cache of downloaded tokenizers

There are three differences from an engine in this process:

- `submit` returns before the server has checked the operation. So an error that only the server can
  detect, such as a prompt that is too long, is raised by the future.
- The caller's ids of models and samplers are valid in this object only. Results and the paths of
  checkpoints contain the ids that the server uses.
- If the server restarts, the client waits for it. The server resumes the operations that it has
  accepted.
"""

import itertools
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast
from urllib.parse import quote

from planish.client.remote_connection import ServerConnection, normalize_url, resolve_api_key
from planish.client.remote_http import is_this_machine
from planish.client.remote_model_queue import ModelQueue, QueuedOperation
from planish.client.remote_retries import PATIENCE_SECONDS
from planish.client.remote_samplers import RemoteSampler, SampleSender
from planish.client.remote_session import RemoteSession
from planish.client.remote_thread import LoopThread
from planish.client.remote_tokenizer import cache_directory, cache_tokenizer
from planish.errors import CheckpointError, EngineClosedError, UnsupportedError, UserError
from planish.processes.background import wait_for_saves
from planish.service import (
    CheckpointInfo,
    CreateModel,
    CreateSampler,
    Operation,
    PublishSampler,
    ReleaseSampler,
    Sample,
    SamplerInfo,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.types import Checkpoint, CheckpointPath, GetServerCapabilitiesResponse
from planish.wire.fields import Fields
from planish.wire.operations import PostRequest
from planish.wire.records import (
    capabilities_from_json,
    checkpoint_from_json,
    lora_from_weights_info,
)

P = ParamSpec("P")
R = TypeVar("R")

_PAGE_SIZE = 1000


class RemoteService:
    """A `Service` whose engine is on a server."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Begin a session. `api_key` defaults to the environment's PLANISH_API_KEY, else
        TINKER_API_KEY, else no key.

        `patience_seconds` is how long the server may be unreachable, for instance during a restart,
        before waiting requests fail.
        """
        url = normalize_url(base_url)
        self._connection = ServerConnection(
            url, resolve_api_key(api_key), patience_seconds, compress=not is_this_machine(url)
        )
        self._thread = LoopThread("planish-remote", self._connection)
        try:
            self._session = self._thread.call(
                RemoteSession.begin, self._connection, user_metadata or {}
            )
        except BaseException:
            self._thread.stop()
            raise
        self._thread.spawn(self._session.keep_alive)
        self._sample_sender = SampleSender(self._connection, self._thread)
        self._thread.spawn(self._sample_sender.run)
        self._model_queues: dict[str, ModelQueue] = {}
        self._samplers: dict[str, RemoteSampler] = {}
        self._model_numbers, self._sampler_numbers = itertools.count(), itertools.count()
        self._tokenizers: dict[str, Path] = {}
        self._pending_futures: set[Future[Any]] = set()
        """The futures of unfinished operations."""
        self.pending_saves: set[Future[Any]] = set()
        """The futures among `_pending_futures` that save a checkpoint."""
        self._is_closed = False
        # `close` must see every submitted operation. The lock is reentrant, because garbage
        # collection within `submit` may release a sampler, which calls `submit` again.
        self._submit_lock = threading.RLock()
        # When this object is garbage-collected, its connection is closed. If the object still
        # exists at the exit of the interpreter, `at_exit` first waits for running saves and ends
        # the session.
        weakref.finalize(self, self._thread.stop).atexit = False
        self._thread.at_exit = _weak_close_callback(self)

    def submit(self, operation: Operation[R]) -> Future[R]:
        """Queue `operation` for the server. The future raises an error if the server rejects it."""
        if self._is_closed:
            raise _closed_error()
        if not self._thread.is_alive():
            raise EngineClosedError(
                "the connection to the server is closed, or belongs to the parent process; make a "
                "new ServiceClient here"
            )
        future: Future[Any] = Future()
        # Keep this object alive until the operation is finished: the caller of
        # `ServiceClient(...).create_sampling_client(...).sample(...)` has only the future.
        keep_alive = [self]
        future.add_done_callback(lambda _: keep_alive.clear())
        with self._submit_lock:
            if self._is_closed:
                raise _closed_error()
            self._pending_futures.add(future)
            future.add_done_callback(self._pending_futures.discard)
            if isinstance(operation, (SaveWeights, SaveWeightsForSampler)):
                self.pending_saves.add(future)
                future.add_done_callback(self.pending_saves.discard)
            try:
                self._dispatch(operation, future)
            except BaseException:
                self._pending_futures.discard(future)
                self.pending_saves.discard(future)
                raise
        return cast("Future[R]", future)

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the base models that the server offers."""
        return capabilities_from_json(self._get("/get_server_capabilities"))

    def sampler_info(self, sampler_id: str) -> SamplerInfo:
        """Wait until the server has created the sampler; return its base model and checkpoint."""
        return self._sampler(sampler_id).info_future.result()

    def tokenizer_directory(self, base_model: str) -> Path:
        """Return a local directory with the tokenizer, downloaded once from the server."""
        if base_model not in self._tokenizers:
            files = self._get("/tokenizer", {"base_model": base_model}).mapping("files")
            self._tokenizers[base_model] = cache_tokenizer(files, cache_directory())
        return self._tokenizers[base_model]

    def checkpoints(self, run_id: str | None = None) -> list[Checkpoint]:
        """Return the server's checkpoints of a run, or of all runs, newest first."""
        prefix = "" if run_id is None else f"/training_runs/{quote(run_id, safe=':')}"
        checkpoints: list[Checkpoint] = []
        offset = 0
        while True:
            page = self._get(f"{prefix}/checkpoints", {"limit": _PAGE_SIZE, "offset": offset})
            checkpoints += _checkpoints(page)
            # If the metadata are large, a server may send fewer checkpoints than requested.
            num_sent = len(page.array("checkpoints"))
            offset += num_sent
            cursor = page.optional(page.object, "cursor")
            if not num_sent or cursor is None or offset >= cursor.integer("total_count"):
                return checkpoints

    def checkpoint_info(self, path: str) -> CheckpointInfo:
        """Return the base model, LoRA configuration and description of the checkpoint at a
        tinker:// path.
        """
        parsed = CheckpointPath.parse(path)
        info = self._post(PostRequest.json("/weights_info", {"tinker_path": str(parsed)}))
        return CheckpointInfo(
            info.text("base_model"), lora_from_weights_info(info), self._checkpoint(parsed, info)
        )

    def delete_checkpoint(self, path: str) -> None:
        """Delete the checkpoint at a tinker:// path from the server."""
        parsed = CheckpointPath.parse(path)
        segment = parsed.checkpoint_id.partition("/")[0]
        run, name = quote(parsed.run_id, safe=":"), quote(parsed.name, safe=":")
        self._call(self._connection.delete, f"/training_runs/{run}/checkpoints/{segment}/{name}")

    def close(self, finish: bool = True) -> None:
        """End the session. With `finish`, wait for unfinished operations first; otherwise their
        futures fail, although the server may still run them.
        """
        with self._submit_lock:
            self._is_closed = True
        try:
            for future in list(self._pending_futures) if finish and self._thread.is_alive() else []:
                with suppress(Exception):
                    future.result()
        finally:
            with suppress(RuntimeError, EngineClosedError):  # already closed
                self._thread.call(self._session.finish, "success" if finish else "interrupted")
            self._thread.stop()
            self._fail_pending()

    # Sending an operation.

    def _dispatch(self, operation: Operation[Any], future: Future[Any]) -> None:
        match operation:
            case CreateModel():
                self._create_model(operation, future)
            case CreateSampler():
                sampler = self._new_sampler(operation.sampler_id)
                server_operation = replace(operation, sampler_id=sampler.server_id)
                self._thread.spawn(
                    self._sample_sender.create,
                    server_operation,
                    sampler,
                    QueuedOperation(server_operation, future),
                )
            case ReleaseSampler():
                sampler = self._sampler(operation.sampler_id)
                _remove_value(self._samplers, sampler)
                self._thread.spawn(self._sample_sender.release, sampler)
                future.set_result(None)
            case Sample():
                if operation.on_token is not None:
                    raise UnsupportedError(
                        "on_token: a server returns complete samples; use its /v1 endpoints to "
                        "stream tokens"
                    )
                if operation.logprob_token_ids:
                    raise UnsupportedError(
                        "logprob_token_ids: only an engine in this process has it; use the "
                        "server's /v1/completions"
                    )
                if operation.stop_gate is not None:
                    raise UnsupportedError("stop_gate: only an engine in this process has it")
                sampler = self._sampler(operation.sampler_id)
                self._thread.spawn(self._sample_sender.sample, operation, sampler, future)
            case PublishSampler():
                queue = self._model_queue(operation.model_id)
                sampler = self._new_sampler(operation.sampler_id)
                future.add_done_callback(lambda future: _set_sampler_info(sampler, queue, future))
                server_operation = replace(
                    operation, model_id=queue.model_id, sampler_id=sampler.server_id
                )
                self._thread.post(queue.put, QueuedOperation(server_operation, future))
            case _:
                self._dispatch_to_model(cast(Any, operation), future)

    def _create_model(self, operation: CreateModel, future: Future[Any]) -> None:
        server_id = f"{self._session.session_id}:train:{next(self._model_numbers)}"
        queue = ModelQueue(server_id, self._connection, self._thread)
        if self._model_queues.setdefault(operation.model_id, queue) is not queue:
            raise UserError(f"model_id={operation.model_id!r} is in use; give another")
        self._model_queues[server_id] = queue
        self._thread.spawn(queue.run)
        self._thread.post(
            queue.put, QueuedOperation(replace(operation, model_id=server_id), future)
        )

    def _dispatch_to_model(self, operation: Any, future: Future[Any]) -> None:
        queue = self._model_queue(operation.model_id)
        if isinstance(operation, UnloadModel):
            _remove_value(self._model_queues, queue)
        self._thread.post(
            queue.put, QueuedOperation(replace(operation, model_id=queue.model_id), future)
        )

    def _new_sampler(self, sampler_id: str) -> RemoteSampler:
        sampler = RemoteSampler(f"{self._session.session_id}:sample:{next(self._sampler_numbers)}")
        if self._samplers.setdefault(sampler_id, sampler) is not sampler:
            raise UserError(f"sampler_id={sampler_id!r} is in use; give another")
        self._samplers[sampler.server_id] = sampler
        return sampler

    def _model_queue(self, model_id: str) -> ModelQueue:
        queue = self._model_queues.get(model_id)
        if queue is None:
            raise UserError(
                f"model_id={model_id!r}: there is no such model, or it was unloaded; create one"
            )
        return queue

    def _sampler(self, sampler_id: str) -> RemoteSampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise UserError(
                f"sampler_id={sampler_id!r}: there is no such sampler, or it was released; create "
                "one"
            )
        return sampler

    def _checkpoint(self, path: CheckpointPath, info: Fields) -> Checkpoint:
        """Return the checkpoint in `info`. Servers other than planish's leave it out. In that case,
        find the checkpoint in the list of the run's checkpoints.
        """
        if info.has("checkpoint"):
            return checkpoint_from_json(info.object("checkpoint"))
        for checkpoint in self.checkpoints(path.run_id):
            if checkpoint.tinker_path == str(path):
                return checkpoint
        raise CheckpointError(
            f"{path} is no longer among the checkpoints of its run; give another path"
        )

    # Requests that block until the server answers.

    def _get(self, path: str, params: Mapping[str, str | int] | None = None) -> Fields:
        return Fields.of(self._call(self._connection.get, path, params).content)

    def _post(self, posted: PostRequest) -> Fields:
        return Fields.of(self._call(self._connection.post, posted).content)

    def _call(self, function: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._is_closed:
            raise _closed_error()
        return self._thread.call(function, *args, **kwargs)

    def _fail_pending(self) -> None:
        for future in list(self._pending_futures):
            with suppress(InvalidStateError):  # finished or cancelled just now
                future.set_exception(_closed_error())


def _remove_value(values_by_id: dict[str, R], removed: R) -> None:
    """Remove the value `removed` from a dictionary that has it under two keys: the caller's id and
    the server's id.
    """
    for name, value in list(values_by_id.items()):
        if value is removed:
            values_by_id.pop(name, None)


def _closed_error() -> EngineClosedError:
    return EngineClosedError(
        "the connection to the server was closed before this operation finished; make a new "
        "ServiceClient"
    )


def _set_sampler_info(
    sampler: RemoteSampler, queue: ModelQueue, publish_future: Future[str]
) -> None:
    """Set `sampler.ready` from the finished PublishSampler. This callback is added first, so it
    runs before callbacks of the caller.
    """
    if publish_future.cancelled():
        sampler.info_future.set_exception(
            UserError(
                f"sampler_id={sampler.server_id!r}: its creation was cancelled; create another one"
            )
        )
    elif (error := publish_future.exception()) is not None:
        sampler.info_future.set_exception(error)
    else:
        assert queue.info is not None
        sampler.info_future.set_result(
            SamplerInfo(publish_future.result(), queue.info.model_name, None)
        )


def _checkpoints(page: Fields) -> list[Checkpoint]:
    """Return the checkpoints of a page, except those of type `external`. They are made for
    downloads, and clients cannot load them.
    """
    return [
        checkpoint_from_json(fields)
        for fields in page.objects("checkpoints")
        if fields.text("checkpoint_type") != "external"
    ]


def _weak_close_callback(service: RemoteService) -> Callable[[], None]:
    """Return a function that waits for the service's pending checkpoints and then closes it. It
    does nothing if the service no longer exists.
    """
    reference = weakref.ref(service)

    def close() -> None:
        service = reference()
        if service is None:
            return
        try:
            wait_for_saves(list(service.pending_saves))
        finally:
            service.close(finish=False)

    return close
