"""The attention of prefix trees by one T x T mask: slow, and plainly right."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from planish.model.kernels.interface.parts import Attend
from planish.model.sequences.prefix_tree import MicroBatch


def attention_mask(micro_batch: MicroBatch) -> np.ndarray:
    """Return the attention mask, bool [T, T]: entry (i, j) is True if query i attends to key j."""
    row = np.arange(len(micro_batch))
    mask = (row[None, :] <= row[:, None]) & (row[:, None] < micro_batch.subtree_end[None, :])
    for start, stop in micro_batch.blocks:
        mask[start:stop, start:stop] = True
    return mask


def dense_mask_attention(
    micro_batch: MicroBatch, device: torch.device, windows: Sequence[int | None] = ()
) -> Attend:
    """Return the slow reference implementation of TorchTreeAttention.

    It uses one T x T mask and computes everything in float32 or wider.
    """
    whole = torch.from_numpy(attention_mask(micro_batch)).to(device)
    position = torch.from_numpy(micro_batch.positions).to(device)
    distance = position[:, None] - position

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return the attention output [T, Hq, E]; see `Attend` for the arguments."""
        group = q.shape[1] // k.shape[1]
        window = windows[layer] if windows else None
        allowed = whole if window is None else whole & (distance < window)
        accum_dtype = torch.promote_types(q.dtype, torch.float32)
        q_h, k_h, v_h = (
            x.transpose(0, 1).to(accum_dtype)
            for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        )
        scores = (q_h @ k_h.transpose(1, 2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, float("-inf"))
        if sinks is not None:
            scores = torch.cat(
                (scores, sinks.to(accum_dtype).view(-1, 1, 1).expand(-1, len(q), 1)), 2
            )
        weights = scores.softmax(-1)[..., : len(q)]
        return (weights @ v_h).transpose(0, 1).to(q.dtype)

    return attend
