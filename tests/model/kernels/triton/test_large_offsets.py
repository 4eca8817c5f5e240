"""Kernels reach rows whose offset is beyond 2 ** 31 entries.

The rows of an input are 2 ** 30 entries apart, in memory that is reserved but not used. A product of
a row and its stride in int32 would address other memory. This ends a process, so the kernels run in
a process of their own.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SETUP = """
import torch
from backends import CONFIG

STRIDE = 1 << 30

def far(rows, width, seed=0):
    '''Return bf16 rows in reserved memory, 2 ** 30 entries apart, and a contiguous copy.'''
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    memory = torch.empty((rows - 1) * STRIDE + width, dtype=torch.bfloat16)
    spread = memory.as_strided(values.shape, (STRIDE, 1))
    spread.copy_(values)
    return spread, values

def check(compute, *shapes):
    inputs = [far(*shape, seed) for seed, shape in enumerate(shapes)]
    found, expected = (compute(*chosen) for chosen in zip(*inputs, strict=True))
    assert torch.equal(found, expected)
    assert found.float().abs().sum() > 0
"""
CASES = {
    "lora": """
from planish.model.kernels.triton import lora_kernels
a, b = torch.ones(2, 32).bfloat16(), torch.ones(48, 2).bfloat16()
tiles = torch.tensor([[1, 2, 0, 0], [0, 4, 0, 2]], dtype=torch.int32)
pointers = torch.tensor([[[a.data_ptr(), b.data_ptr(), 0, 0]]])

def compute(x, out):
    parts = lora_kernels.scratch(4, 2, x.device)
    lora_kernels.add_(x, out, [48], 0, tiles, pointers, parts, aligned=False)
    return out

check(compute, (4, 32), (4, 48))
""",
    "single logits": """
from planish.model.kernels.triton.head_kernels import token_logits
rows = tokens = torch.tensor([3, 0, 2])
check(lambda x, w, h, b: token_logits(x, w, rows, tokens, (h, b)), (4, 32), (4, 32), (4, 2), (4, 2))
""",
    "rope": """
from planish.model.kernels.triton.elementwise_kernels import rope
angles = torch.linspace(0, 3, 32).view(4, 1, 8)
check(lambda x: rope(x.view(4, 1, 16), angles.cos(), angles.sin()), (4, 16))
""",
    "experts": """
from planish.model.kernels.triton import expert_kernels
weights, ranges = torch.ones(2, 24, 32).bfloat16(), torch.tensor([[0, 1], [1, 4]]).int()

def compute(x, out):
    gradient = expert_kernels.gradient(x, out.clone(), ranges).flatten()
    made = expert_kernels.matmul(x, weights, ranges, 24, out=out).flatten()
    return torch.cat([made.float(), gradient])

check(compute, (4, 32), (4, 24))
""",
    "tree attention": """
import numpy as np
from planish.model.kernels.triton.tree_attention import TritonTreeAttention
from planish.model.sequences.prefix_tree import pack
(micro_batch,) = pack([np.arange(4)], 4)

def compute(*inputs):
    inputs = [x.view(4, 1, 16).requires_grad_() for x in inputs]
    attend = TritonTreeAttention(micro_batch, torch.device("cpu"), ())
    out = attend(0, *inputs)
    return torch.cat([out, *torch.autograd.grad(out.float().sum(), inputs)])

check(compute, (4, 16), (4, 16), (4, 16))
""",
    "keys and values of a decoding step": """
from planish.model.kernels.triton.decode_kernels import Heads, Row, keep
pool = torch.zeros(2, 1, 1, 64, 16).bfloat16()
bases = torch.tensor([[pool[0].data_ptr(), pool[1].data_ptr()]])
table = torch.tensor([[0, 0, 64, position, 0, 0] for position in range(4)]).int()

def compute(k, v):
    pool.zero_()
    keep(Heads(1, 1, 16, torch.bfloat16), table, bases, k.view(4, 1, 16), v.view(4, 1, 16))
    return pool.clone()

check(compute, (4, 16), (4, 16))
""",
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems may not reserve so much memory")
def test_rows_beyond_two_gigabytes_are_read_and_written():
    cases = [f"print({kernel!r}, flush=True)\n{code}" for kernel, code in CASES.items()]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([SETUP, *cases])],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert done.stdout.splitlines() == list(CASES)
