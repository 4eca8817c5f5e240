"""The masks and forced tokens of constrained samples during a step.

A grammar's process computes the next mask of a sample while the decoder runs the next step. So a
step may begin before its masks are there, and it waits for them only when it samples tokens.
Together with a mask, the process computes the forced tokens before it. Forced tokens are the tokens
that a grammar determines completely, so they are not sampled.
"""

from collections.abc import Sequence

import numpy as np

from planish.engine.constraints.grammar import GrammarState, wait_for_masks
from planish.engine.sampling.requests import RunningSample

_MAX_MASK_WAIT_SECONDS = 0.02
"""The maximum time that a step waits for the grammar masks of constrained samples. A sample whose
mask is still missing gets no token in this step, so that other samples do not wait any longer.
"""
_MAX_FORCED_WAIT_SECONDS, _MAX_FORCED_WAIT_SAMPLES = 0.002, 16
"""The limits of the wait for forced tokens before a decoding step. If masks of at most
_MAX_FORCED_WAIT_SAMPLES samples are pending, the step waits for these masks up to
_MAX_FORCED_WAIT_SECONDS. The step then decodes their forced tokens too. If more masks are pending,
the step does not wait, because the processes would need longer than that.
"""


def set_row_counts(samples: Sequence[RunningSample], max_rows: int) -> None:
    """Set the number of rows of each sample in the next decoding step.

    Forced tokens add rows only while the whole step has at most `max_rows` rows.
    """
    constrained = [sample for sample in samples if sample.grammar is not None]
    pending = [s.grammar for s in constrained if s.grammar and not s.grammar.is_ready]
    if 0 < len(pending) <= _MAX_FORCED_WAIT_SAMPLES:
        wait_for_masks(pending, _MAX_FORCED_WAIT_SECONDS, for_all=True)
    rows_left = max_rows - len(samples)
    for sample in constrained:
        tokens_left = sample.request.max_tokens - len(sample.tokens) - 1
        num_forced = min(len(sample.forced_tokens), tokens_left, rows_left)
        sample.num_rows, rows_left = 1 + num_forced, rows_left - num_forced


def wait_for_late_masks(samples: Sequence[RunningSample]) -> None:
    """Wait a moment for the masks of samples that cannot run without them."""
    states = [s.grammar for s in samples if s.grammar and s.awaits_mask]
    if states:
        wait_for_masks(states, _MAX_MASK_WAIT_SECONDS)


def wait_after_pass(states: Sequence[GrammarState]) -> None:
    """Wait for the masks that were not there when the pass began, except those that are late
    already.
    """
    pending = [state for state in states if not state.is_ready]
    if pending:
        on_time = [state for state in pending if not state.is_late]
        wait_for_masks(on_time, _MAX_MASK_WAIT_SECONDS, for_all=True)


def has_usable_mask(sample: RunningSample, grammar: GrammarState) -> bool:
    """Return whether the sample's next mask is computed. An error fails the sample's request."""
    grammar.is_late = not grammar.is_ready
    if grammar.error is not None and not grammar.is_late:
        sample.request.fail(grammar.error)
        return False
    return not grammar.is_late


def allowed_tokens(sample: RunningSample, token_index: int, vocab_size: int) -> np.ndarray | None:
    """Return the tokens that may become token number `token_index` (see `Adjustment.allowed_bits`).

    For a sample without a constraint, None means that all tokens are allowed. For a sample with
    a constraint, None means that no token is allowed. This happens if the text is complete, the
    grammar allows no further text, and the request has no stop tokens.
    """
    may_stop = token_index >= sample.request.op.sampling_params.min_tokens
    if sample.grammar is None:
        return sample.request.allowed_bits(vocab_size, may_stop)
    stop_tokens = sample.request.stop_bits(vocab_size)
    mask = sample.grammar.mask
    assert mask is not None
    if not may_stop:
        others = mask.bits & ~stop_tokens
        if others.any():
            return others
    if mask.is_complete and sample.request.stop_condition.token_ids:
        return mask.bits | stop_tokens
    return None if mask.is_empty else mask.bits
