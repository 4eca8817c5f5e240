"""The samplers that the engine thread runs: their creation, their requests and their end.

Only the engine thread uses a `SamplerSessions`.
"""

from collections.abc import Callable

from planish.engine.base_models import BaseModel
from planish.engine.failures import fail_all, prepare_error
from planish.engine.training_models import (
    QueuedSample,
    QueuedSamplerCreation,
    QueuedSampling,
    SamplerSession,
)
from planish.errors import UserError
from planish.service import ReleaseSampler

CANCELLED_CREATION = "its creation was cancelled; create another one"


class SamplerSessions:
    """The samplers with open requests or weights, and the base models that were sampled from."""

    def __init__(self) -> None:
        self._sessions: list[SamplerSession] = []
        self._base_models: list[BaseModel] = []

    def busy_base_models(self) -> list[BaseModel]:
        """Return the base models whose sampler has work."""
        return [base for base in self._base_models if base.sampler.busy]

    def accept(self, queued: QueuedSampling) -> None:
        """Start a request, or create or release a sampler."""
        session = queued.session
        if session not in self._sessions:
            self._sessions.append(session)
        match queued:
            case QueuedSample():
                self._start_sample(queued)
            case QueuedSamplerCreation():
                self._create_sampler(queued)
            case QueuedSampling(operation=ReleaseSampler()):
                session.is_released = True
                self.drop_unused()
                queued.future.set_result(None)
            case _:
                pass

    def _create_sampler(self, queued: QueuedSamplerCreation) -> None:
        """Load the weights of a sampler, and start the requests that waited for it."""
        session, loaded_adapter = queued.session, queued.loaded_adapter
        try:
            if not queued.future.set_running_or_notify_cancel():
                session.failure = CANCELLED_CREATION
                return
            if loaded_adapter is not None:
                session.weights = loaded_adapter.sampler_weights(session.base)
            session.version = loaded_adapter.version if loaded_adapter is not None else "base"
        except BaseException as error:
            session.failure = str(error)
            raise
        finally:
            self.start_waiting_requests(session)
        queued.future.set_result(session.sampler_id)

    def _start_sample(self, queued: QueuedSample) -> None:
        """Submit a request to the sampler, or let it wait until the sampler is ready.

        Raise UserError if the creation of the sampler has failed.
        """
        session = queued.session
        if session.failure is not None:
            raise UserError(f"sampler_id={session.sampler_id!r}: {session.failure}")
        if session.version is None:
            session.waiting_requests.append(queued)
            return
        if session.base not in self._base_models:
            self._base_models.append(session.base)
        session.base.sampler.submit(
            queued.operation, session.weights, session.version, queued.future
        )
        session.running_futures.add(queued.future)
        queued.future.add_done_callback(session.running_futures.discard)

    def start_waiting_requests(self, session: SamplerSession) -> None:
        """Start the requests that waited for this sampler, or fail them if its creation failed."""
        if session not in self._sessions:
            self._sessions.append(session)
        waiting, session.waiting_requests = session.waiting_requests, []
        for queued in waiting:
            try:
                self._start_sample(queued)
            except Exception as error:
                queued.fail(error)

    def run_turn(self, base: BaseModel) -> None:
        """Run one step of the base model's sampler; an exception fails all of its requests."""
        _run(base, base.sampler.step)

    def finish_steps(self) -> None:
        """Append the tokens of all steps that were launched and not finished."""
        for base in self.busy_base_models():
            _run(base, base.sampler.finish_step)

    def drop_unused(self) -> None:
        """Free the weights and cached prefixes of released samplers without open requests."""
        for unused_session in [session for session in self._sessions if session.is_unused]:
            self._sessions.remove(unused_session)
            if not any(
                session.version == unused_session.version and session.base is unused_session.base
                for session in self._sessions
            ):
                unused_session.base.sampler.evict_prefixes(unused_session.version)
            unused_session.weights = None

    def close(self, error: Exception) -> None:
        """Fail all open requests with `error`, and drop the references to all tensors."""
        for session in self._sessions:
            fail_all(session.waiting_requests, error)
        for base in self._base_models:
            base.sampler.abort_all(error)
        self._sessions, self._base_models = [], []


def _run(base: BaseModel, work: Callable[[], None]) -> None:
    """Run work of the base model's sampler; an exception fails all of its requests."""
    try:
        base.make_current()
        work()
    except Exception as error:
        prepare_error(error, base)
        base.sampler.abort_all(error)
