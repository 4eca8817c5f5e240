"""Errors of the engine thread's operations."""

from collections.abc import Iterable

from planish.engine.base_models import BaseModel
from planish.engine.release_memory import clear_frames
from planish.engine.training_models import QueuedOperation
from planish.errors import EngineClosedError, PlanishError, is_out_of_memory


def prepare_error(error: BaseException, base: BaseModel) -> None:
    """Prepare an exception for the operation's future.

    The function clears the frames of the traceback. Otherwise their tensors would stay in memory as
    long as the exception does. An out-of-memory error gets a note that names the settings to lower.

    Raises EngineClosedError if this process can no longer use the device. All later work on the
    device would fail in the same way. The operations in progress fail with this error too, so a
    server keeps their requests and runs them again after a restart.
    """
    clear_frames(error)
    if is_out_of_memory(error):
        error.add_note(
            f"The memory of {base.device} is full. For training, lower micro_batch_tokens (now "
            f"{base.trainer.settings.micro_batch_tokens:,}). For sampling, lower kv_cache_bytes "
            f"(now {base.sampler.settings.kv_cache_bytes:,}) or max_batch (now "
            f"{base.sampler.settings.max_batch:,})"
        )
    if not isinstance(error, PlanishError) and base.is_lost():
        raise EngineClosedError(
            f"{base.device} is no longer usable in this process after this error: {error}; "
            "start the program again"
        ) from error


def fail_all(operations: Iterable[QueuedOperation], error: Exception) -> None:
    """Fail all of these operations with `error`."""
    for queued in operations:
        queued.fail(error)
