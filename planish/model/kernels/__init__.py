"""The kernels behind the decoder: reference (torch), cpp (CPUs) and triton (GPUs)."""
