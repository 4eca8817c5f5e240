"""`RemoteService` implements `Service` over HTTP, with the messages of planish/wire. So a script
runs unchanged on an engine in its own process or on a server.

    remote_model_queue  sends the operations of one model in order
    remote_samplers     samplers and sampling requests
    remote_session      begin, heartbeat and end of the session
    remote_link         HTTP requests (remote_http) with retries (remote_retries)
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

from __future__ import annotations

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

from planish.client.remote_http import is_this_machine
from planish.client.remote_link import Link, normalize_url, resolve_api_key
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
from planish.wire.operations import Posted
from planish.wire.records import (
    capabilities_from_json,
    checkpoint_from_json,
    lora_from_weights_info,
)

P = ParamSpec("P")
R = TypeVar("R")

_PAGE = 1000


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
        self._link = Link(
            url, resolve_api_key(api_key), patience_seconds, compress=not is_this_machine(url)
        )
        self._thread = LoopThread("planish-remote", self._link)
        try:
            self._session = self._thread.call(RemoteSession.begin, self._link, user_metadata or {})
        except BaseException:
            self._thread.stop()
            raise
        self._thread.spawn(self._session.keep_alive)
        self._sample_sender = SampleSender(self._link, self._thread)
        self._thread.spawn(self._sample_sender.run)
        self._models: dict[str, ModelQueue] = {}
        self._samplers: dict[str, RemoteSampler] = {}
        self._model_numbers, self._sampler_numbers = itertools.count(), itertools.count()
        self._tokenizers: dict[str, Path] = {}
        self._open: set[Future[Any]] = set()
        """The futures of unfinished operations."""
        self._saves: set[Future[Any]] = set()
        """The futures among `_open` that save a checkpoint."""
        self._is_closed = False
        # `close` must see every submitted operation. The lock is reentrant, because garbage
        # collection within `submit` may release a sampler, which calls `submit` again.
        self._submit_lock = threading.RLock()
        # When this object is garbage-collected, its connection is closed. If the object still
        # exists at the exit of the interpreter, `at_exit` first waits for running saves and ends
        # the session.
        weakref.finalize(self, self._thread.stop).atexit = False
        self._thread.at_exit = _weak_close(self)

    def submit(self, operation: Operation[R]) -> Future[R]:
        """Queue `operation` for the server. The future raises an error if the server rejects it."""
        if self._is_closed:
            raise _closed_error()
        if not self._thread.is_alive():
            raise EngineClosedError(
                "the connection to the server is closed, or belongs to the parent process; make a "
                "new ServiceClient here"
            )
        answer: Future[Any] = Future()
        # Keep this object alive until the operation is finished: the caller of
        # `ServiceClient(...).create_sampling_client(...).sample(...)` has only the future.
        keep_alive = [self]
        answer.add_done_callback(lambda _: keep_alive.clear())
        with self._submit_lock:
            if self._is_closed:
                raise _closed_error()
            self._open.add(answer)
            answer.add_done_callback(self._open.discard)
            if isinstance(operation, (SaveWeights, SaveWeightsForSampler)):
                self._saves.add(answer)
                answer.add_done_callback(self._saves.discard)
            try:
                self._dispatch(operation, answer)
            except BaseException:
                self._open.discard(answer)
                self._saves.discard(answer)
                raise
        return cast("Future[R]", answer)

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the base models that the server offers."""
        return capabilities_from_json(self._read("/get_server_capabilities"))

    def sampler_info(self, sampler_id: str) -> SamplerInfo:
        """Wait until the server has created the sampler; return its base model and checkpoint."""
        return self._sampler(sampler_id).ready.result()

    def tokenizer_directory(self, base_model: str) -> Path:
        """Return a local directory with the tokenizer, downloaded once from the server."""
        if base_model not in self._tokenizers:
            files = self._read("/tokenizer", {"base_model": base_model}).mapping("files")
            self._tokenizers[base_model] = cache_tokenizer(files, cache_directory())
        return self._tokenizers[base_model]

    def checkpoints(self, run_id: str | None = None) -> list[Checkpoint]:
        """Return the server's checkpoints of a run, or of all runs, newest first."""
        prefix = "" if run_id is None else f"/training_runs/{quote(run_id, safe=':')}"
        found: list[Checkpoint] = []
        offset = 0
        while True:
            page = self._read(f"{prefix}/checkpoints", {"limit": _PAGE, "offset": offset})
            found += _checkpoints(page)
            # If the metadata are large, a server may send fewer checkpoints than requested.
            sent = len(page.array("checkpoints"))
            offset += sent
            cursor = page.optional(page.object, "cursor")
            if not sent or cursor is None or offset >= cursor.integer("total_count"):
                return found

    def checkpoint_info(self, path: str) -> CheckpointInfo:
        """Return the base model, LoRA configuration and description of the checkpoint at a
        tinker:// path.
        """
        parsed = CheckpointPath.parse(path)
        info = self._post(Posted.json("/weights_info", {"tinker_path": str(parsed)}))
        return CheckpointInfo(
            info.text("base_model"), lora_from_weights_info(info), self._checkpoint(parsed, info)
        )

    def delete_checkpoint(self, path: str) -> None:
        """Delete the checkpoint at a tinker:// path from the server."""
        parsed = CheckpointPath.parse(path)
        segment = parsed.checkpoint_id.partition("/")[0]
        run, name = quote(parsed.run_id, safe=":"), quote(parsed.name, safe=":")
        self._call(self._link.delete, f"/training_runs/{run}/checkpoints/{segment}/{name}")

    def close(self, finish: bool = True) -> None:
        """End the session. With `finish`, wait for unfinished operations first; otherwise their
        futures fail, although the server may still run them.
        """
        with self._submit_lock:
            self._is_closed = True
        try:
            for answer in list(self._open) if finish and self._thread.is_alive() else []:
                with suppress(Exception):
                    answer.result()
        finally:
            with suppress(RuntimeError, EngineClosedError):  # already closed
                self._thread.call(self._session.finish, "success" if finish else "interrupted")
            self._thread.stop()
            self._fail_open()

    # Sending an operation.

    def _dispatch(self, operation: Operation[Any], answer: Future[Any]) -> None:
        match operation:
            case CreateModel():
                self._create_model(operation, answer)
            case CreateSampler():
                sampler = self._new_sampler(operation.sampler_id)
                named = replace(operation, sampler_id=sampler.server_id)
                self._thread.spawn(
                    self._sample_sender.create, named, sampler, QueuedOperation(named, answer)
                )
            case ReleaseSampler():
                sampler = self._sampler(operation.sampler_id)
                _remove_value(self._samplers, sampler)
                self._thread.spawn(self._sample_sender.release, sampler)
                answer.set_result(None)
            case Sample():
                if operation.on_token is not None:
                    raise UnsupportedError(
                        "on_token: a server returns complete samples; use its /v1 endpoints to "
                        "stream tokens"
                    )
                sampler = self._sampler(operation.sampler_id)
                self._thread.spawn(self._sample_sender.sample, operation, sampler, answer)
            case PublishSampler():
                queue = self._model_queue(operation.model_id)
                sampler = self._new_sampler(operation.sampler_id)
                answer.add_done_callback(lambda answer: _set_ready(sampler, queue, answer))
                named = replace(operation, model_id=queue.model_id, sampler_id=sampler.server_id)
                self._thread.post(queue.put, QueuedOperation(named, answer))
            case _:
                self._dispatch_to_model(cast(Any, operation), answer)

    def _create_model(self, operation: CreateModel, answer: Future[Any]) -> None:
        server_id = f"{self._session.session_id}:train:{next(self._model_numbers)}"
        queue = ModelQueue(server_id, self._link, self._thread)
        if self._models.setdefault(operation.model_id, queue) is not queue:
            raise UserError(f"model_id={operation.model_id!r} is in use; give another")
        self._models[server_id] = queue
        self._thread.spawn(queue.work)
        self._thread.post(
            queue.put, QueuedOperation(replace(operation, model_id=server_id), answer)
        )

    def _dispatch_to_model(self, operation: Any, answer: Future[Any]) -> None:
        queue = self._model_queue(operation.model_id)
        if isinstance(operation, UnloadModel):
            _remove_value(self._models, queue)
        self._thread.post(
            queue.put, QueuedOperation(replace(operation, model_id=queue.model_id), answer)
        )

    def _new_sampler(self, sampler_id: str) -> RemoteSampler:
        sampler = RemoteSampler(f"{self._session.session_id}:sample:{next(self._sampler_numbers)}")
        if self._samplers.setdefault(sampler_id, sampler) is not sampler:
            raise UserError(f"sampler_id={sampler_id!r} is in use; give another")
        self._samplers[sampler.server_id] = sampler
        return sampler

    def _model_queue(self, model_id: str) -> ModelQueue:
        queue = self._models.get(model_id)
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

    def _read(self, path: str, params: Mapping[str, str | int] | None = None) -> Fields:
        return Fields.of(self._call(self._link.get, path, params).content)

    def _post(self, posted: Posted) -> Fields:
        return Fields.of(self._call(self._link.post, posted).content)

    def _call(self, function: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._is_closed:
            raise _closed_error()
        return self._thread.call(function, *args, **kwargs)

    def _fail_open(self) -> None:
        for answer in list(self._open):
            with suppress(InvalidStateError):  # finished or cancelled just now
                answer.set_exception(_closed_error())


def _remove_value(known: dict[str, R], removed: R) -> None:
    """Remove `removed` from a dictionary in which it has two keys, the caller's id and the
    server's.
    """
    for name, value in list(known.items()):
        if value is removed:
            known.pop(name, None)


def _closed_error() -> EngineClosedError:
    return EngineClosedError(
        "the connection to the server was closed before this operation finished; make a new "
        "ServiceClient"
    )


def _set_ready(sampler: RemoteSampler, queue: ModelQueue, published: Future[str]) -> None:
    """Set `sampler.ready` from the finished PublishSampler. This callback is added first, so it
    runs before callbacks of the caller.
    """
    if published.cancelled():
        sampler.ready.set_exception(
            UserError(
                f"sampler_id={sampler.server_id!r}: its creation was cancelled; create another one"
            )
        )
    elif (error := published.exception()) is not None:
        sampler.ready.set_exception(error)
    else:
        assert queue.info is not None
        sampler.ready.set_result(SamplerInfo(published.result(), queue.info.model_name, None))


def _checkpoints(page: Fields) -> list[Checkpoint]:
    """Return the checkpoints of a page, except external ones, which clients cannot load."""
    return [
        checkpoint_from_json(fields)
        for fields in page.objects("checkpoints")
        if fields.text("checkpoint_type") != "external"
    ]


def _weak_close(service: RemoteService) -> Callable[[], None]:
    """Return a function that waits for the service's pending checkpoints and then closes it. It
    does nothing if the service no longer exists.
    """
    reference = weakref.ref(service)

    def close() -> None:
        service = reference()
        if service is None:
            return
        try:
            wait_for_saves(list(service._saves))
        finally:
            service.close(finish=False)

    return close
