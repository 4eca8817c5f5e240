"""The decoding steps of a sampler: each samples one token for every chosen sample.

On a CPU, a step plans, runs and applies its pass. On a GPU, the steps overlap: while the GPU
computes a step, the host plans and launches the next one. Only then does it append the tokens of
the first step. Until then these tokens are pending: they are on the device, where the next step
reads them. The choice of tokens needs nothing from the host but a uniform number, which depends on
the seed and the position.

A sample that turns out to have ended has one more row in the step that was already launched. The
token of this row is dropped. The slot can be freed at once, because the device runs later work
after that step.

Samples whose logits are adjusted depend on their earlier tokens in the host's memory (masks,
penalties, forced tokens), so a step with such samples is applied before the next one is planned.
A step is also applied early before samples are preempted, before the first tokens of new samples,
and before another model or sampler takes a turn (engine_thread.py).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from planish.engine.sampling.decoding_turns import DecodingTurns
from planish.engine.sampling.model_runner import ModelRunner
from planish.engine.sampling.plan import plan_decoding
from planish.engine.sampling.requests import RunningSample
from planish.engine.sampling.selection import SelectedTokens, Selection
from planish.engine.sampling.slots import Slots
from planish.errors import UserError
from planish.model.kernels.interface.backend import Backend


@dataclass(frozen=True, eq=False)
class _LaunchedStep:
    """A decoding step whose tokens are not appended yet."""

    samples: Sequence[RunningSample]
    selected: SelectedTokens
    is_small: bool
    """Whether the step does not have all samples (see `DecodingTurns`)."""
    start_time: float


class DecodingSteps:
    """The decoding steps of one sampler."""

    def __init__(
        self,
        runner: ModelRunner,
        slots: Slots,
        backend: Backend,
        selection: Selection,
        turns: DecodingTurns,
    ) -> None:
        """The steps overlap on a GPU, unless PLANISH_OVERLAP is 0.

        `turns`: the times of the steps are charged to it.
        """
        self.overlap = wants_overlap() and not backend.uses_main_memory
        """Whether a step is launched before the tokens of the step before are on the host."""
        self._runner, self._slots = runner, slots
        self._backend, self._selection, self._turns = backend, selection, turns
        self._launched: _LaunchedStep | None = None
        self._last_end_time = 0.0

    @property
    def has_pending_tokens(self) -> bool:
        """Whether the tokens of the last step are not appended yet."""
        return self._launched is not None

    def run(self, samples: Sequence[RunningSample], is_small: bool) -> list[RunningSample]:
        """Run a step, and return the samples that ended: in the step before if the steps overlap,
        or else in this step. `is_small`: whether the step does not have all samples.
        """
        start_time = perf_counter()
        plan = plan_decoding(
            samples,
            self._slots,
            self._backend,
            self._runner.row_multiple,
            None if self._launched is None else self._launched.selected.as_pending(),
        )
        selected = self._selection.select(plan.sampled, self._runner.run(plan))
        ended_samples = self.finish()
        for sample in samples:
            sample.num_pending_tokens = 1
        self._launched = _LaunchedStep(samples, selected, is_small, start_time)
        if not self.overlap or any(sample.request.is_adjusted for sample in samples):
            ended_samples += self.finish()
        if plan.recurrence is not None:
            for sample in samples:
                sample.use_next_state()
        return ended_samples

    def discard_pending_tokens(self) -> None:
        """Discard the pending tokens, whose samples have all ended, without waiting for them."""
        self._launched = None

    def finish(self) -> list[RunningSample]:
        """Append the pending tokens, if there are any, and return the samples that ended."""
        step, self._launched = self._launched, None
        if step is None:
            return []
        for sample in step.samples:
            sample.num_pending_tokens = 0
        ended_samples = self._selection.append(step.selected)
        end_time = perf_counter()
        # Before the end of the previous step, the device was busy with that step.
        seconds = end_time - max(step.start_time, self._last_end_time)
        self._turns.charge(step.is_small, seconds)
        self._last_end_time = end_time
        return ended_samples


def wants_overlap() -> bool:
    """Return whether PLANISH_OVERLAP allows decoding steps to overlap. It does by default.

    Raises UserError for an unknown value.
    """
    found = os.environ.get("PLANISH_OVERLAP", "1")
    if found not in ("0", "1"):
        raise UserError(f"PLANISH_OVERLAP={found!r}: give 0 or 1 (the default)")
    return found == "1"
