"""`Service` on a server: the same operations, over the protocol of planish/wire, so that a script
runs near or far unchanged.

    remote_checks     what is wrong before anything is sent
    remote_lane       the operations of one model, in order
    remote_samplers   samplers and samples
    remote_session    how the session begins, lives and ends
    remote_link       HTTP (remote_http), repeated until it is answered (remote_patience)
    remote_thread     the event loop in which all of that runs
    remote_tokenizer  tokenizers, fetched once

What differs from an engine in this process: `submit` returns before the server has looked, so what
only the server can see to be wrong (a prompt that is too long, say) comes through the future. The
caller's ids of models and samplers are names in this object; the server's own, with which paths of
checkpoints begin, are in what operations answer. A server that is restarted is waited for; what it
had acknowledged goes on.
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

from planish.client.remote_checks import check
from planish.client.remote_http import is_this_machine
from planish.client.remote_lane import Entry, Lane
from planish.client.remote_link import Link, checked_key, checked_url
from planish.client.remote_patience import PATIENCE_SECONDS
from planish.client.remote_samplers import Drawing, RemoteSampler
from planish.client.remote_session import RemoteSession
from planish.client.remote_thread import LoopThread
from planish.client.remote_tokenizer import cache_directory, keep_tokenizer
from planish.errors import CheckpointError, EngineClosedError, UserError
from planish.processes.background import wait_for_saves
from planish.service import (
    CheckpointInfo,
    CreateModel,
    CreateSampler,
    ForwardBackward,
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
from planish.wire.client_operations import Posted
from planish.wire.fields import Fields
from planish.wire.records import (
    capabilities_from_json,
    checkpoint_from_json,
    lora_from_weights_info,
)

P = ParamSpec("P")
R = TypeVar("R")

_PAGE = 1000


class RemoteService:
    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Begin a session. `api_key`: by default PLANISH_API_KEY, else TINKER_API_KEY of the
        environment, else none.

        `patience_seconds`: for so long a server may be away, to be restarted, before what waits for
        it fails.
        """
        url = checked_url(base_url)
        self._link = Link(
            url, checked_key(api_key), patience_seconds, compress=not is_this_machine(url)
        )
        self._thread = LoopThread("planish-remote", self._link)
        try:
            self._session = self._thread.call(RemoteSession.begin, self._link, user_metadata or {})
        except BaseException:
            self._thread.stop()
            raise
        self._thread.spawn(self._session.keep_alive)
        self._drawing = Drawing(self._link, self._thread)
        self._thread.spawn(self._drawing.run)
        self._models: dict[str, Lane] = {}
        self._samplers: dict[str, RemoteSampler] = {}
        self._model_numbers, self._sampler_numbers = itertools.count(), itertools.count()
        self._tokenizers: dict[str, Path] = {}
        self._open: set[Future[Any]] = set()
        """Not answered yet."""
        self._saves: set[Future[Any]] = set()
        """Those of them that are checkpoints."""
        self._is_closed = False
        # So that `close` knows of every operation that is given. Reentrant: a sampler may be
        # collected, and so released, within `submit`.
        self._giving = threading.RLock()
        # One that nobody can reach any more lets go of its connection; at exit, one that is left
        # waits for its checkpoints and tells the server.
        weakref.finalize(self, self._thread.stop).atexit = False
        self._thread.at_exit = _weak_close(self)

    def submit(self, operation: Operation[R]) -> Future[R]:
        """As `Service.submit`, but it reads nothing, and checks no more than it can see."""
        if self._is_closed:
            raise _closed()
        if not self._thread.is_alive():
            raise EngineClosedError(
                "the connection to the server is gone, or in the process that this one was forked from; make a new ServiceClient here"
            )
        check(operation)
        operation = _kept(operation)
        answer: Future[Any] = Future()
        # Until it is answered: of `ServiceClient(...).create_sampling_client(...).sample(...)` the
        # caller holds the future alone.
        kept = [self]
        answer.add_done_callback(lambda _: kept.clear())
        with self._giving:
            if self._is_closed:
                raise _closed()
            self._open.add(answer)
            answer.add_done_callback(self._open.discard)
            if isinstance(operation, (SaveWeights, SaveWeightsForSampler)):
                self._saves.add(answer)
                answer.add_done_callback(self._saves.discard)
            try:
                self._give(operation, answer)
            except BaseException:
                self._open.discard(answer)
                self._saves.discard(answer)
                raise
        return cast("Future[R]", answer)

    def capabilities(self) -> GetServerCapabilitiesResponse:
        return capabilities_from_json(self._read("/get_server_capabilities"))

    def sampler_info(self, sampler_id: str) -> SamplerInfo:
        return self._sampler(sampler_id).ready.result()

    def tokenizer_directory(self, base_model: str) -> Path:
        if base_model not in self._tokenizers:
            files = self._read("/tokenizer", {"base_model": base_model}).mapping("files")
            self._tokenizers[base_model] = keep_tokenizer(files, cache_directory())
        return self._tokenizers[base_model]

    def checkpoints(self, run_id: str | None = None) -> list[Checkpoint]:
        if run_id is not None:
            return _checkpoints(self._read(f"/training_runs/{quote(run_id, safe=':')}/checkpoints"))
        found: list[Checkpoint] = []
        for offset in itertools.count(0, _PAGE):
            page = self._read("/checkpoints", {"limit": _PAGE, "offset": offset})
            found += _checkpoints(page)
            if len(page.array("checkpoints")) < _PAGE:
                return found
        raise AssertionError("there is no end of pages")

    def checkpoint_info(self, path: str) -> CheckpointInfo:
        parsed = CheckpointPath.parse(path)
        info = self._post(Posted.json("/weights_info", {"tinker_path": str(parsed)}))
        return CheckpointInfo(
            info.text("base_model"), lora_from_weights_info(info), self._checkpoint(parsed, info)
        )

    def delete_checkpoint(self, path: str) -> None:
        parsed = CheckpointPath.parse(path)
        segment = parsed.checkpoint_id.partition("/")[0]
        run, name = quote(parsed.run_id, safe=":"), quote(parsed.name, safe=":")
        self._call(self._link.delete, f"/training_runs/{run}/checkpoints/{segment}/{name}")

    def close(self, finish: bool = True) -> None:
        """End the session. `finish`: wait for what is under way first; otherwise it fails, though
        the server may still do it.
        """
        with self._giving:
            self._is_closed = True
        try:
            for answer in list(self._open) if finish and self._thread.is_alive() else []:
                with suppress(Exception):
                    answer.result()
        finally:
            with suppress(RuntimeError, EngineClosedError):  # it was closed before
                self._thread.call(self._session.finish, "success" if finish else "interrupted")
            self._thread.stop()
            self._fail_open()

    # What `submit` does with an operation that can be sent.

    def _give(self, operation: Operation[Any], answer: Future[Any]) -> None:
        match operation:
            case CreateModel():
                self._create_model(operation, answer)
            case CreateSampler():
                sampler = self._new_sampler(operation.sampler_id)
                named = replace(operation, sampler_id=sampler.server_id)
                self._thread.spawn(self._drawing.create, named, sampler, Entry(named, answer))
            case ReleaseSampler():
                sampler = self._sampler(operation.sampler_id)
                _forget(self._samplers, sampler)
                self._thread.spawn(self._drawing.release, sampler)
                answer.set_result(None)
            case Sample():
                sampler = self._sampler(operation.sampler_id)
                self._thread.spawn(self._drawing.sample, operation, sampler, answer)
            case PublishSampler():
                lane, sampler = (
                    self._lane(operation.model_id),
                    self._new_sampler(operation.sampler_id),
                )
                answer.add_done_callback(lambda answer: _settle(sampler, lane, answer))
                named = replace(operation, model_id=lane.model_id, sampler_id=sampler.server_id)
                self._thread.post(lane.put, Entry(named, answer))
            case _:
                self._give_to_model(cast(Any, operation), answer)

    def _create_model(self, operation: CreateModel, answer: Future[Any]) -> None:
        server_id = f"{self._session.session_id}:train:{next(self._model_numbers)}"
        lane = Lane(server_id, self._link, self._thread)
        if self._models.setdefault(operation.model_id, lane) is not lane:
            raise UserError(f"model_id={operation.model_id!r} is in use; give another")
        self._models[server_id] = lane
        self._thread.spawn(lane.work)
        self._thread.post(lane.put, Entry(replace(operation, model_id=server_id), answer))

    def _give_to_model(self, operation: Any, answer: Future[Any]) -> None:
        lane = self._lane(operation.model_id)
        if isinstance(operation, UnloadModel):
            _forget(self._models, lane)
        self._thread.post(lane.put, Entry(replace(operation, model_id=lane.model_id), answer))

    def _new_sampler(self, sampler_id: str) -> RemoteSampler:
        sampler = RemoteSampler(f"{self._session.session_id}:sample:{next(self._sampler_numbers)}")
        if self._samplers.setdefault(sampler_id, sampler) is not sampler:
            raise UserError(f"sampler_id={sampler_id!r} is in use; give another")
        self._samplers[sampler.server_id] = sampler
        return sampler

    def _lane(self, model_id: str) -> Lane:
        lane = self._models.get(model_id)
        if lane is None:
            raise UserError(
                f"model_id={model_id!r}: there is no such model (or it was unloaded); create one"
            )
        return lane

    def _sampler(self, sampler_id: str) -> RemoteSampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise UserError(
                f"sampler_id={sampler_id!r}: there is no such sampler (or it was released); create one"
            )
        return sampler

    def _checkpoint(self, path: CheckpointPath, info: Fields) -> Checkpoint:
        """As planish's server tells it; another one lists it among those of its run."""
        if info.has("checkpoint"):
            return checkpoint_from_json(info.object("checkpoint"))
        for checkpoint in self.checkpoints(path.run_id):
            if checkpoint.tinker_path == str(path):
                return checkpoint
        raise CheckpointError(
            f"{path} is not among the checkpoints of its run any more; name another one"
        )

    # Waiting for the server.

    def _read(self, path: str, params: Mapping[str, str | int] | None = None) -> Fields:
        return Fields.of(self._call(self._link.get, path, params).content)

    def _post(self, posted: Posted) -> Fields:
        return Fields.of(self._call(self._link.post, posted).content)

    def _call(self, function: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._is_closed:
            raise _closed()
        return self._thread.call(function, *args, **kwargs)

    def _fail_open(self) -> None:
        for answer in list(self._open):
            with suppress(InvalidStateError):  # answered or cancelled in this moment
                answer.set_exception(_closed())


def _kept(operation: Operation[R]) -> Operation[R]:
    """With lists and dictionaries of its own: it is written down later, and the caller may go on to
    change his.
    """
    match operation:
        case ForwardBackward():
            config = dict(operation.loss_fn_config)
            return cast(Any, replace(operation, data=list(operation.data), loss_fn_config=config))
        case CreateModel() | SaveWeights() | SaveWeightsForSampler():
            return cast(Any, replace(operation, user_metadata=dict(operation.user_metadata)))
        case _:
            return operation


def _forget(known: dict[str, R], gone: R) -> None:
    """Under all of its names."""
    for name in [name for name, other in list(known.items()) if other is gone]:
        known.pop(name, None)


def _closed() -> EngineClosedError:
    return EngineClosedError(
        "the connection to the server was closed before this was done; make a new ServiceClient"
    )


def _settle(sampler: RemoteSampler, lane: Lane, published: Future[str]) -> None:
    """Note what became of a published sampler, before anybody else hears of it."""
    if published.cancelled():
        sampler.ready.set_exception(
            UserError(f"sampler_id={sampler.server_id!r}: its making was cancelled")
        )
    elif (error := published.exception()) is not None:
        sampler.ready.set_exception(error)
    else:
        assert lane.info is not None
        sampler.ready.set_result(SamplerInfo(published.result(), lane.info.model_name, None))


def _checkpoints(page: Fields) -> list[Checkpoint]:
    """Those that planish's clients can use: external weights are files to be fetched by other
    programs.
    """
    return [
        checkpoint_from_json(fields)
        for fields in page.objects("checkpoints")
        if fields.text("checkpoint_type") != "external"
    ]


def _weak_close(service: RemoteService) -> Callable[[], None]:
    """Closes the service if it still exists, when the checkpoints that were asked for are on the
    server's disk.
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
