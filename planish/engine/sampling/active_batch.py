"""How prompts and samples leave the batch of a sampler.

The scheduler ends their reservations, and their slots and tensors are freed, always together.
"""

from collections.abc import Sequence

from planish.engine.sampling.requests import Prompt, PromptTensors, Request, RunningSample
from planish.engine.sampling.scheduler import Scheduler
from planish.engine.sampling.slots import Slots


class ActiveBatch:
    """The active prompts and running samples of one sampler."""

    def __init__(self, scheduler: Scheduler, slots: Slots) -> None:
        """`scheduler` and `slots` have the reservations and the slots of the batch."""
        self._scheduler, self._slots = scheduler, slots

    def remove(self, samples: Sequence[RunningSample]) -> None:
        """Remove samples, and free their slots and unused prompts."""
        self._slots.free_samples(samples)
        for sample in samples:
            self._scheduler.finish(sample)
            sample.free_states()
        self.release_unused([sample.prompt for sample in samples])

    def preempt(self, sample: RunningSample) -> None:
        """Remove a sample, and free its memory, until it can resume."""
        self._slots.free_samples([sample])
        self._scheduler.preempt(sample)
        sample.free_states()
        self.release_unused([sample.prompt])

    def withdraw(self, request: Request) -> None:
        """Remove a request that was cancelled or has failed, with its samples."""
        self.remove(self._scheduler.withdraw(request))
        if request.prompt is not None:
            self.release_unused([request.prompt])

    def release_unused(self, prompts: Sequence[Prompt]) -> None:
        """Free the slots and tensors of all `prompts` that no sample or response needs any more."""
        unused = [
            prompt
            for prompt in dict.fromkeys(prompts)
            if prompt.num_pending_samples == 0 and prompt in self._scheduler.prompts
        ]
        self._slots.free_prompts(unused)
        for prompt in unused:
            self._scheduler.release(prompt)
            prompt.tensors = PromptTensors()

    def clear(self) -> None:
        """Drop all prompts and samples, and free their memory."""
        # An error may reference prompts and samples, so their tensors are freed here.
        for prompt in self._scheduler.prompts:
            prompt.tensors = PromptTensors()
        for sample in self._scheduler.running:
            sample.free_states()
        self._scheduler.clear()
        self._slots.reset()
