"""The prefix-tree attention kernels: log-sum-exp."""

import numpy as np
import pytest
import torch
from dense_attention import attention_mask

from planish.model.kernels.triton.tree_attention import TritonTreeAttention
from planish.model.sequences.prefix_tree import pack

triton_forest = pytest.importorskip("planish.model.kernels.triton.tree_kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_sum_exp_covers_exactly_the_visible_scores(device: torch.device, dtype: torch.dtype):
    (whole,) = pack(
        [np.arange(50), np.array([*range(20), *range(70, 90)]), np.arange(100, 107)], 1000
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(len(whole), heads, 16, generator=generator).to(device, dtype)
        for heads in (6, 2, 2)
    )
    out, lse = TritonTreeAttention(whole, device).attend(q, k, v)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    scores = torch.einsum("the,she->ths", q.float(), k.float().repeat_interleave(3, 1)) / 4
    hidden = ~torch.from_numpy(attention_mask(whole)).to(device)
    expected = scores.masked_fill(hidden[:, None], float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)
