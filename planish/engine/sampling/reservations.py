"""The reservations of KV cache positions, which limit how many samples run at the same time.

A sample first reserves as many positions as recent samples of its owner needed. It reserves more
when it becomes longer. So many samples run at the same time even if their `max_tokens` is far above
the lengths that they reach. If the memory is too small for the growth of all running samples, the
scheduler preempts some of them (scheduler.py).
"""

from planish.engine.sampling.requests import Prompt, Request, RunningSample
from planish.model.sequences.positions import SPAN, capacity_for, grown_capacity, sample_capacity

MAX_PREEMPTIONS = 2
"""The maximum number of times that a sample is preempted. After that it resumes only with a
reservation for its maximum length.
"""
_FIRST_EXPECTED_TOKENS = 192
"""The expected number of tokens of a sample before any sample of its owner has ended."""
_WEIGHT_OF_LAST = 1 / 16
"""The weight of the last sample in the moving average of an owner's numbers of tokens."""
_MIN_HEADROOM_TOKENS = 64
"""The minimum number of tokens for which a resumed sample has space before it must grow."""


class Reservations:
    """The KV cache positions that the prompts and samples of one sampler have reserved."""

    def __init__(self, max_positions: int, num_state_positions: int, block: int) -> None:
        """Create a budget without reservations.

        `max_positions`: the maximum number of reserved positions. `num_state_positions`: the number
        of positions that take as much memory as one recurrent state; each prompt and each sample
        reserves so many more. `block`: the minimum growth of a sample's slot, in positions.
        """
        self.max_positions = max_positions
        self.num_reserved = 0
        self._num_state_positions, self._block = num_state_positions, block
        self._mean_tokens: dict[str, float] = {}
        """The moving average of the numbers of tokens of each owner's samples."""

    def fits(self, positions: int) -> bool:
        """Return whether so many more positions fit.

        Without any reservation, every request fits. The sampler has checked that its largest sample
        fits alone. A sample that continues after a preemption may need one span more.
        """
        return not self.num_reserved or self.num_reserved + positions <= self.max_positions

    def num_prompt_positions(self, length: int) -> int:
        """Return the positions that a prompt reserves for its keys, values and state."""
        return capacity_for(length) + self._num_state_positions

    def num_sample_positions(self, capacity: int, is_constrained: bool) -> int:
        """Return the positions that a sample reserves for a slot of this capacity and its state. A
        sample with a constraint has two states: that before its last token, in case the mask is
        late, and that after it.
        """
        return capacity + (2 if is_constrained else 1) * self._num_state_positions

    def first_capacity(
        self, request: Request, prompt_length: int, preempted: RunningSample | None = None
    ) -> int:
        """Return the capacity that a sample of the request reserves when it starts, or when the
        `preempted` sample resumes. `prompt_length`: the length of the prompt that it continues.
        """
        num_tokens = len(preempted.tokens) if preempted is not None else 0
        num_prefilled = max(0, num_tokens - 1)
        limit = sample_capacity(prompt_length, request.max_tokens - num_prefilled)
        if preempted is not None and preempted.num_preemptions >= MAX_PREEMPTIONS:
            return limit
        mean = self._mean_tokens.get(request.op.owner, _FIRST_EXPECTED_TOKENS)
        expected = max(int(mean), num_tokens + max(_MIN_HEADROOM_TOKENS, num_tokens // 4))
        positions = prompt_length % SPAN + expected - num_prefilled
        return grown_capacity(positions, limit, self._block)

    def add_prompt(self, prompt: Prompt) -> None:
        """Reserve the positions of a prompt."""
        self.num_reserved += self.num_prompt_positions(prompt.length)

    def remove_prompt(self, prompt: Prompt) -> None:
        """End the reservation of a prompt."""
        self.num_reserved -= self.num_prompt_positions(prompt.length)

    def add_sample(self, sample: RunningSample, capacity: int) -> None:
        """Reserve a slot of this capacity for a sample that starts or resumes."""
        sample.reserved_capacity = capacity
        self.num_reserved += self.num_sample_positions(capacity, sample.request.is_constrained)

    def remove_sample(self, sample: RunningSample) -> None:
        """End the reservation of a sample."""
        self.num_reserved -= self.num_sample_positions(
            sample.reserved_capacity, sample.request.is_constrained
        )
        sample.reserved_capacity = 0
        if sample.stop_reason is not None:
            self._learn(sample.request.op.owner, len(sample.tokens))

    def grow(self, sample: RunningSample) -> bool:
        """Reserve a slot with space for the sample's next rows, and return whether it fits.

        While a slot moves, the sample has two slots. The pools have space for this if the old slot
        takes at most an eighth of the memory (`max_pool_bytes`). The part above an eighth is added
        to the reservation.
        """
        num_positions = sample.num_stored + sample.num_rows
        if num_positions <= sample.reserved_capacity:
            return True
        capacity = grown_capacity(num_positions, sample.max_capacity, self._block)
        missing = capacity - sample.reserved_capacity
        moved = max(0, sample.capacity - self.max_positions // 8)
        if self.num_reserved + missing + moved > self.max_positions:
            return False
        sample.reserved_capacity = capacity
        self.num_reserved += missing
        return True

    def _learn(self, owner: str, num_tokens: int) -> None:
        """Update the moving average of an owner with the tokens of an ended sample."""
        mean = self._mean_tokens.get(owner, num_tokens)
        self._mean_tokens[owner] = mean + _WEIGHT_OF_LAST * (num_tokens - mean)
