"""What must hold before the first import of a test: without a GPU, Triton's kernels are interpreted on the CPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
