"""Triton kernels for GPUs, compiled and tested on the GPU that uses them."""
